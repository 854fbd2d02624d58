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

from steersman.compile.explain import EndpointReport
from steersman.model.addresses import join_host_port
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family, PlanKey
from steersman.model.plan import Endpoint, ServicePlan
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


class Share(NamedTuple):
    """The connections of one ready endpoint."""

    endpoint: Endpoint
    used: bool
    """Whether this node sends connections to it."""
    new: int
    open: int


def judge(plan: ServicePlan, report: EndpointReport, load: Load) -> CheckResult:
    """Say whether the load of a port is even, and name the reason if it is not."""
    what = f"{plan.key.name} ({plan.key.family.kubernetes})"
    used = {str(endpoint) for endpoint in plan.reachable}
    shares = []
    for each in report.ready:
        end = str(each.endpoint)
        new, now = load.new.get(end, 0), load.open.get(end, 0)
        shares.append(Share(each.endpoint, end in used, new, now))
    evidence = [f"{s.endpoint}: {s.new} connections, {s.open} of them open now" for s in shares]
    if len(shares) < 2:
        return ok(f"{what} has {len(shares)} ready endpoints: there is nothing to spread")
    if not uneven([s.new for s in shares]) and not uneven([s.open for s in shares]):
        total = sum(s.new for s in shares)
        if not total:
            return ok(f"no connection to {what} was seen here lately")
        return ok(f"{total} connections to {what} are spread as chance does", *evidence)
    reason, remedy = reason_of(plan, shares, load.clients)
    return warning(
        f"the load of {what} is uneven: {reason or 'no setting of the Service explains it'}",
        *evidence,
        *report.lines[:1],
        remedy=remedy,
        # Without a reason it is at best a consequence.
        cause=0 if reason else Cause.SYMPTOM + 7,
    )


def reason_of(plan: ServicePlan, shares: Sequence[Share], clients: int) -> tuple[str, str]:
    """Return why the load is uneven ("" if nothing explains it), and what to do."""
    in_use = [share for share in shares if share.used]
    here = [share for share in shares if share.endpoint.local]
    elsewhere = [share for share in shares if not share.endpoint.local]
    left_out = len(in_use) < len(shares) and not uneven([share.new for share in in_use])
    if left_out and plan.cluster:
        return (
            f"topology hints leave {len(shares) - len(in_use)} of {len(shares)} ready endpoints "
            "out on this node",
            "intended by trafficDistribution or topology-mode; remove them to use all",
        )
    fewer = max((share.new for share in elsewhere), default=0)
    local_only = plan.local and here and elsewhere and fewer < min(share.new for share in here)
    if left_out or local_only:
        number = len(in_use) if left_out else len(here)
        return (
            f"policy Local sends clients only to the {number} of {len(shares)} ready endpoints on "
            "this node",
            "intended; spread the pods evenly over the nodes, or use policy Cluster",
        )
    if plan.affinity_seconds:
        return (
            f"session affinity (ClientIP, {plan.affinity_seconds} s) keeps each client at one "
            f"endpoint, and only {clients} client{'s' * (clients > 1)} connected lately",
            "remove sessionAffinity, or accept it: it evens out with many clients",
        )
    if plan.scheduling.weights or plan.least_connections:
        return "annotations of the Service weigh its endpoints", "see the Service's annotations"
    new, now = [share.new for share in shares], [share.open for share in shares]
    if uneven(now) and (not uneven(new) or sum(now) * 2 > sum(new)):
        return (
            f"{sum(now)} long-lived connections stay at the endpoints that they were made to; only "
            "new ones are spread",
            "make clients close connections from time to time (keep-alive limits, gRPC "
            "max_connection_age), or balance requests instead of connections",
        )
    return "", "endpoints that became ready later have fewer; compare again after some minutes"
