"""Tables of nf_tables that vanish with a socket, and the expressions of their rules.

A table with an owner (NFT_TABLE_F_OWNER, Linux 5.12) belongs to the netlink socket that creates it:
nothing of it is left behind if the process is killed, and no other program can change it. Rules are
lists of expressions as in linux/netfilter/nf_tables.h; they work in one register, from left to
right, until one does not match.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from steersman.host.nlmsg import (
    NLM_F_ACK,
    NLM_F_APPEND,
    NLM_F_CREATE,
    NLM_F_EXCL,
    Request,
    attr,
    be32,
    nested,
    text,
)
from steersman.model.names import Family

PREROUTING, INPUT, OUTPUT, POSTROUTING = 0, 1, 3, 4  # NF_INET_*
NETWORK, TRANSPORT = 1, 2  # NFT_PAYLOAD_*_HEADER
REGISTER = 1  # NFT_REG_1, 16 bytes
META_NFPROTO, META_L4PROTO = 15, 16
NFPROTO = {Family.IPV4: 2, Family.IPV6: 10}
_SUBSYSTEM = 10 << 8  # NFNL_SUBSYS_NFTABLES
_NEWTABLE, _NEWCHAIN, _NEWRULE, _BATCH_BEGIN, _BATCH_END = 0, 3, 6, 16, 17
_OWNER = 2  # NFT_TABLE_F_OWNER
_INET = 1  # NFPROTO_INET: both families


class Chain(NamedTuple):
    """A base chain of an owned table."""

    name: str
    hook: int
    priority: int
    rules: Sequence[Sequence[bytes]]
    """Each a list of expressions."""


def owned_table(name: str, chains: Iterable[Chain]) -> list[Request]:
    """Return the transaction that makes a table of family inet with its chains and rules."""
    requests = [_request(_NEWTABLE, text(1, name), be32(2, _OWNER), flags=NLM_F_EXCL)]
    for chain in chains:
        where = nested(4, be32(1, chain.hook), attr(2, struct.pack("!i", chain.priority)))
        kind = text(7, "filter")
        requests.append(_request(_NEWCHAIN, text(1, name), text(3, chain.name), where, kind))
        for rule in chain.rules:
            body = nested(4, *(nested(1, each) for each in rule))
            parts = text(1, name), text(2, chain.name), body
            requests.append(_request(_NEWRULE, *parts, flags=NLM_F_APPEND))
    edge = struct.pack("=BB2s", 0, 0, b"\0\x0a")
    return [Request(_BATCH_BEGIN, edge), *requests, Request(_BATCH_END, edge)]


def _request(kind: int, *parts: bytes, flags: int = 0) -> Request:
    head = struct.pack("=BB2s", _INET, 0, b"\0\0")
    return Request(_SUBSYSTEM | kind, head + b"".join(parts), NLM_F_CREATE | NLM_F_ACK | flags)


# Expressions


def expression(name: str, *parts: bytes) -> bytes:
    """Return an expression by its name in the kernel, with its attributes."""
    return text(1, name) + nested(2, *parts)


def register_is(value: bytes) -> bytes:
    """Compare the register for equality."""
    return expression("cmp", be32(1, REGISTER), be32(2, 0), nested(3, attr(1, value)))


def register_bits_are(mask: bytes, value: bytes) -> list[bytes]:
    """Compare some bits of the register."""
    sizes = be32(1, REGISTER), be32(2, REGISTER), be32(3, len(mask))
    bits = nested(4, attr(1, mask)), nested(5, attr(1, bytes(len(mask))))
    return [expression("bitwise", *sizes, *bits), register_is(value)]


def meta_is(key: int, value: int) -> list[bytes]:
    """Compare a property of the packet (NFT_META_*) that has one byte."""
    loaded = expression("meta", be32(2, key), be32(1, REGISTER))
    return [loaded, register_is(bytes((value,)))]


def load_ct(key: int) -> bytes:
    """Load a property of the packet's connection (NFT_CT_*)."""
    return expression("ct", be32(2, key), be32(1, REGISTER))


def payload(base: int, offset: int, size: int) -> bytes:
    """Load bytes of a header."""
    parts = be32(1, REGISTER), be32(2, base), be32(3, offset), be32(4, size)
    return expression("payload", *parts)


def payload_is(base: int, offset: int, value: bytes) -> list[bytes]:
    """Compare bytes of a header."""
    return [payload(base, offset, len(value)), register_is(value)]


def limit(packets: int, seconds: int, burst: int) -> bytes:
    """Match this number of packets in so many seconds at most, after a first burst."""
    rate = attr(1, struct.pack("!Q", packets)), attr(2, struct.pack("!Q", seconds))
    return expression("limit", *rate, be32(3, burst), be32(4, 0))
