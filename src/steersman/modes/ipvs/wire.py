"""IPVS over generic netlink: messages built and taken apart (linux/ip_vs.h). No sockets here."""

from __future__ import annotations

import enum
import socket
import struct
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from steersman.host.netlink import Netlink, Request
from steersman.host.nlmsg import (
    NLM_F_ACK,
    Message,
    attr,
    attributes,
    be16,
    iter_attributes,
    nested,
    string,
    text,
    u32,
)
from steersman.model.addresses import canonical_ip
from steersman.model.names import PROTOCOL_BY_NUMBER
from steersman.modes.ipvs.names import Server, ServerKey, Target

_GENL_ID_CTRL = 16
_CTRL_CMD_GETFAMILY, _CTRL_ATTR_FAMILY_ID, _CTRL_ATTR_FAMILY_NAME = 3, 1, 2
_HASHED = 0x2  # added by the kernel to everything it lists
_INFO_VERSION, _INFO_SIZE = 1, 2
_SERVICE, _DEST, _TIMEOUT_TCP, _TIMEOUT_FIN, _TIMEOUT_UDP = 1, 2, 4, 5, 6
_STATS, _STATS64 = 10, 12
_FAMILIES = {socket.AF_INET: 4, socket.AF_INET6: 16}


class Command(enum.IntEnum):
    """IPVS_CMD_*."""

    NEW_SERVICE = 1
    SET_SERVICE = 2
    DEL_SERVICE = 3
    GET_SERVICE = 4
    NEW_DEST = 5
    SET_DEST = 6
    DEL_DEST = 7
    GET_DEST = 8
    SET_CONFIG = 12
    GET_CONFIG = 13
    GET_INFO = 15


class Stats(NamedTuple):
    """Counters of a virtual or real server since it was made."""

    connections: int
    packets_in: int
    packets_out: int
    bytes_in: int
    bytes_out: int


class Listed(NamedTuple):
    """A virtual server as the kernel lists it; its real servers are listed apart."""

    key: ServerKey
    scheduler: str
    flags: int
    timeout: int
    stats: Stats


class Limits(NamedTuple):
    """What ip_vs says of itself."""

    version: str
    connection_buckets: int
    """Size of the hash table of connections (conn_tab_bits of the module)."""


class Timeouts(NamedTuple):
    """How long idle connections live, in seconds."""

    tcp: int
    tcp_fin: int
    udp: int


def resolve(netlink: Netlink) -> int:
    """Ask for the number of the IPVS family; NetlinkError where the kernel has no ip_vs."""
    payload = _header(_CTRL_CMD_GETFAMILY) + text(_CTRL_ATTR_FAMILY_NAME, "IPVS")
    (reply,) = netlink.request(Request(_GENL_ID_CTRL, payload))
    return int(struct.unpack("=H", attributes(reply.payload, 4)[_CTRL_ATTR_FAMILY_ID])[0])


def _header(command: int) -> bytes:
    return bytes((command, 1, 0, 0))


def _packed(address: str) -> tuple[int, bytes]:
    """Address family, and the address in a union of 16 bytes."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return family, socket.inet_pton(family, address).ljust(16, b"\0")


def _u16(kind: int, value: int) -> bytes:
    return attr(kind, struct.pack("=H", value))


@lru_cache(maxsize=4096)
def _identity(key: ServerKey) -> bytes:
    family, address = _packed(key.address)
    protocol = key.protocol.number
    return _u16(1, family) + _u16(2, protocol) + attr(3, address) + be16(4, key.port)


@lru_cache(maxsize=4096)
def _place(target: Target) -> bytes:
    family, address = _packed(target[0])
    return attr(1, address) + be16(2, target[1]) + _u16(11, family)


def service(family: int, command: Command, key: ServerKey, server: Server | None = None) -> Request:
    """A request about a virtual server; `server` for those that make or change it."""
    parts = [_identity(key)]
    if server is not None:
        netmask = 128 if ":" in key.address else 0xFFFFFFFF
        flags = attr(7, struct.pack("=II", server.flags, 0xFFFFFFFF))
        parts += text(6, server.scheduler), flags, u32(8, server.timeout), u32(9, netmask)
    return Request(family, _header(command) + nested(_SERVICE, *parts), NLM_F_ACK)


_PLAIN = u32(3, 0) + u32(5, 0) + u32(6, 0)
"""Forwarding by masquerading, and no thresholds of connections."""


def destination(
    family: int, command: Command, key: ServerKey, target: Target, weight: int = 1
) -> Request:
    """A request about a real server: masqueraded forwarding, without thresholds."""
    end = _place(target)
    if command is not Command.DEL_DEST:
        end += _PLAIN + u32(4, weight)
    body = nested(_SERVICE, _identity(key)) + nested(_DEST, end)
    return Request(family, _header(command) + body, NLM_F_ACK)


def timeouts(family: int, tcp: int, fin: int, udp: int) -> Request:
    """A request to set how long idle connections live, in seconds; 0 leaves one as it is."""
    body = u32(_TIMEOUT_TCP, tcp) + u32(_TIMEOUT_FIN, fin) + u32(_TIMEOUT_UDP, udp)
    return Request(family, _header(Command.SET_CONFIG) + body, NLM_F_ACK)


def ask_info(netlink: Netlink, family: int) -> Limits:
    """Ask for version and size; the version is 3 bytes, as in the kernel's own words 1.2.1."""
    (reply,) = netlink.request(Request(family, _header(Command.GET_INFO)))
    values = attributes(reply.payload, 4)
    number = _int(values[_INFO_VERSION])
    version = f"{number >> 16 & 0xFF}.{number >> 8 & 0xFF}.{number & 0xFF}"
    return Limits(version, _int(values[_INFO_SIZE]))


