"""Explain connections: where they go, by which rules, seen from the nodes that handle them. Pure.

A connection is decided by the first node that handles its packets: the node of the client, or for
a client outside the node that the packets arrive at. If that node leaves them alone and the
destination is an address of another node, that one decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count

import msgspec

from steersman.compile.explain import EndpointReport, ServiceReports
from steersman.compile.node import config_of_node, facts_of_node, zone_of
from steersman.compile.planner import compile_all
from steersman.compile.trace import Flow, Outcome, classify, trace
from steersman.model.addresses import canonical_ip, family_of, join_host_port
from steersman.model.kube import EndpointSlice
from steersman.model.names import ObjectName, PlanKey, Protocol
from steersman.model.plan import (
    Endpoint,
    Frontend,
    FrontendKind,
    NodePlan,
    ServicePlan,
    SourceClass,
)
from steersman.model.world import World
from steersman.operate.answer import Answer, Block, Cell, Line, QuestionError, Style, Table
from steersman.operate.names import Names, Target, UnknownNameError

_HEADS: dict[Outcome, tuple[str, Style]] = {
    "forward": ("forwarded to", "good"),
    "drop": ("dropped: the client gets no answer until it times out", "bad"),
    "reject": ("rejected: the client gets an error at once", "bad"),
    "accept": ("not for a Service: it goes on unchanged", ""),
}
CLIENTS: Mapping[str, str] = {"pod": "a pod", "node": "this node", "external": "outside"}
"""Classes of clients in words."""
_INSIDE = frozenset({FrontendKind.CLUSTER_IP})
_MOST_FLOWS = 200
"""Connections explained in one answer; a Service has as many ports as it likes."""


class EndpointView(msgspec.Struct, frozen=True, rename="camel"):
    """An endpoint, with the names of its pod and its node."""

    address: str
    """`ip:port`."""
    pod: str = ""
    """`namespace/name`; "" if the EndpointSlice does not say."""
    node: str = ""
    zone: str = ""


class Hop(msgspec.Struct, frozen=True, rename="camel"):
    """The decision of one node."""

    node: str
    verdict: Outcome
    service: str | None
    """The ServicePort whose address it is."""
    frontend: str | None
    """Kind of that address, such as `clusterIP`."""
    endpoints: tuple[EndpointView, ...]
    """Where it goes: to one of these."""
    masquerade: bool
    """Whether the endpoint sees an address of this node as the client."""
    reasons: tuple[str, ...]
    assumed: bool = False
    """Whether the packets may arrive at any node, not only at this one."""
    hairpins: tuple[str, ...] = ()
    """If only some endpoints are the client itself: their addresses; they alone see an address of
    this node."""
    even: bool = True
    """Whether all endpoints are equally likely; if not, a scheduler, weights or a hash decides."""


class ExplainedFlow(msgspec.Struct, frozen=True, rename="camel"):
    """One connection, through one node or two."""

    client: str
    """As it was typed, or the pod or node of the address."""
    source: str
    """Address, or class of clients."""
    destination: str
    port: int
    protocol: Protocol
    hops: tuple[Hop, ...]

    @property
    def verdict(self) -> Outcome:
        """The decision of the last node."""
        return self.hops[-1].verdict

    @property
    def headline(self) -> Line:
        """The connection and what happens to it, in one sentence."""
        last = self.hops[-1]
        words, style = _HEADS[last.verdict]
        if last.verdict == "forward":
            one = len(last.endpoints) == 1
            words += (
                f" {_named(last.endpoints[0])}"
                if one
                else f" one of {len(last.endpoints)} endpoints"
            )
            words += ", masqueraded" if last.masquerade else ""
        client = CLIENTS.get(self.client, self.client)
        if self.source not in CLIENTS and self.source != self.client:
            client += f" ({self.source})"
        where = f"{join_host_port(self.destination, self.port)}/{self.protocol}"
        return Line(f"from {client} to {where}: {words}", style)

    def blocks(self) -> Iterator[Block]:
        """Yield the lines of this connection."""
        last = self.hops[-1]
        yield self.headline
        numbers = count(1)
        for hop in self.hops:
            where = ", if the packets arrive there" if hop.assumed else ""
            yield Line(f"on node {hop.node}{where}:", "dim", 2)
            for reason in hop.reasons:
                yield Line(f"{next(numbers)}. {reason}", "", 4)
        if len(last.endpoints) > 1 and any(each.pod or each.node for each in last.endpoints):
            yield endpoint_table(last.endpoints)


def endpoint_table(
    endpoints: Sequence[EndpointView], more: Sequence[tuple[str, Sequence[Cell]]] = ()
) -> Table:
    """Return a table of endpoints, without columns that are empty.

    Args:
        endpoints: one for each row.
        more: further columns, each with its name and its cells.
    """
    columns: list[tuple[str, Sequence[Cell]]] = [
        ("ENDPOINT", [f"    {each.address}" for each in endpoints]),
        ("POD", [each.pod for each in endpoints]),
        ("NODE", [each.node for each in endpoints]),
    ]
    shown = [(name, cells) for name, cells in (*columns, *more) if any(cells)]
    names = [f"    {name}" if name == "ENDPOINT" else name for name, _ in shown]
    return Table(names, list(zip(*(cells for _, cells in shown), strict=True)))


def _named(endpoint: EndpointView) -> str:
    return f"{endpoint.address} ({endpoint.pod})" if endpoint.pod else endpoint.address


class FlowAnswer(Answer, frozen=True, kw_only=True):
    """What happens to some connections."""

    flows: tuple[ExplainedFlow, ...]
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 if one of them is dropped or rejected."""
        return int(any(flow.verdict in ("drop", "reject") for flow in self.flows))

    def blocks(self, wide: bool) -> Iterator[Block]:  # noqa: ARG002
        """Yield the connections, with an empty line between two."""
        for index, flow in enumerate(self.flows):
            if index:
                yield Line("")
            yield from flow.blocks()
        for note in self.notes:
            yield Line(note, "warn" if self.flows else "")


