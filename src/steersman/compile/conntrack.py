"""Describe stale conntrack entries: their Service would no longer send the client there.

An established UDP flow keeps its endpoint in conntrack for as long as packets come, even if the
endpoint is gone, or if the Service has left the destination; such entries must be deleted
(behaviour 12).

    plan, Services --served_ports--> ServedPort --+
                                                  +--stale--> Stale, which tells a stale entry
    plans before --destinations--> those left ----+

Only the holder of a destination decides about it: a Service that lost a claim cannot cut the
winner's clients. This module is pure; netfilter/conntrack/ lists and deletes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from steersman.compile.endpoints import build_endpoints
from steersman.compile.service import PROTOCOLS, closes_connections
from steersman.model.addresses import family_of
from steersman.model.conntrack import Stale, pack_socket
from steersman.model.inputs import Snapshot
from steersman.model.kube import Service
from steersman.model.names import Family, ObjectName, PlanKey, Protocol, ServicePortName
from steersman.model.plan import Endpoint, Frontend, NodePlan, ServicePlan, Value

_UDP = Protocol.UDP
_NODE_PORT = 3
"""Bytes of a packed destination without an address."""


class ServedPort(Value, frozen=True):
    """The destinations and endpoints of one ServicePort in one family."""

    protocol: Protocol
    port: int
    addresses: tuple[str, ...]
    """clusterIP, external IPs and load balancer IPs, canonical."""
    node_port: int = 0
    endpoints: tuple[Endpoint, ...] = ()
    """For UDP: the serving ones, on any node. For a port that closes connections: all."""
    close_connections: bool = False
    """TCP and SCTP entries are deleted too if their endpoint is gone; see behaviour 12."""


def left_destinations(before: ServicePlan, after: ServicePlan | None) -> frozenset[bytes]:
    """Return the destinations of UDP that a ServicePort no longer has; None if it is gone."""
    if before.key.name.protocol is not _UDP or (after and after.frontends == before.frontends):
        return frozenset()
    now = after.frontends if after else ()
    return frozenset(_destination(before, f) for f in before.frontends).difference(
        _destination(before, f) for f in now
    )


def numbers_to_look_up(ports: Iterable[ServedPort], left: Iterable[bytes]) -> set[int]:
    """Return the port numbers for which `stale` has to know who holds them."""
    node_ports = {port.node_port for port in ports}
    return (node_ports | {int.from_bytes(key[-2:], "big") for key in left}) - {0}


def destinations_at(
    numbers: Container[int], plans: Iterable[ServicePlan], family: Family
) -> Iterator[bytes]:
    """Yield the destinations of a family, packed, whose port is one of these numbers."""
    for plan in plans:
        for frontend in plan.frontends:
            if frontend.port in numbers and plan.key.family is family:
                yield _destination(plan, frontend)


def _destination(plan: ServicePlan, frontend: Frontend) -> bytes:
    """Return a destination, packed; a node port is one without an address."""
    protocol = bytes((plan.key.name.protocol.number,))
    if frontend.address:
        return protocol + pack_socket(frontend.address, frontend.port)
    return protocol + frontend.port.to_bytes(2, "big")


def is_concerned(service: Service) -> bool:
    """Whether a Service can have stale entries: most Services have only TCP ports."""
    ports = service.spec.ports or ()
    return any(port.protocol == "UDP" for port in ports) or closes_connections(service)


def served_ports(
    name: ObjectName, plan: NodePlan, snapshot: Snapshot, family: Family
) -> Iterator[ServedPort]:
    """Yield the ports of a Service that can have stale entries, with the destinations they hold."""
    service = snapshot.services.get(name)
    if service is None or not is_concerned(service):
        return
    # TCP and SCTP ports count only if the Service closes connections.
    closes = closes_connections(service)
    plans: dict[PlanKey, ServicePlan] = {}
    for port in service.spec.ports or ():
        protocol = PROTOCOLS.get(port.protocol)
        if protocol is not None and (closes or protocol is _UDP):
            key = PlanKey(ServicePortName(*name, port.name or "", protocol), family)
            if key in plan.services:
                plans[key] = plan.services[key]
    if not plans:
        return
    # Endpoints that are not ready but still serve keep their flows, so plans do not suffice.
    wanted = {(key.name.port, key.name.protocol) for key in plans}
    endpoints = build_endpoints(snapshot.slices.get(name, ()), family, "", wanted)
    for key, held in plans.items():
        protocol = key.name.protocol
        states = endpoints.get((key.name.port, protocol), ())
        yield ServedPort(
            protocol=protocol,
            port=next((f.port for f in held.frontends if f.address), 0),  # of all addresses
            addresses=tuple(f.address for f in held.frontends if f.address),
            node_port=next((f.port for f in held.frontends if not f.address), 0),
            endpoints=tuple(s.endpoint for s in states if s.serving or protocol is not _UDP),
            close_connections=closes,
        )


def stale(
    family: Family,
    ports: Iterable[ServedPort],
    held: Iterable[bytes] = (),
    left: Iterable[bytes] = (),
) -> Stale:
    """Return the description of the stale entries of a family.

    A UDP port without serving endpoints is left out: its clients would have nowhere better to go.
    If two ports claim one destination, the endpoints of both are valid. At a destination that its
    Service has left, every entry that was translated is stale.

    Args:
        held: destinations that Services hold, of the `numbers_to_look_up`: no node port counts
            at their addresses, and they are not left.
    """
    by_address: dict[bytes, frozenset[bytes]] = {}
    by_node_port: dict[bytes, frozenset[bytes]] = {}
    for port in ports:
        if not (port.endpoints if port.protocol is _UDP else port.close_connections):
            continue
        protocol = bytes((port.protocol.number,))
        sources = frozenset(pack_socket(e.ip, e.port) for e in port.endpoints)
        for address in port.addresses:
            if family_of(address) is family:
                key = protocol + pack_socket(address, port.port)
                by_address[key] = by_address.get(key, frozenset()) | sources
        if port.node_port:
            key = protocol + port.node_port.to_bytes(2, "big")
            by_node_port[key] = by_node_port.get(key, frozenset()) | sources
    own = frozenset(held)
    gone = frozenset(left).difference(own, by_address, by_node_port)
    node_ports = frozenset(key for key in gone if len(key) == _NODE_PORT)
    by_node_port |= dict.fromkeys(node_ports, frozenset())
    by_address |= {key: frozenset((key[1:],)) for key in gone - node_ports}
    return Stale(family, by_address, by_node_port, own, node_ports)
