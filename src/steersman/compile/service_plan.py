"""Plan one Service: Frontends, Actions and endpoints of its ports, as if no other Service existed.

Behaviour 6 decides by the policy and by who the client is:

                       from a pod        from this node    from elsewhere
    clusterIP
      policy Cluster   cluster           cluster *         cluster *
      policy Local     local             local *           local *        (no local one: drop)
    external IP, load balancer IP, node port
      policy Cluster   cluster masq.     cluster masq.     cluster masq.
      policy Local     cluster           cluster masq.     local          (no local one: drop)

    * masquerade if pods can be recognised: only clients outside of the pod network need it
    no endpoint anywhere: reject all; `masquerade_all` masquerades all traffic to clusterIPs
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from msgspec.structs import replace

from steersman.compile.annotations import Plans, with_options, with_weights
from steersman.compile.endpoints import (
    Categories,
    EndpointsByPort,
    categorize,
    limited_slices,
    local_ready_count,
    read_endpoints,
    union,
    with_ejections,
)
from steersman.compile.findings import FindingCollector
from steersman.compile.service import MAX_PORT, ParsedService, PortSpec, closes_connections
from steersman.model import codes
from steersman.model.addresses import family_of, networks_of
from steersman.model.failover import Ejection
from steersman.model.findings import Finding, Severity
from steersman.model.kube import EndpointSlice, Service
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

# All the Actions there are, shared by all plans.
DROP = Action(Verdict.DROP)
REJECT = Action(Verdict.REJECT)
TO_CLUSTER = Action(Verdict.FORWARD, Pool.CLUSTER)
TO_CLUSTER_MASQUERADED = Action(Verdict.FORWARD, Pool.CLUSTER, masquerade=True)
TO_LOCAL = Action(Verdict.FORWARD, Pool.LOCAL)
TO_LOCAL_MASQUERADED = Action(Verdict.FORWARD, Pool.LOCAL, masquerade=True)

Actions: TypeAlias = tuple[Action, Action, Action]
"""For a pod, for this node, for everyone else."""
_CLUSTER_IP = FrontendKind.CLUSTER_IP  # a member by name costs ten times as much (Python 3.11)
_ALL_DROP: Actions = (DROP, DROP, DROP)
_ALL_REJECT: Actions = (REJECT, REJECT, REJECT)
_ALL_MASQUERADED: Actions = (TO_CLUSTER_MASQUERADED,) * 3
FIELDS = {
    FrontendKind.CLUSTER_IP: "spec.clusterIP",
    FrontendKind.EXTERNAL_IP: "spec.externalIPs",
    FrontendKind.LOAD_BALANCER_IP: "status.loadBalancer.ingress",
}
"""The field of a Service that requests an address, by kind of the Frontend."""


def plan_service(
    parsed: ParsedService,
    slices: Iterable[EndpointSlice],
    settings: NodeSettings,
    zone: str,
    *,
    ejections: tuple[Ejection, ...] = (),
) -> tuple[Plans, tuple[Finding, ...]]:
    """Return the plans of a Service's ports, and the problems of its objects."""
    if not parsed.ports:
        return {}, parsed.findings
    traits, node_name = settings.traits, settings.node_name
    # Only the ports that the Service has are read from its slices.
    slices, more = limited_slices(slices)
    findings = parsed.findings + more
    closes = traits.terminates_connections and closes_connections(parsed.service)
    plans: Plans = {}
    found: dict[Family, EndpointsByPort] = {}
    ready: dict[Family, int] = {}
    for key, spec in parsed.ports:
        name, family = key
        if family not in found:  # the ports of a family share the endpoints
            found[family], more = read_endpoints(slices, family, node_name, parsed.wanted)
            findings += more
        states = found[family].get((name.port, name.protocol), ())
        usable = with_ejections(states, name.protocol, ejections) if ejections else states
        plan = plan_port(key, spec, categorize(usable, spec, node_name, zone), settings)
        if closes:  # all listed endpoints keep their connections, also those that terminate
            kept = tuple(sorted({state.endpoint for state in states}, key=str))
            plan = replace(plan, proxy=replace(plan.proxy, kept=kept))
        if spec.health_check_node_port:
            port = spec.health_check_node_port
            if family not in ready:
                ready[family] = local_ready_count(found[family])
            elif traits.one_health_check_port:
                port = 0  # only the first port of each family has it
            plan = replace(plan, ready_here=ready[family], health_check_node_port=port)
        plans[key] = plan
    # What depends on the whole Service: own addresses, then the annotations.
    if traits.assigns_vips:
        plans, more = without_own_addresses(parsed.service, plans, settings)
        findings += more
    if annotated := [slice_ for slice_ in slices if slice_.metadata.annotations is not None]:
        plans, more = with_weights(annotated, plans, parsed.wanted)
        findings += more
    if parsed.service.metadata.annotations is not None:
        plans, more = with_options(parsed.service, parsed.service.metadata.annotations, plans)
        findings += more
    return plans, findings


