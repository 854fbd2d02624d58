"""The network namespace of the calling thread, which is that of the node: sockets and facts."""

from __future__ import annotations

import socket
from pathlib import Path

from steersman.host.netlink import NETLINK_ROUTE, Netlink, Subscription
from steersman.host.rtnetlink import RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV6_IFADDR, RTNLGRP_LINK
from steersman.modes.ebpf import layout

_SO_NETNS_COOKIE = 71
# Of the network namespace of the thread that reads it; both families.
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def netns_cookie() -> int:
    """Return the number by which programs know the namespace of this thread (Linux 5.14)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        cookie = sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
    return int.from_bytes(cookie, layout.BYTE_ORDER)


def rtnetlink() -> Netlink:
    """Open a netlink socket for devices and addresses."""
    return Netlink(NETLINK_ROUTE, buffer=1 << 20)


def device_changes() -> Subscription:
    """Subscribe to changes of devices and addresses."""
    groups = (RTNLGRP_LINK, RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV6_IFADDR)
    return Subscription(NETLINK_ROUTE, groups)


def port_range() -> tuple[int, int]:
    """Return the first and last port for sockets that ask for none."""
    first, last = map(int, _PORT_RANGE.read_text().split())
    return first, last
