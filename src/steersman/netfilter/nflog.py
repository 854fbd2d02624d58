"""Packets that rules log for programs: nfnetlink_log (linux/netfilter/nfnetlink_log.h).

One socket of a network namespace listens to a group; packets of a group without a listener go
nowhere.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import NamedTuple

from steersman.host.nlmsg import Message, Request, attr, attributes, be32, string

PACKET = 4 << 8  # NFNL_SUBSYS_ULOG, NFULNL_MSG_PACKET
BYTES = 128
"""Of each packet: enough for the headers, also of the packet in an ICMP error."""
ICMP, ICMP6 = 1, 58
_PORTS = struct.Struct("!HH")
_CONFIG = 4 << 8 | 1  # NFULNL_MSG_CONFIG
_COMMAND, _MODE, _TIMEOUT, _THRESHOLD = 1, 2, 4, 5  # NFULA_CFG_*
_BIND, _COPY_PACKET = 1, 2  # NFULNL_CFG_CMD_BIND, NFULNL_COPY_PACKET
_HEADER, _PAYLOAD, _PREFIX = 1, 9, 10  # NFULA_*


class Logged(NamedTuple):
    """A packet that a rule has logged."""

    prefix: str
    """What the rule calls it."""
    packet: bytes
    """Its first bytes, from the network header on."""
    hook: int
    """Number of the netfilter hook; 255 if the kernel does not say."""


class IpHeader(NamedTuple):
    """The headers of a packet of IPv4, or of IPv6 without extension headers."""

    source: str
    source_port: int
    """0 for ICMP, and if the ports are cut off."""
    destination: str
    port: int
    protocol: int
    """IANA's number."""
    size: int
    """Of the network header, in bytes; the transport header comes next."""


def ip_header(packet: bytes, transport: bytes = b"") -> IpHeader | None:
    """Read a packet's headers; None if the first one is none, or is cut off.

    Args:
        packet: from the network header on.
        transport: from the transport header on, if that does not follow.
    """
    version = packet[0] >> 4 if packet else 0
    if version == 4 and len(packet) >= 20:
        protocol, size, addresses = packet[9], (packet[0] & 15) * 4, packet[12:20]
    elif version == 6 and len(packet) >= 40:
        protocol, size, addresses = packet[6], 40, packet[8:40]
    else:
        return None
    half = len(addresses) // 2
    source, destination = (str(ip_address(each)) for each in (addresses[:half], addresses[half:]))
    ports, behind = (0, 0), transport or packet[size:]
    if protocol not in (ICMP, ICMP6) and len(behind) >= _PORTS.size:
        ports = _PORTS.unpack_from(behind)
    return IpHeader(source, ports[0], destination, ports[1], protocol, size)


def listen(request: Callable[[Request], object], groups: Sequence[int]) -> int:
    """Receive the packets of the first free group, each at once; return its number.

    Args:
        request: sends a request over the socket that is to receive.
        groups: numbers.

    Raises:
        OSError: EPERM if every group has a listener, or without CAP_NET_ADMIN; EINVAL
            if the kernel has no nfnetlink_log.
    """
    for number, group in enumerate(groups, 1):
        head = struct.pack("!BBH", 0, 0, group)
        try:
            request(Request(_CONFIG, head + attr(_COMMAND, bytes((_BIND,)))))
        except OSError as error:
            if error.errno == errno.EPERM and number < len(groups):
                continue
            raise
        mode = attr(_MODE, struct.pack("!IBx", BYTES, _COPY_PACKET))
        for part in (mode, be32(_THRESHOLD, 1), be32(_TIMEOUT, 1)):
            request(Request(_CONFIG, head + part))
        return group
    raise ValueError("no group was named")


def read(message: Message) -> Logged | None:
    """Read a message of the socket; None if it is no packet."""
    if message.kind != PACKET:
        return None
    values = attributes(message.payload, 4)
    hook = values.get(_HEADER, b"\0\0\0\xff")[2]
    return Logged(string(values.get(_PREFIX, b"")), values.get(_PAYLOAD, b""), hook)
