"""Doctor's dials: every endpoint, every frontend and the node port, from the node and from a pod.

The dials of endpoints tell whether a frontend that fails is a cause or only a consequence: what no
endpoint answers, no frontend can answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from steersman.compile.conflicts import describe
from steersman.compile.trace import Flow, trace
from steersman.model.addresses import is_loopback
from steersman.model.names import PlanKey
from steersman.model.plan import FrontendKind, ServicePlan, SourceClass
from steersman.operate.doctor.check import (
    Applies,
    Cause,
    Check,
    CheckResult,
    Context,
    both,
    error,
    ok,
    on_the_node,
    skipped,
    unknown,
    warning,
    with_service,
)
from steersman.operate.doctor.traffic_dial import Dial, Target, dial
from steersman.operate.doctor.traffic_load import connections_before

MOST = 64
"""Endpoints, and destinations of frontends, that are dialled in one run."""
_TRIES = 3
"""Dials of a frontend: it may choose another endpoint each time."""


class Destination(NamedTuple):
    """A frontend at one address, and what the plan does with a dial from here."""

    key: PlanKey
    words: str
    target: Target
    is_node_port: bool


# Facts, shared by the checks


async def _from_node(context: Context) -> tuple[Dial, ...]:
    return await _dial_all(_endpoints(context), None)


async def _from_pod(context: Context) -> tuple[Dial, ...]:
    return await _dial_all(_endpoints(context), Path(context.question.netns))


def _endpoints(context: Context) -> list[Target]:
    """Return the endpoints in use, each once; endpoints of the same address stay together."""
    found = dict.fromkeys(
        Target(endpoint.ip, endpoint.port, plan.key.name.protocol)
        for plan in context.plans
        for endpoint in plan.reachable
    )
    return [*found][:MOST]


async def _dial_all(targets: Sequence[Target], netns: Path | None) -> tuple[Dial, ...]:
    return tuple(await asyncio.gather(*(dial(target, netns) for target in targets)))


# Endpoints


async def endpoints_from_node(context: Context) -> Iterable[CheckResult]:
    """Dial each endpoint from the node."""
    return _of_endpoints(await context.once(_from_node), "this node", Cause.ENDPOINT)


async def endpoints_from_pod(context: Context) -> Iterable[CheckResult]:
    """Dial each endpoint from the pod: rules for forwarded packets and NetworkPolicies count."""
    dials = await context.once(_from_pod)
    here = {each.target for each in await context.once(_from_node) if each.good}
    failed = [each for each in dials if not each.good and each.outcome != "failed"]
    pod = f"the pod {context.question.pod or context.question.netns}"
    if failed and all(each.target in here for each in failed):
        return [
            error(
                f"{pod} does not reach {_names(failed)}, but this node does: packets between them "
                "are not forwarded",
                *(f"{each.target}: {each}" for each in failed),
                remedy="a NetworkPolicy, a firewall rule in FORWARD, or forwarding is off",
                cause=Cause.PATH + 1,
            )
        ]
    return _of_endpoints(dials, pod, Cause.ENDPOINT + 1)


def _of_endpoints(dials: Sequence[Dial], source: str, cause: int) -> list[CheckResult]:
    """Judge the dials of endpoints: all, some or none of them answer."""
    if not dials:
        return [skipped("there is no endpoint to dial")]
    evidence = [f"{each.target}: {each}" for each in sorted(dials, key=lambda each: each.good)]
    untried = [each for each in dials if each.outcome == "failed"]
    failed = [each for each in dials if not each.good and each.outcome != "failed"]
    if len(untried) == len(dials):
        return [unknown(f"no endpoint could be dialled from {source}: {untried[0].reason}")]
    if failed:
        which = "no endpoint" if len(failed) == len(dials) else _names(failed)
        share = f" ({len(failed)} of {len(dials)} endpoints)" * (len(failed) < len(dials))
        verb = "answers" if which == "no endpoint" else "does not answer"
        outcomes = {each.outcome for each in failed}
        why = {"refused": "refused", "timeout": "no answer at all", "unreachable": "unreachable"}
        kinds = ", ".join(why.get(outcome, outcome) for outcome in sorted(outcomes))
        return [
            error(
                f"{which}{share} {verb} when dialled from {source}: {kinds}",
                *evidence,
                remedy=remedy_for(failed),
                cause=cause,
            )
        ]
    slow = [each for each in dials if each.repeated]
    if slow:
        return [
            warning(
                f"{_names(slow)} answers {source} only after packets were sent again: packets are "
                "lost, or its queue of new connections is full",
                *evidence,
                remedy="see the load of the pod (ss -ltn: Recv-Q at Send-Q) and of the network",
                cause=cause,
            )
        ]
    if all(each.outcome == "silent" for each in dials):
        return [ok(f"no ICMP error comes back to {source} from any UDP endpoint", *evidence)]
    return [ok(f"all {len(dials)} endpoints answer {source}", *evidence)]


def _names(dials: Sequence[Dial]) -> str:
    """Name the targets of some dials, the first few of them."""
    first = ", ".join(str(each.target) for each in dials[:3])
    return first if len(dials) <= 3 else f"{first} and {len(dials) - 3} more"


def remedy_for(failed: Sequence[Dial]) -> str:
    """Say what to do about dials that failed in the same way as the first."""
    first = failed[0]
    port = first.target.port
    if first.outcome == "refused" and first.by:
        return f"{first.by} rejects it: look for a REJECT rule there"
    if first.outcome == "refused":
        return (
            f"the pod is there, but no process of it listens on port {port}: is targetPort right, "
            "does the program run, and does it listen on every address?"
        )
    if first.outcome == "timeout":
        return (
            "the pod is gone, hangs, or packets on the way are dropped: see the node that it runs "
            "on, its NetworkPolicies, and the routes to it (ip route get)"
        )
    return "there is no way to the pod: see the routes (ip route get) and the network plugin"


# Frontends


def _destinations(context: Context, source: SourceClass) -> list[Destination]:
    """Return the frontends that the plan forwards for clients of a class, at each address."""
    out: list[Destination] = []
    for plan in context.plans:
        settings = context.world.plan.settings.family(plan.key.family)
        protocol = plan.key.name.protocol
        for frontend in plan.frontends:
            is_node_port = frontend.kind is FrontendKind.NODE_PORT
            addresses = settings.local_addresses if is_node_port else (frontend.address,)
            for address in addresses:
                if source is SourceClass.POD and is_loopback(address):
                    continue  # a pod's own loopback, not the node's
                flow = Flow(source, address, frontend.port, protocol)
                if trace(context.world.plan, flow).verdict == "forward":
                    target = Target(address, frontend.port, protocol)
                    words = describe(plan.key, frontend)
                    out.append(Destination(plan.key, words, target, is_node_port))
    return out[:MOST]


async def addresses_from_node(context: Context) -> Iterable[CheckResult]:
    """Dial the cluster IP, external and load balancer IPs from the node."""
    found = [d for d in _destinations(context, SourceClass.NODE) if not d.is_node_port]
    return await _of_frontends(context, found, None)


async def node_ports_from_node(context: Context) -> Iterable[CheckResult]:
    """Dial the node port on each address that serves it, loopback included."""
    found = [d for d in _destinations(context, SourceClass.NODE) if d.is_node_port]
    return await _of_frontends(context, found, None)


async def addresses_from_pod(context: Context) -> Iterable[CheckResult]:
    """Dial all addresses of the Service from the pod."""
    found = _destinations(context, SourceClass.POD)
    return await _of_frontends(context, found, Path(context.question.netns))


async def _of_frontends(
    context: Context, found: Sequence[Destination], netns: Path | None
) -> Iterable[CheckResult]:
    """Dial destinations a few times each, and judge the failures by those of the endpoints."""
    source = f"the pod {context.question.pod or netns}" if netns else "this node"
    if not found:
        return [skipped(f"nothing is forwarded for {source} here")]
    with suppress(OSError):  # the check of the load says why they cannot be listed
        await context.once(connections_before)
    tries = [each.target for each in found for _ in range(_TRIES)]
    dials = await _dial_all(tries, netns)
    endpoints = await context.once(_from_pod if netns else _from_node)
    broken = {each.target for each in endpoints if not each.good}
    plans = {plan.key: plan for plan in context.plans}
    out: list[CheckResult] = []
    fine: list[str] = []
    for each in found:
        mine = [d for d in dials if d.target == each.target]
        failed = [d for d in mine if not d.good]
        if not failed:
            fine.append(f"{_where(each)}: {mine[0]}")
        elif failed[0].outcome == "failed":
            out.append(unknown(f"{_where(each)} could not be dialled: {failed[0].reason}"))
        else:
            out.append(failure_of(each, source, failed, broken, plans[each.key]))
    if fine:
        out.append(ok(f"{len(fine)} of {len(found)} destinations answer {source}", *fine))
    return out


def _where(each: Destination) -> str:
    return f"{each.words} at {each.target.address}" if each.is_node_port else each.words


def failure_of(
    each: Destination,
    source: str,
    failed: Sequence[Dial],
    broken: set[Target],
    plan: ServicePlan,
) -> CheckResult:
    """Return the result for a destination that does not answer as it should."""
    protocol = plan.key.name.protocol
    behind = [Target(e.ip, e.port, protocol) for e in plan.reachable]
    dead = [target for target in behind if target in broken]
    times = f"{len(failed)} of {_TRIES} times" if len(failed) < _TRIES else "each time"
    evidence = [f"{d.target}: {d}" for d in failed[:1]]
    if dead:
        return error(
            f"{_where(each)} does not answer {source} ({times}): a consequence, as {len(dead)} of "
            f"its {len(behind)} endpoints do not answer either",
            *evidence,
            cause=Cause.SYMPTOM + 5,
        )
    return error(
        f"{_where(each)} does not answer {source} ({times}), although its endpoints do when they "
        f"are dialled themselves: {failed[0]}",
        *evidence,
        remedy="packets are dropped or go elsewhere between the rules and the endpoint: "
        f"steersman trace --to {each.target} shows where",
    )


_HERE: Applies = both(with_service, on_the_node)
_POD: Applies = both(
    _HERE,
    lambda context: "" if context.question.netns else "no pod was named to dial from (--from-pod)",
)
DIAL_CHECKS = (
    Check(
        "endpoints-from-node",
        "endpoints dialled from the node",
        endpoints_from_node,
        _HERE,
        Cause.ENDPOINT,
    ),
    Check(
        "endpoints-from-pod",
        "endpoints dialled from the pod",
        endpoints_from_pod,
        _POD,
        Cause.ENDPOINT + 1,
    ),
    Check(
        "addresses-from-node",
        "addresses of the Service dialled from the node",
        addresses_from_node,
        _HERE,
        Cause.SYMPTOM,
    ),
    Check(
        "node-port-from-node",
        "node port dialled from the node",
        node_ports_from_node,
        _HERE,
        Cause.SYMPTOM + 1,
    ),
    Check(
        "addresses-from-pod",
        "addresses of the Service dialled from the pod",
        addresses_from_pod,
        _POD,
        Cause.SYMPTOM + 2,
    ),
)
