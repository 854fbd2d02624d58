"""What happens to one connection, and why: a NodePlan walked as a packet would (behaviour 6).

Works on the plan alone, so that it says what the kernel was told and not what the cluster holds;
why an endpoint is in the plan or not is told by `compile.reasons`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from steersman.compile.claims import describe
from steersman.compile.flow import Decision, Flow, Outcome, canonical, classify
from steersman.model.addresses import (
    canonical_ip,
    family_of,
    in_cidr,
    is_loopback,
    join_host_port,
)
from steersman.model.names import PlanKey, Protocol
from steersman.model.plan import (
    Endpoint,
    FamilySettings,
    Frontend,
    FrontendKind,
    NodePlan,
    NodeSettings,
    Pool,
    ServicePlan,
    SourceClass,
    Verdict,
)

__all__ = ["Decision", "Flow", "classify", "trace"]

Match: TypeAlias = tuple[ServicePlan, Frontend]


class _Walk:
    """One Flow on its way; collects reasons."""

    def __init__(self, plan: NodePlan, flow: Flow) -> None:
        self.plan = plan
        self.flow = flow
        self.settings: NodeSettings = plan.settings
        self.family_name = family_of(flow.destination)
        self.family: FamilySettings = plan.settings.family(self.family_name)
        self.reasons: list[str] = []

    def say(self, reason: str) -> None:
        self.reasons.append(reason)

    def decide(
        self,
        verdict: Outcome,
        match: Match | None = None,
        endpoints: tuple[Endpoint, ...] = (),
        masquerade: bool = False,
    ) -> Decision:
        key, frontend = (match[0].key, match[1]) if match else (None, None)
        return Decision(verdict, endpoints, masquerade, key, frontend, tuple(self.reasons))


def trace(plan: NodePlan, flow: Flow) -> Decision:
    """Decide what happens to a Flow on this node.

    Addresses in the Flow may be spelled in any way. A destination that is no address matches
    nothing; a source that is none is taken to be outside the cluster.
    """
    walk = _Walk(plan, canonical(flow))
    if canonical_ip(walk.flow.destination) is None:
        walk.say(f"{flow.destination!r} is not an IP address: give one, names are not looked up")
        return walk.decide("accept")
    if walk.family_name not in plan.settings.families:
        walk.say(f"{walk.family_name.kubernetes} is not served on this node: left as it is")
        return walk.decide("accept")
    match = _at_address(walk) or _at_node_port(walk)
    if match is not None:
        return _at_frontend(walk, match)
    return _elsewhere(walk)


# Which destination is it?


def _plans(walk: _Walk) -> Iterable[ServicePlan]:
    for key, plan in walk.plan.services.items():
        if key.family is walk.family_name and key.name.protocol is walk.flow.protocol:
            yield plan


def _at_address(walk: _Walk) -> Match | None:
    for plan in _plans(walk):
        for frontend in plan.frontends:
            if (frontend.address, frontend.port) == (walk.flow.destination, walk.flow.port):
                kind = _KINDS[frontend.kind]
                walk.say(f"{describe(plan.key, frontend)} is {kind} of {plan.key.name}")
                return plan, frontend
    return None


_KINDS = {
    FrontendKind.CLUSTER_IP: "the clusterIP",
    FrontendKind.EXTERNAL_IP: "an external IP",
    FrontendKind.LOAD_BALANCER_IP: "a load balancer IP",
    FrontendKind.NODE_PORT: "the node port",
}


def _at_node_port(walk: _Walk) -> Match | None:
    flow = walk.flow
    if not walk.family.sources.is_local(flow.destination):
        return None
    for plan in _plans(walk):
        for frontend in plan.frontends:
            if frontend.kind is FrontendKind.NODE_PORT and frontend.port == flow.port:
                walk.say(f"{describe(plan.key, frontend)} is the node port of {plan.key.name}")
                return plan, frontend
    return None


def _serves_node_ports(walk: _Walk) -> bool:
    """Whether the destination is an address at which node ports answer; say so."""
    address, family = walk.flow.destination, walk.family
    if is_loopback(address):
        serves = family.localhost_node_ports
        why = "loopback node ports are on" if serves else "node ports do not answer on loopback"
    elif family.node_port_addresses is None:
        serves, why = True, "node ports answer on every address of this node"
    else:
        serves = address in family.node_port_addresses
        listed = ", ".join(family.node_port_addresses) or "none"
        why = f"node ports answer on these addresses of this node: {listed}"
    walk.say(f"{address} is an address of this node; {why}")
    return serves


# What happens there?


def _at_frontend(walk: _Walk, match: Match) -> Decision:
    _, frontend = match
    if frontend.kind is FrontendKind.NODE_PORT and not _serves_node_ports(walk):
        return _node_port_elsewhere(walk, match)
    if not _source_allowed(walk, frontend):
        walk.say("dropped")
        return walk.decide("drop", match)
    source = classify(walk.plan.settings, walk.flow)
    walk.say(_who(walk, source))
    action = frontend.action(source)
    if action.verdict is not Verdict.FORWARD and _is_spared(walk, frontend):
        walk.say("this mode refuses nothing that this node itself sends there: left as it is")
        return walk.decide("accept")
    if action.verdict is not Verdict.FORWARD:
        walk.say(_REFUSALS[action.verdict])
        return walk.decide(_OUTCOMES[action.verdict], match)
    return _forward(walk, match, action.pool, action.masquerade)


def _is_spared(walk: _Walk, frontend: Frontend) -> bool:
    """Whether refusing it is left out: a node's own packets are never forwarded to a far IP."""
    flow, family = walk.flow, walk.family
    own = flow.source is SourceClass.NODE or family.sources.is_local(str(flow.source))
    return (
        walk.settings.traits.spares_own_external_traffic
        and frontend.kind in (FrontendKind.EXTERNAL_IP, FrontendKind.LOAD_BALANCER_IP)
        and own
        and not family.sources.is_local(flow.destination)
    )