class ReachAnswer(Answer, frozen=True, kw_only=True):
    """What a client reaches: one connection to each clusterIP."""

    client: str
    flows: tuple[ExplainedFlow, ...]

    def blocks(self, wide: bool) -> Iterator[Block]:  # noqa: ARG002
        """Yield a table."""
        rows: list[tuple[Cell, ...]] = []
        for flow in self.flows:
            hop = flow.hops[-1]
            ends = ", ".join(map(_named, hop.endpoints[:3]))
            more = f" and {len(hop.endpoints) - 3} more" if len(hop.endpoints) > 3 else ""
            where = f"{join_host_port(flow.destination, flow.port)}/{flow.protocol}"
            masq = "masqueraded" if hop.masquerade else ""
            verdict: Cell = (hop.verdict, _HEADS[hop.verdict][1])
            rows.append((hop.service or "", where, verdict, ends + more, masq))
        columns = ("SERVICE", "ADDRESS", "VERDICT", "ENDPOINTS", "")
        client = CLIENTS.get(self.client, self.client)
        yield Table(columns, rows, f"From {client}:", "no Service has a clusterIP")


class Plans:
    """The plans of all nodes of a World; those of other nodes are made when they are asked for."""

    def __init__(self, world: World, names: Names) -> None:
        self._world = world
        self._names = names
        self._plans = {names.here: world.plan}

    def of(self, node: str) -> NodePlan:
        """Return the plan of a node, as far as its Node object is known."""
        plan = self._plans.get(node)
        if plan is None:
            world, known = self._world, self._names.nodes.get(node)
            if known is None:
                self._names.missed.add(node)
            plan = self._plans[node] = compile_all(
                msgspec.structs.replace(world.snapshot, node=known),
                config_of_node(world.config, node),
                facts_of_node(node, known),
                world.plan.settings.traits,
            )
        return plan


