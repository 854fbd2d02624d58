"""Tables and chains of nf_tables that are there: leftovers of a mode, and lists.

This works if neither iptables nor nft is installed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from functools import partial

from steersman.host.netlink import (
    NETLINK_NETFILTER,
    DumpInterruptedError,
    Netlink,
    NetlinkError,
)
from steersman.host.nlmsg import attributes, string, text
from steersman.host.process import NEEDS_NET_ADMIN
from steersman.model.names import Family
from steersman.netfilter.nft.wire import (
    ALL,
    CHAIN_NAME,
    FAMILY_NAMES,
    GETCHAIN,
    GETTABLE,
    HEAD,
    NFPROTO,
    TABLE_NAME,
    Table,
    about,
    request,
    table_of,
)

_LISTS = 6
"""Lists that are read at most, if all of them are disturbed."""
_UNSUPPORTED = (errno.EPROTONOSUPPORT, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOENT)
"""Errors of a kernel without nf_tables."""


def chains_left(ours: Callable[[str, str], bool], families: Iterable[Family]) -> str:
    """Return a sentence about chains of iptables-nft that are left, or "".

    Args:
        ours: whether a chain, given by its table and name, is meant.
        families: where to look.
    """

    def name(found: dict[int, bytes]) -> str:
        table, chain = string(found.get(TABLE_NAME, b"")), string(found.get(CHAIN_NAME, b""))
        return chain if ours(table, chain) else ""

    return _left("chains", partial(_some_list, GETCHAIN, name), families)


def known_chains_left(chains: Iterable[tuple[str, str]], families: Iterable[Family]) -> str:
    """Do the same for chains of known tables and names, without a list of all chains."""

    def look(netlink: Netlink, family: Family) -> list[str]:
        found = []
        for table, chain in chains:
            where = Table(NFPROTO[family], table)
            try:
                netlink.request(about(where, GETCHAIN, text(CHAIN_NAME, chain)))
            except NetlinkError as error:
                if error.errno in _UNSUPPORTED:  # ENOENT: there is no such chain or table
                    continue
                raise
            found.append(chain)
        return found

    return _left("chains", look, families)


def table_left(wanted: str, families: Iterable[Family]) -> str:
    """Return a sentence about a table of nftables that is left, or ""."""

    def name(found: dict[int, bytes]) -> str:
        return wanted if string(found.get(TABLE_NAME, b"")) == wanted else ""

    return _left("tables", partial(_some_list, GETTABLE, name), families)


def _left(
    objects: str, look: Callable[[Netlink, Family], list[str]], families: Iterable[Family]
) -> str:
    names: list[str] = []
    try:
        with Netlink(NETLINK_NETFILTER, buffer=1 << 20) as netlink:
            for family in families:
                names += look(netlink, family)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return ""
        if error.errno in (errno.EPERM, errno.EACCES):
            return f"looking for {objects} {NEEDS_NET_ADMIN}"
        return f"{objects} cannot be listed: {error.strerror}"
    found = sorted(names)
    return f"{objects} are left: {len(found)}, such as {found[0]}" if found else ""


def _some_list(
    kind: int, name: Callable[[dict[int, bytes]], str], netlink: Netlink, family: Family
) -> list[str]:
    """Return the names in a list; if rules change all the time, in the longest of several."""
    listing = request(kind, NFPROTO[family])
    longest: list[str] = []
    for _ in range(_LISTS):
        found: list[str] = []
        try:
            for reply in netlink.dump(listing):
                if named := name(attributes(reply.payload, HEAD.size)):
                    found.append(named)
            return found
        except DumpInterruptedError:
            longest = max(longest, found, key=len)
    return longest


def list_tables() -> list[tuple[str, str]]:
    """Return family and name of the tables whose chains see packets of IP; blocks.

    `nft list tables` does the same, but nft 1.0.6 reads every rule of the machine for it.

    Raises:
        OSError: they cannot be listed.
    """
    found = []
    with Netlink(NETLINK_NETFILTER, buffer=1 << 20) as netlink:
        for reply in netlink.dump(request(GETTABLE, ALL)):
            family = FAMILY_NAMES.get(reply.payload[0], "arp")
            if family != "arp":
                found.append((family, table_of(reply.payload)))
    return found
