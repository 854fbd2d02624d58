"""The network namespace of the node: sockets, facts, and ports shared with netfilter there."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

from steersman.host.netlink import (
    NETLINK_NETFILTER,
    NETLINK_ROUTE,
    BpfInstruction,
    Netlink,
    Subscription,
)
from steersman.host.rtnetlink import (
    RT_SCOPE_UNIVERSE,
    RTM_DELADDR,
    RTM_DELLINK,
    RTM_NEWADDR,
    RTM_NEWLINK,
    RTNLGRP_IPV4_IFADDR,
    RTNLGRP_IPV6_IFADDR,
    RTNLGRP_LINK,
)
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.bpf import HashMap
from steersman.modes.ebpf.tracking import (
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

T = TypeVar("T")
_SO_NETNS_COOKIE = 71
# Of the network namespace of the thread that reads it; both families.
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TYPE_AT = 4 if layout.BYTE_ORDER == "little" else 5  # low byte of nlmsg_type
# Socket filter for links and global addresses. A pod that starts or stops also brings messages
# that would wake the process for nothing: link-local addresses, ports of a bridge (AF_BRIDGE),
# and changes of flags such as IFF_UP. ifi_change is the mask of changed flags, all ones for a new
# link, and 0 for all other changes.
_WANTED_CHANGES = (
    BpfInstruction(0x30, 0, 0, _TYPE_AT),  # load a byte
    BpfInstruction(0x15, 6, 0, RTM_NEWADDR),
    BpfInstruction(0x15, 5, 0, RTM_DELADDR),
    BpfInstruction(0x30, 0, 0, 16),  # ifi_family, after the nlmsghdr
    BpfInstruction(0x15, 0, 5, socket.AF_UNSPEC),
    BpfInstruction(0x20, 0, 0, 28),  # load a word: ifi_change
    BpfInstruction(0x15, 4, 0, 0),
    BpfInstruction(0x15, 3, 2, 0xFFFFFFFF),
    BpfInstruction(0x30, 0, 0, 19),  # ifa_scope
    BpfInstruction(0x15, 1, 0, RT_SCOPE_UNIVERSE),
    BpfInstruction(0x06, 0, 0, 0),  # drop
    BpfInstruction(0x06, 0, 0, 0xFFFFFFFF),  # keep
)
assert max(RTM_NEWLINK, RTM_DELLINK, RTM_NEWADDR, RTM_DELADDR) < 1 << 8


class Enter(Protocol):
    """Calls a function in the network namespace of the node, and returns its result."""

    def __call__(self, function: Callable[[], T], /) -> T:
        """Call the function there."""


def call_here(function: Callable[[], T]) -> T:
    """Call a function in the network namespace of this thread."""
    return function()


class NodeNetns:
    """The network namespace of the node; that of this process unless a test says otherwise."""

    def __init__(self, enter: Enter = call_here) -> None:
        self.run = enter
        """Calls a function there."""

    def netfilter(self) -> Netlink:
        """Open a netlink socket of netfilter."""
        return self.run(lambda: Netlink(NETLINK_NETFILTER))

    def rtnetlink(self) -> Netlink:
        """Open a netlink socket for devices and addresses."""
        return self.run(lambda: Netlink(NETLINK_ROUTE, buffer=1 << 20))

    def device_changes(self) -> Subscription:
        """Subscribe to changes of devices and of global addresses."""
        groups = (RTNLGRP_LINK, RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV6_IFADDR)
        return self.run(lambda: Subscription(NETLINK_ROUTE, groups, wanted=_WANTED_CHANGES))

    def cookie(self) -> int:
        """Return the number by which programs know the namespace (Linux 5.14)."""

        def ask() -> bytes:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                return sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)

        return int.from_bytes(self.run(ask), layout.BYTE_ORDER)

    def port_range(self) -> tuple[int, int]:
        """Return the first and last port for sockets that ask for none."""
        first, last = map(int, self.run(_PORT_RANGE.read_text).split())
        return first, last


# -- Ports of masqueraded connections --------------------------------------------------------------
#
# While one mode takes the place of another, the programs and netfilter both masquerade, and choose
# ports for it. netfilter sees connections of the programs with the port of the client, and programs
# do not see the entries of netfilter. If both chose the same port towards an endpoint, the new
# connection would break the present one. So each gets entries of the other's connections.

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


def ports_in_use(flows: HashMap) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield protocol, node and endpoint of the connections that programs masquerade."""
    for key, value in flows.items():
        ended = layout.flow_state(value) in (CLOSING, RESET, REFUSED)
        if layout.flow_kind(value) == TO_CLIENT and not ended:
            flow = FlowEntry.unpack(key, value)
            if flow.rewritten != flow.destination:  # otherwise netfilter has an entry
                node, endpoint = map(layout.without_prefix, (flow.destination, flow.source))
                yield flow.protocol, node, endpoint
