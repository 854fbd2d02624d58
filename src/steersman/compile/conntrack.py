"""Which conntrack entries are stale: those of clients that a Service would no longer send there.

Established flows of UDP keep their endpoint in conntrack for as long as packets come, also when
the endpoint is gone; somebody has to cut them (SPEC 12). Pure: host/conntrack.py lists and deletes.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from steersman.compile.endpoints import EndpointState, build_endpoints
from steersman.compile.service import PortSpec, service_ports
from steersman.model.addresses import family_of
from steersman.model.kube import EndpointSlice, Service
from steersman.model.names import Family, ObjectName, Protocol
from steersman.model.plan import Endpoint, Value
from steersman.model.snapshot import Snapshot

PROTOCOL_NUMBERS: dict[Protocol, int] = {Protocol.TCP: 6, Protocol.UDP: 17, Protocol.SCTP: 132}
"""IANA's numbers, as in conntrack entries."""


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


class Entry(NamedTuple):
    """A conntrack entry, as far as it decides anything."""

    protocol: int
    destination: str
    """Where the client sent its packet."""
    destination_port: int
    source: str
    """Where the answers come from: the endpoint, if the packet was translated."""
    source_port: int


class Stale(Value, frozen=True):
    """Tells stale entries, by packed keys: it is asked hundreds of thousands of times.

    A destination is a byte of protocol number, the packed address and the port in network order;
    a source is packed address and port.
    """

    family: Family
    by_address: Mapping[bytes, frozenset[bytes]]
    """Valid sources by destination."""
    by_node_port: Mapping[bytes, frozenset[bytes]]
    """Valid sources by protocol and port, for destinations that are no Service's address."""

    def __bool__(self) -> bool:
        return bool(self.by_address or self.by_node_port)

    @property
    def protocols(self) -> tuple[int, ...]:
        """The protocol numbers whose entries can be stale."""
        return tuple(sorted({key[0] for key in (*self.by_address, *self.by_node_port)}))

    def contains(self, destination: bytes, source: bytes) -> bool:
        """Whether an entry is stale. A Service's address decides before a node port does."""
        valid = self.by_address.get(destination)
        if valid is None:
            valid = self.by_node_port.get(destination[:1] + destination[-2:])
        return valid is not None and source not in valid

    def contains_entry(self, entry: Entry) -> bool:
        """Whether an entry is stale."""
        destination = _socket(entry.destination, entry.destination_port)
        source = _socket(entry.source, entry.source_port)
        return self.contains(bytes((entry.protocol,)) + destination, source)


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
    return stale(
        family,
        (
            port
            for name in chosen
            if (service := snapshot.services.get(name)) is not None
            for port in served_ports(
                service,
                snapshot.slices.get(name, {}).values(),
                family,
                allow_external_ips=allow_external_ips,
            )
        ),
    )


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
        if spec.protocol is Protocol.UDP or closes:
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
        addresses=(spec.cluster_ip, *spec.external_ips, *spec.load_balancer_vips),
        node_port=spec.node_port,
        endpoints=tuple(state.endpoint for state in states if state.serving or not udp),
        close_connections=closes,
    )


def stale(family: Family, ports: Iterable[ServedPort]) -> Stale:
    """Return what tells the stale entries of a family, given all that is served in it.

    A UDP port without serving endpoints takes no part: its clients would have nowhere better to
    go. Where two ports claim one destination, the endpoints of both are valid.
    """
    by_address: dict[bytes, frozenset[bytes]] = {}
    by_node_port: dict[bytes, frozenset[bytes]] = {}
    for port in ports:
        if not _cleaned(port):
            continue
        protocol = bytes((PROTOCOL_NUMBERS[port.protocol],))
        sources = frozenset(_socket(e.ip, e.port) for e in port.endpoints)
        for address in port.addresses:
            if family_of(address) is family:
                _unite(by_address, protocol + _socket(address, port.port), sources)
        if port.node_port:
            _unite(by_node_port, protocol + port.node_port.to_bytes(2, "big"), sources)
    return Stale(family, by_address, by_node_port)


def _cleaned(port: ServedPort) -> bool:
    if port.protocol is Protocol.UDP:
        return bool(port.endpoints)
    return port.close_connections


def _unite(into: dict[bytes, frozenset[bytes]], key: bytes, sources: frozenset[bytes]) -> None:
    into[key] = into.get(key, frozenset()) | sources


def _socket(address: str, port: int) -> bytes:
    number = socket.AF_INET6 if family_of(address) is Family.IPV6 else socket.AF_INET
    return socket.inet_pton(number, address) + port.to_bytes(2, "big")
