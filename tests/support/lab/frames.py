"""Ethernet frames made and taken apart, every checksum right."""

from __future__ import annotations

import socket
import struct

from tests.support.lab.sctp import crc32c

TCP, UDP, SCTP = 6, 17, 132
SYN, ACK, FIN, RST = 2, 16, 1, 4
ETHERNET = bytes.fromhex("020000000001020000000002")
CHUNKS = {SYN: 1, SYN | ACK: 2, RST: 6, FIN: 14}
"""Of SCTP: what does the same."""


def complement(data: bytes) -> int:
    """The Internet checksum (RFC 1071) of data that holds its own: 0 where that is right."""
    data += b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def pseudo(source: str, destination: str, protocol: int, length: int) -> bytes:
    packed = b"".join(socket.inet_pton(family(a), a) for a in (source, destination))
    return packed + struct.pack("!II", length, protocol)


def transport(protocol: int, ports: tuple[int, int], flags: int, payload: bytes) -> bytes:
    """A transport header without its checksum, and where that goes."""
    if protocol == TCP:
        return struct.pack("!HHIIBBHHH", *ports, 1, 0, 0x50, flags, 1000, 0, 0) + payload
    if protocol == UDP:
        return struct.pack("!HHHH", *ports, 8 + len(payload), 0) + payload
    chunk = CHUNKS.get(flags, 0).to_bytes(1, "big") + b"\0" + (4 + len(payload)).to_bytes(2, "big")
    return struct.pack("!HHII", *ports, 1, 0) + chunk + payload


def with_checksum(source: str, destination: str, protocol: int, data: bytes) -> bytes:
    if protocol == SCTP:
        return data[:8] + struct.pack("<I", crc32c(data)) + data[12:]
    place = {TCP: 16, UDP: 6, 1: 2, 58: 2}[protocol]
    head = b"" if protocol == 1 else pseudo(source, destination, protocol, len(data))
    return data[:place] + struct.pack("!H", complement(head + data)) + data[place + 2 :]


def ip(
    source: str,
    destination: str,
    protocol: int,
    data: bytes,
    *,
    fragment: int = 0,
    options: bytes = b"",
) -> bytes:
    """An Ethernet frame with an IP packet."""
    ends = b"".join(socket.inet_pton(family(a), a) for a in (source, destination))
    if ":" in source:
        head = struct.pack("!IHBB", 0x60000000, len(data), protocol, 64) + ends
        return ETHERNET + b"\x86\xdd" + head + data
    words = 5 + len(options) // 4
    head = struct.pack(
        "!BBHHHBBH", 0x40 | words, 0, 4 * words + len(data), 77, fragment, 64, protocol, 0
    )
    head += ends + options
    head = head[:10] + struct.pack("!H", complement(head)) + head[12:]
    return ETHERNET + b"\x08\x00" + head + data


def packet(
    source: tuple[str, int],
    destination: tuple[str, int],
    protocol: int = TCP,
    flags: int = SYN,
    payload: bytes = b"",
    options: bytes = b"",
) -> bytes:
    data = transport(protocol, (source[1], destination[1]), flags, payload)
    data = with_checksum(source[0], destination[0], protocol, data)
    return ip(source[0], destination[0], protocol, data, options=options)


def unwrap(frame: bytes) -> tuple[str, str, int, bytes]:
    """Addresses, protocol and the rest of a frame, whose IP header must be right."""
    data = frame[14:]
    if data[0] >> 4 == 6:
        ends = [socket.inet_ntop(socket.AF_INET6, data[n : n + 16]) for n in (8, 24)]
        return ends[0], ends[1], data[6], data[40:]
    size = (data[0] & 15) * 4
    assert complement(data[:size]) == 0, "the checksum of the IP header is wrong"
    ends = [socket.inet_ntop(socket.AF_INET, data[n : n + 4]) for n in (12, 16)]
    return ends[0], ends[1], data[9], data[size:]


def see(frame: bytes) -> tuple[tuple[str, int], tuple[str, int]]:
    """Source and destination of a frame, all of whose checksums must be right."""
    source, destination, protocol, data = unwrap(frame)
    if protocol == SCTP:
        given = struct.unpack_from("<I", data, 8)[0]
        assert crc32c(data[:8] + bytes(4) + data[12:]) == given, "the CRC is wrong"
    elif protocol != UDP or data[6:8] != b"\0\0":
        assert complement(pseudo(source, destination, protocol, len(data)) + data) == 0
    ports = struct.unpack_from("!HH", data)
    return (source, ports[0]), (destination, ports[1])
