"""Which conntrack entries are stale: those of clients that a Service would no longer send there.

Established flows of UDP keep their endpoint in conntrack for as long as packets come, also when
the endpoint is gone; somebody has to cut them (SPEC 12). Pure: host/conntrack.py lists and deletes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from steersman.compile.endpoints import EndpointState, build_endpoints
from steersman.compile.notes import MAX_PORT
from steersman.compile.service import PortSpec, service_ports
from steersman.model.addresses import family_of
from steersman.model.conntrack import PROTOCOL_NUMBERS, Stale, pack_socket
from steersman.model.kube import EndpointSlice, Service
from steersman.model.names import Family, ObjectName, Protocol
from steersman.model.plan import Endpoint, Value
from steersman.model.snapshot import Snapshot


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
    """Entries of TCP or SCTP are cut as well when their endpoint is gone (beyond SPEC 12)."""


def stale_entries(
    snapshot: Snapshot,
    family: Family,
    names: Iterable[ObjectName] | None = None,
    *,
    allow_external_ips: bool = True,
) -> Stale:
    """Return what tells the stale entries of a family from the objects of the cluster.

    Args:
        snapshot: the objects.
        family: the family.
        names: only these Services are looked at; None for all. Their clients are all that a
            change of just these can have left behind.
        allow_external_ips: as for compile/service.py.
    """
    chosen = snapshot.services if names is None else names
    ports = tuple(ports_in(snapshot, family, chosen, allow_external_ips=allow_external_ips))
    numbers = {port.node_port for port in ports} - {0}
    own = destinations_at(snapshot, family, snapshot.services, numbers)
    return stale(family, ports, own)


def ports_in(
    snapshot: Snapshot,
    family: Family,
    names: Iterable[ObjectName],
    *,
    allow_external_ips: bool = True,
) -> Iterator[ServedPort]:
    """Return the ports of some Services whose entries may become stale."""
    for name in names:
        service = snapshot.services.get(name)
        if service is not None:
            slices = snapshot.slices.get(name, {}).values()
            yield from served_ports(service, slices, family, allow_external_ips=allow_external_ips)


def destinations_at(
    snapshot: Snapshot, family: Family, names: Iterable[ObjectName], numbers: Container[int]
) -> Iterator[bytes]:
    """Return the destinations of some Services, packed, whose port has one of these numbers.

    A node port counts on every address, but for these (SPEC 12).
    """
    for name in names:
        service = snapshot.services.get(name)
        if service is None or all(port.port not in numbers for port in service.spec.ports or ()):
            continue  # nearly all of them
        for spec in service_ports(service, family).values():
            if spec.port in numbers:
                protocol = bytes((PROTOCOL_NUMBERS[spec.protocol],))
                yield from (protocol + pack_socket(a, spec.port) for a in _addresses(spec))


def _addresses(spec: PortSpec) -> tuple[str, ...]:
    return (spec.cluster_ip, *spec.external_ips, *spec.load_balancer_vips)


def served_ports(
    service: Service,
    slices: Iterable[EndpointSlice],
    family: Family,
    *,
    allow_external_ips: bool = True,
) -> Iterator[ServedPort]:
    """Return the ports of a Service whose entries may become stale."""
    closes = closes_connections(service)
    if not closes and all(port.protocol != "UDP" for port in service.spec.ports or ()):
        return  # most Services: worth a short cut
    endpoints = build_endpoints(slices, family, "")
    specs = service_ports(service, family, allow_external_ips=allow_external_ips)
    for name, spec in specs.items():
        served = 0 < spec.port <= MAX_PORT  # else the port has no frontends either
        if served and (spec.protocol is Protocol.UDP or closes):
            yield _served_port(spec, endpoints.get((name.port, spec.protocol), ()), closes)


def closes_connections(service: Service) -> bool:
    """Whether a Service asks for connections to gone endpoints to be cut."""
    annotations = service.metadata.annotations
    return annotations is not None and annotations.close_connections == "true"


def _served_port(spec: PortSpec, states: Iterable[EndpointState], closes: bool) -> ServedPort:
    udp = spec.protocol is Protocol.UDP
    return ServedPort(
        protocol=spec.protocol,
        port=spec.port,
        addresses=_addresses(spec),
        node_port=spec.node_port,
        endpoints=tuple(state.endpoint for state in states if state.serving or not udp),
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
        protocol = bytes((PROTOCOL_NUMBERS[port.protocol],))
        sources = frozenset(pack_socket(e.ip, e.port) for e in port.endpoints)
        for address in port.addresses:
            if family_of(address) is family:
                _unite(by_address, protocol + pack_socket(address, port.port), sources)
        if port.node_port:
            _unite(by_node_port, protocol + port.node_port.to_bytes(2, "big"), sources)
    return Stale(family, by_address, by_node_port, frozenset(own))


def _cleaned(port: ServedPort) -> bool:
    if port.protocol is Protocol.UDP:
        return bool(port.endpoints)
    return port.close_connections


def _unite(into: dict[bytes, frozenset[bytes]], key: bytes, sources: frozenset[bytes]) -> None:
    into[key] = into.get(key, frozenset()) | sources
