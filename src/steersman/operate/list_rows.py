"""The rows of lists, from a World: Services, endpoints, node ports. Pure.

`list_answers` has the types, `lists` is what the commands ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import msgspec

from steersman.compile.explain import ServiceReports
from steersman.compile.node import zone_of
from steersman.compile.service import MAX_PORT, PROTOCOLS
from steersman.compile.trouble import trouble_of
from steersman.model.addresses import canonical_ip
from steersman.model.kube import EndpointSlice, Service
from steersman.model.names import ObjectName, PlanKey, Protocol
from steersman.model.plan import (
    Action,
    FrontendKind,
    Pool,
    ServicePlan,
    SourceClass,
    Verdict,
)
from steersman.model.stats import ConnectionStats, StatsKey, frontend_label
from steersman.model.world import World
from steersman.operate.list_answers import (
    Counts,
    EndpointList,
    ListedEndpoint,
    ListedFrontend,
    ListedPort,
    NodePort,
    NodePortList,
    ServiceList,
    Unserved,
)

Describe: TypeAlias = Callable[[ServicePlan], Sequence[str]]
"""Returns the places of a plan's kernel objects, in the words of the mode's tool."""


class Filter(msgspec.Struct, frozen=True):
    """What to list; empty fields select everything."""

    namespace: str = ""
    name: str = ""
    """Of the Service."""
    address: str = ""
    """Canonical: of a frontend or of an endpoint."""
    port: int = 0
    """Of a frontend, a node port or an endpoint."""
    pod: str = ""
    """`NAMESPACE/NAME` or `NAME` of a pod."""

    def __bool__(self) -> bool:
        return self != EVERYTHING


EVERYTHING = Filter()


class Sample(msgspec.Struct, frozen=True):
    """The connections so far of all ServicePorts, at one moment."""

    at: float
    """Seconds, of a clock that only goes forward."""
    stats: ConnectionStats


class _Shared:
    """What the ports of one Service have in common."""

    def __init__(self, world: World, name: ObjectName) -> None:
        snapshot = world.snapshot
        service = snapshot.services.get(name)
        slices = tuple(snapshot.slices.get(name, {}).values())
        self.name = name
        self.places = places_of(slices)
        """Node, zone and pod by address: reports have only what plans are made of."""
        self.reports: ServiceReports | None = None
        """None if the snapshot, a live view, is ahead of the plan."""
        self._numbers: dict[tuple[str, Protocol | None], int] = {}
        if service is not None:
            settings, zone = world.plan.settings, zone_of(snapshot.node)
            ejections = snapshot.ejected.get(name, ())
            self.reports = ServiceReports(service, slices, settings, zone, ejections=ejections)
            for port in service.spec.ports or ():
                self._numbers[port.name or "", PROTOCOLS.get(port.protocol)] = port.port

    def why_no_frontend(self, key: PlanKey) -> str:
        """Say why a port is served nowhere."""
        number = self._numbers.get((key.name.port, key.name.protocol), 1)
        if not 0 < number <= MAX_PORT:
            return f"not served: {number} is no port number"
        return "not served: another Service or port holds its addresses"


class Lists:
    """The lists of a World."""

    def __init__(
        self,
        world: World,
        now: float,
        samples: Sequence[Sample] = (),
        describe: Describe | None = None,
        note: str = "",
    ) -> None:
        """Prepare a list.

        Args:
            world: what to list.
            now: seconds since 1970, for ages.
            samples: counts of connections; two give rates.
            describe: names the kernel objects of a plan; None leaves them out.
            note: why something that was asked for is not there.
        """
        self._world = world
        self._now = now
        self._samples = tuple(samples[-2:])
        self._describe = describe
        self._note = note
        self._shared: _Shared | None = None
        self._findings: dict[str, list[str]] = {}
        for finding in world.findings:
            self._findings.setdefault(finding.object, []).append(str(finding))

    def services(self, wanted: Filter = EVERYTHING) -> ServiceList:
        """List Services."""
        unserved: list[Unserved] = []
        if not (wanted.address or wanted.port or wanted.pod):
            # Headless ones, those of other proxies, broken ones.
            planned = {key.name.object_name for key in self._world.plan.services}
            known = {**self._world.snapshot.services, **self._world.unserved}
            for name in sorted(known.keys() - planned):
                if wanted.namespace in ("", name.namespace) and wanted.name in ("", name.name):
                    why = self.why_unserved(name, known[name])
                    unserved.append(Unserved(str(name), _type(known[name]), why))
        ports = tuple(self.ports(wanted))
        return ServiceList(
            ports=ports,
            unserved=tuple(unserved),
            filtered=bool(wanted),
            note=self._note,
            now=self._now,
        )

    def endpoints(self, wanted: Filter = EVERYTHING) -> EndpointList:
        """List endpoints; of those that an address, port or pod selects, no others."""
        ports = []
        for port in self.ports(wanted):
            kept = port.endpoints
            if wanted.pod or wanted.address or wanted.port:
                named = [
                    each
                    for each in kept
                    if (not wanted.pod or _is_pod(wanted.pod, each))
                    and wanted.address in ("", _split(each)[0])
                    and wanted.port in (0, _split(each)[1])
                ]
                kept = tuple(named) or kept  # a frontend was selected: all of its endpoints
            ports.append(msgspec.structs.replace(port, endpoints=kept))
        return EndpointList(ports=tuple(ports), filtered=bool(wanted), note=self._note)

    def node_ports(self, wanted: Filter = EVERYTHING) -> NodePortList:
        """List node ports and health check node ports, by number."""
        settings = self._world.plan.settings
        found: list[NodePort] = []
        checks: dict[tuple[int, str, str], NodePort] = {}  # the ports of a Service share one
        for key, port in self._listed(wanted):
            family = settings.family(key.family)
            common = (port.protocol, port.family)
            for frontend in port.frontends:
                if frontend.kind == FrontendKind.NODE_PORT:
                    found.append(
                        NodePort(
                            frontend.port, *common, "node port", port.service, port.port,
                            family.node_port_addresses, family.localhost_node_ports,
                            frontend.clients[SourceClass.EXTERNAL], port.used, frontend.counts,
                        )
                    )  # fmt: skip
            if check := port.health_check_node_port:
                row = NodePort(
                    check, "TCP", port.family, "health check", port.service, "",
                    family.node_port_addresses, False, "answered by the proxy", port.used,
                )  # fmt: skip
                checks[check, port.family, port.service] = row
        found += checks.values()
        # A port inside the cluster selects a Service, and so all of its node ports.
        if wanted.port:
            found = [row for row in found if row.port == wanted.port] or found
        found.sort(key=lambda row: (row.port, row.protocol, row.family))
        return NodePortList(node_ports=tuple(found), filtered=bool(wanted), note=self._note)

    def ports(self, wanted: Filter) -> Iterator[ListedPort]:
        """Yield the ServicePorts that a filter selects, by name."""
        for _, port in self._listed(wanted):
            yield port

    def _listed(self, wanted: Filter) -> Iterator[tuple[PlanKey, ListedPort]]:
        plans = self._world.plan.services
        for key in sorted(plans):
            name = key.name
            if wanted.namespace not in ("", name.namespace) or wanted.name not in (
                "",
                name.service,
            ):
                continue
            port = self._port(key, plans[key])
            if _selects(wanted, port):
                yield key, port

    def why_unserved(self, name: ObjectName, service: Service) -> str:
        """Return why a Service has no plan, by its first Finding if it has any."""
        served = self._world.snapshot.services
        findings = self._findings.get(f"Service {name}") if name in served else None
        return findings[0] if findings else self._world.why_unserved(service)

    # One ServicePort

    def _port(self, key: PlanKey, plan: ServicePlan) -> ListedPort:
        name = key.name
        snapshot = self._world.snapshot
        service = snapshot.services.get(name.object_name)
        slices = snapshot.slices.get(name.object_name, {})
        # The ports of a Service follow each other: what they share is read once.
        shared = self._shared
        if shared is None or shared.name != name.object_name:
            shared = self._shared = _Shared(self._world, name.object_name)
        endpoints, notes = self._endpoints(key, plan, shared)
        frontends = tuple(
            ListedFrontend(
                frontend.kind.value,
                frontend.address,
                frontend.port,
                {
                    source.value: treatment_of(plan, frontend.action(source))
                    for source in SourceClass
                },
                frontend.source_ranges,
                self._count("frontends", (name, frontend_label(frontend))),
            )
            for frontend in plan.frontends
        )
        objects = [f"Service {name.object_name}"]
        objects += [f"EndpointSlice {name.namespace}/{each}" for each in slices]
        counts = [frontend.counts for frontend in frontends]
        known = [each.connections for each in counts if each.connections is not None]
        rates = [each.rate for each in counts if each.rate is not None]
        spec = None if service is None else service.spec
        created = None if service is None else service.metadata.creation_timestamp
        trouble = trouble_of(plan)
        problem = trouble.reason if trouble else ""
        if not plan.frontends:
            problem = shared.why_no_frontend(key)
        return ListedPort(
            str(name.object_name),
            name.port,
            name.protocol.value,
            key.family.kubernetes,
            "ClusterIP" if service is None else _type(service),
            frontends,
            endpoints,
            notes,
            problem,
            tuple(each for one in objects for each in self._findings.get(one, ())),
            (spec and spec.internal_traffic_policy) or "Cluster",
            (spec and spec.external_traffic_policy) or "Cluster",
            plan.affinity_seconds,
            plan.health_check_node_port,
            created,
            () if self._describe is None else tuple(self._describe(plan)),
            Counts(sum(known) if known else None, sum(rates) if rates else None),
        )

    def _endpoints(
        self,
        key: PlanKey,
        plan: ServicePlan,
        shared: _Shared,
    ) -> tuple[tuple[ListedEndpoint, ...], tuple[str, ...]]:
        """Return the endpoints, in or out, and what else there is to say about them."""
        if shared.reports is None:
            return (), ()
        report = shared.reports.of(key)
        used = set(plan.reachable)
        found: list[ListedEndpoint] = []
        for each in report.endpoints:
            node, zone, pod = shared.places.get(each.endpoint.ip, ("", "", ""))
            printed = str(each.endpoint)
            found.append(
                ListedEndpoint(
                    printed,
                    each.endpoint in used,
                    each.why.removeprefix("in: ").removeprefix("out: "),
                    each.endpoint.local,
                    node,
                    zone,
                    pod,
                    self._count("endpoints", (key.name, printed)),
                )
            )
        return tuple(found), (*report.notes, *map(str, report.findings))

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


def places_of(slices: Iterable[EndpointSlice]) -> dict[str, tuple[str, str, str]]:
    """Return node, zone and pod by canonical address."""
    found: dict[str, tuple[str, str, str]] = {}
    for slice_ in slices:
        for endpoint in slice_.endpoints or ():
            address = canonical_ip(endpoint.addresses[0]) if endpoint.addresses else None
            if address is not None:
                target, pod = endpoint.target_ref, ""
                if target is not None and target.kind == "Pod":
                    pod = f"{target.namespace or slice_.metadata.namespace}/{target.name}"
                found[address] = endpoint.node_name or "", endpoint.zone or "", pod
    return found


def _selects(wanted: Filter, port: ListedPort) -> bool:
    """Whether an address, port or pod of a filter belongs to a ServicePort."""
    if wanted.pod and not any(_is_pod(wanted.pod, each) for each in port.endpoints):
        return False
    hosts = {frontend.address for frontend in port.frontends}
    numbers = {frontend.port for frontend in port.frontends} | {port.health_check_node_port}
    for endpoint in port.endpoints:
        host, number = _split(endpoint)
        hosts.add(host)
        numbers.add(number)
    return wanted.address in ("", *hosts) and wanted.port in (0, *numbers)


def _split(endpoint: ListedEndpoint) -> tuple[str, int]:
    """Return address and port of an endpoint."""
    host, _, number = endpoint.address.rpartition(":")
    return host.strip("[]"), int(number)


def _is_pod(wanted: str, endpoint: ListedEndpoint) -> bool:
    """Whether an endpoint is the pod of a name, with or without its namespace, or of an address."""
    return wanted in (endpoint.pod, endpoint.pod.rpartition("/")[2], _split(endpoint)[0])


def treatment_of(plan: ServicePlan, action: Action) -> str:
    """Say what happens to clients of a class."""
    if action.verdict is not Verdict.FORWARD:
        return action.verdict.value
    number = len(plan.pool(action.pool))
    where = " on this node" if action.pool is Pool.LOCAL else ""
    masqueraded = ", masqueraded" if action.masquerade else ""
    return f"forward to {number} endpoint{'s' * (number != 1)}{where}{masqueraded}"


def _type(service: Service) -> str:
    return service.spec.type or "ClusterIP"
