"""A cheap sign of change: hashes of what the kernel lists, hardly taken apart.

Neither IPVS nor ipset counts generations. So the kernel lists everything, as for `read`, but
nothing is decoded, compared or kept; counters, which traffic changes, are left out.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Hashable
from hashlib import blake2b

from steersman.host.netlink import NETLINK_GENERIC, NETLINK_NETFILTER, Netlink, Request
from steersman.host.nlmsg import u8
from steersman.modes.ipvs.kernel import Kernel
from steersman.modes.ipvs.names import ServerKey
from steersman.modes.ipvs.parse import is_drained, parse_servers
from steersman.modes.ipvs.sockets import Sockets
from steersman.modes.ipvs.wire import digest_services
from steersman.netfilter.generation import digest_rules, generation

_IPSET_LIST = (6 << 8) | 7  # NFNL_SUBSYS_IPSET, IPSET_CMD_LIST: linux/netfilter/ipset/ip_set.h
_IPSET_PROTOCOL = 6
_COUNTS = re.compile(r" +\d+ +\d+ *$", re.MULTILINE)
_DRAINED = re.compile(r" 0 +0 +0 *$", re.MULTILINE)


async def of_kernel(kernel: Kernel, sockets: Sockets, generic: int) -> Hashable | None:
    """Return hashes of all that `kernel.read` looks at; None where `read` has something to do.

    Args:
        kernel: the doors.
        sockets: of generic netlink and netfilter.
        generic: number of the IPVS family.

    Raises:
        OSError, BusyError: the kernel does not say.
    """
    netfilter = sockets.get(NETLINK_NETFILTER)

    def listed() -> tuple[Hashable, ...] | None:
        text = kernel.servers.table()
        if has_drained(text, kernel.is_ours):
            return None
        services = digest_services(sockets.get(NETLINK_GENERIC), generic)
        return of_table(text), services, of_sets(netfilter), frozenset(kernel.device.addresses())

    token = await asyncio.to_thread(listed)
    if token is None:
        return None
    if kernel.iptables.tool.variant == "nft":
        return (*token, generation(netfilter))
    return (*token, digest_rules([await kernel.iptables.save(f) for f in kernel.families]))


def has_drained(text: str, is_ours: Callable[[ServerKey], bool]) -> bool:
    """Whether a real server of ours in /proc/net/ip_vs waits for `read` to delete it.

    It has weight 0 and no connections. What others have drained waits for nothing.
    """
    return bool(_DRAINED.search(text)) and any(
        is_ours(key) and any(map(is_drained, group)) for key, group in parse_servers(text).items()
    )


def of_table(text: str) -> bytes:
    """Return a hash of /proc/net/ip_vs without its counts of connections."""
    return _digest(_COUNTS.sub("", text).encode())


def of_sets(netlink: Netlink) -> bytes:
    """Return a hash of all ipsets, by a socket of NETLINK_NETFILTER."""
    digest = blake2b(digest_size=16)
    for reply in netlink.dump(Request(_IPSET_LIST, bytes(4) + u8(1, _IPSET_PROTOCOL))):
        digest.update(reply.payload)
    return digest.digest()


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()
