"""A port that a Service is served at, as every answer shows it: where, to which endpoints, and why.

`explain`, the lists and the pages are views of a ServedPort. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from steersman.compile.service import MAX_PORT, PROTOCOLS
from steersman.compile.trouble import trouble_of
from steersman.model.addresses import join_host_port
from steersman.model.findings import Finding
from steersman.model.names import PlanKey
from steersman.model.plan import Action, FrontendKind, Pool, ServicePlan, SourceClass, Verdict
from steersman.model.stats import ConnectionStats, StatsKey, frontend_label
from steersman.operate.explain_flow import EndpointView, FlowExplainer

Describe: TypeAlias = Callable[[ServicePlan], Sequence[str]]
"""Returns the places of a plan's kernel objects, in the words of the mode's tool."""
_VERDICTS = {
    Verdict.REJECT: "rejected, no endpoint can take the traffic",
    Verdict.DROP: "dropped, no endpoint is on this node",
}


class Counts(msgspec.Struct, frozen=True, rename="camel"):
    """Connections of a frontend or endpoint."""

    connections: int | None = None
    """So far; None if they are not known."""
    rate: float | None = None
    """New connections per second; None without a second sample."""


class Sample(msgspec.Struct, frozen=True):
    """The connections so far of all ServicePorts, at one moment."""

    at: float
    """Seconds, of a clock that only goes forward."""
    stats: ConnectionStats


class ServedFrontend(msgspec.Struct, frozen=True, rename="camel"):
    """A destination of clients."""

    kind: FrontendKind
    address: str
    """"" for a node port."""
    port: int
    protocol: str
    clients: Mapping[str, str]
    """What happens by class of client: `to one of 3 endpoints`, `dropped, ...`, `rejected, ...`."""
    source_ranges: tuple[str, ...] = ()
    counts: Counts = Counts()

    def __str__(self) -> str:
        return f":{self.port}" if not self.address else join_host_port(self.address, self.port)

    @property
    def text(self) -> str:
        """The destination in words: `clusterIP 10.96.0.10:80/TCP`, `node port 30080/TCP`."""
        if not self.address:
            return f"node port {self.port}/{self.protocol}"
        return f"{self.kind.value} {self}/{self.protocol}"

    @property
    def dead(self) -> bool:
        """Whether no client reaches an endpoint."""
        return not any(each.startswith("to ") for each in self.clients.values())


class ServedEndpoint(EndpointView, frozen=True, rename="camel"):
    """An endpoint of a ServicePort in one family."""

    used: bool = False
    """Whether some client can be sent there."""
    why: str = ""
    """`in: ready`, `out: not ready`: why it is used or not."""
    local: bool = False
    counts: Counts = Counts()


class ServedPort(msgspec.Struct, frozen=True, rename="camel"):
    """A ServicePort in one family."""

    service: str
    port: str
    """Name of the port; "" if it has none."""
    protocol: str
    family: str
    type: str
    frontends: tuple[ServedFrontend, ...]
    endpoints: tuple[ServedEndpoint, ...]
    notes: tuple[str, ...]
    """What else there is to say about the endpoints: hints, or why there are none."""
    problem: str
    """Why clients cannot use it, in a few words; "" if they can."""
    findings: tuple[str, ...] = ()
    internal_policy: str = "Cluster"
    external_policy: str = "Cluster"
    affinity_seconds: int = 0
    health_check_node_port: int = 0
    created: str | None = None
    """When the Service was created, in RFC 3339; None if it does not say."""
    objects: tuple[str, ...] = ()
    """Where the mode keeps it in the kernel; () if that was not asked for."""
    counts: Counts = Counts()
    """Of all its frontends."""

    @property
    def port_text(self) -> str:
        """The port as lists show it: its name, else its number, and the protocol."""
        number = str(self.frontends[0].port) if self.frontends else "-"
        return f"{self.port or number}/{self.protocol}"

    @property
    def used(self) -> int:
        """The number of endpoints that clients can be sent to."""
        return sum(endpoint.used for endpoint in self.endpoints)


class ServedPorts:
    """The ServicePorts of one node."""

    def __init__(
        self,
        explainer: FlowExplainer,
        node: str = "",
        samples: Sequence[Sample] = (),
        describe: Describe | None = None,
    ) -> None:
        """Prepare to describe ports.

        Args:
            explainer: of the World.
            node: whose view it is; "" for the node that the World is about.
            samples: counts of connections; two give rates.
            describe: names the kernel objects of a plan; None leaves them out.
        """
        self._explainer = explainer
        self._node = node or explainer.names.here
        self._samples = tuple(samples[-2:])
        self._describe = describe
        self._findings: dict[str, list[Finding]] = {}
        for finding in explainer.world.findings:
            self._findings.setdefault(finding.object, []).append(finding)

    def findings_of(self, object_: str) -> Sequence[Finding]:
        """Return the Findings of an object, such as `Service shop/web`."""
        return self._findings.get(object_, ())

    def of(self, key: PlanKey, plan: ServicePlan) -> ServedPort:
        """Return one ServicePort of the node; the ports of a Service should follow each other."""
        name, snapshot = key.name, self._explainer.world.snapshot
        service = snapshot.services.get(name.object_name)
        spec = None if service is None else service.spec
        report = self._explainer.report(key, self._node)
        used = set(plan.reachable)
        endpoints = []
        for each in report.endpoints:
            view = self._explainer.endpoint(key, each.endpoint)
            endpoints.append(
                ServedEndpoint(
                    view.address,
                    view.pod,
                    view.node,
                    view.zone,
                    each.endpoint in used,
                    each.why,
                    each.endpoint.local,
                    self._count("endpoints", (name, view.address)),
                )
            )
        frontends = tuple(
            ServedFrontend(
                each.kind,
                each.address,
                each.port,
                name.protocol.value,
                {source.value: _words(plan, each.action(source)) for source in SourceClass},
                each.source_ranges,
                self._count("frontends", (name, frontend_label(each))),
            )
            for each in plan.frontends
        )
        slices = snapshot.slices.get(name.object_name, ())
        objects = [f"Service {name.object_name}"]
        objects += [f"EndpointSlice {each.metadata.object_name}" for each in slices]
        counts = [frontend.counts for frontend in frontends]
        known = [each.connections for each in counts if each.connections is not None]
        rates = [each.rate for each in counts if each.rate is not None]
        return ServedPort(
            str(name.object_name),
            name.port,
            name.protocol.value,
            key.family.kubernetes,
            (spec and spec.type) or "ClusterIP",
            frontends,
            tuple(endpoints),
            report.notes,
            self._problem(key, plan),
            tuple(str(found) for each in objects for found in self.findings_of(each)),
            (spec and spec.internal_traffic_policy) or "Cluster",
            (spec and spec.external_traffic_policy) or "Cluster",
            plan.affinity_seconds,
            plan.health_check_node_port,
            None if service is None else service.metadata.creation_timestamp,
            () if self._describe is None else tuple(self._describe(plan)),
            Counts(sum(known) if known else None, sum(rates) if rates else None),
        )

    def _problem(self, key: PlanKey, plan: ServicePlan) -> str:
        """Say why clients cannot use a port, or why it is served nowhere."""
        if plan.frontends:
            trouble = trouble_of(plan)
            return trouble.reason if trouble else ""
        service = self._explainer.world.snapshot.services.get(key.name.object_name)
        for port in (service and service.spec.ports) or ():
            mine = (port.name or "", PROTOCOLS.get(port.protocol)) == key.name[2:]
            if mine and not 0 < port.port <= MAX_PORT:
                return f"not served: {port.port} is no port number"
        return "not served: another Service or port holds its addresses"

    def _count(self, table: str, key: StatsKey) -> Counts:
        if not self._samples:
            return Counts()
        values = [getattr(sample.stats, table).get(key, 0) for sample in self._samples]
        if len(values) == 1:
            return Counts(values[0])
        seconds = self._samples[1].at - self._samples[0].at
        # A restart of the process, or of the Service, begins to count again.
        new = max(0, values[1] - values[0])
        return Counts(values[1], new / seconds if seconds > 0 else None)


def _words(plan: ServicePlan, action: Action) -> str:
    """Say what happens to a class of clients."""
    if action.verdict is not Verdict.FORWARD:
        return _VERDICTS[action.verdict]
    ends = plan.pool(action.pool)
    words = f"to {ends[0]}" if len(ends) == 1 else f"to one of {len(ends)} endpoints"
    words += " on this node" if action.pool is Pool.LOCAL else ""
    return words + (", masqueraded" if action.masquerade else "")
