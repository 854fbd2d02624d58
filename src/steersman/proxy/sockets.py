"""The proxy's sockets: make and bind them, allocate proxy ports, ask how clients came in."""

from __future__ import annotations

import contextlib
import errno
import logging
import random
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from steersman.host.process import raise_descriptor_limit
from steersman.model.addresses import canonical_ip
from steersman.model.failover import Backend
from steersman.model.names import PlanKey, Protocol
from steersman.model.plan import Endpoint

if TYPE_CHECKING:
    from steersman.proxy.failures import DialWatch

# -- Sockets ---------------------------------------------------------------------------------------

OpenSocket: TypeAlias = Callable[[str, str], socket.socket]
"""Makes a socket from an address (for its family) and a protocol."""

_LINUX = sys.platform == "linux"
_KINDS: dict[str, socket.SocketKind] = {
    Protocol.TCP: socket.SOCK_STREAM,
    Protocol.UDP: socket.SOCK_DGRAM,
}
_COOL_DOWN = 0.5  # seconds until a freed proxy port is given out again
BACKLOG = 4096
"""Clients that may wait to be accepted."""
_FOR_OTHERS = 256
"""Descriptors that connections may not take. The health servers need some; they in turn leave the
last 128 to the rest of the process."""
_DEFAULT_LIMIT = 8192
_TUNING = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 120), ("TCP_KEEPINTVL", 30), ("TCP_KEEPCNT", 5))
        if hasattr(socket, name)
    ),
)
"""Options of a TCP connection: level, option, value."""
_FREE_BIND = {socket.AF_INET: (0, 15), socket.AF_INET6: (socket.IPPROTO_IPV6, 78)}
"""IP_FREEBIND and IPV6_FREEBIND of linux/in.h and linux/in6.h."""
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""Value of SO_LINGER."""

# What Linux tells about arrivals (linux/in.h, linux/in6.h, linux/sockios.h)
_IP_PKTINFO = 8
_IP_PKTOPTIONS = 9
_IPV6_2292PKTOPTIONS = 6
_IPV6_RECVPKTINFO = 49
_IPV6_PKTINFO = 50
_SIOCGIFNAME = 0x8910
_CMSG = struct.Struct("@NiI")  # length, level, type: struct cmsghdr
_IN_PKTINFO = struct.Struct("@i4s4s")  # interface, our address, the packet's
_IN6_PKTINFO = struct.Struct("@16si")
Ancillary: TypeAlias = tuple[int, int, bytes]


class ListenerKey(NamedTuple):
    """Identifies a listening socket when it is handed to the next process."""

    key: str
    """The FrontendKey, as it is printed."""
    address: str
    """The address that it is bound to."""


Sockets: TypeAlias = Mapping[ListenerKey, socket.socket]


class PortError(OSError):
    """No proxy port is free."""


def open_socket(address: str, protocol: str) -> socket.socket:
    """Make a socket of the family of an address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.socket(family, _KINDS[protocol])


def wildcard(ipv6: bool) -> str:
    """Return the address that binds every address."""
    return "::" if ipv6 else "0.0.0.0"


