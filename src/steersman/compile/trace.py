"""Trace one connection through a NodePlan, as a packet would go, with reasons (behaviour 6).

The trace reads only the plan, so it shows what the kernel was given and not what the cluster has.
The steps: find the destination; at a node port, check that the address serves it; check the source
ranges; take the Action for the class of the client. `compile.explain` tells why an endpoint is in
the plan.

A reason is a sentence of its own, in the order in which the packet meets the rules; none is taken
back by a later one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from msgspec.structs import replace

from steersman.compile.conflicts import describe
from steersman.model.addresses import canonical_ip, family_of, in_cidr, is_loopback, join_host_port
from steersman.model.names import PlanKey, Protocol
from steersman.model.plan import (
    Action,
    Endpoint,
    Frontend,
    FrontendKind,
    NodePlan,
    NodeSettings,
    Pool,
    ServicePlan,
    SourceClass,
    Value,
    Verdict,
)


class Flow(Value, frozen=True):
    """A new connection (or first datagram) that this node sees."""

    source: str | SourceClass
    """The client's address, or only its class."""
    destination: str
    port: int
    protocol: Protocol = Protocol.TCP
    interface: str = ""
    """Ingress interface; "" for a process of this node, or if it does not matter."""

    def __str__(self) -> str:
        return f"{self.source} to {join_host_port(self.destination, self.port)}/{self.protocol}"


Outcome: TypeAlias = Literal["forward", "drop", "reject", "accept"]


class TraceResult(Value, frozen=True):
    """The result for a Flow."""

    verdict: Outcome
    """`accept`: it passes unchanged, because it is not for a Service."""
    endpoints: tuple[Endpoint, ...] = ()
    """Endpoints of a forwarded Flow; it goes to one of them."""
    masquerade: bool = False
    """Whether the endpoint sees an address of this node instead of the client's. Also true if
    every endpoint is the client itself; if only some are, those alone see it."""
    plan: PlanKey | None = None
    frontend: Frontend | None = None
    reasons: tuple[str, ...] = ()
    """The rules that applied, in plain words."""
    hairpins: tuple[Endpoint, ...] = ()
    """If only some of the endpoints are the client itself: these, which see an address of this
    node."""


Match: TypeAlias = tuple[ServicePlan, Frontend]
_KINDS = {
    FrontendKind.CLUSTER_IP: "is the clusterIP of",
    FrontendKind.EXTERNAL_IP: "is an external IP of",
    FrontendKind.LOAD_BALANCER_IP: "is a load balancer IP of",
    FrontendKind.NODE_PORT: "belongs to",
}
_OUTCOMES: Mapping[Verdict, Outcome] = {
    Verdict.FORWARD: "forward",
    Verdict.DROP: "drop",
    Verdict.REJECT: "reject",
}
_REFUSALS = {
    Verdict.REJECT: "no endpoint in the whole cluster can take the traffic: rejected",
    Verdict.DROP: "the traffic policy is Local and no endpoint is on this node: dropped",
}
_LISTED = 8  # endpoints that a reason lists


def classify(settings: NodeSettings, flow: Flow) -> SourceClass:
    """Return the class of the client of a Flow."""
    if isinstance(flow.source, SourceClass):
        return flow.source
    family = settings.family(family_of(flow.destination))
    return family.sources.classify(flow.source, flow.interface)


def trace(plan: NodePlan, flow: Flow) -> TraceResult:
    """Decide what happens to a Flow on this node.

    Addresses in the Flow may have any spelling. A destination that is not an address matches
    nothing; a source that is not one counts as outside of the cluster.
    """
    # Spell the addresses canonically, as the plan does.
    source, destination = flow.source, canonical_ip(flow.destination)
    if not isinstance(source, SourceClass):
        source = canonical_ip(source) or SourceClass.EXTERNAL
    tracer = _Tracer(
        plan, replace(flow, source=source, destination=destination or flow.destination)
    )
    if destination is None:
        tracer.say(f"{flow.destination!r} is not an IP address: give one, names are not looked up")
        return tracer.decide("accept")
    family = family_of(destination)
    if family not in plan.settings.families:
        tracer.say(f"{family.kubernetes} is not served on this node: left as it is")
        return tracer.decide("accept")
    match = tracer.find()
    return tracer.at_frontend(match) if match else tracer.without_frontend()


