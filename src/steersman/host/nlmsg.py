"""Netlink messages as bytes: build and parse them. Sockets are in netlink.py.

Layouts are those of linux/netlink.h (RFC 3549), padded to four bytes:

    nlmsghdr: length 4, type 2, flags 2, sequence 4, port 4
    the family's own header (ifinfomsg, nfgenmsg, genlmsghdr)
    attributes: length 2, type 2, value

Integers are in the machine's byte order unless the family says otherwise (nf_tables: big endian).
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

NLMSG_ERROR = 2
NLMSG_DONE = 3

NLM_F_REQUEST = 0x1
NLM_F_ACK = 0x4
NLM_F_DUMP_INTR = 0x10
NLM_F_REPLACE = 0x100
NLM_F_EXCL = 0x200
NLM_F_CREATE = 0x400
NLM_F_APPEND = 0x800
NLM_F_DUMP = 0x300
NLM_F_CAPPED = 0x100  # in NLMSG_ERROR: the refused message is not repeated in full
NLM_F_ACK_TLVS = 0x200  # in NLMSG_ERROR: attributes with an explanation follow

NLA_F_NESTED = 0x8000
NLA_TYPE_MASK = 0x3FFF

NLMSGERR_ATTR_MSG, NLMSGERR_ATTR_OFFS = 1, 2
HEADER = struct.Struct("=IHHII")
_ATTR = struct.Struct("=HH")
_ERROR = struct.Struct("=i")
_PADDING = (b"", b"\0\0\0", b"\0\0", b"\0")


class Request(NamedTuple):
    """One message to the kernel."""

    kind: int
    payload: bytes
    flags: int = 0
    """In addition to NLM_F_REQUEST."""


class Message(NamedTuple):
    """One netlink message as received."""

    kind: int
    """nlmsg_type; below 16 it is one of the NLMSG_* common to all families."""
    flags: int
    sequence: int
    """That of the request; 0 in notifications."""
    payload: bytes
    """Everything after the netlink header."""
    port: int = 0
    """In notifications: nl_pid of the socket that made the change; 0 for the kernel itself."""


def message(kind: int, flags: int, sequence: int, payload: bytes) -> bytes:
    """Return a whole message, from this process (port 0: the kernel fills it in)."""
    size = HEADER.size + len(payload)
    return HEADER.pack(size, kind, flags, sequence, 0) + payload + _PADDING[size & 3]


def messages(data: bytes) -> Iterator[Message]:
    """Yield the messages of a datagram, without a truncated last one."""
    offset, end = 0, len(data)
    while offset + 16 <= end:
        size, kind, flags, sequence, port = HEADER.unpack_from(data, offset)
        if size < 16 or offset + size > end:
            return
        yield Message(kind, flags, sequence, data[offset + 16 : offset + size], port)
        offset += (size + 3) & ~3


def attr(kind: int, value: bytes) -> bytes:
    """Return an attribute, padded."""
    size = len(value)
    return _ATTR.pack(size + 4, kind) + value + _PADDING[size & 3]


def nested(kind: int, *parts: bytes) -> bytes:
    """Return an attribute that holds attributes."""
    return attr(kind | NLA_F_NESTED, b"".join(parts))


def text(kind: int, value: str) -> bytes:
    """Return a NUL-terminated string attribute."""
    return attr(kind, value.encode() + b"\0")


def u8(kind: int, value: int) -> bytes:
    """Return a one-byte attribute."""
    return attr(kind, bytes((value,)))


def u32(kind: int, value: int) -> bytes:
    """Return a 32-bit attribute in the machine's byte order."""
    return attr(kind, struct.pack("=I", value))


def be16(kind: int, value: int) -> bytes:
    """Return a 16-bit attribute in network byte order."""
    return attr(kind, value.to_bytes(2, "big"))


def be32(kind: int, value: int) -> bytes:
    """Return a 32-bit attribute in network byte order."""
    return attr(kind, value.to_bytes(4, "big"))


def iter_attributes(data: bytes, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield attributes in order, without the flags in their kind.

    Malformed data, which no kernel sends, ends the iteration.
    """
    end = len(data)
    while offset + 4 <= end:
        size, kind = _ATTR.unpack_from(data, offset)
        if size < 4 or offset + size > end:
            return
        yield kind & NLA_TYPE_MASK, data[offset + 4 : offset + size]
        offset += (size + 3) & ~3


def attributes(data: bytes, offset: int = 0) -> dict[int, bytes]:
    """Return attributes by kind; the last one of each kind wins."""
    return dict(iter_attributes(data, offset))


def string(value: bytes) -> str:
    """Read a NUL-terminated string."""
    return value.split(b"\0", 1)[0].decode(errors="replace")


def parse_ack(reply: Message) -> tuple[int, str]:
    """Parse NLMSG_ERROR or NLMSG_DONE: errno (0 for success) and the kernel's explanation or ""."""
    if len(reply.payload) < 4:  # there is no error code
        return 0, ""
    return -_ERROR.unpack_from(reply.payload)[0], string(
        _explained(reply).get(NLMSGERR_ATTR_MSG, b"")
    )


def blamed_offset(reply: Message) -> int:
    """Return the position in the refused message of the attribute to blame; 0 if there is none."""
    return int.from_bytes(_explained(reply).get(NLMSGERR_ATTR_OFFS, b""), sys.byteorder)


def _explained(reply: Message) -> dict[int, bytes]:
    """Return the attributes of an extended acknowledgement (NETLINK_EXT_ACK, since 4.12)."""
    if not reply.flags & NLM_F_ACK_TLVS:
        return {}
    # After the error code, NLMSG_ERROR repeats the refused message: only its header if capped.
    offset = 4
    if reply.kind == NLMSG_ERROR:
        capped = bool(reply.flags & NLM_F_CAPPED) or len(reply.payload) < 20
        size = 16 if capped else HEADER.unpack_from(reply.payload, 4)[0]
        offset += (size + 3) & ~3
    return attributes(reply.payload, offset)
