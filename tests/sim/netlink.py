"""The node's interfaces and conntrack table, behind netlink sockets that fail as real ones do.

A socket answers dumps, deletions and acknowledgements in the kernel's own format, so that the
program's own netlink code runs. Filters in dumps are ignored, as kernels before 5.8 do.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from steersman.host.nlmsg import (
    NLM_F_ACK,
    NLM_F_DUMP,
    NLM_F_DUMP_INTR,
    NLMSG_DONE,
    NLMSG_ERROR,
    attr,
    attributes,
    be16,
    be32,
    message,
    messages,
    nested,
    text,
    u8,
)
from steersman.model.conntrack import pack_socket
from tests.sim.universe import SimLoop, Universe

_ROUTE = 0
_NEWLINK, _DELLINK, _GETLINK = 16, 17, 18
_NEWADDR, _DELADDR, _GETADDR = 20, 21, 22
_CT_NEW, _CT_GET, _CT_DELETE = 0x100, 0x101, 0x102
_MEMBERSHIP = 1
_UNIVERSE_SCOPE, _LINK_SCOPE, _HOST_SCOPE = 0, 253, 254


@dataclass(frozen=True)
class Address:
    """An address of an interface."""

    interface: str
    ip: str
    length: int

    @property
    def family(self) -> int:
        return socket.AF_INET6 if ":" in self.ip else socket.AF_INET

    @property
    def scope(self) -> int:
        if self.ip.startswith("fe80:"):
            return _LINK_SCOPE
        return _HOST_SCOPE if self.ip in ("::1", "127.0.0.1") else _UNIVERSE_SCOPE


@dataclass
class Flow:
    """A conntrack entry of a UDP client."""

    number: int
    family: int
    client: str
    client_port: int
    destination: str
    port: int
    source: str
    """Where answers come from: the endpoint; the destination itself where untranslated."""
    source_port: int
    protocol: int = 17
    row: bytes = field(init=False, default=b"", repr=False)
    """As the kernel lists it."""

    def __post_init__(self) -> None:
        there = (self.client, self.client_port, self.destination, self.port)
        back = (self.source, self.source_port, self.client, self.client_port)
        payload = _tuple(1, self, there) + _tuple(2, self, back) + be32(12, self.number)
        self.row = bytes((self.family, 0, 0, 0)) + payload

    @property
    def packed(self) -> tuple[bytes, bytes]:
        """Destination and source as `Stale.contains` takes them."""
        there = bytes((self.protocol,)) + pack_socket(self.destination, self.port)
        return there, pack_socket(self.source, self.source_port)


class Links:
    """The interface table."""

    def __init__(self, tables: NetlinkTables) -> None:
        self._tables = tables
        self._indexes: dict[str, int] = {}
        self.addresses: dict[Address, None] = {}
        self._next = 1

    def add(self, name: str, *addresses: str) -> None:
        """Create an interface, or give it more addresses."""
        if name not in self._indexes:
            self._indexes[name] = self._next
            self._next += 1
            self._tables.announce(_ROUTE, self._link(_NEWLINK, name))
        for each in addresses:
            ip, _, length = each.partition("/")
            address = Address(name, ip, int(length))
            if address not in self.addresses:
                self.addresses[address] = None
                self._tables.announce(_ROUTE, self._address(_NEWADDR, address))

    def drop(self, address: Address) -> None:
        """Take an address away."""
        if address in self.addresses:
            del self.addresses[address]
            self._tables.announce(_ROUTE, self._address(_DELADDR, address))

    def remove(self, name: str) -> None:
        """Remove an interface with its addresses."""
        for address in [a for a in self.addresses if a.interface == name]:
            self.drop(address)
        if name in self._indexes:
            self._tables.announce(_ROUTE, self._link(_DELLINK, name))
            del self._indexes[name]

    @property
    def of_interest(self) -> tuple[Address, ...]:
        """The addresses that a program may care about: every pod has one of link scope."""
        return tuple(each for each in self.addresses if each.scope != _LINK_SCOPE)

    def names(self) -> list[str]:
        return list(self._indexes)

    def dump(self, kind: int) -> Iterator[tuple[int, bytes]]:
        if kind == _GETLINK:
            yield from (self._link(_NEWLINK, name) for name in self._indexes)
        else:
            yield from (self._address(_NEWADDR, address) for address in self.addresses)

    def _link(self, kind: int, name: str) -> tuple[int, bytes]:
        head = struct.pack("=BxHiII", 0, 1, self._indexes[name], 1, 0)
        return kind, head + text(3, name)

    def _address(self, kind: int, address: Address) -> tuple[int, bytes]:
        index = self._indexes[address.interface]
        head = struct.pack("=BBBBI", address.family, address.length, 0x80, address.scope, index)
        packed = socket.inet_pton(address.family, address.ip)
        local = attr(2, packed) if address.family == socket.AF_INET else b""
        return kind, head + attr(1, packed) + local


class Conntrack:
    """The conntrack table."""

    def __init__(self) -> None:
        self.flows: dict[int, Flow] = {}
        self._next = 1

    def add(self, client: str, client_port: int, to: tuple[str, int], via: tuple[str, int]) -> Flow:
        family = socket.AF_INET6 if ":" in client else socket.AF_INET
        flow = Flow(self._next, family, client, client_port, *to, *via)
        self.flows[self._next] = flow
        self._next += 1
        return flow

    def dump(self, family: int) -> Iterator[tuple[int, bytes]]:
        for flow in self.flows.values():
            if flow.family == family:
                yield _CT_NEW, flow.row


def _tuple(kind: int, flow: Flow, ends: tuple[str, int, str, int]) -> bytes:
    source, source_port, destination, port = ends
    first, second = (1, 2) if flow.family == socket.AF_INET else (3, 4)
    pack = socket.inet_pton
    return nested(
        kind,
        nested(
            1,
            attr(first, pack(flow.family, source)),
            attr(second, pack(flow.family, destination)),
        ),
        nested(2, u8(1, flow.protocol), be16(2, source_port), be16(3, port)),
    )


class NetlinkTables:
    """The kernel behind netlink sockets, and how they fail."""

    def __init__(self, universe: Universe) -> None:
        self.universe = universe
        self.links = Links(self)
        self.conntrack = Conntrack()
        self.faults: Counter[str] = Counter()
        """How many of the next operations fail: emfile, enobufs, interrupted, refused_delete,
        lost_news."""
        self.sockets: dict[NetlinkSocket, None] = {}
        self.dumps = 0

    def open(self, protocol: int, _buffer: int) -> Any:
        """Stand in for `steersman.host.netlink.open_socket`."""
        if self.fails("emfile"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made = NetlinkSocket(self, protocol)
        self.sockets[made] = None
        return made

    def fails(self, what: str) -> bool:
        if self.faults[what] <= 0:
            return False
        self.faults[what] -= 1
        self.universe.note(f"netlink: {what}")
        return True

    def announce(self, protocol: int, news: tuple[int, bytes]) -> None:
        """Notify subscribers."""
        datagram = message(news[0], 0, 0, news[1])
        for each in tuple(self.sockets):
            if each.subscribed and each.protocol == protocol:
                each.hear(datagram)

    def forget(self, loop: SimLoop) -> None:
        """Close the sockets of a dead process."""
        for each in [each for each in self.sockets if each.loop is loop]:
            del self.sockets[each]


class NetlinkSocket:
    """Stands in for a socket of AF_NETLINK."""

    def __init__(self, tables: NetlinkTables, protocol: int) -> None:
        self.protocol = protocol
        self.loop = asyncio._get_running_loop()
        self.subscribed = False
        self._tables = tables
        self._datagrams: deque[bytes | OSError] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def __enter__(self) -> NetlinkSocket:
        return self

    def setsockopt(self, _level: int, option: int, _value: object) -> None:
        self.subscribed = self.subscribed or option == _MEMBERSHIP

    def setblocking(self, _whether: bool) -> None:
        return

    def getsockname(self) -> tuple[int, int]:
        return (4711, 0)

    def close(self) -> None:
        self._tables.sockets.pop(self, None)

    def sendmsg(self, buffers: Sequence[bytes]) -> None:
        for each in messages(b"".join(buffers)):
            if each.flags & NLM_F_DUMP == NLM_F_DUMP:
                self._dump(each.kind, each.sequence, each.payload)
            else:
                self._request(each.kind, each.flags, each.sequence, each.payload)

    def recv(self, _size: int, _flags: int = 0) -> bytes:
        if not self._datagrams:
            raise BlockingIOError(errno.EAGAIN, "nothing there")
        found = self._datagrams.popleft()
        if isinstance(found, OSError):
            raise found
        return found

    async def received(self, loop: SimLoop) -> bytes:
        """Wait for a notification."""
        if not self._datagrams:
            self._waiting = loop.create_future()
            await self._waiting
        return self.recv(0)

    def hear(self, datagram: bytes) -> None:
        """Be notified; now and then the buffer overflows instead."""
        if self._tables.fails("lost_news"):
            self._datagrams.append(OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS)))
        else:
            self._datagrams.append(datagram)
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done() and self.loop is not None:
            self._tables.universe.inside(self.loop, lambda: waiting.set_result(None))  # type: ignore[arg-type]

    def _dump(self, kind: int, sequence: int, payload: bytes) -> None:
        tables = self._tables
        tables.dumps += 1
        found = (
            tables.links.dump(kind)
            if self.protocol == _ROUTE
            else tables.conntrack.dump(payload[0])
        )
        flags = NLM_F_DUMP_INTR if tables.fails("interrupted") else 0
        rows = [message(each, flags, sequence, body) for each, body in found]
        if tables.fails("enobufs"):
            self._datagrams.append(b"".join(rows[: len(rows) // 2]))
            self._datagrams.append(OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS)))
            return
        if rows:
            self._datagrams.append(b"".join(rows))
        self._datagrams.append(message(NLMSG_DONE, flags, sequence, struct.pack("=i", 0)))

    def _request(self, kind: int, flags: int, sequence: int, payload: bytes) -> None:
        code = 0
        if kind == _CT_DELETE:
            number = int.from_bytes(attributes(payload, 4)[12], "big")
            if self._tables.fails("refused_delete"):
                code = errno.EBUSY
            elif self._tables.conntrack.flows.pop(number, None) is None:
                code = errno.ENOENT
        if flags & NLM_F_ACK:
            head = struct.pack("=iIHHII", -code, 16, kind, 0, sequence, 0)
            self._datagrams.append(message(NLMSG_ERROR, 0x100, sequence, head))
