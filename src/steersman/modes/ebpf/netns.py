"""The network namespace of the calling thread, which is that of the node: sockets and facts."""

from __future__ import annotations

import socket
from pathlib import Path

from steersman.host.netlink import (
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


def netns_cookie() -> int:
    """Return the number by which programs know the namespace of this thread (Linux 5.14)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        cookie = sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
    return int.from_bytes(cookie, layout.BYTE_ORDER)


def rtnetlink() -> Netlink:
    """Open a netlink socket for devices and addresses."""
    return Netlink(NETLINK_ROUTE, buffer=1 << 20)


def device_changes() -> Subscription:
    """Subscribe to changes of devices and of global addresses."""
    groups = (RTNLGRP_LINK, RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV6_IFADDR)
    return Subscription(NETLINK_ROUTE, groups, wanted=_WANTED_CHANGES)


def port_range() -> tuple[int, int]:
    """Return the first and last port for sockets that ask for none."""
    first, last = map(int, _PORT_RANGE.read_text().split())
    return first, last
