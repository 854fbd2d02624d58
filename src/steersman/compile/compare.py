"""Compare two plans of a node: which Services are treated differently, and how.

The rules of two modes, or of two versions, have nothing in common. Their plans do: a frontend, the
Action for each class of clients, the endpoints. What plans leave to the mode is in its Traits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from steersman.model.names import Family, PlanKey
from steersman.model.plan import (
    Action,
    FamilySettings,
    Frontend,
    FrontendKind,
    NodePlan,
    Pool,
    ServicePlan,
    SourceClass,
    Verdict,
)


class Treatment(msgspec.Struct, frozen=True, rename="camel"):
    """One way in which traffic is treated differently, and the Services that it concerns."""

    reason: str
    """A sentence without its full stop."""
    services: tuple[str, ...] = ()
    """Services, as `shop/web`; () if it concerns the node as a whole."""
    places: tuple[str, ...] = ()
    """The frontends or endpoints of these Services, as `shop/web 10.96.0.1:80`."""


_KINDS = {
    FrontendKind.CLUSTER_IP: "cluster IP",
    FrontendKind.EXTERNAL_IP: "external IP",
    FrontendKind.LOAD_BALANCER_IP: "load balancer IP",
    FrontendKind.NODE_PORT: "node port",
}
_CLIENTS = {
    SourceClass.POD: "pods of this node",
    SourceClass.NODE: "this node itself",
    SourceClass.EXTERNAL: "clients elsewhere",
}
_POLICIES = {Pool.CLUSTER: "Cluster", Pool.LOCAL: "Local"}
_VERDICTS = {Verdict.DROP: "dropped", Verdict.REJECT: "rejected"}


def compare_plans(before: NodePlan, after: NodePlan) -> tuple[Treatment, ...]:
    """Return every difference for traffic: first those of the node, then by reason."""
    found: dict[str, dict[str, str]] = {}
    """Services by place, by reason."""
    # The node as a whole.
    node: list[str] = []
    old, new = before.settings.traits, after.settings.traits
    for name, row in TRAIT_ROWS.items():
        if row.concerns is None and getattr(old, name) != getattr(new, name):
            node.append(row.comes if getattr(new, name) else row.goes)
    if before.settings.masquerade_mark != after.settings.masquerade_mark:
        marks = after.settings.masquerade_mark, before.settings.masquerade_mark
        node.append("the packet mark for masquerading is {:#x} instead of {:#x}".format(*marks))
    for family in after.settings.families:
        was, will_be = before.settings.family(family), after.settings.family(family)
        if family in before.settings.families and was.detector != will_be.detector:
            node.append(
                f"{family.kubernetes}: local pods are recognised by {_detector(will_be)} instead "
                f"of {_detector(was)}"
            )
    # Its Services, by the difference.
    for key in sorted(before.services.keys() | after.services.keys(), key=str):
        plans = before.services.get(key), after.services.get(key)
        for reason, place in _reasons(key, *plans, before, after):
            found.setdefault(reason, {})[place] = str(key.name.object_name)
    rest = [
        Treatment(reason, tuple(dict.fromkeys(services.values())), tuple(services))
        for reason, services in sorted(found.items())
    ]
    return (*map(Treatment, node), *rest)


def _reasons(
    key: PlanKey,
    old: ServicePlan | None,
    new: ServicePlan | None,
    before: NodePlan,
    after: NodePlan,
) -> Iterator[tuple[str, str]]:
    """Yield the differences of one ServicePort, each with its place."""
    name = str(key.name)
    if old is None or new is None:
        verb = "from now on" if old is None else "no longer"
        if not all(key.family in plan.settings.families for plan in (before, after)):
            yield f"served {verb}, as all of {key.family.kubernetes}", name
            return
        for present in filter(None, (old, new)):
            for frontend in present.frontends:
                yield f"{_KINDS[frontend.kind]} served {verb}", _place(name, key, frontend)
        return
    mine = {(f.kind, f.address, f.port): f for f in old.frontends}
    theirs = {(f.kind, f.address, f.port): f for f in new.frontends}
    for where in sorted(mine.keys() | theirs.keys()):
        was, will_be = mine.get(where), theirs.get(where)
        if was and will_be:
            for reason in _frontend_reasons(was, will_be):
                yield reason, _place(name, key, will_be)
            continue
        verb = "no longer" if was else "from now on"
        for frontend in filter(None, (was, will_be)):
            yield f"{_KINDS[frontend.kind]} served {verb}", _place(name, key, frontend)
    for reason, endpoint in _endpoint_reasons(old, new):
        yield reason, f"{name} {endpoint}"
    for reason in _option_reasons(old, new, before, after):
        yield reason, name


def _endpoint_reasons(old: ServicePlan, new: ServicePlan) -> Iterator[tuple[str, str]]:
    """Yield the endpoints that get other connections, each with the difference."""
    before, after = ({str(end) for end in plan.reachable} for plan in (old, new))
    for endpoint in sorted(after - before):
        yield "endpoint gets connections from now on", endpoint
    for endpoint in sorted(before - after):
        yield "endpoint gets no more connections", endpoint
    for pool, policy in _POLICIES.items():
        used, will_use = ({str(end) for end in plan.pool(pool)} for plan in (old, new))
        if not (used and will_use):  # of a pool that is not used, the Actions tell
            continue
        for endpoint in sorted((will_use - used) & before):
            yield f"endpoint gets connections by policy {policy} from now on", endpoint
        for endpoint in sorted((used - will_use) & after):
            yield f"endpoint gets no more connections by policy {policy}", endpoint


def _place(name: str, key: PlanKey, frontend: Frontend) -> str:
    if not frontend.address:
        return f"{name} node port {frontend.port}/{key.name.protocol.lower()}"
    address = f"[{frontend.address}]" if key.family is Family.IPV6 else frontend.address
    return f"{name} {address}:{frontend.port}/{key.name.protocol.lower()}"


def _frontend_reasons(old: Frontend, new: Frontend) -> Iterator[str]:
    """Yield the differences of one destination."""
    kind = _KINDS[new.kind]
    changes: dict[str, list[str]] = {}
    for source in SourceClass:
        was, will_be = old.action(source), new.action(source)
        if was != will_be:
            change = f"{_treated(will_be)} instead of {_treated(was)}"
            changes.setdefault(change, []).append(_CLIENTS[source])
    for change, clients in changes.items():
        who = "all clients" if len(clients) == len(SourceClass) else " and ".join(clients)
        yield f"{kind}: {who} {change}"
    if old.source_ranges != new.source_ranges:
        yield f"{kind}: other source ranges are let in"


def _treated(action: Action) -> str:
    if action.verdict is not Verdict.FORWARD:
        return _VERDICTS[action.verdict]
    where = "on this node" if action.pool is Pool.LOCAL else "on all nodes"
    source = "the node's address as source" if action.masquerade else "their own source address"
    return f"sent to endpoints {where} with {source}"


def _choice(plan: ServicePlan) -> tuple[object, ...]:
    return plan.least_connections, plan.maglev, plan.scheduling


# Differences of modes and of settings


class _TraitRow(NamedTuple):
    """What a trait means for the ServicePorts that it concerns, when it comes and when it goes."""

    comes: str
    goes: str
    concerns: Callable[[ServicePlan], bool] | None = None
    """None: the node as a whole."""


def _any(
    verdicts: tuple[Verdict, ...], kinds: tuple[FrontendKind, ...] = tuple(FrontendKind)
) -> Callable[[ServicePlan], bool]:
    """Return whether a plan has a frontend of these kinds with one of these verdicts."""

    def holds(plan: ServicePlan) -> bool:
        return any(
            frontend.action(source).verdict in verdicts
            for frontend in plan.frontends
            if frontend.kind in kinds
            for source in SourceClass
        )

    return holds


_REFUSED = (Verdict.DROP, Verdict.REJECT)
_OUTSIDE = (FrontendKind.EXTERNAL_IP, FrontendKind.LOAD_BALANCER_IP)

TRAIT_ROWS = {
    "terminates_connections": _TraitRow(
        "connections end in the process: endpoints see the node's address as source",
        "connections no longer end in the process: endpoints see clients unless masqueraded",
        _any((Verdict.FORWARD,)),
    ),
    "refuses_node_ports_everywhere": _TraitRow(
        "node ports that refuse clients do so at every address of the node",
        "node ports refuse clients only at the addresses that serve node ports",
        _any(_REFUSED, (FrontendKind.NODE_PORT,)),
    ),
    "spares_own_external_traffic": _TraitRow(
        "without endpoints, this node's own traffic to it is not refused but leaves the node",
        "without endpoints, this node's own traffic to it is refused, too",
        _any(_REFUSED, _OUTSIDE),
    ),
    "filters_without_endpoints": _TraitRow(
        "source ranges drop clients even without endpoints",
        "without endpoints, source ranges are not enforced: all clients are refused alike",
        lambda plan: not plan.reachable and any(f.source_ranges for f in plan.frontends),
    ),
    "rejects_unknown_ports": _TraitRow(
        "a cluster IP rejects connections to ports of no Service at once",
        "connections to a cluster IP at a port of no Service leave the node and time out",
    ),
    "drops_unassigned_addresses": _TraitRow(
        "packets to addresses of the Service CIDRs that no Service has are dropped",
        "packets to addresses of the Service CIDRs that no Service has leave the node",
    ),
    "assigns_vips": _TraitRow(
        "the addresses of Services are assigned to an interface of this node",
        "the addresses of Services are no longer assigned to an interface of this node",
    ),
    "tracks_connections": _TraitRow(
        "connections need entries in the kernel's conntrack table",
        "connections no longer need entries in the kernel's conntrack table",
    ),
}
"""By field of Traits. The others show in the plans, or change nothing that a client sees."""


def _detector(own: FamilySettings) -> str:
    detector = own.detector
    if detector.interface_prefix:
        return f"interfaces {detector.interface_prefix}*"
    return detector.cidr or detector.interface or "nothing"


def _option_reasons(
    old: ServicePlan, new: ServicePlan, before: NodePlan, after: NodePlan
) -> Iterator[str]:
    """Yield differences of options, modes and settings that concern one ServicePort."""
    if old.affinity_seconds != new.affinity_seconds:
        was, will_be = (
            f"{n} s" if n else "none" for n in (old.affinity_seconds, new.affinity_seconds)
        )
        yield f"session affinity: {will_be} instead of {was}"
    if old.health_check_node_port != new.health_check_node_port:
        yield "health checks are admitted at another port, or no longer"
    if _choice(old) != _choice(new):
        yield "endpoints are chosen in another way, or with other weights"
    if old.proxy.proxy_protocol != new.proxy.proxy_protocol:
        sent = "sent" if new.proxy.proxy_protocol else "no longer sent"
        yield f"the PROXY protocol header is {sent} to endpoints"
    traits, later = before.settings.traits, after.settings.traits
    for name, row in TRAIT_ROWS.items():
        if row.concerns is None or getattr(traits, name) == getattr(later, name):
            continue
        if row.concerns(old) or row.concerns(new):
            yield row.comes if getattr(later, name) else row.goes
    if all(frontend.address for frontend in new.frontends):
        return
    family = new.key.family
    here, there = before.settings.family(family), after.settings.family(family)
    if here.node_port_addresses != there.node_port_addresses:
        yield f"node port served at {_served(there)} instead of {_served(here)}"
    if here.localhost_node_ports != there.localhost_node_ports:
        served = "served" if there.localhost_node_ports else "no longer served"
        yield f"node port {served} on loopback addresses"


def _served(own: FamilySettings) -> str:
    addresses = own.node_port_addresses
    if addresses is None:
        return "every address of the node"
    return ", ".join(addresses) or "no address"
