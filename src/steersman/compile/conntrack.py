"""Which conntrack entries are stale: those of clients that a Service would no longer send there.

Established flows of UDP keep their endpoint in conntrack for as long as packets come, also when
the endpoint is gone; somebody has to cut them (behaviour 12). A Service has a say only about the
destinations that it holds in the plan: one that lost a claim cannot cut the winner's clients.
Pure: netfilter/conntrack.py lists and deletes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from steersman.compile.endpoints import EndpointState, build_endpoints
from steersman.compile.notes import PROTOCOLS
from steersman.model.addresses import family_of
from steersman.model.conntrack import Stale, pack_socket
from steersman.model.inputs import Snapshot
from steersman.model.kube import EndpointSlice, Service
from steersman.model.names import Family, ObjectName, PlanKey, Protocol, ServicePortName
from steersman.model.plan import Endpoint, NodePlan, ServicePlan, Value

_UDP = Protocol.UDP


class ServedPort(Value, frozen=True):
    """What matters of one ServicePort in one family."""

    protocol: Protocol
    port: int
    addresses: tuple[str, ...]
    """clusterIP, external IPs and load balancer IPs, canonical."""
    node_port: int = 0
    endpoints: tuple[Endpoint, ...] = ()
    """For UDP: the serving ones, wherever they are. For a port that closes connections: all."""
    close_connections: bool = False
    """Entries of TCP or SCTP are cut, too, if their endpoint is gone; see behaviour 12."""


class Destinations:
    """The address destinations in the plans, by port number.

    A node port counts on every address of the node except for these (behaviour 12). The index makes
    them known without looking at all plans. It is kept up to date by what changed.
    """

    def __init__(self) -> None:
        self._keys: dict[int, set[PlanKey]] = {}
        self._port: dict[PlanKey, int] = {}

    def update(self, changed: Mapping[PlanKey, ServicePlan], removed: Iterable[PlanKey]) -> None:
        """Take the plans that are new or differ, and the keys of those that are gone."""
        for key in removed:
            self._forget(key)
        for key, plan in changed.items():
            port = next((f.port for f in plan.frontends if f.address), None)
            if port != self._port.get(key):
                self._forget(key)
                if port is not None:
                    self._port[key] = port
                    self._keys.setdefault(port, set()).add(key)

    def _forget(self, key: PlanKey) -> None:
        port = self._port.pop(key, None)
        if port is not None:
            keys = self._keys[port]
            keys.discard(key)
            if not keys:
                del self._keys[port]

    def at(self, numbers: Iterable[int], plan: NodePlan, family: Family) -> Iterator[bytes]:
        """Return the destinations of a family, packed, whose port has one of these numbers."""
        for number in numbers:
            for key in self._keys.get(number, ()):
                held = plan.services.get(key)
                if held is not None and key.family is family:
                    protocol = bytes((key.name.protocol.number,))
                    for frontend in held.frontends:
                        if frontend.address:
                            yield protocol + pack_socket(frontend.address, frontend.port)


def is_concerned(service: Service) -> bool:
    """Whether entries of a Service can become stale at all: most Services have only TCP ports."""
    ports = service.spec.ports or ()
    return any(port.protocol == "UDP" for port in ports) or closes_connections(service)


def closes_connections(service: Service) -> bool:
    """Whether a Service asks for connections to gone endpoints to be cut."""
    annotations = service.metadata.annotations
    return annotations is not None and annotations.close_connections == "true"


def served_ports(
    name: ObjectName, plan: NodePlan, snapshot: Snapshot, family: Family
) -> Iterator[ServedPort]:
    """Return the ports of a Service whose entries may become stale, with what they hold."""
    service = snapshot.services.get(name)
    if service is None or not is_concerned(service):
        return
    closes = closes_connections(service)
    plans = [
        plan.services[key]
        for key in dict.fromkeys(_keys(name, service, family))
        if key in plan.services and (closes or key.name.protocol is _UDP)
    ]
    if plans:
        slices: Iterable[EndpointSlice] = snapshot.slices.get(name, {}).values()
        ports = {(held.key.name.port, held.key.name.protocol) for held in plans}
        endpoints = build_endpoints(slices, family, "", ports)
        for held in plans:
            wanted = held.key.name
            states = endpoints.get((wanted.port, wanted.protocol), ())
            yield _served_port(held, states, closes)


def _keys(name: ObjectName, service: Service, family: Family) -> Iterator[PlanKey]:
    for port in service.spec.ports or ():
        protocol = PROTOCOLS.get(port.protocol)
        if protocol is not None:
            yield PlanKey(ServicePortName(*name, port.name or "", protocol), family)


def _served_port(plan: ServicePlan, states: Iterable[EndpointState], closes: bool) -> ServedPort:
    protocol = plan.key.name.protocol
    by_address = [frontend for frontend in plan.frontends if frontend.address]
    node_ports = [frontend.port for frontend in plan.frontends if not frontend.address]
    return ServedPort(
        protocol=protocol,
        port=by_address[0].port if by_address else 0,
        addresses=tuple(frontend.address for frontend in by_address),
        node_port=node_ports[0] if node_ports else 0,
        endpoints=tuple(
            state.endpoint for state in states if state.serving or protocol is not _UDP
        ),
        close_connections=closes,
    )


def stale(family: Family, ports: Iterable[ServedPort], own: Iterable[bytes] = ()) -> Stale:
    """Return what tells the stale entries of a family, given all that is served in it.

    A UDP port without serving endpoints takes no part: its clients would have nowhere better to
    go. Where two ports claim one destination, the endpoints of both are valid. No node port counts
    on the destinations in `own`.
    """
    by_address: dict[bytes, frozenset[bytes]] = {}
    by_node_port: dict[bytes, frozenset[bytes]] = {}
    for port in ports:
        if not _cleaned(port):
            continue
        protocol = bytes((port.protocol.number,))
        sources = frozenset(pack_socket(e.ip, e.port) for e in port.endpoints)
        for address in port.addresses:
            if family_of(address) is family:
                _unite(by_address, protocol + pack_socket(address, port.port), sources)
        if port.node_port:
            _unite(by_node_port, protocol + port.node_port.to_bytes(2, "big"), sources)
    return Stale(family, by_address, by_node_port, frozenset(own))


def _cleaned(port: ServedPort) -> bool:
    if port.protocol is _UDP:
        return bool(port.endpoints)
    return port.close_connections


def _unite(into: dict[bytes, frozenset[bytes]], key: bytes, sources: frozenset[bytes]) -> None:
    into[key] = into.get(key, frozenset()) | sources
