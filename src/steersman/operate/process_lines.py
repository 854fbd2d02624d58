"""The state of the running process on a few lines, as `status` and `top` begin. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from steersman.model.findings import Severity
from steersman.model.node_state import NodeState
from steersman.operate.answer import Line, Style, age_text
from steersman.run.pages.conditions import count_words, trouble_words


def process_lines(state: NodeState, now: float) -> Iterator[Line]:
    """Yield a title, then a line for each part of the process; `now` is in seconds since 1970."""
    variant = f" ({state.variant})" if state.variant else ""
    name = f"steersman {state.version}, {state.mode} mode{variant}"
    up = age_text(state.now - state.started)
    yield Line(f"{name}, node {state.node}, pid {state.pid}, up {up}", "title")

    if not state.healthy:
        yield Line("health    NOT HEALTHY: a change waits for too long", "bad", 2)

    style: Style = "" if state.synced_at else "warn"
    sync = "none has reached the kernel yet"
    if state.synced_at:
        took = sum(state.phases.values()) * 1e3
        age = age_text(now - state.synced_at)
        sync = f"revision {state.revision} ({state.sync_reason}), {age} ago, {took:.1f} ms"
    if state.owes:
        sync, style = f"{sync}, changes wait", "warn"
    if state.refused:
        sync, style = f"{sync}, {state.refused} refused by the kernel", "bad"
    yield Line(f"sync      {sync}", style, 2)

    source, connected = state.source, True
    text = "manifests"
    if source.kind != "manifests":
        connected = source.connected
        text = f"{source.server}, {'connected' if connected else 'NOT CONNECTED'}"
        if source.quiet_seconds is not None:
            text += f", last event {age_text(source.quiet_seconds)} ago"
    yield Line(f"source    {text}", "" if connected else "bad", 2)

    objects = f"{state.services} Services, {state.endpoint_slices} EndpointSlices, "
    objects += f"{state.service_ports} ServicePorts, {state.objects} kernel objects"
    yield Line(f"objects   {objects}", "", 2)

    counts = state.finding_counts
    worst: Style = "warn" if counts.get(Severity.WARNING) else "good"
    worst = "bad" if counts.get(Severity.ERROR) else worst
    yield Line(f"findings  {count_words(counts)}", worst, 2)
    if words := trouble_words(state):
        yield Line(f"trouble   {words}", "warn", 2)
    if (last := state.drift) is not None:
        when = f"last {age_text(now - last.at)} ago: {last.what}, by {last.who}"
        yield Line(f"drift     {state.repairs} repaired, {when}", "warn", 2)
