"""Doctor's check of the load: whether connections are spread evenly, and why if they are not.

Two figures of each endpoint are compared: connections that are open now, and all that conntrack
remembers (closed ones for two minutes). A new connection chooses at random, so new ones are even;
open ones stay where they were made. Counters since the start would include the past.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from math import sqrt
from typing import NamedTuple

from steersman.compile.explain import EndpointReason, EndpointReport
from steersman.model.addresses import join_host_port
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family, PlanKey
from steersman.model.plan import ServicePlan
from steersman.netfilter.conntrack.flows import Tracked, tracked
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.facts import support
from steersman.operate.doctor.result import Cause, CheckResult, Found, ok, skipped, warning

_SIGMAS = 4.0
"""A share further from the fair one than this many standard deviations is not by chance."""
_RATIO = 1.5
"""A share above this multiple of the fair one, or below the inverse, is worth a word."""


class Load(NamedTuple):
    """The connections of one ServicePort in one family, by printed endpoint."""

    new: Mapping[str, int]
    """All that are remembered or, without conntrack, were ever counted."""
    open: Mapping[str, int]
    """Those that are open now."""
    clients: int = 0
    """Addresses of clients with tracked connections."""


async def load(context: Context) -> Found:
    """Say for each port whether its connections are spread evenly."""
    out = []
    connections = await context.once(connections_before)
    for plan in context.plans:
        own = {(frontend.address, frontend.port) for frontend in plan.frontends}
        entries = [
            each
            for each in connections.get(plan.key.family, ())
            if each.protocol is plan.key.name.protocol
            and ((each.address, each.port) in own or ("", each.port) in own)
        ]
        # A mode that does without conntrack has counters of its own, since it began to serve.
        counts = not context.world.plan.settings.traits.tracks_connections
        ever = (await context.once(counted_connections)).get(plan.key, {}) if counts else {}
        out.append(judge(plan, context.report(plan), load_of(entries, ever)))
    return out or skipped("no port of the Service is served here")


async def connections_before(context: Context) -> Mapping[Family, Sequence[Tracked]]:
    """Return the tracked connections to the Service, as they were before doctor's own dials.

    The dials of addresses wait for this fact, so that doctor does not count itself.

    Raises:
        OSError: they cannot be listed.
    """
    found: dict[Family, Sequence[Tracked]] = {}
    for family in context.families if context.linux else ():
        plans = [plan for plan in context.plans if plan.key.family is family]
        wanted = {(frontend.address, frontend.port) for p in plans for frontend in p.frontends}
        found[family] = await asyncio.to_thread(tracked, family, wanted)
    return found


async def counted_connections(context: Context) -> Mapping[PlanKey, Mapping[str, int]]:
    """Return the connections that the mode counted, by endpoint; empty if it counts none here."""
    try:
        usable = await context.once(support)
        if context.mode is None or usable is None or not usable.usable:
            return {}
        stats = await context.mode.worker.do_slowly(context.mode.stats(context.plans))
    except (ApplyError, BusyError, OSError):  # then there is no figure to judge by
        return {}
    if stats is None or not stats.endpoints:
        return {}
    out: dict[PlanKey, dict[str, int]] = {}
    for plan in context.plans:
        for endpoint in plan.reachable:
            if count := stats.endpoints.get((plan.key.name, str(endpoint))):
                out.setdefault(plan.key, {})[str(endpoint)] = count
    return out


def load_of(entries: Sequence[Tracked], ever: Mapping[str, int]) -> Load:
    """Return the load that tracked connections and the mode's counters show."""
    remembered: Counter[str] = Counter()
    now: Counter[str] = Counter()
    for entry in entries:
        endpoint = join_host_port(entry.endpoint, entry.endpoint_port)
        if entry.answered:
            remembered[endpoint] += 1
            if entry.state in ("", "ESTABLISHED"):
                now[endpoint] += 1
    clients = {entry.client for entry in entries}
    return Load(ever or remembered, now, len(clients))


