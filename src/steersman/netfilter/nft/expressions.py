"""Expressions of rules of nf_tables. Pure.

A rule is a list of expressions, which work from left to right until one does not match. Each has a
name and a nest of attributes, NFTA_PAYLOAD_*, NFTA_META_* and so on in
linux/netfilter/nf_tables.h. It reads and writes registers: the 32-bit ones (NFT_REG32_00 = 8 and
up); an IPv6 address takes four.
"""

from __future__ import annotations

import struct

from steersman.host.nlmsg import attr, be32, nested, text, u8
from steersman.model.names import Family
from steersman.netfilter.nft.wire import NFPROTO

REGISTER = 8  # the first one
NETWORK, TRANSPORT = 1, 2  # NFT_PAYLOAD_*_HEADER
META_NFPROTO, META_L4PROTO = 15, 16  # NFT_META_*
CT_STATE, CT_DIRECTION, CT_STATUS = 0, 1, 2  # NFT_CT_*
CT_PROTOCOL, CT_PROTO_SRC, CT_PROTO_DST = 10, 11, 12
CT_SRC_IP = {Family.IPV4: 19, Family.IPV6: 21}
CT_DST_IP = {Family.IPV4: 20, Family.IPV6: 22}
DROP, JUMP, GOTO, RETURN = 0, -3, -4, -5  # NF_DROP, NFT_*
_SOURCE_AT = {Family.IPV4: 12, Family.IPV6: 8}
"""Offset of the source address in the IP header; the destination follows."""
_EQUAL, _DIFFERS = 0, 1  # NFT_CMP_*


def expression(name: str, *attributes: bytes) -> bytes:
    """Return an expression by its name in the kernel, as an element of a rule."""
    return nested(1, text(1, name), nested(2, *attributes))


def width(family: Family) -> int:
    """Return the number of registers that an address takes."""
    return family.bits // 32


# Load something into a register


def payload(base: int, offset: int, size: int, register: int = REGISTER) -> bytes:
    """Load bytes of a header."""
    parts = be32(1, register), be32(2, base), be32(3, offset), be32(4, size)
    return expression("payload", *parts)


def load_field(family: Family, field: str, register: int = REGISTER) -> bytes:
    """Load a field of the packet, as nft spells it: saddr, daddr, sport or dport."""
    size, at = family.bits // 8, _SOURCE_AT[family]
    where = {
        "saddr": (NETWORK, at, size),
        "daddr": (NETWORK, at + size, size),
        "sport": (TRANSPORT, 0, 2),
        "dport": (TRANSPORT, 2, 2),
    }[field]
    return payload(*where, register)


def load_meta(key: int, register: int = REGISTER) -> bytes:
    """Load a property of the packet."""
    return expression("meta", be32(2, key), be32(1, register))


def load_ct(key: int) -> bytes:
    """Load a property of the packet's connection."""
    return expression("ct", be32(1, REGISTER), be32(2, key))


def load_original(key: int, register: int = REGISTER) -> bytes:
    """Load an address or port of the packet that opened the connection, as it was before NAT."""
    return expression("ct", be32(1, register), be32(2, key), u8(3, 0))


# Match, or go on to the next rule


def register_is(value: bytes) -> bytes:
    """Compare the first register for equality."""
    return expression("cmp", be32(1, REGISTER), be32(2, _EQUAL), nested(3, attr(1, value)))


def register_bits_are(mask: bytes, value: bytes) -> list[bytes]:
    """Compare some bits of the first register."""
    return [_masked(mask), register_is(value)]


def register_has(flag: int) -> list[bytes]:
    """Match if the first register has a flag."""
    mask = struct.pack("=I", flag)
    differs = be32(1, REGISTER), be32(2, _DIFFERS), nested(3, attr(1, bytes(len(mask))))
    return [_masked(mask), expression("cmp", *differs)]


def _masked(mask: bytes) -> bytes:
    """Keep some bits of the first register: (register & mask) ^ 0."""
    sizes = be32(1, REGISTER), be32(2, REGISTER), be32(3, len(mask))
    bits = nested(4, attr(1, mask)), nested(5, attr(1, bytes(len(mask))))
    return expression("bitwise", *sizes, *bits)


def meta_is(key: int, value: int) -> list[bytes]:
    """Compare a property of the packet that has one byte."""
    return [load_meta(key), register_is(bytes((value,)))]


def field_is(family: Family, field: str, value: bytes) -> list[bytes]:
    """Compare a field of the packet."""
    return [load_field(family, field), register_is(value)]


def payload_is(base: int, offset: int, value: bytes) -> list[bytes]:
    """Compare bytes of a header."""
    return [payload(base, offset, len(value)), register_is(value)]


def limit(packets: int, seconds: int, burst: int) -> bytes:
    """Match this number of packets in so many seconds at most, after a first burst."""
    rate = attr(1, struct.pack("!Q", packets)), attr(2, struct.pack("!Q", seconds))
    return expression("limit", *rate, be32(3, burst), be32(4, 0))


def lookup(name: str, destination: int | None = None) -> bytes:
    """Match if a set or map has the key from the first register on; load what a map has for it."""
    into = () if destination is None else (be32(3, destination),)
    return expression("lookup", text(1, name), be32(2, REGISTER), *into)


# Decide


def verdict(code: int, chain: str = "") -> bytes:
    """End the rule with a verdict; jump and goto lead to a chain."""
    decision = nested(2, attr(1, struct.pack("!i", code)), text(2, chain) if chain else b"")
    return expression("immediate", be32(1, 0), nested(2, decision))  # 0: NFT_REG_VERDICT


def dnat(family: Family, address: int, port: int) -> bytes:
    """Change the destination to the address and port that begin at two registers."""
    kind = be32(1, 1), be32(2, NFPROTO[family])  # NFT_NAT_DNAT
    # The flag says that there is a port: NF_NAT_RANGE_PROTO_SPECIFIED.
    return expression("nat", *kind, be32(3, address), be32(5, port), be32(7, 2))