def plan_port(
    key: PlanKey, spec: PortSpec, found: Categories, settings: NodeSettings
) -> ServicePlan:
    """Return the plan of one ServicePort, without the options of annotations."""
    frontends: list[Frontend] = []
    if 0 < spec.port <= MAX_PORT:
        actions = internal_actions(spec, found, settings)
        frontends.append(Frontend(_CLUSTER_IP, spec.cluster_ip, spec.port, *actions))
    if frontends and spec.externally_accessible:
        family = settings.family(key.family)
        actions = external_actions(spec, found, family, settings)
        # Without endpoints some modes reject all clients, others still drop by the ranges first.
        guarded = found.has_any or settings.traits.filters_without_endpoints
        ranges = allowed_sources(spec, family) if guarded else ()
        addresses = {spec.cluster_ip}  # the first kind of an address counts
        for kind, candidates, sources in (
            (FrontendKind.EXTERNAL_IP, spec.external_ips, ()),
            (FrontendKind.LOAD_BALANCER_IP, spec.load_balancer_vips, ranges),
        ):
            for address in candidates:
                if address not in addresses:
                    addresses.add(address)
                    frontends.append(Frontend(kind, address, spec.port, *actions, sources))
        if spec.node_port:
            frontends.append(Frontend(FrontendKind.NODE_PORT, "", spec.node_port, *actions))
    plan = ServicePlan(
        key,
        tuple(frontends),
        found.cluster,
        found.local,
        found.reachable,
        spec.affinity_seconds,
        spec.health_check_node_port,
        draining=found.draining,
    )
    if frontends and not spec.externally_accessible:  # a clusterIP uses just the lists it needs
        return plan
    return without_frontends(plan, plan.frontends)


def without_frontends(plan: ServicePlan, kept: tuple[Frontend, ...]) -> ServicePlan:
    """Return a plan with only these of its Frontends, and the endpoints that they use."""
    actions = [action for each in kept for action in (each.pod, each.node, each.external)]
    used = {action.pool for action in actions if action.verdict is Verdict.FORWARD}
    cluster: tuple[Endpoint, ...] = plan.cluster if Pool.CLUSTER in used else ()
    local: tuple[Endpoint, ...] = plan.local if Pool.LOCAL in used else ()
    reachable = union(cluster, local)
    return replace(plan, frontends=kept, cluster=cluster, local=local, reachable=reachable)


def internal_actions(spec: PortSpec, found: Categories, settings: NodeSettings) -> Actions:
    """Decide what happens at the clusterIP."""
    # The list of endpoints by policy, and whether this node has any.
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
    # Answers to a client outside of the pod network must come back through this node.
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
    # Policy Cluster: an endpoint may be on any node, so answers must come back through this one.
    if not spec.external_policy_local:
        return _ALL_MASQUERADED
    # Policy Local: local endpoints answer the client directly and see its address.
    terminates = settings.traits.terminates_connections
    if found.local:
        others = TO_LOCAL_MASQUERADED if terminates else TO_LOCAL
    elif settings.falls_back and found.cluster:
        others = TO_CLUSTER_MASQUERADED  # a remote endpoint must answer through this node
    else:
        others = DROP
    to_cluster = TO_CLUSTER_MASQUERADED if terminates else TO_CLUSTER
    # A pod of this node is treated as at the clusterIP: all endpoints, and its source is kept.
    pod = to_cluster if family.detector else others
    return (pod, TO_CLUSTER_MASQUERADED, others)


def allowed_sources(spec: PortSpec, family: FamilySettings) -> tuple[str, ...]:
    """Return the CIDRs that may use the load balancer VIPs; () means everyone.

    If a range includes this node, the VIPs are allowed too: a connection from this node to a VIP
    has the VIP as its source (behaviour 6).
    """
    ranges = spec.load_balancer_source_ranges
    if not ranges or networks_of(family.node_ip).isdisjoint(ranges):
        return ranges
    own = [f"{vip}/{family_of(vip).bits}" for vip in spec.load_balancer_vips]
    return tuple(dict.fromkeys([*ranges, *own]))


def without_own_addresses(
    service: Service, plans: Plans, settings: NodeSettings
) -> tuple[Plans, tuple[Finding, ...]]:
    """Return plans without Frontends at this node's own addresses, and Findings about those.

    In modes that assign VIPs, a Service with such an address would take it away from everything
    else on this node (kubernetes issues 75290, 93175, 127410).
    """
    # Node ports have the address "", which is never one of the node's.
    problems = FindingCollector("Service", codes.ADDRESS_OF_THE_NODE, service.metadata)
    out = dict(plans)
    for key, plan in plans.items():
        own = settings.family(key.family).local_addresses
        clashing = [frontend for frontend in plan.frontends if frontend.address in own]
        for frontend in clashing:
            reason = f"{frontend.address} is an address of this node: not served there, as the"
            reason += " node would be cut off; give the Service another address, or use a mode"
            reason += " that assigns no Service addresses to the node"
            problems.add(FIELDS[frontend.kind], reason, Severity.ERROR)
        if clashing:
            rest = tuple(f for f in plan.frontends if f not in clashing)
            out[key] = without_frontends(plan, rest)
    return out, problems.findings
