"""Sockets whose Service address was replaced by an endpoint when they connected or sent.

Programs note the peers of sockets in three maps:

    seats      connected sockets, in slots by cookie (c/peers.h)
    crowded    connected sockets that found their slot taken
    reverses   UDP sockets, connected or not, by cookie and endpoint (LRU)

A UDP socket that is connected to an endpoint which is gone would go on sending there, so it is
destroyed: its owner sees an error, as if the port were unreachable. The kernel lists and destroys
sockets per network namespace (sock_diag(7); SOCK_DESTROY since Linux 4.9, with
CONFIG_INET_DIAG_DESTROY). Sockets that are not connected are left alone: their owners would not
expect an error, and the next datagram gets another endpoint anyway.
"""

from __future__ import annotations

import errno
import logging
import socket
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from steersman.host.connect import idle_seconds
from steersman.host.netlink import DumpInterruptedError, Netlink, NetlinkError
from steersman.host.netns import enter, namespaces
from steersman.host.nlmsg import Request, attributes
from steersman.model.connections import ConnectionSearch, ConnectionState, OpenConnection
from steersman.model.conntrack import Stale
from steersman.model.names import PROTOCOL_BY_NUMBER, Protocol
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.bpf import ArrayMap, HashMap

NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY, _SOCK_DESTROY = 20, 21
# `struct inet_diag_req_v2` before its `id`: family, protocol, wanted attributes, states.
_REQUEST = struct.Struct("=BBBxI")
# `struct inet_diag_sockid`: ports, source, destination, interface, cookie.
_ID = struct.Struct("=4s16s16sIQ")
# Of `struct inet_diag_msg`: offset of `id`, after family, state and two timers; size of the whole.
_ID_AT, _HEAD_SIZE = 4, 72
_INFO = 2  # INET_DIAG_INFO: a struct tcp_info
_CONNECTED = 1 << 1  # TCP_ESTABLISHED; the kernel uses it for connected UDP sockets, too
_CONNECTING = 1 << 2  # TCP_SYN_SENT
_LISTENS = 10  # TCP_LISTEN
_ANY_STATE = 0xFFFFFFFF
_CARRIES = _ANY_STATE & ~(1 << 6 | 1 << _LISTENS)  # all but TCP_TIME_WAIT and TCP_LISTEN
_TCP_STATES = {
    1: ConnectionState.OPEN,
    **dict.fromkeys((2, 3, 12), ConnectionState.OPENING),  # SYN_SENT, SYN_RECV, NEW_SYN_RECV
    **dict.fromkeys((4, 5, 8, 9, 11), ConnectionState.CLOSING),
}
_NO_COOKIE = (1 << 64) - 1
_UDP, _TCP = Protocol.UDP.number, Protocol.TCP.number
log = logging.getLogger("steersman.ebpf")


class Peer(NamedTuple):
    """The two peers of a socket, as packed endpoints."""

    cookie: int
    frontend: bytes
    """The peer that its owner sees."""
    endpoint: bytes
    """The peer that gets the packets."""


def read_peers(maps: Mapping[str, int]) -> Iterator[Peer]:
    """Yield the peers of all sockets, some twice; connected TCP sockets as well.

    Args:
        maps: descriptors by name; they stay with their owner.
    """
    for key, value in HashMap(maps["reverses"]).items():
        cookie, endpoint = layout.REVERSE_KEY.unpack(key)
        (frontend,) = layout.REVERSE.unpack(value)
        yield Peer(cookie, frontend, endpoint)
    for key, value in HashMap(maps["crowded"]).items():
        endpoint, frontend, *ports = layout.PEER.unpack(value)
        cookie = int.from_bytes(key, layout.BYTE_ORDER)
        yield Peer(cookie, frontend + ports[1], endpoint + ports[0])
    # Programs write in between; `destroy` compares the peers with the kernel's list of sockets.
    for slot in layout.SOCKET_SLOT.iter_unpack(ArrayMap(maps["seats"]).whole()):
        cookie, endpoint, frontend, *ports = slot
        if cookie:
            yield Peer(cookie, frontend + ports[1], endpoint + ports[0])


def stale_peers(peers: Iterable[Peer], stale: Stale) -> Iterator[Peer]:
    """Yield the peers of UDP sockets whose endpoint is gone."""
    if _UDP not in stale.protocols:
        return
    for peer in peers:
        frontend = bytes((_UDP,)) + layout.without_prefix(peer.frontend)
        if stale.contains(frontend, layout.without_prefix(peer.endpoint)):
            yield peer


class Socket(NamedTuple):
    """A connected UDP socket, or one of TCP that connects."""

    cookie: int
    own: bytes
    """Its own end, packed as an endpoint."""
    peer: bytes
    """Packed endpoint."""
    family: int
    identity: bytes
    """`struct inet_diag_sockid`."""

    @classmethod
    def unpack(cls, payload: bytes) -> Socket:
        """Take a `struct inet_diag_msg` apart."""
        identity = payload[_ID_AT : _ID_AT + _ID.size]
        ports, source, destination, _, cookie = _ID.unpack(identity)
        if payload[0] == socket.AF_INET:
            source = layout.IPV4_PREFIX + source[:4]
            destination = layout.IPV4_PREFIX + destination[:4]
        ends = source + ports[:2], destination + ports[2:]
        return cls(cookie, *ends, payload[0], identity)


def destroy(doomed: Collection[tuple[int, bytes]]) -> int:
    """Destroy connected UDP sockets in all network namespaces; return how many there were.

    Args:
        doomed: cookie and peer of each.
    """
    wanted = frozenset(doomed)
    return in_all_namespaces(lambda netlink: _destroy_here(netlink, wanted)) if doomed else 0


