"""From plans to the Ruleset of the mode. Pure; keys and values are those of layout.py.

With Maglev's consistent hashing (Eisenbud and others, NSDI 2016, section 3.4) every node gives the
same client the same endpoint. Each endpoint has its own order of the table's places, and the
endpoints take turns: each takes the first place in its order that is free. So shares are even, and
an endpoint that goes moves few clients of the others. The table depends on the endpoints only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec

from steersman.model.hashes import blake2b
from steersman.model.names import Family
from steersman.model.plan import (
    Action,
    Endpoint,
    Frontend,
    FrontendKind,
    NodeSettings,
    ServicePlan,
)
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.layout import FrontendValue, Kind, ServiceValue, pack_address, pack_cidr

MAGLEV_SIZE = 4093
"""Places of a table, a prime. Shares of 40 endpoints differ by 1 %. A table takes 8 KB, a change up
to two milliseconds: a quarter of the cost of the usual 16,381 places."""
MAGLEV_PADDED = 4096
"""Places of a table in the map."""


class Programs(msgspec.Struct, frozen=True):
    """Facts for rendering that are not in the plan."""

    digest: bytes
    """Of the object to attach, 16 bytes."""
    guard_node_ports: bool = True
    """Whether processes of the node may not bind to a node port in use."""
    fast_path: bool = False
    """Whether packets of known connections are sent on past the network stack."""


def render_node(settings: NodeSettings, programs: Programs) -> dict[bytes, bytes]:
    """Render the node's objects: programs, configuration, prefixes, addresses of node ports."""
    out: dict[bytes, bytes] = {
        Kind.PROGRAMS.value: programs.digest,
        Kind.CONFIG.value: _config(settings, programs),
    }
    for family in settings.families:
        own = settings.family(family)
        addresses = own.node_port_addresses
        if addresses is None:  # loopback has a flag of its own
            local = own.local_addresses
            addresses = tuple(a for a in local if not a.startswith("127.") and a != "::1")
        for address in addresses:
            out[Kind.NODE_IP + pack_address(address)] = b""
        for cidr in own.service_cidrs:
            out[_prefix(layout.PREFIXES_SERVICE_CIDRS, cidr)] = b""
        if own.detector.cidr:
            out[_prefix(layout.PREFIXES_PODS, own.detector.cidr)] = b""
    return out


def _prefix(number: int, cidr: str) -> bytes:
    return Kind.PREFIX + layout.node_prefix(number, pack_cidr(cidr))


def _config(settings: NodeSettings, programs: Programs) -> bytes:
    detectors = [settings.family(family).detector for family in settings.families]
    interface = next((d.interface for d in detectors if d.interface), "")
    prefix = next((d.interface_prefix for d in detectors if d.interface_prefix), "")
    flags = 0
    if any(detector.cidr for detector in detectors):
        flags |= layout.CONFIG_DETECTOR_CIDR
    if interface or prefix:
        flags |= layout.CONFIG_DETECTOR_DEVICE
    if settings.ipv4.localhost_node_ports and Family.IPV4 in settings.families:
        flags |= layout.CONFIG_LOCALHOST_NODE_PORTS
    if programs.guard_node_ports:
        flags |= layout.CONFIG_GUARD_NODE_PORTS
    if programs.fast_path:
        flags |= layout.CONFIG_FAST_PATH
    node_ips = (
        pack_address(address) if address else bytes(layout.ADDRESS_SIZE)
        for address in (settings.ipv4.node_ip, settings.ipv6.node_ip)
    )
    return layout.NODE_VALUE.pack(*node_ips, flags, interface.encode(), prefix.encode())


def render_service(plan: ServicePlan) -> dict[bytes, bytes]:
    """Render one ServicePort: its endpoints, its frontends, and their source ranges."""
    name = layout.service_name(plan.key)
    out: dict[bytes, bytes] = {}
    for frontend in plan.frontends:
        actions = _pack_actions(frontend.pod, frontend.node, frontend.external)
        flags = layout.FRONTEND_RANGES if frontend.source_ranges else 0
        if frontend.kind is FrontendKind.CLUSTER_IP:
            flags |= layout.FRONTEND_CLUSTER_IP
        key = frontend_key(plan, frontend)
        out[Kind.FRONTEND + key] = FrontendValue(actions, flags, name).pack()
        for cidr in frontend.source_ranges:
            out[Kind.RANGE + pack_cidr(cidr) + name] = b""
    if out:
        cluster = _endpoints(plan.cluster) if plan.cluster else b""
        local = _endpoints(plan.local) if plan.local else b""
        value = ServiceValue(plan.affinity_seconds, cluster, local)
        out[Kind.SERVICE + name] = value.pack()
        if plan.maglev and plan.cluster:
            out[Kind.MAGLEV + name] = maglev_table([*map(layout.pack_endpoint, plan.cluster)])
    return out


@lru_cache(maxsize=256)  # there are a dozen
def _pack_actions(pod: Action, node: Action, external: Action) -> int:
    """Pack the Actions of a Frontend, in the order of `enum source_class`."""
    packed = map(layout.pack_action, (pod, node, external))
    return sum(action << 4 * place for place, action in enumerate(packed))


def _endpoints(pool: Sequence[Endpoint]) -> bytes:
    return b"".join(map(layout.pack_endpoint, pool))


def frontend_key(plan: ServicePlan, frontend: Frontend) -> bytes:
    """Return the key of a frontend in the maps."""
    address = layout.UNSPECIFIED[plan.key.family]
    if frontend.address:
        address = pack_address(frontend.address)
    return layout.FRONTEND_KEY.pack(address, frontend.port, plan.key.name.protocol.number)


def maglev_table(endpoints: Sequence[bytes]) -> bytes:
    """Return the endpoint of each place: its position in the list, two bytes each.

    Args:
        endpoints: packed, without duplicates; up to MAGLEV_SIZE of them get places.
    """
    places = array("H", bytes(2 * MAGLEV_PADDED))
    taken = bytearray(MAGLEV_SIZE)
    orders = [_maglev_order(endpoint) for endpoint in endpoints[:MAGLEV_SIZE]]
    left = MAGLEV_SIZE if orders else 0
    # In turn, each endpoint takes the next free place in its own order.
    while left:
        for number, order in enumerate(orders):
            place = next(order)
            while taken[place]:
                place = next(order)
            taken[place] = 1
            places[place] = number
            left -= 1
            if not left:
                break
    return places.tobytes()


def _maglev_order(endpoint: bytes) -> Iterator[int]:
    """Yield all places, in an order of the endpoint's own."""
    digest = blake2b(endpoint, digest_size=16).digest()
    place = int.from_bytes(digest[:8], "big") % MAGLEV_SIZE
    step = int.from_bytes(digest[8:], "big") % (MAGLEV_SIZE - 1) + 1
    while True:
        yield place
        place = (place + step) % MAGLEV_SIZE