class FlowExplainer:
    """Explains connections in one World."""

    def __init__(self, world: World, names: Names) -> None:
        self.world = world
        self.names = names
        self.plans = Plans(world, names)
        self._who: tuple[ObjectName, dict[str, EndpointView]] | None = None
        self._last: tuple[tuple[ObjectName, str], ServiceReports] | None = None

    def report(self, key: PlanKey, node: str) -> EndpointReport:
        """Return why the endpoints of a ServicePort are used on a node."""
        snapshot, name = self.world.snapshot, key.name.object_name
        service = snapshot.services.get(name)
        if service is None:  # a live view may be ahead of the plan
            return EndpointReport()
        if self._last is None or self._last[0] != (name, node):  # its ports follow each other
            here = node == self.names.here  # other nodes eject endpoints by themselves
            reports = ServiceReports(
                service,
                snapshot.slices.get(name, ()),
                self.plans.of(node).settings,
                zone_of(snapshot.node if here else self.names.nodes.get(node)),
                ejections=snapshot.ejected.get(name, ()) if here else (),
            )
            self._last = (name, node), reports
        return self._last[1].of(key)

    def explain(
        self, client: Target, to: Target, *, interface: str = "", node: str = ""
    ) -> FlowAnswer:
        """Explain the connections of a client to a destination, one for each port and family.

        Args:
            client: where they come from.
            to: where they go; not a pod without a port, see explain_service.py.
            interface: by which the packets arrive; "" if it does not matter.
            node: the node that handles them first; "" for the one that they reach.

        Raises:
            QuestionError: there is no such connection.
        """
        first = node or client.node
        if not first and client.client in (SourceClass.POD, SourceClass.NODE):
            first = self.names.here
        flows: list[ExplainedFlow] = []
        mixed = False
        for address, port, protocol in self._destinations(client, to, first):
            source = self._source(client, address, first)
            if source is None:
                mixed = True
                continue
            if len(flows) == _MOST_FLOWS:
                note = f"only the first {_MOST_FLOWS} connections are shown: give a port"
                return FlowAnswer(flows=tuple(flows), notes=(note,))
            flow = Flow(source, address, port, protocol, interface)
            at = first or self.names.node_at(address)
            flows.append(self.one(flow, at or self.names.here, client, assumed=not at))
        if not flows and mixed:
            raise QuestionError(
                f"no address of {client.label} is known in an address family of {to.label}"
            )
        if to.kind == "node":  # the families in which nothing is served are of no interest
            flows = [flow for flow in flows if flow.verdict != "accept"] or flows[:1]
        notes: tuple[str, ...] = ()
        if not flows and to.kind == "service":
            about = f"see `steersman explain {to.label}`"
            notes = (f"Service {to.label} has no address on this node: {about}",)
        elif not flows and to.kind == "node":
            notes = (f"no Service has a node port at {to.label}",)
        elif not flows:
            notes = (f"no Service is at {to.label}: the proxies leave packets to it alone",)
        return FlowAnswer(flows=tuple(flows), notes=notes)

    def reach(self, client: Target, *, namespace: str = "", node: str = "") -> ReachAnswer:
        """Explain what a client reaches: its connections to all clusterIPs."""
        at = node or client.node or self.names.here
        whole, flows = self.plans.of(at), list[ExplainedFlow]()
        for key, plan in whole.services.items():
            if namespace not in ("", key.name.namespace):
                continue
            # A trace looks at all plans: with one at a time, 10,000 Services take a second.
            alone = msgspec.structs.replace(whole, services={key: plan})
            for frontend in plan.frontends:
                source = self._source(client, frontend.address, at)
                if frontend.kind is FrontendKind.CLUSTER_IP and source is not None:
                    flow = Flow(source, frontend.address, frontend.port, key.name.protocol)
                    hop = self._hop(flow, at, alone)
                    flows.append(_explained(client, flow, [hop]))
        flows.sort(key=lambda flow: (flow.hops[-1].service or "", flow.destination))
        return ReachAnswer(client=client.label, flows=tuple(flows))

    def one(self, flow: Flow, at: str, client: Target, *, assumed: bool = False) -> ExplainedFlow:
        """Explain one connection that a node handles first; see `Hop.assumed`."""
        hops = [msgspec.structs.replace(self._hop(flow, at), assumed=assumed)]
        beyond = self.names.node_at(flow.destination)
        if hops[0].verdict == "accept" and beyond and beyond != at:
            # The other node sees this one's address if the client is this node itself.
            source = flow.source
            if source is SourceClass.NODE:
                family = family_of(flow.destination)
                own = (a for a in self.names.node_addresses(at) if family_of(a) is family)
                source = next(own, SourceClass.EXTERNAL)
            there = msgspec.structs.replace(flow, source=source, interface="")
            hops.append(self._hop(there, beyond))
        elif hops[0].verdict == "accept" and flow.destination not in self.names.endpoint_nodes:
            self.names.missed.add(flow.destination)  # it may be another node's
        return _explained(client, flow, hops)

    def _hop(self, flow: Flow, node: str, plan: NodePlan | None = None) -> Hop:
        """Return the decision of one node, by a part of its plan if one is given."""
        plan = plan or self.plans.of(node)
        flow = self._with_interface(flow, plan, node)
        result = trace(plan, flow)
        ends = (self.endpoint(result.plan, each) for each in result.endpoints if result.plan)
        reasons = list(result.reasons)
        pods = self.names.pods_at(flow.destination) if result.verdict == "accept" else ()
        if pods:
            names = " and ".join(str(pod.name) for pod in pods[:3])
            reasons.append(f"{flow.destination} is the address of pod {names}")
        if self.names.nodes.get(node) is None:
            why = "its addresses and zone are not known"
            reasons.append(f"the Node object of {node} is not known here: {why}")
        rule = plan.services[result.plan] if result.plan else None
        hashed = rule is not None and (rule.maglev or rule.least_connections)
        scheduled = rule is not None and (rule.scheduling.scheduler or rule.scheduling.weights)
        return Hop(
            node,
            result.verdict,
            str(result.plan.name) if result.plan else None,
            result.frontend.kind.value if result.frontend else None,
            tuple(ends),
            result.masquerade,
            tuple(reasons),
            hairpins=tuple(map(str, result.hairpins)),
            even=not (hashed or scheduled),
        )

    def _with_interface(self, flow: Flow, plan: NodePlan, node: str) -> Flow:
        """Let a known pod of the node arrive by an interface that pods have, if that counts."""
        detector = plan.settings.family(family_of(flow.destination)).detector
        name = detector.interface or (detector.interface_prefix and f"{detector.interface_prefix}0")
        if flow.interface or not name or isinstance(flow.source, SourceClass):
            return flow
        local = any(pod.node == node for pod in self.names.pods_at(flow.source))
        if not local or self.names.node_at(flow.source):
            return flow
        return msgspec.structs.replace(flow, interface=name)

    def endpoint(self, key: PlanKey, endpoint: Endpoint) -> EndpointView:
        """Return an endpoint with its names."""
        service = key.name.object_name
        if self._who is None or self._who[0] != service:  # its endpoints follow each other
            self._who = service, dict(self._named_endpoints(service))
        found = self._who[1].get(endpoint.ip, EndpointView(""))
        return EndpointView(str(endpoint), found.pod, found.node, found.zone)

    def _named_endpoints(self, service: ObjectName) -> Iterator[tuple[str, EndpointView]]:
        """Yield the endpoints of a Service by canonical address."""
        # Slices are unpacked whenever they are read: those of the last report are at hand.
        if self._last is not None and self._last[0][0] == service:
            slices: Iterable[EndpointSlice] = self._last[1].slices
        else:
            slices = self.world.snapshot.slices.get(service, ())
        for slice_ in slices:
            for each in slice_.endpoints or ():
                ref, pod = each.target_ref, ""
                if ref is not None and ref.kind == "Pod":
                    pod = f"{ref.namespace or service.namespace}/{ref.name}"
                for text in each.addresses or ():
                    if (address := canonical_ip(text)) is not None:
                        view = EndpointView(address, pod, each.node_name or "", each.zone or "")
                        yield address, view

    def _source(self, client: Target, destination: str, first: str) -> str | SourceClass | None:
        """Return the client as the first node sees it; None without an address of the family."""
        if client.client is not None:
            return client.client
        if client.kind == "node" and client.node == first:
            return SourceClass.NODE
        family = family_of(destination)
        return next((a for a in client.addresses if family_of(a) is family), None)

    # Destinations

    def _destinations(
        self, client: Target, to: Target, first: str
    ) -> Iterable[tuple[str, int, Protocol]]:
        """Return the addresses and ports that a destination stands for."""
        if to.kind == "service":
            return self._of_service(client, to, first)
        if not to.addresses:
            raise UnknownNameError(f"no address of {to.label} is known: give it, not the name")
        if to.port:
            protocol = to.protocol or Protocol.TCP
            # An address means itself; a node is one machine, whose first addresses are enough.
            by_family = {family_of(address): address for address in reversed(to.addresses)}
            return [(address, to.port, protocol) for _, address in sorted(by_family.items())]
        found = []
        for address in to.addresses:
            at = self.names.node_at(address)
            for key, _, frontend in self._frontends(first or at or self.names.here):
                if to.protocol in (None, key.name.protocol) and (
                    frontend.address == address
                    or (at and not frontend.address and key.family is family_of(address))
                ):
                    found.append((address, frontend.port, key.name.protocol))
        return sorted(found)

    def _of_service(
        self, client: Target, to: Target, first: str
    ) -> Iterator[tuple[str, int, Protocol]]:
        """Yield the addresses of a Service at which its client would look for it."""
        at = first or self.names.here
        wanted = {(each.name or "", each.protocol or "TCP") for each in to.ports}
        found = [
            (key, frontend)
            for key, _, frontend in self._frontends(at)
            if key.name.object_name == to.name and (key.name.port, key.name.protocol) in wanted
        ]
        settings = self.plans.of(at).settings
        outside = client.client is SourceClass.EXTERNAL
        if client.client is None and client.addresses:
            flow = Flow(client.addresses[0], client.addresses[0], 1)
            outside = not client.node and classify(settings, flow) is SourceClass.EXTERNAL
        public = [each for each in found if each[1].kind not in _INSIDE]
        for key, frontend in public if outside and public else found:
            if not outside and frontend.kind not in _INSIDE:
                continue
            address = frontend.address
            if not address:  # a node port, at the node that is asked or else at any other one
                known = (self.names.node_addresses(node) for node in (at, *self.names.nodes))
                own = next(filter(None, known), ())
                address = next((a for a in own if family_of(a) is key.family), "")
            if address:
                yield address, frontend.port, key.name.protocol

    def _frontends(self, node: str) -> Iterator[tuple[PlanKey, ServicePlan, Frontend]]:
        for key, plan in self.plans.of(node).services.items():
            for frontend in plan.frontends:
                yield key, plan, frontend


def _explained(client: Target, flow: Flow, hops: Iterable[Hop]) -> ExplainedFlow:
    return ExplainedFlow(
        client.label, str(flow.source), flow.destination, flow.port, flow.protocol, tuple(hops)
    )