def uneven(counts: Sequence[int]) -> bool:
    """Whether the counts of endpoints that are equally likely are far from even, not by chance."""
    total, number = sum(counts), len(counts)
    if number < 2 or not total:
        return False
    fair = total / number
    most = _SIGMAS * sqrt(fair * (1 - 1 / number))
    return any(
        abs(count - fair) > most and (count > fair * _RATIO or count < fair / _RATIO)
        for count in counts
    )


def judge(plan: ServicePlan, report: EndpointReport, load: Load) -> CheckResult:
    """Say whether the load of a port is even, and name the reason if it is not."""
    ready = report.ready
    what = f"{plan.key.name} ({plan.key.family.kubernetes})"
    shown = [str(state.endpoint) for state in ready]
    new, now = ([counts.get(end, 0) for end in shown] for counts in (load.new, load.open))
    evidence = [
        f"{end}: {more} connections, {here} of them open now"
        for end, more, here in zip(shown, new, now, strict=True)
    ]
    if len(ready) < 2:
        return ok(f"{what} has {len(ready)} ready endpoints: there is nothing to spread")
    if not uneven(new) and not uneven(now):
        if not sum(new):
            return ok(f"no connection to {what} was seen here lately")
        return ok(f"{sum(new)} connections to {what} are spread as chance does", *evidence)
    reason, remedy = reason_of(plan, load, ready, (new, now))
    return warning(
        f"the load of {what} is uneven: {reason or 'no setting of the Service explains it'}",
        *evidence,
        *report.lines[:1],
        remedy=remedy,
        # Without a reason it is at best a consequence.
        cause=0 if reason else Cause.SYMPTOM + 7,
    )


def reason_of(
    plan: ServicePlan,
    load: Load,
    ready: Sequence[EndpointReason],
    counts: tuple[Sequence[int], Sequence[int]],
) -> tuple[str, str]:
    """Return why the load is uneven ("" if nothing explains it), and what to do."""
    used = {str(endpoint) for endpoint in plan.reachable}
    unused = [str(state.endpoint) for state in ready if str(state.endpoint) not in used]
    new, now = counts
    in_use = [count for state, count in zip(ready, new, strict=True) if str(state.endpoint) in used]
    if unused and not uneven(in_use):
        if plan.cluster:
            return (
                f"topology hints leave {len(unused)} of {len(ready)} ready endpoints out on this "
                "node",
                "intended by trafficDistribution or topology-mode; remove them to use all",
            )
        return _only_local(len(used), len(ready))
    elsewhere = [c for state, c in zip(ready, new, strict=True) if not state.endpoint.local]
    here = [c for state, c in zip(ready, new, strict=True) if state.endpoint.local]
    if plan.local and here and elsewhere and max(elsewhere) < min(here):
        return _only_local(len(here), len(ready))
    if plan.affinity_seconds:
        return (
            f"session affinity (ClientIP, {plan.affinity_seconds} s) keeps each client at one "
            f"endpoint, and only {load.clients} client{'s' * (load.clients > 1)} connected lately",
            "remove sessionAffinity, or accept it: it evens out with many clients",
        )
    if plan.scheduling.weights or plan.least_connections:
        return "annotations of the Service weigh its endpoints", "see the Service's annotations"
    if uneven(now) and (not uneven(new) or sum(now) * 2 > sum(new)):
        return (
            f"{sum(now)} long-lived connections stay at the endpoints that they were made to; only "
            "new ones are spread",
            "make clients close connections from time to time (keep-alive limits, gRPC "
            "max_connection_age), or balance requests instead of connections",
        )
    return "", "endpoints that became ready later have fewer; compare again after some minutes"


def _only_local(here: int, ready: int) -> tuple[str, str]:
    """Return the reason and the remedy for clients that policy Local keeps on this node."""
    return (
        f"policy Local sends clients only to the {here} of {ready} ready endpoints on this node",
        "intended; spread the pods evenly over the nodes, or use policy Cluster",
    )
