"""Ports of masqueraded connections, which programs and netfilter must not both choose.

While one mode takes the place of another, both masquerade. netfilter sees connections of the
programs with the port of the client, and programs do not see the entries of netfilter. If both
chose the same port towards an endpoint, the new connection would break the present one. So each
gets entries of the other's connections.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice

from steersman.host.netlink import (
    Netlink,
)
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.bpf import HashMap
from steersman.modes.ebpf.flows import (
    CLOSING,
    ESTABLISHED,
    INGRESS,
    REFUSED,
    RESET,
    TO_CLIENT,
    FlowEntry,
    read_timeouts,
)
from steersman.netfilter.conntrack.ports import masqueraded

_RESERVED = 4  # at most one in so many entries of the map


def reserve_ports(flows: HashMap, netlink: Netlink) -> None:
    """Add a flow for each connection that netfilter masquerades; it changes nothing in packets.

    Raises:
        OSError: the connections cannot be listed.
    """
    timeouts, now = read_timeouts(), time.monotonic_ns()
    for entry in islice(masqueraded(netlink), flows.capacity // _RESERVED):
        address, port = layout.pack_address(entry.seen_source), entry.seen_port.to_bytes(2, "big")
        endpoint = layout.pack_address(entry.endpoint) + entry.endpoint_port.to_bytes(2, "big")
        protocol = entry.protocol.number
        key = layout.flow_key(endpoint, address + port, protocol, INGRESS)
        # It expires when the entry of netfilter does.
        idle = max(timeouts.of(protocol, ESTABLISHED) - entry.seconds_left, 0)
        last = max(now - idle * 1_000_000_000, 0)
        if flows.get(key) is None:
            flows.put(key, layout.FLOW.pack(address, last, port, TO_CLIENT, ESTABLISHED, 0))


def ports_in_use(
    entries: Iterable[tuple[bytes, bytes]],
) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield protocol, node and endpoint of the connections that programs masquerade.

    Args:
        entries: of the map `flows`.
    """
    for key, value in entries:
        ended = layout.flow_state(value) in (CLOSING, RESET, REFUSED)
        if layout.flow_kind(value) == TO_CLIENT and not ended:
            flow = FlowEntry.unpack(key, value)
            if flow.rewritten != flow.destination:  # otherwise netfilter has an entry
                node, endpoint = map(layout.without_prefix, (flow.destination, flow.source))
                yield flow.protocol, node, endpoint
