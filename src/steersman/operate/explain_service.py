"""Explain Services and pods: where they are served, which endpoints are used, and why. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from steersman.model.addresses import canonical_ip
from steersman.model.findings import Finding, Severity
from steersman.model.names import ObjectName
from steersman.model.plan import Pool, ServicePlan, SourceClass, Verdict
from steersman.model.world import World
from steersman.operate.answer import Answer, Block, Cell, Line, Style, Table
from steersman.operate.explain_flow import FlowExplainer, endpoint_table
from steersman.operate.names import Target, label_of
from steersman.operate.served import ServedPort, ServedPorts

_CLIENTS = {
    SourceClass.POD: "pods",
    SourceClass.NODE: "this node",
    SourceClass.EXTERNAL: "outside",
}
_NODES = 10  # listed by name
STYLES: Mapping[Severity, Style] = {Severity.ERROR: "bad", Severity.WARNING: "warn"}
"""How a Finding is shown."""


# One Service


class ServiceAnswer(Answer, frozen=True, kw_only=True):
    """Where a Service is served on a node, and why its endpoints are in use or not."""

    service: str
    type: str
    node: str
    ports: tuple[ServedPort, ...] = ()
    notes: tuple[str, ...] = ()
    """Why it is not served, if it is not, and what could not be found out."""
    findings: tuple[Finding, ...] = ()
    not_yet: bool = False
    """Whether it may be served as soon as the process, which has just started, has synced."""

    @property
    def exit_code(self) -> int:
        """1 if it has an error, or a frontend that serves nobody; 2 if that is not known yet."""
        if self.not_yet:
            return 2
        dead = any(frontend.dead for port in self.ports for frontend in port.frontends)
        return int(dead or any(each.severity is Severity.ERROR for each in self.findings))

    def blocks(self, wide: bool) -> Iterator[Block]:  # noqa: ARG002
        """Yield the ports, one after the other."""
        yield Line(f"Service {self.service} ({self.type}), as node {self.node} serves it", "title")
        for port in self.ports:
            yield from port_blocks(port)
        for note in self.notes:
            yield Line(note, "", 2)
        for finding in self.findings:
            yield Line(f"{finding.severity.value}: {finding}", STYLES[finding.severity], 2)


def port_blocks(port: ServedPort) -> Iterator[Block]:
    """Yield the lines of one port: what happens at each address, and the endpoints."""
    yield Line(f"port {port.port or '(unnamed)'}, {port.protocol}, {port.family}", "title", 2)
    for frontend in port.frontends:
        yield Line(frontend.text, "", 4)
        if frontend.source_ranges:
            ranges = ", ".join(frontend.source_ranges)
            yield Line(f"only for clients in {ranges}; others are dropped", "", 6)
        words = frontend.clients
        if len(set(words.values())) == 1:
            words = {"everyone": words[SourceClass.EXTERNAL]}
        for name, what in words.items():
            who = name if name == "everyone" else f"from {_CLIENTS[SourceClass(name)]}"
            yield Line(f"{who}: {what}", "" if what.startswith("to ") else "bad", 6)
    if seconds := port.affinity_seconds:
        text = f"a client keeps its endpoint for {seconds} s (session affinity by address)"
        yield Line(text, "", 4)
    if port.health_check_node_port:
        yield Line(f"health check node port {port.health_check_node_port}", "", 4)
    for note in port.notes:
        yield Line(note, "warn", 4)
    if port.endpoints:
        used: list[Cell] = [(each.why, "good" if each.used else "dim") for each in port.endpoints]
        yield endpoint_table(port.endpoints, [("STATE", used)])


def explain_service(explainer: FlowExplainer, name: ObjectName, node: str = "") -> ServiceAnswer:
    """Explain where a Service is served on a node, and why its endpoints are in or out.

    Args:
        explainer: of the World; the Service is one that its names resolved.
        name: the Service.
        node: name of the node; "" for the one that the World is about.
    """
    world, at = explainer.world, node or explainer.names.here
    plan = explainer.plans.of(at)
    service = explainer.world.service(name)
    plans = {key: each for key, each in plan.services.items() if key.name.object_name == name}
    served = ServedPorts(explainer, at)
    ports = tuple(_with_nodes(served.of(key, each), explainer, each) for key, each in plans.items())
    notes: tuple[str, ...] = ()
    if service is not None and not plans:
        notes = (world.why_unserved(service),)
    elif explainer.names.nodes.get(at) is None:
        notes = (f"the Node object of {at} is not known: its zone and addresses are not",)
    return ServiceAnswer(
        service=str(name),
        type=(service.spec.type if service else None) or "ClusterIP",
        node=at,
        ports=ports,
        notes=notes,
        findings=findings_of(world, name),
        not_yet=bool(world.not_yet) and name in world.snapshot.services,
    )


def findings_of(world: World, name: ObjectName) -> tuple[Finding, ...]:
    """Return the Findings about a Service and its EndpointSlices, worst first."""
    slices = world.snapshot.slices.get(name, ())
    mine = {f"EndpointSlice {slice_.metadata.object_name}" for slice_ in slices}
    mine.add(f"Service {name}")
    found = dict.fromkeys(each for each in world.findings if each.object in mine)
    return tuple(sorted(found, key=lambda each: each.severity is not Severity.ERROR))


def _with_nodes(port: ServedPort, explainer: FlowExplainer, plan: ServicePlan) -> ServedPort:
    """Return a port, with the nodes that can serve it if its policy is Local.

    Each node serves such a port by itself. The Findings are those of the whole Service.
    """
    port = msgspec.structs.replace(port, findings=())
    actions = [each.action(source) for each in plan.frontends for source in SourceClass]
    if not any(each.verdict is Verdict.DROP or each.pool is Pool.LOCAL for each in actions):
        return port
    report = explainer.report(plan.key, explainer.names.here)
    ready = {str(each.endpoint) for each in report.endpoints if each.ready}
    nodes = Counter(e.node or "unknown nodes" for e in port.endpoints if e.address in ready)
    listed = ", ".join(f"{node} ({number})" for node, number in sorted(nodes.items())[:_NODES])
    more = f" and {len(nodes) - _NODES} more nodes" if len(nodes) > _NODES else ""
    note = f"traffic policy Local: ready endpoints are on {listed or 'no node'}{more}"
    return msgspec.structs.replace(port, notes=(*port.notes, note))


# One pod, or an address that may be an endpoint


class Membership(msgspec.Struct, frozen=True, rename="camel"):
    """A ServicePort that lists a pod as an endpoint."""

    service: str
    endpoint: str
    used: bool
    why: str


class PodAnswer(Answer, frozen=True, kw_only=True):
    """The Services that use a pod, as a node sees them."""

    pod: str
    addresses: tuple[str, ...]
    runs_on: str
    """Name of the pod's node; "" if it is not known."""
    node: str
    services: tuple[Membership, ...]
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 if Services list it and none uses it."""
        return int(bool(self.services) and not any(each.used for each in self.services))

    def blocks(self, wide: bool) -> Iterator[Block]:  # noqa: ARG002
        """Yield the pod, and a table of Services."""
        where = f" on node {self.runs_on}" if self.runs_on else ""
        addresses = [each for each in self.addresses if each != self.pod]
        known = f" at {', '.join(addresses)}" if addresses else ""
        yield Line(f"{self.pod}{known}{where}", "title")
        rows: list[tuple[Cell, ...]] = [
            (each.service, each.endpoint, (each.why, "good" if each.used else "bad"))
            for each in self.services
        ]
        title = f"Services that list it as an endpoint, as node {self.node} uses them:"
        if rows:
            yield Line(title)
            yield Table(("SERVICE", "ENDPOINT", "STATE"), rows)
        else:
            yield Line("no Service lists it as an endpoint: no EndpointSlice has its address")
        for note in self.notes:
            yield Line(note, "dim")


def explain_pod(explainer: FlowExplainer, target: Target, node: str = "") -> PodAnswer:
    """Explain which Services use a pod or an address, and which do not and why.

    Args:
        explainer: of the World.
        target: a pod or an address; with a port, only endpoints with that port count.
        node: the node whose view it is; "" for the one that the World is about.
    """
    at = node or explainer.names.here
    snapshot, plan = explainer.world.snapshot, explainer.plans.of(at)
    wanted = set(target.addresses)
    owners = {
        owner
        for owner, slices in snapshot.slices.items()
        if any(
            address in wanted or canonical_ip(address) in wanted
            for slice_ in slices
            for each in slice_.endpoints or ()
            for address in each.addresses or ()
        )
    }
    found = [
        Membership(f"{key.name} ({key.name.protocol})", str(each.endpoint), each.used, each.why)
        for key in plan.services
        if key.name.object_name in owners
        for each in explainer.report(key, at).endpoints
        if each.endpoint.ip in wanted and target.port in (0, each.endpoint.port)
    ]
    notes = [
        f"{owner}: {explainer.world.why_unserved(service)}"
        for owner in sorted(owners)
        if (service := explainer.world.unserved.get(owner)) is not None
    ]
    if target.port:
        notes.append(
            f"connections to {label_of(target)} itself are for no Service: proxies leave them alone"
        )
    return PodAnswer(
        pod=target.label,
        addresses=target.addresses,
        runs_on=target.node,
        node=at,
        services=tuple(sorted(found, key=lambda each: (not each.used, each.service))),
        notes=tuple(notes),
    )