def in_all_namespaces(visit: Callable[[Netlink], int]) -> int:
    """Call a function with a socket of sock_diag in each network namespace; return the sum."""

    def visit_all() -> int:
        total = 0
        for path in namespaces():
            try:
                enter(path)
                with Netlink(NETLINK_SOCK_DIAG, buffer=1 << 20) as netlink:
                    total += visit(netlink)
            except OSError as error:
                # ENOENT: it ended in the meantime. EINVAL: it is no namespace.
                if error.errno not in (errno.ENOENT, errno.EINVAL):
                    log.warning("ebpf: cannot look at the sockets in %s: %s", path, error)
        return total

    # In a thread of its own, which stays in the last namespace and ends there.
    with ThreadPoolExecutor(1, thread_name_prefix="ebpf sockets") as pool:
        return pool.submit(visit_all).result()


def _destroy_here(netlink: Netlink, doomed: frozenset[tuple[int, bytes]]) -> int:
    found = [sock for sock in connected(netlink) if (sock.cookie, sock.peer) in doomed]
    return sum(destroy_one(netlink, sock) for sock in found)


def destroy_one(netlink: Netlink, sock: Socket, protocol: int = _UDP) -> bool:
    """Destroy a socket; return False if its owner has closed it."""
    head = _REQUEST.pack(sock.family, protocol, 0, _ANY_STATE)
    try:
        netlink.request(Request(_SOCK_DESTROY, head + sock.identity))
    except NetlinkError as error:
        if error.errno != errno.ENOENT:
            raise
        return False
    return True


def connected(netlink: Netlink) -> Iterator[Socket]:
    """Yield the connected UDP sockets of both families."""
    return map(Socket.unpack, _listed(netlink, _UDP, _CONNECTED))


def connecting(netlink: Netlink) -> Iterator[Socket]:
    """Yield the TCP sockets that wait for an answer to their SYN, of both families."""
    return map(Socket.unpack, _listed(netlink, _TCP, _CONNECTING))


def _listed(netlink: Netlink, protocol: int, states: int, wanted: int = 0) -> Iterator[bytes]:
    """Yield a `struct inet_diag_msg` for each socket of both families."""
    for family in (socket.AF_INET, socket.AF_INET6):
        head = _REQUEST.pack(family, protocol, wanted, states)
        for reply in netlink.dump(Request(_SOCK_DIAG_BY_FAMILY, head + bytes(_ID.size))):
            yield reply.payload


def find_connections(maps: Mapping[str, int], search: ConnectionSearch) -> None:
    """Add the connections of sockets of this machine whose peer was replaced.

    Args:
        maps: descriptors by name; they stay with their owner.
        search: tells which are wanted.
    """
    peers: dict[int, dict[bytes, bytes]] = {}
    for peer in read_peers(maps):
        frontend = layout.without_prefix(peer.frontend)
        if any(search.wants(bytes((protocol,)) + frontend) for protocol in (_TCP, _UDP)):
            peers.setdefault(peer.cookie, {})[peer.endpoint] = peer.frontend
    if not peers:
        return

    def visit(netlink: Netlink) -> int:
        for protocol in (_TCP, _UDP):
            with suppress(DumpInterruptedError):  # most of them were seen
                for payload in _listed(netlink, protocol, _CARRIES, 1 << _INFO - 1):
                    sock = Socket.unpack(payload)
                    for found in _connections(sock, payload, protocol, peers.get(sock.cookie, {})):
                        if search.wants(found[0]):
                            search.add(found[1])
        return 0

    in_all_namespaces(visit)


def _connections(
    sock: Socket, payload: bytes, protocol: int, peers: Mapping[bytes, bytes]
) -> Iterator[tuple[bytes, OpenConnection]]:
    """Yield the connections of a socket, each with its packed destination.

    Args:
        sock: the socket.
        payload: its `struct inet_diag_msg` and attributes.
        protocol: its number.
        peers: the frontends by endpoint; several for a UDP socket that is not connected.
    """
    tcp = protocol == _TCP
    state = _TCP_STATES.get(payload[1]) if tcp else ConnectionState.OPEN
    info = attributes(payload, _HEAD_SIZE).get(_INFO, b"") if tcp and peers else b""
    unconnected = not tcp and not any(sock.peer[layout.ADDRESS_SIZE :])
    for endpoint, frontend in peers.items():
        if state is not None and (unconnected or endpoint == sock.peer):
            yield (
                bytes((protocol,)) + layout.without_prefix(frontend),
                OpenConnection(
                    endpoint=layout.print_endpoint(endpoint),
                    client=layout.print_endpoint(sock.own),
                    frontend=layout.print_endpoint(frontend),
                    protocol=PROTOCOL_BY_NUMBER[protocol].value,
                    state=state,
                    idle=idle_seconds(info),
                ),
            )


def exists(netlink: Netlink, own: bytes, peer: bytes) -> bool:
    """Whether a TCP socket has these two ends, packed as endpoints."""
    (source, port), (destination, to) = (
        (end[: layout.ADDRESS_SIZE], end[layout.ADDRESS_SIZE :]) for end in (own, peer)
    )
    family = socket.AF_INET6
    if layout.is_ipv4(own):
        family = socket.AF_INET
        source, destination = (each[len(layout.IPV4_PREFIX) :] for each in (source, destination))
    identity = _ID.pack(port + to, source, destination, 0, _NO_COOKIE)
    head = _REQUEST.pack(family, _TCP, 0, _ANY_STATE)
    try:
        replies = netlink.request(Request(_SOCK_DIAG_BY_FAMILY, head + identity))
    except NetlinkError as error:
        if error.errno != errno.ENOENT:
            raise
        return False
    # The second byte is the state. The kernel finds a socket that listens on the port, too.
    return any(reply.payload[1] != _LISTENS for reply in replies)