class PortAllocator:
    """Gives out proxy ports: any free one, or those of a range in turn."""

    def __init__(
        self,
        chosen: tuple[int, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an allocator for a range (first and last port); None lets the kernel choose."""
        self._range = range(chosen[0], chosen[1] + 1) if chosen else range(1)
        self._next = -1  # the first is chosen when it is needed
        self._freed: dict[int, float] = {}
        self._clock = clock

    def bind(self, sock: socket.socket, address: str) -> int:
        """Bind a socket to a proxy port and return it.

        Raises:
            PortError: all ports of the range are in use.
            OSError: the address cannot be bound.
        """
        if self._next < 0:
            self._next = random.randrange(len(self._range))
        for _ in self._range:
            # If the kernel chooses, the range is just port 0.
            port = self._range[self._next]
            self._next = (self._next + 1) % len(self._range)
            if port and self._freed.get(port, 0.0) > self._clock():
                continue
            try:
                sock.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            self._freed.pop(port, None)
            return int(sock.getsockname()[1])
        words = f"{self._range[0]}-{self._range[-1]}"
        raise PortError(errno.EADDRINUSE, f"no proxy port of {words} is free; widen the range")

    def allows(self, port: int) -> bool:
        """Whether the allocator could have given out a port."""
        return self._range == range(1) or port in self._range

    def release(self, port: int) -> None:
        """Return a port. It cools down before it is given out again."""
        if port in self._range:
            self._freed[port] = self._clock() + _COOL_DOWN


def prepare(sock: socket.socket, *, shared: bool) -> None:
    """Set the options of a listening socket before it is bound.

    Args:
        sock: the socket.
        shared: let the next process bind the same port while this one still drains.
    """
    sock.setblocking(False)
    if hasattr(socket, "SO_REUSEPORT"):
        # With SO_REUSEADDR two UDP sockets (on Windows two TCP sockets, too) could get one port.
        if sock.type is socket.SOCK_STREAM:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if sock.family == socket.AF_INET6:  # another listener has the IPv4 address
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    if _LINUX:  # a new IPv6 address cannot be bound while duplicate address detection runs
        with contextlib.suppress(OSError):
            sock.setsockopt(*_FREE_BIND[sock.family], 1)


def tune(sock: socket.socket) -> None:
    """Set the options of a TCP connection: send at once, and notice a peer that vanished."""
    sock.setblocking(False)
    for option in _TUNING:
        sock.setsockopt(*option)


def tune_accepted(sock: socket.socket) -> None:
    """Do the same for a connection that was accepted from a socket that is tuned."""
    if _LINUX:  # it has inherited the options (tcp(7))
        sock.setblocking(False)
    else:
        tune(sock)


def reset(sock: socket.socket) -> None:
    """Close a TCP connection with a reset."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    sock.close()


def descriptor_limit() -> int:
    """Raise the limit of descriptors; return how many of them connections may take."""
    if sys.platform == "win32":
        return _DEFAULT_LIMIT
    limit = raise_descriptor_limit()
    return limit - min(limit // 4, _FOR_OTHERS)


class Arrival(NamedTuple):
    """How a datagram came in."""

    interface: int = 0
    """Index of the interface; 0 if unknown."""
    address: bytes = b""
    """The address of ours that it was sent to, packed; b"" if unknown."""


def request_arrivals(sock: socket.socket) -> bool:
    """Have the kernel note how connections and datagrams come in; False if it cannot."""
    if not _LINUX:
        return False
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVPKTINFO, 1)
    else:
        sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
    return True


def arrival_of(ancillary: Iterable[Ancillary]) -> Arrival:
    """Read the ancillary data of a datagram from recvmsg(2)."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IP, _IP_PKTINFO):
            index, address, _ = _IN_PKTINFO.unpack(data[: _IN_PKTINFO.size])
            return Arrival(index, address)
        if (level, kind) == (socket.IPPROTO_IPV6, _IPV6_PKTINFO):
            address, index = _IN6_PKTINFO.unpack(data[: _IN6_PKTINFO.size])
            return Arrival(index, address)
    return Arrival()


def reply_options(arrival: Arrival) -> list[Ancillary]:
    """Return ancillary data for sendmsg(2), so that a reply comes from the address asked."""
    if len(arrival.address) == 4:
        data = _IN_PKTINFO.pack(0, arrival.address, bytes(4))
        return [(socket.IPPROTO_IP, _IP_PKTINFO, data)]
    if len(arrival.address) == 16:
        data = _IN6_PKTINFO.pack(arrival.address, 0)
        return [(socket.IPPROTO_IPV6, _IPV6_PKTINFO, data)]
    return []


def interface_of(sock: socket.socket) -> str:
    """Return the name of the interface that an accepted connection came in by; "" if unknown.

    Linux keeps the index with the socket. The option IP_PKTOPTIONS returns it, which ip(7) does
    not mention (net/ipv4/ip_sockglue.c, net/ipv6/ipv6_sockglue.c).
    """
    if not _LINUX:
        return ""
    ipv6 = sock.family == socket.AF_INET6
    level = socket.IPPROTO_IPV6 if ipv6 else socket.IPPROTO_IP
    option = _IPV6_2292PKTOPTIONS if ipv6 else _IP_PKTOPTIONS
    with contextlib.suppress(OSError, struct.error):
        data = sock.getsockopt(level, option, 256)
        offset = _CMSG.size + (16 if ipv6 else 0)  # in6_pktinfo starts with the address
        (index,) = struct.unpack_from("@i", data, offset)
        return interface_name(sock, index)
    return ""


def interface_name(sock: socket.socket, index: int) -> str:
    """Return the name of an interface in the network namespace of a socket; "" if it is gone."""
    if index <= 0:
        return ""
    from fcntl import ioctl  # noqa: PLC0415  # Linux only

    with contextlib.suppress(OSError):
        answer = ioctl(sock, _SIOCGIFNAME, struct.pack("16si20x", b"", index))  # netdevice(7)
        return bytes(answer[:16]).split(b"\0", 1)[0].decode()
    return ""


# -- Dials -----------------------------------------------------------------------------------------
#
# The connections that this process dials, so that it never relays to itself without end.
#
# An endpoint may be an address of the proxy itself: a node port, another Service's address or a
# proxy port. The process then accepts its own dial and, unless it recognises it, dials again.
# A dial to another ServicePort is relayed once. A dial that is itself relayed, or one that comes
# back to the ServicePort that made it, is refused.

SocketAddress: TypeAlias = tuple[Any, ...]
"""An address of the socket module: host, port and, for IPv6, more."""
_Local: TypeAlias = tuple[Protocol, str, int]
_WILDCARDS = frozenset(map(wildcard, (False, True)))
log = logging.getLogger(__name__)


class Dial:
    """A socket that is, or is about to be, connected to an endpoint."""

    __slots__ = ("endpoint", "give_up", "local", "owner", "relayed", "socket")

    def __init__(
        self, sock: socket.socket, owner: PlanKey, endpoint: Endpoint, *, relayed: bool
    ) -> None:
        self.socket = sock
        self.owner = owner
        self.endpoint = endpoint
        self.relayed = relayed
        """It was made for a client that is a dial of this process, too."""
        self.local: _Local | None = None
        self.give_up: Callable[[], bool] | None = None
        """Lets it time out now, while it is being connected (TCP); False if it does already."""


class DialRegistry:
    """The dials of all listeners, by their local address."""

    def __init__(self) -> None:
        self._pending: dict[Dial, None] = {}
        """Dials whose local address is not known yet; most have none before connect()."""
        self._known: dict[_Local, list[Dial]] = {}
        self._reported: set[PlanKey] = set()
        self.watch: DialWatch | None = None
        """Who wants to know how dials end; None, and nothing is noted."""

    def __len__(self) -> int:
        """Return the number of dials."""
        return len(self._pending) + sum(map(len, self._known.values()))

    def add(
        self, sock: socket.socket, owner: PlanKey, endpoint: Endpoint, caller: Dial | None
    ) -> Dial:
        """Add a socket before it is connected; `caller` is its client if that is a dial, too."""
        dial = Dial(sock, owner, endpoint, relayed=caller is not None)
        self._pending[dial] = None
        return dial

    def remove(self, dial: Dial) -> None:
        """Remove a dial whose socket is closed, or is closed next. Idempotent."""
        self._pending.pop(dial, None)
        if dial.local is not None:
            dials = self._known[dial.local]
            dials.remove(dial)
            if not dials:
                del self._known[dial.local]
            dial.local = None

    def find(
        self,
        protocol: Protocol,
        peer: SocketAddress,
        reached: Callable[[], Collection[SocketAddress]] | None = None,
    ) -> Dial | None:
        """Return the dial that a client is; None if the client is another process.

        Args:
            protocol: of both.
            peer: the client's address.
            reached: tells the addresses by which the client may have reached the listener: another
                program's TCP socket may have the same local address if it is connected to
                another destination. None for UDP, where a local address has one socket.
        """
        # Local addresses are read here, and not after connect(): a dial can be accepted before
        # the task that dials runs again.
        for dial in tuple(self._pending):
            try:
                name: SocketAddress = dial.socket.getsockname()
            except OSError:  # closed; `remove` comes next
                del self._pending[dial]
                continue
            if name[1] and name[0] not in _WILDCARDS:  # Windows has the address once connected
                del self._pending[dial]
                dial.local = (dial.owner.name.protocol, *_plain(name))
                self._known.setdefault(dial.local, []).append(dial)
        dials = self._known.get((protocol, *_plain(peer)), ())
        if reached is None:
            return next(iter(dials), None)
        # TCP: of the dials with this local address, the one to our address.
        found = {_plain(address) for address in reached()} if dials else ()
        return next((d for d in dials if (d.endpoint.ip, d.endpoint.port) in found), None)

    def refuses(self, caller: Dial, owner: PlanKey) -> bool:
        """Whether a ServicePort must not serve a dial of this process; logs the first refusal."""
        if not caller.relayed and caller.owner != owner:
            return False
        if caller.owner not in self._reported:
            self._reported.add(caller.owner)
            log.warning(
                "%s: endpoint %s leads back to this proxy, to %s; refusing its connections "
                "because they would be relayed in a loop; use addresses of servers as endpoints",
                caller.owner,
                caller.endpoint,
                owner,
            )
        return True

    def give_up(self, backends: Collection[Backend]) -> int:
        """Let the attempts to connect to endpoints time out now; return their number."""
        found = [*self._pending, *(dial for dials in self._known.values() for dial in dials)]
        given_up = 0
        for dial in found:
            where = Backend(dial.endpoint.ip, dial.endpoint.port, dial.owner.name.protocol)
            if dial.give_up is not None and where in backends:
                given_up += dial.give_up()
        return given_up

    def forget(self, owner: PlanKey) -> None:
        """Log the next refusal of a ServicePort again."""
        self._reported.discard(owner)


def _plain(address: SocketAddress) -> tuple[str, int]:
    """Return host and port; an IPv4-mapped address as IPv4, without a scope (`%eth0`)."""
    host = str(address[0]).partition("%")[0]
    return canonical_ip(host) or host, int(address[1])
