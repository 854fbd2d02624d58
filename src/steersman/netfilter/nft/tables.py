"""Tables and chains of nf_tables that are there: leftovers of a mode, and lists.

This works if neither iptables nor nft is installed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable

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

    def look(netlink: Netlink, family: Family) -> list[str]:
        """List all chains; if rules change all the time, believe the longest of several lists."""
        longest: list[str] = []
        for _ in range(_LISTS):
            found: list[str] = []
            try:
                for reply in netlink.dump(request(GETCHAIN, NFPROTO[family])):
                    values = attributes(reply.payload, HEAD.size)
                    chain = string(values.get(CHAIN_NAME, b""))
                    if ours(string(values.get(TABLE_NAME, b"")), chain):
                        found.append(chain)
                return found
            except DumpInterruptedError:
                longest = max(longest, found, key=len)
        return longest

    return _left("chains", look, families)


def known_chains_left(chains: Iterable[tuple[str, str]], families: Iterable[Family]) -> str:
    """Do the same for chains of known tables and names, without a list of all chains."""
    return _left("chains", lambda netlink, family: _existing(netlink, chains, family), families)


def existing_chains(chains: Iterable[tuple[str, str]], family: Family) -> list[str]:
    """Return the names of those chains, given by table and name, that are there.

    Raises:
        OSError: they cannot be looked up.
    """
    with Netlink(NETLINK_NETFILTER) as netlink:
        return _existing(netlink, chains, family)


def lookup_trouble(family: Family) -> str:
    """Return why no table of nf_tables can be looked up, or ""; no table is created."""
    try:
        with Netlink(NETLINK_NETFILTER) as netlink:
            netlink.request(about(Table(NFPROTO[family], "filter"), GETTABLE))
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            return NEEDS_NET_ADMIN
        if error.errno != errno.ENOENT:  # there is no such table
            return f"nf_tables: {error.strerror}"
    return ""


def table_left(name: str, families: Iterable[Family]) -> str:
    """Return a sentence about a table of nftables that is left, or ""."""

    def look(netlink: Netlink, family: Family) -> list[str]:
        return [name] if _exists(netlink, Table(NFPROTO[family], name), GETTABLE) else []

    return _left("tables", look, families)


def _existing(netlink: Netlink, chains: Iterable[tuple[str, str]], family: Family) -> list[str]:
    return [
        chain
        for table, chain in chains
        if _exists(netlink, Table(NFPROTO[family], table), GETCHAIN, text(CHAIN_NAME, chain))
    ]


def _exists(netlink: Netlink, table: Table, kind: int, *named: bytes) -> bool:
    try:
        netlink.request(about(table, kind, *named))
    except NetlinkError as error:
        if error.errno in _UNSUPPORTED:  # ENOENT: there is no such object, or no such table
            return False
        raise
    return True


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