def ask_timeouts(netlink: Netlink, family: int) -> Timeouts:
    """Ask how long idle connections live."""
    (reply,) = netlink.request(Request(family, _header(Command.GET_CONFIG)))
    values = attributes(reply.payload, 4)
    return Timeouts(*(_int(values[k]) for k in (_TIMEOUT_TCP, _TIMEOUT_FIN, _TIMEOUT_UDP)))


def digest_services(netlink: Netlink, family: int) -> bytes:
    """Return a hash of all virtual servers but for their counters, which traffic changes."""
    digest = blake2b(digest_size=16)
    for reply in netlink.dump(Request(family, _header(Command.GET_SERVICE))):
        for kind, value in iter_attributes(attributes(reply.payload, 4).get(_SERVICE, b"")):
            if kind not in (_STATS, _STATS64):
                digest.update(bytes((kind,)) + value)
    return digest.digest()


def list_services(netlink: Netlink, family: int) -> Iterator[Listed]:
    """List the virtual servers; those found by fwmark are passed over."""
    for reply in netlink.dump(Request(family, _header(Command.GET_SERVICE))):
        if (found := read_service(reply)) is not None:
            yield found


def read_service(reply: Message) -> Listed | None:
    """Take an answer to GET_SERVICE apart; None for a server found by fwmark."""
    values = attributes(attributes(reply.payload, 4).get(_SERVICE, b""))
    if not {1, 2, 3, 4} <= values.keys():
        return None
    protocol = PROTOCOL_BY_NUMBER.get(_int(values[2]))
    family = _int(values[1])
    if protocol is None:
        return None
    address = socket.inet_ntop(family, values[3][: _FAMILIES[socket.AddressFamily(family)]])
    key = ServerKey(protocol, canonical_ip(address) or address, int.from_bytes(values[4], "big"))
    flags = struct.unpack_from("=I", values[7])[0] & ~_HASHED
    return Listed(key, string(values[6]), flags, _int(values[8]), read_stats(values))


def list_destinations(
    netlink: Netlink, family: int, key: ServerKey
) -> Iterator[tuple[Target, Stats]]:
    """List the real servers of a virtual one, with what went through each."""
    body = _header(Command.GET_DEST) + nested(_SERVICE, _identity(key))
    for reply in netlink.dump(Request(family, body)):
        if (found := read_destination(reply, ":" in key.address)) is not None:
            yield found


def read_destination(reply: Message, ipv6: bool) -> tuple[Target, Stats] | None:
    """Take an answer to GET_DEST apart; None where it is about nothing."""
    values = attributes(attributes(reply.payload, 4).get(_DEST, b""))
    if not {1, 2} <= values.keys():
        return None
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    address = socket.inet_ntop(family, values[1][: _FAMILIES[family]])
    target = canonical_ip(address) or address, int.from_bytes(values[2], "big")
    return target, read_stats(values)


def read_stats(values: dict[int, bytes]) -> Stats:
    """Take counters apart: 64-bit ones, or the 32-bit ones of kernels before 4.1."""
    found = attributes(values.get(_STATS64) or values.get(_STATS, b""))
    return Stats(*(_int(found.get(kind, b"\0\0\0\0")) for kind in range(1, 6)))


def _int(value: bytes) -> int:
    return int(struct.unpack({2: "=H", 4: "=I", 8: "=Q"}[len(value)], value)[0])