_OUTCOMES: Mapping[Verdict, Outcome] = {
    Verdict.FORWARD: "forward",
    Verdict.DROP: "drop",
    Verdict.REJECT: "reject",
}
_REFUSALS = {
    Verdict.REJECT: "no endpoint exists anywhere that traffic could go to: rejected",
    Verdict.DROP: "the traffic policy is Local and no endpoint is on this node: dropped",
}


def _node_port_elsewhere(walk: _Walk, match: Match) -> Decision:
    verdict = match[1].external.verdict
    if verdict is Verdict.FORWARD or not walk.settings.traits.refuses_node_ports_everywhere:
        walk.say("not ours: left as it is")
        return walk.decide("accept")
    walk.say("this mode refuses a node port without endpoints on every address")
    walk.say(_REFUSALS[verdict])
    return walk.decide(_OUTCOMES[verdict], match)


def _source_allowed(walk: _Walk, frontend: Frontend) -> bool:
    if not frontend.source_ranges:
        return True
    ranges, source = ", ".join(frontend.source_ranges), walk.flow.source
    if isinstance(source, SourceClass):
        walk.say(f"only clients in {ranges} may use it: taken to be one of them")
        return True
    allowed = any(in_cidr(source, cidr) for cidr in frontend.source_ranges)
    where = "in" if allowed else "not in"
    walk.say(f"{source} is {where} the ranges that may use it ({ranges})")
    return allowed


def _who(walk: _Walk, source: SourceClass) -> str:
    client = walk.flow.source
    name = "the client" if isinstance(client, SourceClass) else f"the client {client}"
    detector = walk.family.detector
    if source is SourceClass.NODE:
        return f"{name} is this node itself"
    if not detector:
        return f"{name} may be a pod or not: nothing is configured to tell"
    how = detector.cidr or f"interface {detector.interface or detector.interface_prefix + '*'}"
    is_pod = (
        "is a pod of this cluster" if source is SourceClass.POD else "is no pod of this cluster"
    )
    return f"{name} {is_pod} (pods: {how})"


def _forward(walk: _Walk, match: Match, pool: Pool, masquerade: bool) -> Decision:
    endpoints = match[0].pool(pool)
    listed = ", ".join(map(str, endpoints))
    on = " on this node" if pool is Pool.LOCAL else ""
    walk.say(f"goes to one of {len(endpoints)} endpoints{on}, each equally likely: {listed}")
    if match[0].affinity_seconds:
        walk.say(
            f"a client keeps its endpoint until {match[0].affinity_seconds} s after its last"
            " new connection (session affinity)"
        )
    spared = walk.settings.traits.spares_hairpins_elsewhere
    own = [e for e in endpoints if e.ip == walk.flow.source and (e.local or not spared)]
    if masquerade:
        walk.say("masqueraded: the endpoint sees an address of this node as the client")
    else:
        walk.say("not masqueraded: the endpoint sees the client's own address")
        for endpoint in own:
            walk.say(f"but masqueraded if it goes to {endpoint}, the client itself (hairpin)")
    hairpin = len(own) == len(endpoints)
    return walk.decide("forward", match, endpoints, masquerade or hairpin)


# What happens where nothing is served?


def _elsewhere(walk: _Walk) -> Decision:
    flow, traits = walk.flow, walk.settings.traits
    where = f"{join_host_port(flow.destination, flow.port)}/{flow.protocol}"
    walk.say(f"no Service of this cluster is at {where}")
    health = _health_check(walk)
    if health is not None:
        walk.say(f"it is the health check node port of {health.key.name.object_name}: let in")
        return walk.decide("accept")
    owner = _cluster_ip_owner(walk)
    if owner is not None:
        walk.say(f"{flow.destination} is the clusterIP of {owner.name.object_name}, on other ports")
    if owner is not None and traits.rejects_unknown_ports:
        walk.say("unknown ports of a clusterIP are rejected")
        return walk.decide("reject")
    if traits.drops_unassigned_addresses and owner is None:
        for cidr in walk.family.service_cidrs:
            if in_cidr(flow.destination, cidr):
                walk.say(f"it is an address for clusterIPs ({cidr}) that is not in use: dropped")
                return walk.decide("drop")
    walk.say("not ours: left as it is")
    return walk.decide("accept")


def _health_check(walk: _Walk) -> ServicePlan | None:
    flow = walk.flow
    if flow.protocol is not Protocol.TCP or not walk.family.sources.is_local(flow.destination):
        return None
    for key, plan in walk.plan.services.items():
        if key.family is walk.family_name and plan.health_check_node_port == flow.port:
            return plan
    return None


def _cluster_ip_owner(walk: _Walk) -> PlanKey | None:
    for key, plan in walk.plan.services.items():
        for frontend in plan.frontends:
            is_cluster_ip = frontend.kind is FrontendKind.CLUSTER_IP
            if is_cluster_ip and frontend.address == walk.flow.destination:
                return key
    return None
