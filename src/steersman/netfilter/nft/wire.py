"""Messages of nf_tables over netlink: tables, chains, rules, and transactions of them. Pure.

Layouts are those of linux/netfilter/nf_tables.h. Attributes that hold numbers are in network byte
order. Attribute 1 is always the table. The name of a chain is 3 in messages about chains
(NFTA_CHAIN_NAME) and 2 in those about rules (NFTA_RULE_CHAIN); that of a set is always 2.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from steersman.host.nlmsg import (
    NLM_F_ACK,
    NLM_F_APPEND,
    NLM_F_CREATE,
    Request,
    attr,
    attributes,
    be32,
    nested,
    string,
    text,
)
from steersman.model.names import Family

SUBSYSTEM = 10 << 8  # NFNL_SUBSYS_NFTABLES
NEWTABLE, GETTABLE, DELTABLE, NEWCHAIN, GETCHAIN, DELCHAIN, NEWRULE, GETRULE, DELRULE = range(9)
NEWSET, GETSET, DELSET, NEWSETELEM, GETSETELEM, DELSETELEM, NEWGEN, GETGEN, TRACE = range(9, 18)
DESTROYTABLE, DESTROYSETELEM = 26, 30
"""Since kernel 6.3: like delete, but an object that does not exist is no error."""
_BATCH_BEGIN, _BATCH_END = 16, 17  # NFNL_MSG_BATCH_*

ALL, INET = 0, 1  # NFPROTO_UNSPEC, NFPROTO_INET
NFPROTO = {Family.IPV4: 2, Family.IPV6: 10}
FAMILY_NAMES = {INET: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}
"""nft's names of the families of tables, by NFPROTO_*."""
PREROUTING, INPUT, FORWARD, OUTPUT, POSTROUTING = range(5)  # NF_INET_*
HOOKS = ("prerouting", "input", "forward", "output", "postrouting")
"""Names of the hooks of IPv4 and IPv6, by their number."""

HEAD = struct.Struct("=BB2s")  # struct nfgenmsg, before the attributes
TABLE_NAME, TABLE_FLAGS, TABLE_USERDATA = 1, 2, 6  # NFTA_TABLE_*
CHAIN_NAME, CHAIN_POLICY = 3, 5  # NFTA_CHAIN_*
CHAIN_HOOK = (4, CHAIN_POLICY, 7, 10)
"""Attributes of a chain: hook and priority, policy, type, flags."""
RULE_CHAIN, RULE_HANDLE, RULE_EXPRESSIONS, RULE_USERDATA = 2, 3, 4, 7  # NFTA_RULE_*
SET_NAME = 2  # NFTA_SET_NAME
OWNER = 2  # NFT_TABLE_F_OWNER
ACCEPT = (1).to_bytes(4, "big")
"""Policy of a base chain that lets packets pass."""


class Table(NamedTuple):
    """A table, as messages name it."""

    protocol: int
    """NFPROTO_*."""
    name: str


def request(kind: int, protocol: int, *attributes: bytes, flags: int = 0) -> Request:
    """Return a request about the objects of a protocol (NFPROTO_*), or of ALL."""
    payload = HEAD.pack(protocol, 0, b"\0\0") + b"".join(attributes)
    return Request(SUBSYSTEM | kind, payload, flags)


def batch(requests: Sequence[Request]) -> list[Request]:
    """Return requests as one transaction. The kernel answers errors, and the last request."""
    edge = HEAD.pack(ALL, 0, b"\0\x0a")  # the resource id is the subsystem, 10
    last = requests[-1]
    return [
        Request(_BATCH_BEGIN, edge),
        *requests[:-1],
        last._replace(flags=last.flags | NLM_F_ACK),
        Request(_BATCH_END, edge),
    ]


def table_of(payload: bytes) -> str:
    """Return the table that a message is about (NEWGEN is about none)."""
    return string(attributes(payload, HEAD.size).get(TABLE_NAME, b""))


def userdata(comment: bytes, kind: int) -> bytes:
    """Return a comment as nft's own type-length-value (libnftnl udata, type 0)."""
    if not comment:
        return b""
    return attr(kind, bytes((0, len(comment) + 1)) + comment + b"\0")


def comment_of(userdata: bytes) -> bytes:
    """Return the comment in user data; b"" if there is none."""
    if len(userdata) < 3 or userdata[0] != 0:
        return b""
    return userdata[2 : 1 + userdata[1]]


# Requests about tables, chains and rules


def about(table: Table, kind: int, *attributes: bytes, flags: int = 0) -> Request:
    """Return a request about an object of a table."""
    return request(kind, table.protocol, text(TABLE_NAME, table.name), *attributes, flags=flags)


def new_table(table: Table, *attributes: bytes, flags: int = 0) -> Request:
    """Add a table that belongs to the socket of the request."""
    owner = be32(TABLE_FLAGS, OWNER)
    return about(table, NEWTABLE, owner, *attributes, flags=flags | NLM_F_CREATE)


def delete_table(table: Table) -> Request:
    """Delete a table with all that is in it."""
    return about(table, DELTABLE)


def new_chain(table: Table, name: str) -> Request:
    """Add a chain."""
    return about(table, NEWCHAIN, text(CHAIN_NAME, name), flags=NLM_F_CREATE)


def new_base_chain(table: Table, name: str, kind: str, hook: int, priority: int) -> Request:
    """Add a base chain; packets that it does not match pass.

    Args:
        table: its table.
        name: name of the chain.
        kind: `filter` or `nat`.
        hook: number of the hook.
        priority: among the chains of that hook; lower ones come first.
    """
    where = nested(4, be32(1, hook), attr(2, struct.pack("!i", priority)))
    what = text(CHAIN_NAME, name), where, attr(CHAIN_POLICY, ACCEPT), text(7, kind)
    return about(table, NEWCHAIN, *what, flags=NLM_F_CREATE)


def delete_chain(table: Table, name: str) -> Request:
    """Delete an empty chain."""
    return about(table, DELCHAIN, text(CHAIN_NAME, name))


def flush_chain(table: Table, name: str) -> Request:
    """Delete all rules of a chain."""
    return about(table, DELRULE, text(RULE_CHAIN, name))


def new_rule(table: Table, chain: str, *expressions: bytes, comment: str = "") -> Request:
    """Append a rule."""
    body = nested(RULE_EXPRESSIONS, *expressions)
    remark = userdata(comment.encode(), RULE_USERDATA)
    flags = NLM_F_CREATE | NLM_F_APPEND
    return about(table, NEWRULE, text(RULE_CHAIN, chain), body, remark, flags=flags)
