"""Doctor's checks of what a Service asks for: who may come in where, and to which endpoints."""

from __future__ import annotations

from steersman.compile.conflicts import describe
from steersman.compile.trace import trace
from steersman.model.addresses import canonical_ip, is_loopback
from steersman.model.names import Family
from steersman.model.plan import FrontendKind, ServicePlan, SourceClass, Verdict
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.result import CheckResult, Found, error, ok, skipped, warning

_NODE_PORT = FrontendKind.NODE_PORT


async def flow(context: Context) -> Found:
    """Report what this node's plan does with the connection in question."""
    flow = context.question.flow
    assert flow is not None
    decision = trace(context.world.plan, flow)
    if decision.verdict == "forward":
        ends = ", ".join(map(str, decision.endpoints))
        return ok(f"{flow} goes to {ends}", *decision.reasons)
    if decision.verdict == "accept":
        return error(
            f"{flow} is not for a Service on this node: it is left as it is",
            *decision.reasons,
            remedy="see `steersman services` and `steersman nodeports` for those that are served",
        )
    ended = {"drop": "dropped", "reject": "rejected"}[decision.verdict]
    why = decision.reasons[-2] if decision.reasons[-1] == ended else decision.reasons[-1]
    return error(
        f"{flow} is {ended} as the Service asks: {why.removesuffix(f': {ended}')}",
        *decision.reasons,
    )


async def policies(context: Context) -> Found:
    """Find clients that a policy of the Service keeps out on this node."""
    out = [found for plan in context.plans if (found := _local_only(context, plan))]
    for plan in context.plans:
        for frontend in plan.frontends:
            if frontend.source_ranges:
                ranges = ", ".join(frontend.source_ranges)
                what = describe(plan.key, frontend)
                out.append(ok(f"only clients in {ranges} may use {what}; others are dropped"))
    return out or ok("neither a traffic policy nor a source range keeps clients out")


def _local_only(context: Context, plan: ServicePlan) -> CheckResult | None:
    """Say what policy Local does where this node has no endpoint; None if it drops nothing."""
    dropped = [
        (frontend, source)
        for frontend in plan.frontends
        for source in SourceClass
        if frontend.action(source).verdict is Verdict.DROP
    ]
    ready = len(context.report(plan).ready)
    # Without any endpoint the endpoints' check has said it.
    if not dropped or not ready:
        return None
    evidence = (
        f"dropped: {', '.join(dict.fromkeys(describe(plan.key, each) for each, _ in dropped))}",
        f"{ready} ready endpoint{'s are' if ready > 1 else ' is'} on other nodes",
    )
    if any(
        frontend.kind is FrontendKind.CLUSTER_IP and source is not SourceClass.EXTERNAL
        for frontend, source in dropped
    ):
        return error(
            f"internalTrafficPolicy of {plan.key.name} is Local and no ready endpoint is on this "
            "node: its pods cannot reach the Service",
            *evidence,
            remedy="run an endpoint on every node that has clients, or use policy Cluster",
        )
    remedy = "send clients to nodes with an endpoint, or use policy Cluster"
    if probe := plan.health_check_node_port:
        remedy = f"load balancers must probe health check node port {probe}"
    return warning(
        f"externalTrafficPolicy of {plan.key.name} is Local and no ready endpoint is on this "
        "node: clients outside who come to this node are dropped",
        *evidence,
        remedy=remedy,
        suspect=True,
    )


async def ports(context: Context) -> Found:
    """Compare the addresses that serve node ports with those that clients use."""
    out = []
    for family in context.families:
        ports = [
            (plan, frontend)
            for plan in context.plans
            for frontend in plan.frontends
            if frontend.kind is _NODE_PORT and plan.key.family is family
        ]
        if ports:
            words = ", ".join(describe(plan.key, frontend) for plan, frontend in ports)
            out.append(judge_serving(context, family, words))
    return out or skipped("the Service has no node port")


def judge_serving(context: Context, family: Family, ports: str) -> CheckResult:
    """Judge whether node ports answer on the addresses that clients use."""
    world = context.world
    settings = world.plan.settings.family(family)
    serving = settings.node_port_addresses
    configured = ", ".join(world.config.node_port_addresses) or "every address"
    if serving is None:
        return ok(f"{ports} answers on every {family.kubernetes} address of this node")
    if not serving:
        return error(
            f"{ports} answers on no {family.kubernetes} address: nodePortAddresses ({configured}) "
            "contains none of this node's",
            f"addresses of this node: {', '.join(settings.local_addresses)}",
            remedy="correct --nodeport-addresses; 'primary' is the node's own InternalIP",
        )
    node = world.snapshot.node
    known = {canonical_ip(each.address): each.type for each in (node.addresses if node else ())}
    # Addresses of the Node that do not serve: clients use those; else any that is not loopback.
    asked = {
        address: kind
        for address, kind in known.items()
        if address in settings.local_addresses and address not in serving
    }
    if asked:
        each = ", ".join(f"{address} ({kind})" for address, kind in asked.items())
        return warning(
            f"{ports} does not answer on {each}: nodePortAddresses is {configured}",
            f"it answers on: {', '.join(serving)}",
            remedy="use an address that serves node ports, or change --nodeport-addresses",
            suspect=True,
        )
    others = [a for a in settings.local_addresses if a not in serving and not is_loopback(a)]
    evidence = [f"not on: {', '.join(others)}"] if others else []
    return ok(f"{ports} answers on {', '.join(serving)} (nodePortAddresses)", *evidence)
