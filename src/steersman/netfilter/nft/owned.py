"""Tables of nf_tables with an owner: locks, and rules that vanish with a process.

A table with an owner (NFT_TABLE_F_OWNER, Linux 5.12) belongs to the netlink socket that creates it.
Only that socket can change or delete it, and it disappears when the socket closes: nothing of it is
left behind if the process is killed. A network namespace has at most one table of a name, and
creating one takes CAP_NET_ADMIN: so it also serves as a lock.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from steersman.host.netlink import NETLINK_NETFILTER, Netlink, NetlinkError
from steersman.host.nlmsg import NLM_F_EXCL, Request, attributes
from steersman.netfilter.nft.wire import (
    GETTABLE,
    HEAD,
    INET,
    OWNER,
    TABLE_FLAGS,
    TABLE_USERDATA,
    Table,
    about,
    batch,
    comment_of,
    delete_table,
    new_base_chain,
    new_rule,
    new_table,
    userdata,
)


class Chain(NamedTuple):
    """A base chain of an owned table."""

    name: str
    hook: int
    priority: int
    rules: Sequence[Sequence[bytes]]
    """Each a list of expressions."""


def owned_table(name: str, chains: Iterable[Chain]) -> Netlink:
    """Make a table of family inet with its chains and rules; it vanishes with the socket.

    Raises:
        OSError: the kernel does not allow it.
    """
    table = Table(INET, name)
    requests = [new_table(table, flags=NLM_F_EXCL)]
    for chain in chains:
        requests.append(new_base_chain(table, chain.name, "filter", chain.hook, chain.priority))
        requests += (new_rule(table, chain.name, *rule) for rule in chain.rules)
    owner = Netlink(NETLINK_NETFILTER, buffer=1 << 18, timeout=10.0)
    try:
        if refused := owner.batch(batch(requests)):
            raise min(refused.items())[1]
    except BaseException:
        owner.close()
        raise
    return owner


class NoTablesError(Exception):
    """Tables with an owner are not available; the message says why."""


class OwnedTables:
    """Tables of nf_tables that belong to a netlink socket of this process."""

    def __init__(self) -> None:
        """Open the socket.

        Raises:
            NoTablesError: it cannot be opened.
        """
        try:
            self._netlink = Netlink(NETLINK_NETFILTER, buffer=1 << 16, timeout=5.0)
        except OSError as error:
            raise NoTablesError(str(error)) from error

    def make(self, name: str, comment: str) -> bool:
        """Create a table unless it exists; return whether it was created.

        Raises:
            NoTablesError: not permitted, or the kernel has no such tables.
        """
        code = self._change(_lock(name, comment))
        if code in (errno.EPERM, errno.EEXIST):  # EPERM: it has another owner
            return False
        if code:
            raise NoTablesError(os.strerror(code))
        return True

    def comment(self, name: str) -> str | None:
        """Return the comment of a table; None if it does not exist or has no owner."""
        try:
            (reply,) = self._netlink.request(about(Table(INET, name), GETTABLE))
        except (NetlinkError, ValueError):
            return None
        found = attributes(reply.payload, HEAD.size)
        if not int.from_bytes(found.get(TABLE_FLAGS, b""), "big") & OWNER:
            return None
        return comment_of(found.get(TABLE_USERDATA, b"")).decode(errors="replace")

    def remove(self, name: str) -> None:
        """Remove a table that we own, or that has no owner."""
        self._change(delete_table(Table(INET, name)))

    def rename(self, name: str, comment: str) -> bool:
        """Give a table that we own another comment; return whether it has it now.

        The kernel cannot change the comment of a table. One transaction removes it and makes it
        again, so there is no moment without it.
        """
        return not self._change(delete_table(Table(INET, name)), _lock(name, comment))

    def close(self) -> None:
        """Close the socket; the kernel then removes our tables."""
        self._netlink.close()

    def _change(self, *requests: Request) -> int:
        """Make a transaction; return the first error of its requests, 0 for none."""
        try:
            refused = self._netlink.batch(batch(requests))
        except OSError as error:
            raise NoTablesError(str(error)) from error
        if 0 in refused:
            raise NoTablesError(os.strerror(refused[0].errno or errno.EIO))
        return next((error.errno or errno.EIO for error in refused.values()), 0)


def _lock(name: str, comment: str) -> Request:
    remark = userdata(comment.encode(), TABLE_USERDATA)
    return new_table(Table(INET, name), remark, flags=NLM_F_EXCL)
