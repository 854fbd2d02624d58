"""The one State as JSON (`/state`), and as a screen of text (`steersman status`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from steersman import __version__
from steersman.model.findings import Finding, printable
from steersman.model.plan import ServicePlan
from steersman.run.state import State
from steersman.source.stats import SourceStats

_TOGETHER = 100
"""ServicePlans that are written at once, some 80 kB."""


def state_json(
    state: State, stats: SourceStats | None, now: float, started: float
) -> Iterator[bytes]:
    """Return the State as of this call as JSON, in pieces that are made as they are taken.

    The pieces may be taken in another thread: what may change meanwhile is read here.

    Args:
        state: the State.
        stats: of the connection to the API server; None with manifests.
        now: seconds since 1970.
        started: when the process started, likewise.
    """
    return _pieces(state, tuple(state.plan.services.values()), _source(stats), now - started)


def _pieces(
    state: State, plans: Sequence[ServicePlan], source: Mapping[str, Any], up: float
) -> Iterator[bytes]:
    result = state.result
    document = {
        "version": __version__,
        "mode": state.mode,
        "uptimeSeconds": round(up, 3),
        "revision": state.revision,
        "synced": result is not None,
        "lastSync": None if result is None else {**_plain(result), "at": state.at},
        "objects": {
            "services": len(state.snapshot.services),
            "endpointSlices": state.slices,
            "servicePorts": len(plans),
            "kernelObjects": state.objects,
        },
        "source": source,
        "findings": [_plain(finding) for finding in state.findings],
        "node": _plain(state.plan.settings),
        "servicePlans": [],
    }
    head = msgspec.json.encode(document).removesuffix(b"]}")
    for start in range(0, len(plans), _TOGETHER):
        part = [_service(plan) for plan in plans[start : start + _TOGETHER]]
        yield head + msgspec.json.encode(part)[1:-1]
        head = b","
    yield b"]}" if plans else head + b"]}"


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value)


def _service(plan: ServicePlan) -> dict[str, Any]:
    fields: dict[str, Any] = _plain(plan)
    fields |= fields.pop("scheduling") | fields.pop("proxy")
    key = plan.key
    fields["key"] = {
        "namespace": key.name.namespace,
        "service": key.name.service,
        "port": key.name.port,
        "protocol": key.name.protocol.value,
        "family": key.family.kubernetes,
    }
    return fields


def _source(stats: SourceStats | None) -> dict[str, Any]:
    if stats is None:
        return {"kind": "manifests"}
    return {
        "kind": "apiserver",
        "server": stats.server,
        "connected": stats.connected,
        "failovers": stats.failovers,
        "errors": dict(stats.errors()),
    }


def status_text(document: Mapping[str, Any], now: float) -> str:
    """Say what `/state` says on one screen.

    Args:
        document: `/state`, decoded.
        now: seconds since 1970.
    """
    objects = document["objects"]
    lines = [
        f"steersman {document['version']}, {document['mode']} mode, "
        f"up {_span(document['uptimeSeconds'])}",
        f"  sync      {_sync(document, now)}",
        f"  source    {_connection(document['source'])}",
        f"  objects   {objects['services']} Services, {objects['endpointSlices']} EndpointSlices, "
        f"{objects['servicePorts']} ServicePorts, {objects['kernelObjects']} kernel objects",
        f"  findings  {_count(document['findings'])}",
    ]
    return "\n".join([*lines, *_listed(document["findings"])])


def _sync(document: Mapping[str, Any], now: float) -> str:
    last = document["lastSync"]
    if last is None:
        return "none has reached the kernel yet"
    took = sum(last["phases"].values()) * 1e3
    refused = f", {last['refused']} refused by the kernel" if last["refused"] else ""
    age = _span(max(0.0, now - last["at"]))
    return f"revision {document['revision']} ({last['reason']}), {age} ago, {took:.1f} ms{refused}"


def _connection(source: Mapping[str, Any]) -> str:
    if source["kind"] == "manifests":
        return "manifests"
    state = "connected" if source["connected"] else "NOT CONNECTED"
    errors = ", ".join(f"{count} {reason}" for reason, count in sorted(source["errors"].items()))
    return f"{source['server']}, {state}" + (f" (so far: {errors})" if errors else "")


def _count(findings: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter(finding["severity"] for finding in findings)
    return ", ".join(f"{counts[kind]} {kind}s" for kind in sorted(counts)) or "none"


def _listed(findings: Sequence[Mapping[str, Any]], most: int = 12) -> list[str]:
    found = [Finding(f["object"], f["field"], f["reason"]) for f in findings[:most]]
    lines = [f"    {printable(str(finding))}" for finding in found]
    more = len(findings) - most
    return [*lines, f"    and {more} more; see /state"] if more > 0 else lines


def _span(seconds: float) -> str:
    whole = int(seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if whole >= 2 * size:
            return f"{whole // size} {unit}"
    return f"{seconds:.1f} s"
