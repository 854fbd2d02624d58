"""The rows of lists, from a World: Services, endpoints, node ports. Pure.

`list_answers` has the types, `lists` is what the commands ask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from steersman.model.kube import Service
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import FrontendKind, SourceClass
from steersman.model.world import World
from steersman.operate.explain_flow import FlowExplainer
from steersman.operate.list_answers import (
    EndpointList,
    NodePort,
    NodePortList,
    ServiceList,
    Unserved,
)
from steersman.operate.names import Names
from steersman.operate.served import Describe, Sample, ServedEndpoint, ServedPort, ServedPorts


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
        self._note = note
        self._ports = ServedPorts(FlowExplainer(world, Names(world)), "", samples, describe)

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
                    unserved.append(Unserved(str(name), known[name].spec.type or "ClusterIP", why))
        ports = tuple(port for _, port in self._listed(wanted))
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
        for _, port in self._listed(wanted):
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

    def _listed(self, wanted: Filter) -> Iterator[tuple[PlanKey, ServedPort]]:
        """Yield the ServicePorts that a filter selects, by name."""
        plans = self._world.plan.services
        for key in sorted(plans):
            name = key.name
            if wanted.namespace not in ("", name.namespace) or wanted.name not in (
                "",
                name.service,
            ):
                continue
            port = self._ports.of(key, plans[key])
            if _selects(wanted, port):
                yield key, port

    def why_unserved(self, name: ObjectName, service: Service) -> str:
        """Return why a Service has no plan, by its first Finding if it has any."""
        served = self._world.snapshot.services
        findings = self._ports.findings_of(f"Service {name}") if name in served else ()
        if not findings:
            return self._world.why_unserved(service)
        return str(findings[0]).removeprefix(f"{findings[0].object} ")


def _selects(wanted: Filter, port: ServedPort) -> bool:
    """Whether an address, port or pod of a filter belongs to a ServicePort."""
    if not (wanted.address or wanted.port or wanted.pod):
        return True
    if wanted.pod and not any(_is_pod(wanted.pod, each) for each in port.endpoints):
        return False
    hosts = {frontend.address for frontend in port.frontends}
    numbers = {frontend.port for frontend in port.frontends} | {port.health_check_node_port}
    for endpoint in port.endpoints:
        host, number = _split(endpoint)
        hosts.add(host)
        numbers.add(number)
    return wanted.address in ("", *hosts) and wanted.port in (0, *numbers)


def _split(endpoint: ServedEndpoint) -> tuple[str, int]:
    """Return address and port of an endpoint."""
    host, _, number = endpoint.address.rpartition(":")
    return host.strip("[]"), int(number)


def _is_pod(wanted: str, endpoint: ServedEndpoint) -> bool:
    """Whether an endpoint is the pod of a name, with or without its namespace, or of an address."""
    return wanted in (endpoint.pod, endpoint.pod.rpartition("/")[2], _split(endpoint)[0])
