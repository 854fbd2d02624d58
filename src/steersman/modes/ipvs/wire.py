"""IPVS over generic netlink: requests and replies (linux/ip_vs.h). No sockets are opened here."""

from __future__ import annotations

import enum
import socket
import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from steersman.host.netlink import Netlink
from steersman.host.nlmsg import (
    NLM_F_ACK,
    Message,
    Request,
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
from steersman.model.hashes import blake2b
from steersman.model.names import PROTOCOL_BY_NUMBER
from steersman.modes.ipvs.objects import Server, ServerKey, Target

_GENL_ID_CTRL = 16
_CTRL_CMD_GETFAMILY, _CTRL_ATTR_FAMILY_ID, _CTRL_ATTR_FAMILY_NAME = 3, 1, 2
_HASHED = 0x2  # IP_VS_SVC_F_HASHED, which the kernel adds to everything it lists
_SERVICE, _DEST, _TIMEOUT_TCP, _TIMEOUT_FIN, _TIMEOUT_UDP = 1, 2, 4, 5, 6  # IPVS_CMD_ATTR_*
# IPVS_SVC_ATTR_*
_SVC_FAMILY, _SVC_PROTOCOL, _SVC_ADDRESS, _SVC_PORT = 1, 2, 3, 4
_SVC_SCHEDULER, _SVC_FLAGS, _SVC_TIMEOUT, _SVC_NETMASK = 6, 7, 8, 9
# IPVS_DEST_ATTR_*
_DEST_ADDRESS, _DEST_PORT, _DEST_METHOD, _DEST_WEIGHT = 1, 2, 3, 4
_DEST_UPPER_THRESHOLD, _DEST_LOWER_THRESHOLD, _DEST_FAMILY = 5, 6, 11
_STATS, _STATS64 = 10, 12  # in both
_ADDRESS_SIZE = {socket.AF_INET: 4, socket.AF_INET6: 16}
_MASQUERADED = u32(_DEST_METHOD, 0) + u32(_DEST_UPPER_THRESHOLD, 0) + u32(_DEST_LOWER_THRESHOLD, 0)
"""Forward by masquerading (IP_VS_CONN_F_MASQ), without thresholds of connections."""


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


class ServerStats(NamedTuple):
    """Counters of a virtual or real server since it was made."""

    connections: int
    packets_in: int
    packets_out: int
    bytes_in: int
    bytes_out: int


class ListedServer(NamedTuple):
    """A virtual server as the kernel lists it, without its real servers."""

    key: ServerKey
    scheduler: str
    flags: int
    timeout: int
    stats: ServerStats


# Requests


def _header(command: int) -> bytes:
    return bytes((command, 1, 0, 0))


def _packed(address: str) -> tuple[int, bytes]:
    """Return the address family, and the address in a union of 16 bytes."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return family, socket.inet_pton(family, address).ljust(16, b"\0")


def _u16(kind: int, value: int) -> bytes:
    return attr(kind, struct.pack("=H", value))


@lru_cache(maxsize=4096)
def _identity(key: ServerKey) -> bytes:
    family, address = _packed(key.address)
    return (
        _u16(_SVC_FAMILY, family)
        + _u16(_SVC_PROTOCOL, key.protocol.number)
        + attr(_SVC_ADDRESS, address)
        + be16(_SVC_PORT, key.port)
    )


@lru_cache(maxsize=4096)
def _end(target: Target) -> bytes:
    family, address = _packed(target[0])
    place = attr(_DEST_ADDRESS, address) + be16(_DEST_PORT, target[1])
    return place + _u16(_DEST_FAMILY, family)


def service(family: int, command: Command, key: ServerKey, server: Server | None = None) -> Request:
    """Return a request about a virtual server; `server` for those that make or change it."""
    parts = [_identity(key)]
    if server is not None:
        parts += (
            text(_SVC_SCHEDULER, server.scheduler),
            attr(_SVC_FLAGS, struct.pack("=II", server.flags, 0xFFFFFFFF)),  # flags and their mask
            u32(_SVC_TIMEOUT, server.timeout),
            u32(_SVC_NETMASK, 128 if ":" in key.address else 0xFFFFFFFF),  # IPv6: a length
        )
    return Request(family, _header(command) + nested(_SERVICE, *parts), NLM_F_ACK)


def destination(
    family: int, command: Command, key: ServerKey, target: Target, weight: int = 1
) -> Request:
    """Return a request about a real server."""
    end = _end(target)
    if command is not Command.DEL_DEST:
        end += _MASQUERADED + u32(_DEST_WEIGHT, weight)
    body = nested(_SERVICE, _identity(key)) + nested(_DEST, end)
    return Request(family, _header(command) + body, NLM_F_ACK)


def timeouts(family: int, tcp: int, fin: int, udp: int) -> Request:
    """Return a request to set the idle time of connections, in seconds; 0 leaves one as it is."""
    body = u32(_TIMEOUT_TCP, tcp) + u32(_TIMEOUT_FIN, fin) + u32(_TIMEOUT_UDP, udp)
    return Request(family, _header(Command.SET_CONFIG) + body, NLM_F_ACK)


# Questions


def resolve(netlink: Netlink) -> int:
    """Return the number of the IPVS family.

    Raises:
        NetlinkError: ENOENT if the kernel has no ip_vs.
    """
    payload = _header(_CTRL_CMD_GETFAMILY) + text(_CTRL_ATTR_FAMILY_NAME, "IPVS")
    (reply,) = netlink.request(Request(_GENL_ID_CTRL, payload))
    return int(struct.unpack("=H", attributes(reply.payload, 4)[_CTRL_ATTR_FAMILY_ID])[0])


def get_timeouts(netlink: Netlink, family: int) -> dict[tuple[str, str], int]:
    """Return the seconds after which idle connections end, by protocol and state."""
    (reply,) = netlink.request(Request(family, _header(Command.GET_CONFIG)))
    values = attributes(reply.payload, 4)
    kinds = {("TCP", "ESTABLISHED"): _TIMEOUT_TCP, ("TCP", "FIN_WAIT"): _TIMEOUT_FIN}
    kinds["UDP", "UDP"] = _TIMEOUT_UDP
    return {state: _int(values[kind]) for state, kind in kinds.items() if kind in values}


def list_services(netlink: Netlink, family: int) -> Iterator[ListedServer]:
    """List the virtual servers, decoded one by one; those found by fwmark are skipped."""
    # Ask for all at once: a server that a write moves in the list meanwhile would be missed.
    for reply in list(netlink.dump(Request(family, _header(Command.GET_SERVICE)))):
        if (found := read_service(reply)) is not None:
            yield found


def digest_services(netlink: Netlink, family: int) -> bytes:
    """Return a digest of all virtual servers without their counters, which traffic changes."""
    digest = blake2b(digest_size=16)
    for reply in netlink.dump(Request(family, _header(Command.GET_SERVICE))):
        for kind, value in iter_attributes(attributes(reply.payload, 4).get(_SERVICE, b"")):
            if kind not in (_STATS, _STATS64):
                digest.update(bytes((kind,)) + value)
    return digest.digest()


def list_destinations(
    netlink: Netlink, family: int, key: ServerKey
) -> Iterator[tuple[Target, ServerStats]]:
    """List the real servers of a virtual one, with their counters."""
    body = _header(Command.GET_DEST) + nested(_SERVICE, _identity(key))
    for reply in netlink.dump(Request(family, body)):
        if (found := read_destination(reply, ":" in key.address)) is not None:
            yield found


# Replies


def read_service(reply: Message) -> ListedServer | None:
    """Decode a reply to GET_SERVICE; None for a server found by fwmark."""
    values = attributes(attributes(reply.payload, 4).get(_SERVICE, b""))
    if not {_SVC_FAMILY, _SVC_PROTOCOL, _SVC_ADDRESS, _SVC_PORT} <= values.keys():
        return None
    protocol = PROTOCOL_BY_NUMBER.get(_int(values[_SVC_PROTOCOL]))
    family = _int(values[_SVC_FAMILY])
    if protocol is None:
        return None
    size = _ADDRESS_SIZE[socket.AddressFamily(family)]  # of a union of 16 bytes
    address = socket.inet_ntop(family, values[_SVC_ADDRESS][:size])
    port = int.from_bytes(values[_SVC_PORT], "big")
    return ListedServer(
        ServerKey(protocol, canonical_ip(address) or address, port),
        string(values[_SVC_SCHEDULER]),
        struct.unpack_from("=I", values[_SVC_FLAGS])[0] & ~_HASHED,
        _int(values[_SVC_TIMEOUT]),
        read_stats(values),
    )


def read_destination(reply: Message, ipv6: bool) -> tuple[Target, ServerStats] | None:
    """Decode a reply to GET_DEST; None if it contains no real server."""
    values = attributes(attributes(reply.payload, 4).get(_DEST, b""))
    if not {_DEST_ADDRESS, _DEST_PORT} <= values.keys():
        return None
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    address = socket.inet_ntop(family, values[_DEST_ADDRESS][: _ADDRESS_SIZE[family]])
    target = canonical_ip(address) or address, int.from_bytes(values[_DEST_PORT], "big")
    return target, read_stats(values)


def read_stats(values: dict[int, bytes]) -> ServerStats:
    """Decode counters: 64-bit ones, or the 32-bit ones of kernels before 4.1."""
    found = attributes(values.get(_STATS64) or values.get(_STATS, b""))
    return ServerStats(*(_int(found.get(kind, b"\0\0\0\0")) for kind in range(1, 6)))


def _int(value: bytes) -> int:
    return int(struct.unpack({2: "=H", 4: "=I", 8: "=Q"}[len(value)], value)[0])
