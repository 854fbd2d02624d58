"""PROXY protocol version 2: how an endpoint is told the client's address. Pure.

Source: the PROXY protocol, versions 1 & 2 (HAProxy Technologies, 2020), section 2.2.
"""

from __future__ import annotations

import socket
import struct

_SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
_VERSION_AND_PROXY = 0x21
_STREAM_OVER = {False: 0x11, True: 0x21}
"""TCP over IPv4, over IPv6."""


def header(client: tuple[str, int], destination: tuple[str, int]) -> bytes:
    """Return what goes before the first byte of a TCP connection.

    Args:
        client: canonical address and port of the client.
        destination: those that it connected to, of the same family.
    """
    ipv6 = ":" in client[0]
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    addresses = b"".join(socket.inet_pton(family, end[0]) for end in (client, destination))
    body = addresses + struct.pack(">HH", client[1], destination[1])
    return (
        _SIGNATURE + struct.pack(">BBH", _VERSION_AND_PROXY, _STREAM_OVER[ipv6], len(body)) + body
    )
