"""Encode requests to ctnetlink, and decode entries.

The kernel filters as far as it can (CTA_FILTER, since 5.8; older kernels ignore the filter and
send every entry).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Collection, Mapping
from ipaddress import ip_address
from typing import NamedTuple

from steersman.host.nlmsg import NLA_F_NESTED, Request, attr, attributes, nested, u8, u32
from steersman.model.addresses import canonical_ip
from steersman.model.names import Family

CT_NEW = 0x100
CT_GET = 0x101
CT_DELETE = 0x102
CTA_TUPLE_ORIG, CTA_TUPLE_REPLY, CTA_STATUS = 1, 2, 3
CTA_PROTOINFO, CTA_TIMEOUT, CTA_ID, CTA_ZONE, CTA_FILTER, CTA_STATUS_MASK = 4, 7, 12, 18, 25, 26
CTA_TIMESTAMP, CTA_TIMESTAMP_START = 20, 1
SEEN_REPLY = 1 << 1  # IPS_SEEN_REPLY
ASSURED, CONFIRMED, SRC_NAT, DST_NAT = 1 << 2, 1 << 3, 1 << 4, 1 << 5
CTA_TUPLE_IP, CTA_TUPLE_PROTO = 1, 2
CTA_IP_V4_SRC, CTA_IP_V4_DST, CTA_IP_V6_SRC, CTA_IP_V6_DST = 1, 2, 3, 4
CTA_PROTO_NUM, CTA_PROTO_SRC_PORT, CTA_PROTO_DST_PORT = 1, 2, 3
CTA_FILTER_ORIG_FLAGS = 1
_PORT_KEY = 1 + 2  # length of a key without an address
_FEW = 4  # keys that are listed one by one
_FILTER_IP_DST, _FILTER_PROTO_NUM, _FILTER_DST_PORT = 1 << 1, 1 << 3, 1 << 5


def list_request(family: Family, key: bytes) -> Request:
    """Return a request for the entries of a key: a protocol, then an address and a port if given.

    Kernels up to at least 6.18 select the wrong entries by an IPv6 address (their comparison is
    inverted), so for IPv6 the port must be enough.
    """
    address, port = key[1:-2], key[-2:] if len(key) > 1 else b""
    flags = _FILTER_PROTO_NUM
    ip = proto = b""
    if address and family is Family.IPV4:
        flags |= _FILTER_IP_DST
        ip = attr(CTA_IP_V4_DST, address)
    if port:
        flags |= _FILTER_DST_PORT
        proto = attr(CTA_PROTO_DST_PORT, port)
    return Request(
        CT_GET,
        bytes((AF_NUMBERS[family], 0, 0, 0))
        + nested(
            CTA_TUPLE_ORIG,
            nested(CTA_TUPLE_IP, ip) if ip else b"",
            nested(CTA_TUPLE_PROTO, u8(CTA_PROTO_NUM, key[0]), proto),
        )
        + nested(CTA_FILTER, u32(CTA_FILTER_ORIG_FLAGS, flags)),
    )


def listed_keys(family: Family, keys: Collection[bytes]) -> list[bytes]:
    """Return the keys to ask for with `list_request` to see every entry of some keys.

    A few are asked for one by one: each costs the kernel a walk of its table. An entry may come
    with several of them, but `is_of` only one.
    """
    ports = {key for key in keys if family is Family.IPV6 or len(key) == _PORT_KEY}
    ports = {key[:1] + key[-2:] for key in ports}
    some = ports | {key for key in keys if key[:1] + key[-2:] not in ports}
    return sorted(some if len(some) <= _FEW else {key[:1] for key in keys})


def is_of(key: bytes, destination: bytes) -> bool:
    """Whether a packed destination is one that `list_request` asks for by this key."""
    if len(key) == 1:
        return destination.startswith(key)
    return destination.startswith(key[:-2]) and destination.endswith(key[-2:])


# The payload of an entry of TCP, UDP or SCTP, as every known kernel writes it. Each bracket is an
# attribute with a header of 4 bytes:
#
#     nfgenmsg [ORIG [IP [source] [destination]] [PROTO [number] [source port] [destination port]]]
#              [REPLY ...the same...] ...
#
# With both tuple headers as expected, fixed offsets are several times as fast as parsing.


class Layout(NamedTuple):
    """Offsets in the payload for one size of addresses."""

    orig: bytes
    """Expected header of the first tuple."""
    reply: bytes
    """Expected header of the second tuple."""
    reply_at: int
    protocol: slice
    destination: slice
    destination_port: slice
    source: slice
    source_port: slice


def _layout(size: int) -> Layout:
    """Return the layout for addresses of `size` bytes."""
    tuple_size = 4 + (4 + 2 * (4 + size)) + (4 + 3 * 8)
    reply = 4 + tuple_size

    def at(offset: int, length: int) -> slice:
        return slice(offset, offset + length)

    number = 2 * size + 24  # from the start of a tuple to its protocol number; then the ports
    return Layout(
        struct.pack("=HH", tuple_size, CTA_TUPLE_ORIG | NLA_F_NESTED),
        struct.pack("=HH", tuple_size, CTA_TUPLE_REPLY | NLA_F_NESTED),
        reply,
        protocol=at(4 + number, 1),
        destination=at(4 + size + 16, size),
        destination_port=at(4 + number + 16, 2),
        source=at(reply + 12, size),
        source_port=at(reply + number + 8, 2),
    )


AF_NUMBERS = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
LAYOUTS: Mapping[int, Layout] = {socket.AF_INET: _layout(4), socket.AF_INET6: _layout(16)}
"""By the first byte of the payload, nfgen_family."""


def entry_keys(payload: bytes) -> tuple[bytes, bytes]:
    """Return destination and source as `model.conntrack.Stale` packs them.

    Both are b"" for an entry without ports.
    """
    layout = LAYOUTS[payload[0]]
    at = layout.reply_at
    if payload[4:8] != layout.orig or payload[at : at + 4] != layout.reply:
        return _parsed_keys(payload)
    return (
        payload[layout.protocol] + payload[layout.destination] + payload[layout.destination_port],
        payload[layout.source] + payload[layout.source_port],
    )


def status_of(payload: bytes) -> int:
    """Return the status of an entry, IPS_*."""
    return int.from_bytes(attributes(payload, 4).get(CTA_STATUS, b""), "big")


def _parsed_keys(payload: bytes) -> tuple[bytes, bytes]:
    """Return the same from an entry of any layout: of ICMP, in a zone, of a future kernel."""
    values = attributes(payload, 4)
    orig, reply = (
        attributes(values.get(CTA_TUPLE_ORIG, b"")),
        attributes(values.get(CTA_TUPLE_REPLY, b"")),
    )
    to, ports = (attributes(orig.get(k, b"")) for k in (CTA_TUPLE_IP, CTA_TUPLE_PROTO))
    back, back_ports = (attributes(reply.get(k, b"")) for k in (CTA_TUPLE_IP, CTA_TUPLE_PROTO))
    if CTA_PROTO_DST_PORT not in ports or CTA_PROTO_SRC_PORT not in back_ports:
        return b"", b""
    destination = to.get(CTA_IP_V4_DST) or to.get(CTA_IP_V6_DST, b"")
    source = back.get(CTA_IP_V4_SRC) or back.get(CTA_IP_V6_SRC, b"")
    return (
        ports[CTA_PROTO_NUM] + destination + ports[CTA_PROTO_DST_PORT],
        source + back_ports[CTA_PROTO_SRC_PORT],
    )


def parse_tuple(data: bytes) -> tuple[int, str, int, str, int] | None:
    """Return protocol, source and destination of a tuple with ports."""
    parts = attributes(data)
    ip, proto = (attributes(parts.get(k, b"")) for k in (CTA_TUPLE_IP, CTA_TUPLE_PROTO))
    source = ip.get(CTA_IP_V4_SRC) or ip.get(CTA_IP_V6_SRC)
    destination = ip.get(CTA_IP_V4_DST) or ip.get(CTA_IP_V6_DST)
    if not source or not destination or CTA_PROTO_DST_PORT not in proto:
        return None
    return (
        int.from_bytes(proto.get(CTA_PROTO_NUM, b""), "big"),
        _address(source),
        int.from_bytes(proto.get(CTA_PROTO_SRC_PORT, b""), "big"),
        _address(destination),
        int.from_bytes(proto[CTA_PROTO_DST_PORT], "big"),
    )


def _address(packed: bytes) -> str:
    text = str(ip_address(packed))
    return canonical_ip(text) or text  # an IPv4 address in one of IPv6 is not canonical


def pack_tuple(
    kind: int, family: Family, protocol: int, source: bytes, destination: bytes
) -> bytes:
    """Return a tuple as an attribute of this kind; the ends are packed addresses and ports."""
    ipv4 = family is Family.IPV4
    ends = (CTA_IP_V4_SRC, CTA_IP_V4_DST) if ipv4 else (CTA_IP_V6_SRC, CTA_IP_V6_DST)
    ip = attr(ends[0], source[:-2]) + attr(ends[1], destination[:-2])
    ports = attr(CTA_PROTO_SRC_PORT, source[-2:]) + attr(CTA_PROTO_DST_PORT, destination[-2:])
    proto = u8(CTA_PROTO_NUM, protocol) + ports
    return nested(kind, nested(CTA_TUPLE_IP, ip), nested(CTA_TUPLE_PROTO, proto))
