"""Tables of nf_tables that belong to a netlink socket (NFT_TABLE_F_OWNER, Linux 5.12).

There is one table of a name in a network namespace, and it takes CAP_NET_ADMIN to make one. One
with an owner can be changed and deleted only by way of the socket that made it, and goes when that
is closed.
"""

from __future__ import annotations

import errno
import os
import struct

from steersman.host.netlink import NETLINK_NETFILTER, Netlink, NetlinkError, Request
from steersman.host.nlmsg import (
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_EXCL,
    attr,
    attributes,
    be32,
    string,
    text,
)

_SUBSYSTEM = 10 << 8  # NFNL_SUBSYS_NFTABLES
_NEWTABLE, _GETTABLE, _DELTABLE = range(3)
_BATCH_BEGIN, _BATCH_END = 16, 17
_NFTA_NAME, _NFTA_FLAGS, _NFTA_USERDATA = 1, 2, 6
_OWNER = 2  # NFT_TABLE_F_OWNER
_HEAD = struct.Struct("=BB2s")  # struct nfgenmsg
_INET = 1  # NFPROTO_INET


class NoTablesError(Exception):
    """There cannot be tables with an owner here; the message says why."""


class OwnedTables:
    """Tables of nf_tables that belong to a netlink socket of this process."""

    def __init__(self) -> None:
        """Open the socket.

        Raises:
            NoTablesError: that is not possible.
        """
        try:
            self._netlink = Netlink(NETLINK_NETFILTER, buffer=1 << 16, timeout=5.0)
        except OSError as error:
            raise NoTablesError(str(error)) from error

    def make(self, name: str, comment: str) -> bool:
        """Make a table, unless there is one already; return whether it was made.

        Raises:
            NoTablesError: we may not, or the kernel has no such tables.
        """
        data = comment.encode() + b"\0"
        userdata = attr(_NFTA_USERDATA, bytes((0, len(data))) + data)
        flags = be32(_NFTA_FLAGS, _OWNER)
        code = self._change(_NEWTABLE, name, flags, userdata, flags=NLM_F_CREATE | NLM_F_EXCL)
        if code in (errno.EPERM, errno.EEXIST):  # EPERM: of another owner
            return False
        if code:
            raise NoTablesError(os.strerror(code))
        return True

    def comment(self, name: str) -> str | None:
        """Return the comment of a table; None where there is none, or nobody owns it."""
        try:
            (reply,) = self._netlink.request(_request(_GETTABLE, text(_NFTA_NAME, name)))
        except (NetlinkError, ValueError):
            return None
        found = attributes(reply.payload, _HEAD.size)
        if not int.from_bytes(found.get(_NFTA_FLAGS, b""), "big") & _OWNER:
            return None
        return string(found.get(_NFTA_USERDATA, b"")[2:])

    def remove(self, name: str) -> None:
        """Remove a table that is ours or nobody's."""
        self._change(_DELTABLE, name)

    def _change(self, kind: int, name: str, *more: bytes, flags: int = 0) -> int:
        """Make a transaction of one request; return the error, 0 for none."""
        request = _request(kind, text(_NFTA_NAME, name), *more, flags=flags | NLM_F_ACK)
        edge = _HEAD.pack(0, 0, b"\0\x0a")
        batch = [Request(_BATCH_BEGIN, edge), request, Request(_BATCH_END, edge)]
        try:
            refused = self._netlink.batch(batch)
        except OSError as error:
            raise NoTablesError(str(error)) from error
        if 0 in refused:
            raise NoTablesError(os.strerror(refused[0].errno or errno.EIO))
        return next((error.errno or errno.EIO for error in refused.values()), 0)

    def close(self) -> None:
        """Let the kernel remove what is ours."""
        self._netlink.close()


def _request(kind: int, *parts: bytes, flags: int = 0) -> Request:
    head = _HEAD.pack(_INET, 0, b"\0\0")
    return Request(_SUBSYSTEM | kind, head + b"".join(parts), flags)
