"""From a ServicePort and its endpoints to Frontends: who is forwarded, dropped, refused.

Behaviour 6 as a few tables of Actions.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from steersman.compile.endpoints import Categories, union
from steersman.compile.notes import MAX_PORT
from steersman.compile.service import PortSpec
from steersman.model.addresses import family_of, in_cidr
from steersman.model.names import Family, PlanKey
from steersman.model.plan import (
    Action,
    Endpoint,
    FamilySettings,
    Frontend,
    FrontendKind,
    NodeSettings,
    Pool,
    ServicePlan,
    Verdict,
)

# The few Actions there are, shared by all plans.
DROP = Action(Verdict.DROP)
REJECT = Action(Verdict.REJECT)
TO_CLUSTER = Action(Verdict.FORWARD, Pool.CLUSTER)
TO_CLUSTER_MASQUERADED = Action(Verdict.FORWARD, Pool.CLUSTER, masquerade=True)
TO_LOCAL = Action(Verdict.FORWARD, Pool.LOCAL)
TO_LOCAL_MASQUERADED = Action(Verdict.FORWARD, Pool.LOCAL, masquerade=True)

Actions = tuple[Action, Action, Action]
"""For a pod, for this node, for everyone else."""
_CLUSTER_IP = FrontendKind.CLUSTER_IP
_ALL_DROP: Actions = (DROP, DROP, DROP)
_ALL_REJECT: Actions = (REJECT, REJECT, REJECT)
_ALL_MASQUERADED: Actions = (TO_CLUSTER_MASQUERADED,) * 3


def plan_port(
    key: PlanKey, spec: PortSpec, found: Categories, settings: NodeSettings
) -> ServicePlan:
    """Return the plan of one ServicePort, as if no other Service existed."""
    frontends = tuple(_frontends(key, spec, found, settings))
    plan = ServicePlan(
        key,
        frontends,
        found.cluster,
        found.local,
        found.reachable,
        spec.affinity_seconds,
        spec.health_check_node_port,
    )
    if frontends and not spec.reachable:  # a clusterIP alone uses just the lists it asked for
        return plan
    return without_frontends(plan, frontends)


def without_frontends(plan: ServicePlan, kept: tuple[Frontend, ...]) -> ServicePlan:
    """Return a plan with only these of its Frontends, and the endpoints that they use."""
    fewer = ServicePlan(plan.key, kept)
    cluster: tuple[Endpoint, ...] = plan.cluster if fewer.uses_cluster else ()
    local: tuple[Endpoint, ...] = plan.local if fewer.uses_local else ()
    return ServicePlan(
        plan.key,
        kept,
        cluster,
        local,
        union(cluster, local),
        plan.affinity_seconds,
        plan.health_check_node_port,
        plan.least_connections,
        plan.maglev,
        plan.proxy_protocol,
        plan.scheduler,
        plan.scheduler_flags,
        plan.weights,
        plan.kept,
        plan.ready_here,
        plan.metrics,
    )


def one_health_check_port(plans: dict[PlanKey, ServicePlan]) -> dict[PlanKey, ServicePlan]:
    """Return a Service's plans, its health check node port in the first of each family only."""
    seen: set[Family] = set()
    out = {}
    for key, plan in plans.items():
        again = bool(plan.health_check_node_port) and key.family in seen
        out[key] = msgspec.structs.replace(plan, health_check_node_port=0) if again else plan
        if plan.health_check_node_port:
            seen.add(key.family)
    return out


def internal_actions(spec: PortSpec, found: Categories, settings: NodeSettings) -> Actions:
    """Decide what happens at the clusterIP."""
    if not found.has_any:
        return _ALL_REJECT
    if not spec.internal_policy_local:
        plain, masqueraded = TO_CLUSTER, TO_CLUSTER_MASQUERADED
    elif found.local:
        plain, masqueraded = TO_LOCAL, TO_LOCAL_MASQUERADED
    elif settings.falls_back and found.cluster:
        plain, masqueraded = TO_CLUSTER, TO_CLUSTER_MASQUERADED
    else:
        return _ALL_DROP
    if settings.masquerade_all or settings.traits.terminates_connections:
        return (masqueraded, masqueraded, masqueraded)
    if settings.family(family_of(spec.cluster_ip)).detector:
        return (plain, masqueraded, masqueraded)
    return (plain, plain, plain)


def external_actions(
    spec: PortSpec, found: Categories, family: FamilySettings, settings: NodeSettings
) -> Actions:
    """Decide what happens at external IPs, load balancer VIPs and the node port."""
    if not found.has_any:
        return _ALL_REJECT
    if not spec.external_policy_local:
        return _ALL_MASQUERADED
    terminates_connections = settings.traits.terminates_connections
    if found.local:
        others = TO_LOCAL_MASQUERADED if terminates_connections else TO_LOCAL
    else:  # elsewhere, answers come back only if they are asked for by this node
        others = TO_CLUSTER_MASQUERADED if settings.falls_back and found.cluster else DROP
    to_cluster = TO_CLUSTER_MASQUERADED if terminates_connections else TO_CLUSTER
    pod = to_cluster if family.detector else others
    return (pod, TO_CLUSTER_MASQUERADED, others)


def allowed_sources(spec: PortSpec, family: FamilySettings) -> tuple[str, ...]:
    """Return who may use the load balancer VIPs; () means everyone.

    Where a range includes this node, connections to a VIP from the node itself have the VIP as
    their source, so the VIPs are allowed too (behaviour 6).
    """
    ranges = spec.load_balancer_source_ranges
    if not any(in_cidr(family.node_ip, cidr) for cidr in ranges):
        return ranges
    own = [f"{vip}/{family_of(vip).bits}" for vip in spec.load_balancer_vips]
    return tuple(dict.fromkeys([*ranges, *own]))


def _frontends(
    key: PlanKey, spec: PortSpec, found: Categories, settings: NodeSettings
) -> Iterable[Frontend]:
    """List the destinations, each once: within a Service the first kind of an address counts."""
    if not 0 < spec.port <= MAX_PORT:
        return
    pod, node, external = internal_actions(spec, found, settings)
    yield Frontend(_CLUSTER_IP, spec.cluster_ip, spec.port, pod, node, external)
    if spec.reachable:
        yield from _external_frontends(spec, found, settings.family(key.family), settings)


def _external_frontends(
    spec: PortSpec, found: Categories, family: FamilySettings, settings: NodeSettings
) -> Iterable[Frontend]:
    actions = external_actions(spec, found, family, settings)
    guarded = found.has_any or settings.traits.filters_without_endpoints
    ranges = allowed_sources(spec, family) if guarded else ()
    seen = {spec.cluster_ip}
    for kind, addresses, sources in (
        (FrontendKind.EXTERNAL_IP, spec.external_ips, ()),
        (FrontendKind.LOAD_BALANCER_IP, spec.load_balancer_vips, ranges),
    ):
        for address in addresses:
            if address not in seen:
                seen.add(address)
                yield Frontend(kind, address, spec.port, *actions, sources)
    if spec.node_port:
        yield Frontend(FrontendKind.NODE_PORT, "", spec.node_port, *actions)
