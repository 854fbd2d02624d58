"""Just enough SCTP over raw sockets to see where a new association goes.

The kernel's own SCTP is often not built in, but netfilter follows SCTP without it: an INIT is
sent, the server answers an INIT ACK that carries its words as a parameter (RFC 9260, 3.3.2-3).
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct

INIT, INIT_ACK = 1, 2
COOKIE = 7  # the parameter that an INIT ACK carries opaque bytes in


PORTS = random.SystemRandom()
"""Whoever seeds `random` does not repeat ports: conntrack would know the association already."""


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """Checksum of a packet; conntrack ignores packets whose checksum is wrong."""
    value = 0xFFFFFFFF
    for byte in data:
        value = TABLE[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF


def packet(source: int, destination: int, tag: int, kind: int, text: bytes) -> bytes:
    """A packet with one INIT or INIT ACK chunk."""
    own_tag = int.from_bytes(os.urandom(4), "big") | 1
    padded = text + b"\0" * (-len(text) % 4)
    parameter = struct.pack("!HH", COOKIE, 4 + len(text)) + padded if text else b""
    body = struct.pack("!IIHHI", own_tag, 65536, 1, 1, 1) + parameter
    chunk = struct.pack("!BBH", kind, 0, 4 + len(body)) + body
    ports = struct.pack("!HHI", source, destination, tag)
    return ports + struct.pack("<I", crc32c(ports + b"\0\0\0\0" + chunk)) + chunk


def payload(sock: socket.socket, data: bytes) -> bytes:
    """The SCTP packet within what a raw socket received: IPv4 ones see the IP header too."""
    return data if sock.family == socket.AF_INET6 else data[(data[0] & 15) * 4 :]


def ask(sock: socket.socket, port: int) -> str:
    """Send an INIT from a random port and return the words of the INIT ACK."""
    own_port = PORTS.randrange(20000, 60000)
    with contextlib.suppress(PermissionError):  # OUTPUT drops it, or rejects: recv will tell
        sock.send(packet(own_port, port, 0, INIT, b""))
    while True:
        data = payload(sock, sock.recv(500))
        source, destination = struct.unpack_from("!HH", data)
        if (source, destination) == (port, own_port) and data[12] == INIT_ACK:
            (length,) = struct.unpack_from("!H", data, 34)
            return data[36 : 32 + length].decode()


def answer(sock: socket.socket, name: str, port: int) -> None:
    """Answer an INIT to our port with our name and the client's address."""
    raw, peer = sock.recvfrom(500)
    data = payload(sock, raw)
    source, destination = struct.unpack_from("!HH", data)
    if destination != port or data[12] != INIT:
        return
    (tag,) = struct.unpack_from("!I", data, 16)
    text = f"{name} {peer[0]}".encode()
    sock.sendto(packet(port, source, tag, INIT_ACK, text), (peer[0], 0))