class _Tracer:
    """One Flow on its way; collects the reasons."""

    def __init__(self, plan: NodePlan, flow: Flow) -> None:
        self.plan = plan
        self.flow = flow
        self.traits = plan.settings.traits
        self.family_name = family_of(flow.destination)
        self.family = plan.settings.family(self.family_name)
        self.is_local = self.family.sources.is_local
        self.reasons: list[str] = []

    def say(self, reason: str) -> None:
        self.reasons.append(reason)

    def decide(
        self,
        verdict: Outcome,
        match: Match | None = None,
        endpoints: tuple[Endpoint, ...] = (),
        masquerade: bool = False,
        hairpins: tuple[Endpoint, ...] = (),
    ) -> TraceResult:
        key, frontend = (match[0].key, match[1]) if match else (None, None)
        reasons = tuple(self.reasons)
        return TraceResult(verdict, endpoints, masquerade, key, frontend, reasons, hairpins)

    def find(self) -> Match | None:
        """Find the Frontend at the destination: an address precedes a node port."""
        flow = self.flow
        plans = [
            plan
            for key, plan in self.plan.services.items()
            if key.family is self.family_name and key.name.protocol is flow.protocol
        ]
        addresses = (
            (flow.destination, "") if self.is_local(flow.destination) else (flow.destination,)
        )
        for address in addresses:  # "" is that of node ports
            for plan in plans:
                for frontend in plan.frontends:
                    if (frontend.address, frontend.port) == (address, flow.port):
                        kind = _KINDS[frontend.kind]
                        self.say(f"{describe(plan.key, frontend)} {kind} {plan.key.name}")
                        return plan, frontend
        return None

    def at_frontend(self, match: Match) -> TraceResult:
        """Decide at a destination that a Service has."""
        # A node port answers only at serving addresses; some modes refuse it at the others.
        flow, frontend = self.flow, match[1]
        if frontend.kind is FrontendKind.NODE_PORT and not self.serves_node_ports():
            verdict = frontend.external.verdict
            if verdict is Verdict.FORWARD or not self.traits.refuses_node_ports_everywhere:
                self.say("no rule of the proxy matches: left as it is")
                return self.decide("accept")
            self.say("this mode refuses a node port without endpoints on every address")
            self.say(_REFUSALS[verdict])
            return self.decide(_OUTCOMES[verdict], match)
        # Source ranges come before anything else, also before a drop or reject.
        if frontend.source_ranges:
            ranges = ", ".join(frontend.source_ranges)
            if isinstance(flow.source, SourceClass):  # no address to compare
                self.say(f"only clients in {ranges} may use it: assumed to be one of them")
            elif any(in_cidr(flow.source, cidr) for cidr in frontend.source_ranges):
                self.say(f"{flow.source} is in the ranges that may use it ({ranges})")
            else:
                self.say(f"{flow.source} is not in the ranges that may use it ({ranges})")
                self.say("dropped")
                return self.decide("drop", match)
        # The class of the client selects the Action.
        source = classify(self.plan.settings, flow)
        self.say(self.client(source))
        action = frontend.action(source)
        if action.verdict is Verdict.FORWARD:
            return self.forward(match, action)
        # Some modes filter only forwarded and incoming packets: the node's own are neither.
        if (
            self.traits.spares_own_external_traffic
            and frontend.kind in (FrontendKind.EXTERNAL_IP, FrontendKind.LOAD_BALANCER_IP)
            and (flow.source is SourceClass.NODE or self.is_local(str(flow.source)))
            and not self.is_local(flow.destination)
        ):
            self.say("this mode refuses nothing that this node itself sends there: left as it is")
            return self.decide("accept")
        self.say(_REFUSALS[action.verdict])
        return self.decide(_OUTCOMES[action.verdict], match)

    def serves_node_ports(self) -> bool:
        """Whether node ports answer at the destination, an address of this node; say why."""
        address, family = self.flow.destination, self.family
        if is_loopback(address):
            serves = family.localhost_node_ports
            why = "loopback node ports are on" if serves else "node ports do not answer on loopback"
        elif family.node_port_addresses is None:
            serves, why = True, "node ports answer on every address of this node"
        else:
            serves = address in family.node_port_addresses
            listed = ", ".join(family.node_port_addresses) or "none"
            why = f"node ports answer on these addresses of this node: {listed}"
        self.say(f"{address} is an address of this node; {why}")
        return serves

    def client(self, source: SourceClass) -> str:
        """Describe the client."""
        client, detector = self.flow.source, self.family.detector
        name = "the client" if isinstance(client, SourceClass) else f"the client {client}"
        if source is SourceClass.NODE:
            return f"{name} is this node itself"
        if not detector:
            return (
                f"{name} does not count as a pod: without clusterCIDRs, pods cannot be recognised"
            )
        how = detector.cidr or f"interface {detector.interface or detector.interface_prefix + '*'}"
        is_pod = "is a pod" if source is SourceClass.POD else "is no pod"
        return f"{name} {is_pod} of this cluster (pods: {how})"

    def forward(self, match: Match, action: Action) -> TraceResult:
        """Forward to the endpoints of a pool."""
        plan, _ = match
        endpoints = plan.pool(action.pool)
        on = " on this node" if action.pool is Pool.LOCAL else ""
        if len(endpoints) == 1:
            self.say(f"goes to {endpoints[0]}, the only endpoint in use{on}")
        else:
            listed = ", ".join(map(str, endpoints[:_LISTED]))
            more = f" and {len(endpoints) - _LISTED} more" if len(endpoints) > _LISTED else ""
            self.say(f"goes to one of {len(endpoints)} endpoints{on}: {listed}{more}")
        if plan.affinity_seconds:
            self.say(
                f"a client keeps its endpoint until {plan.affinity_seconds} s after its last"
                " new connection (session affinity)"
            )
        # Hairpin: an endpoint that reaches itself would drop a packet from its own address.
        spared = self.traits.spares_hairpins_elsewhere
        own = [e for e in endpoints if e.ip == self.flow.source and (e.local or not spared)]
        hairpin = len(own) == len(endpoints)
        if action.masquerade:
            self.say("masqueraded: the endpoint sees an address of this node as the client")
        elif hairpin:
            self.say(
                "masqueraded, because the client itself is the endpoint (hairpin): it sees an"
                " address of this node as the client"
            )
        else:
            but = f", except at {', '.join(map(str, own))}" if own else ""
            self.say(f"not masqueraded: the endpoint sees the client's own address{but}")
            if own:
                self.say("masqueraded there, because that endpoint is the client itself (hairpin)")
        masquerade = action.masquerade or hairpin
        apart = () if masquerade else tuple(own)
        return self.decide("forward", match, endpoints, masquerade, apart)

    def without_frontend(self) -> TraceResult:
        """Decide at a destination that no Service has."""
        flow, services = self.flow, self.plan.services.items()
        where = f"{join_host_port(flow.destination, flow.port)}/{flow.protocol}"
        self.say(f"no Service of this cluster is at {where}")
        # Health check node ports are not Frontends: the kubelet's firewall must admit them.
        if flow.protocol is Protocol.TCP and self.is_local(flow.destination):
            for key, plan in services:
                if key.family is self.family_name and plan.health_check_node_port == flow.port:
                    name = key.name.object_name
                    self.say(f"it is the health check node port of {name}: let in")
                    return self.decide("accept")
        # A clusterIP on another port, or an address that is reserved for clusterIPs.
        for key, plan in services:
            at = {f.address for f in plan.frontends if f.kind is FrontendKind.CLUSTER_IP}
            if flow.destination in at:
                name = key.name.object_name
                self.say(f"{flow.destination} is the clusterIP of {name}, on other ports")
                if self.traits.rejects_unknown_ports:
                    self.say("unknown ports of a clusterIP are rejected")
                    return self.decide("reject")
                break
        else:
            for cidr in self.family.service_cidrs if self.traits.drops_unassigned_addresses else ():
                if in_cidr(flow.destination, cidr):
                    self.say(
                        f"it is an address for clusterIPs ({cidr}) that is not in use: dropped"
                    )
                    return self.decide("drop")
        self.say("no rule of the proxy matches: left as it is")
        return self.decide("accept")
