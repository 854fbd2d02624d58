"""Doctor's dials of the endpoints themselves, from the node.

They tell whether a frontend that fails (tries_check.py) is a cause or only a consequence: what no
endpoint answers, no frontend can answer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from steersman.model.findings import Severity
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import ServicePlan
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.result import Found, error, first_of, ok, skipped, unknown, warning
from steersman.operate.doctor.traffic_dial import Dial, Target, dial
from steersman.operate.doctor.traffic_load import connections_before
from steersman.operate.doctor.tries import sample

MOST_ENDPOINTS = 64
"""Endpoints, and destinations of frontends, that are dialled in one run."""


# Facts, shared by the checks


async def sampled(context: Context) -> Sequence[ServicePlan]:
    """Return the ServicePorts to try: those of the question, or a sample of the node's."""
    if context.question.service:
        return [plan for plan in context.plans if plan.reachable]
    uses: Counter[PlanKey] = Counter()
    with suppress(OSError):
        keys = {(f.address, f.port): p.key for p in context.plans for f in p.frontends}
        for entries in (await context.once(connections_before)).values():
            for each in entries:
                if key := keys.get((each.address, each.port)) or keys.get(("", each.port)):
                    uses[key] += 1
    troubled = set()
    for finding in context.world.plan.findings:
        kind, _, name = finding.object.partition(" ")
        if kind == "Service" and finding.severity is Severity.ERROR:
            troubled.add(ObjectName(*name.split("/", 1)))
    return sample(context.plans, troubled, uses)


async def dials_from_node(context: Context) -> tuple[Dial, ...]:
    """Dial the endpoints in use of the ServicePorts to try, once each."""
    # Endpoints of the same address stay together.
    targets = dict.fromkeys(
        Target(endpoint.ip, endpoint.port, plan.key.name.protocol)
        for plan in await context.once(sampled)
        for endpoint in plan.reachable
    )
    return tuple(await asyncio.gather(*(dial(target) for target in [*targets][:MOST_ENDPOINTS])))


# Endpoints


async def endpoints(context: Context) -> Found:
    """Dial each endpoint from the node: all, some or none of them answer."""
    dials = await context.once(dials_from_node)
    if not dials:
        return skipped("there is no endpoint to dial")
    evidence = [f"{each.target}: {each}" for each in sorted(dials, key=lambda each: each.good)]
    untried = [each for each in dials if each.outcome == "failed"]
    failed = [each for each in dials if not each.good and each.outcome != "failed"]
    if len(untried) == len(dials):
        return unknown(f"no endpoint could be dialled from this node: {untried[0].reason}")
    if failed:
        if len(failed) == len(dials):
            text = "no endpoint answers"
        else:
            verb = "does" if len(failed) == 1 else "do"
            share = f"{len(failed)} of {len(dials)} endpoints"
            text = f"{_names(failed)} ({share}) {verb} not answer"
        outcomes = {each.outcome for each in failed}
        why = {"refused": "refused", "timeout": "no answer at all", "unreachable": "unreachable"}
        kinds = ", ".join(why.get(outcome, outcome) for outcome in sorted(outcomes))
        return error(
            f"{text} when dialled from this node: {kinds}",
            *evidence,
            remedy=remedy_for(failed),
        )
    if slow := [each for each in dials if each.repeated]:
        verb = "answers" if len(slow) == 1 else "answer"
        return warning(
            f"{_names(slow)} {verb} this node only after packets were sent again: packets are "
            "lost, or a queue of new connections is full",
            *evidence,
            remedy="see the load of the pod (`ss -ltn`: Recv-Q at Send-Q) and of the network",
        )
    if all(each.outcome == "silent" for each in dials):
        return ok("no ICMP error comes back to this node from any UDP endpoint", *evidence)
    return ok(f"every endpoint answers this node ({len(dials)})", *evidence)


def _names(dials: Sequence[Dial]) -> str:
    """Name the targets of some dials, the first few of them."""
    return first_of([str(each.target) for each in dials], 3)


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
            "on, its NetworkPolicies, and the routes to it (`ip route get`)"
        )
    return "there is no way to the pod: see the routes (`ip route get`) and the network plugin"
