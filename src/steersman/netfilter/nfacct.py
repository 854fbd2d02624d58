"""Named packet counters of the kernel (nfnetlink_acct), which rules with `-m nfacct` count with.

They are separate in each network namespace. A rule can only name a counter that exists: so they are
created before the rules, and deleted after them.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence

from steersman.host.netlink import NETLINK_NETFILTER, Netlink, NetlinkError
from steersman.host.nlmsg import NLM_F_CREATE, Request, attributes, text
from steersman.model.errors import BusyError

_NEW, _GET, _DELETE = ((7 << 8) | kind for kind in (0, 1, 3))  # NFNL_SUBSYS_ACCT
_NAME, _PACKETS = 1, 2  # NFACCT_*, linux/netfilter/nfnetlink_acct.h
_HEADER = bytes(4)  # struct nfgenmsg
_ATTEMPTS, _PAUSE = 40, 0.05  # nf_tables frees the objects of a deleted rule a moment later


class PacketCounters:
    """Some counters in the network namespace of the calling thread."""

    def __init__(self, names: Sequence[str]) -> None:
        """Create an accessor of the counters with some names."""
        self.names = tuple(names)

    def supported(self) -> bool:
        """Return whether the kernel has such counters; none is created."""
        try:
            self._request(_GET, self.names[0])
        except NetlinkError as error:
            return error.errno == errno.ENOENT
        except OSError:
            return False
        return True

    def packets(self) -> dict[str, int]:
        """Return packets by counter, for those that exist."""
        found = {}
        for name in self.names:
            try:
                (reply,) = self._request(_GET, name)
            except (OSError, ValueError):
                continue
            found[name] = int.from_bytes(attributes(reply, 4).get(_PACKETS, b""), "big")
        return found

    def create(self) -> None:
        """Create the counters that do not exist.

        Raises:
            BusyError: the kernel refuses.
        """
        for name in self.names:
            try:
                self._request(_NEW, name, NLM_F_CREATE)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.EBUSY):  # EBUSY: it exists, too
                    raise BusyError(
                        f"the packet counter {name} cannot be created: {error}"
                    ) from error

    def delete(self) -> None:
        """Delete the counters, which may take a moment; one that foreign rules use stays."""
        left = list(self.names)
        for _ in range(_ATTEMPTS):  # EBUSY for as long as a rule uses one
            for name in tuple(left):
                try:
                    self._request(_DELETE, name)
                except OSError as error:
                    if error.errno == errno.EBUSY:
                        continue
                left.remove(name)
            if not left:
                return
            time.sleep(_PAUSE)

    def _request(self, kind: int, name: str, flags: int = 0) -> list[bytes]:
        with Netlink(NETLINK_NETFILTER, buffer=1 << 16) as netlink:
            request = Request(kind, _HEADER + text(_NAME, name), flags)
            return [reply.payload for reply in netlink.request(request)]
