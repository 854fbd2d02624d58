"""The doors to the kernel: virtual servers, the interface that holds addresses, ipsets.

Everything is told so that telling it twice does no harm: what is there already is brought to its
value, what is gone already is no failure.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from steersman.host.exec import Exec
from steersman.host.netlink import Netlink, NetlinkError, Request
from steersman.host.nlmsg import (
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLMSG_NOOP,
    attr,
    attributes,
    nested,
    text,
    u32,
)
from steersman.model.addresses import canonical_ip
from steersman.model.names import Protocol
from steersman.modes.base import ApplyError, BusyError
from steersman.modes.ipvs.names import MemberKey, Server, ServerKey, SetKey, Target
from steersman.modes.ipvs.parse import Real, parse_servers, parse_sets
from steersman.modes.ipvs.wire import Command, destination, list_services, service

_TABLE = Path("/proc/thread-self/net/ip_vs")
_BATCH = 100
_RTM_NEWLINK, _RTM_DELLINK, _RTM_GETLINK = 16, 17, 18
_RTM_NEWADDR, _RTM_DELADDR, _RTM_GETADDR = 20, 21, 22
_IFNAME, _LINKINFO, _INFO_KIND = 3, 18, 1
_ADDRESS, _LOCAL, _CACHEINFO, _FLAGS, _NODAD = 1, 2, 6, 8, 2
_DEPRECATED = attr(_CACHEINFO, struct.pack("=IIII", 0, 0xFFFFFFFF, 0, 0))
"""Valid for ever, preferred never: RFC 6724 then takes none of them as the source of anything but
connections to itself. Without it IPv6 masquerading may choose the address of a Service."""
_NOTHING = Request(NLMSG_NOOP, b"")
_ABSENT = (errno.ENODEV, errno.ENXIO)

Inside = Callable[[Callable[[], str]], str]


class Step(NamedTuple):
    """A request, and what to do where the kernel refuses it."""

    what: str
    """Whom it concerns, for people."""
    request: Request
    harmless: tuple[int, ...] = ()
    """Refusals that mean that it is so already."""
    instead: Request | None = None
    """What to ask where it exists already."""


def send(netlink: Netlink, steps: Iterable[Step]) -> None:
    """Send requests in batches, in order.

    Raises:
        ApplyError: one was refused, for a reason that is not harmless.
    """
    steps = list(steps)
    for start in range(0, len(steps), _BATCH):
        part = steps[start : start + _BATCH]
        # A refused first message ends the wait for the others, so the first is none.
        refused = netlink.batch([_NOTHING, *(step.request for step in part)])
        judged = (_judge(part[index - 1], error) for index, error in refused.items())
        again = [step for step in judged if step is not None]
        if again:
            send(netlink, again)


def _judge(step: Step, error: NetlinkError) -> Step | None:
    if step.instead is not None and error.errno == errno.EEXIST:
        return Step(step.what, step.instead)
    if error.errno in step.harmless:
        return None
    raise ApplyError(f"{step.what}: {error.strerror}") from error


class Servers:
    """The kernel's virtual servers, over generic netlink."""

    def __init__(self, netlink: Netlink, family: int, inside: Inside) -> None:
        """Take a socket, the number of the IPVS family, and how to read files of its namespace."""
        self._netlink = netlink
        self._family = family
        self._inside = inside
        self._drained: dict[ServerKey, list[Real]] = {}

    def read(self) -> dict[ServerKey, Server]:
        """List the virtual servers, everybody's.

        Real servers of weight 0 are not in the result: they only keep the connections they have.
        """
        reals = parse_servers(self._inside(_TABLE.read_text))
        self._drained = {
            key: [real for real in group if not (real.weight or real.active or real.inactive)]
            for key, group in reals.items()
        }
        found = {}
        for listed in list_services(self._netlink, self._family):
            targets = tuple(sorted(r.target for r in reals.get(listed.key, ()) if r.weight))
            server = Server(listed.scheduler, listed.flags, listed.timeout, False, targets)
            found[listed.key] = server
        return found

    def end_drained(self, keys: Iterable[ServerKey]) -> None:
        """Delete real servers that had weight 0 and no connections at the last `read`."""
        drained = ((key, real) for key in keys for real in self._drained.pop(key, ()))
        send(self._netlink, [self._remove(key, real.target) for key, real in drained])

    def write(self, changes: Iterable[tuple[ServerKey, Server | None, Server]]) -> None:
        """Make and change virtual servers: each with what it is now (None: nothing) and is to be.

        Raises:
            ApplyError: the kernel refused one.
        """
        send(self._netlink, [step for change in changes for step in self._steps(*change)])

    def delete(self, keys: Iterable[ServerKey]) -> None:
        """Delete virtual servers."""
        gone = (errno.ESRCH, errno.ENOENT)
        send(
            self._netlink,
            [Step(_said(k), service(self._family, Command.DEL_SERVICE, k), gone) for k in keys],
        )

    def _steps(self, key: ServerKey, old: Server | None, new: Server) -> Iterator[Step]:
        family, what = self._family, _said(key)
        change = service(family, Command.SET_SERVICE, key, new)
        if old is None:
            yield Step(what, service(family, Command.NEW_SERVICE, key, new), (), change)
        elif _settings(old) != _settings(new):
            yield Step(what, change)
        had = set(old.targets) if old else set()
        for target in [t for t in new.targets if t not in had]:
            make = destination(family, Command.NEW_DEST, key, target)
            again = destination(family, Command.SET_DEST, key, target)
            yield Step(f"{what} to {target[0]}:{target[1]}", make, (), again)
        for target in sorted(had.difference(new.targets)):
            yield self._end(key, target)

    def _end(self, key: ServerKey, target: Target) -> Step:
        """Let a real server go: without new connections until it has none, UDP at once."""
        if key.protocol is Protocol.UDP:
            return self._remove(key, target)
        drain = destination(self._family, Command.SET_DEST, key, target, weight=0)
        return Step(f"{_said(key)} without {target[0]}:{target[1]}", drain, (errno.ENOENT,))

    def _remove(self, key: ServerKey, target: Target) -> Step:
        request = destination(self._family, Command.DEL_DEST, key, target)
        gone = (errno.ENOENT, errno.ESRCH)
        return Step(f"{_said(key)} without {target[0]}:{target[1]}", request, gone)


def _said(key: ServerKey) -> str:
    return f"virtual server {key.protocol} {key.address} port {key.port}"


def _settings(server: Server) -> tuple[str, int, int]:
    return server.scheduler, server.flags, server.timeout


class Device:
    """The interface that holds the addresses of Services; it stays down, which is enough."""

    def __init__(self, netlink: Netlink, name: str) -> None:
        """Take a rtnetlink socket."""
        self._netlink = netlink
        self._name = name

    def index(self) -> int:
        """Return the number of the interface; 0 where it is not there."""
        try:
            replies = self._netlink.request(
                Request(_RTM_GETLINK, bytes(16) + text(_IFNAME, self._name))
            )
        except NetlinkError as error:
            if error.errno in _ABSENT:
                return 0
            raise
        return int(struct.unpack_from("=i", replies[0].payload, 4)[0])

    def make(self) -> None:
        """Make the interface where it is not there."""
        kind = nested(_LINKINFO, text(_INFO_KIND, "dummy"))
        payload = bytes(16) + text(_IFNAME, self._name) + kind
        flags = NLM_F_CREATE | NLM_F_EXCL
        request = Request(_RTM_NEWLINK, payload, flags | NLM_F_ACK)
        send(self._netlink, [Step(f"interface {self._name}", request, (errno.EEXIST,))])

    def remove(self) -> None:
        """Remove the interface, and with it all addresses on it."""
        request = Request(_RTM_DELLINK, bytes(16) + text(_IFNAME, self._name), NLM_F_ACK)
        send(self._netlink, [Step(f"interface {self._name}", request, _ABSENT)])

    def addresses(self) -> set[str]:
        """List the addresses on the interface."""
        index, found = self.index(), set()
        for reply in self._netlink.dump(Request(_RTM_GETADDR, bytes(8))) if index else ():
            family, _, _, _, number = struct.unpack_from("=BBBBI", reply.payload)
            if number == index:
                values = attributes(reply.payload, 8)
                address = socket.inet_ntop(family, values.get(_LOCAL) or values[_ADDRESS])
                found.add(canonical_ip(address) or address)
        return found

    def add(self, addresses: Iterable[str]) -> None:
        """Put addresses on the interface."""
        self._change(_RTM_NEWADDR, addresses, errno.EEXIST)

    def drop(self, addresses: Iterable[str]) -> None:
        """Take addresses off the interface."""
        self._change(_RTM_DELADDR, addresses, errno.EADDRNOTAVAIL)

    def _change(self, kind: int, addresses: Iterable[str], harmless: int) -> None:
        wanted = list(addresses)
        index = self.index() if wanted else 0
        flags = NLM_F_ACK | (NLM_F_CREATE | NLM_F_EXCL if kind == _RTM_NEWADDR else 0)
        steps = []
        for address in wanted:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            packed = socket.inet_pton(family, address)
            head = struct.pack("=BBBBI", family, len(packed) * 8, 0, 0, index)
            body = head + attr(_LOCAL, packed) + attr(_ADDRESS, packed) + u32(_FLAGS, _NODAD)
            if family == socket.AF_INET6:
                body += _DEPRECATED
            what = f"address {address} on {self._name}"
            steps.append(Step(what, Request(kind, body, flags), (harmless,)))
        send(self._netlink, steps)


class Sets:
    """The kernel's ipsets, by the ipset command."""

    def __init__(self, execute: Exec) -> None:
        """Take what runs programs."""
        self._execute = execute

    async def read(self) -> dict[SetKey | MemberKey, str]:
        """List our sets and their entries.

        Raises:
            BusyError: ipset does not say.
        """
        result = await self._execute.run(["ipset", "save"])
        if result.returncode:
            raise BusyError(f"ipset save: {result.message}")
        return dict(parse_sets(result.stdout.decode(errors="replace")))

    async def restore(self, lines: Sequence[str]) -> None:
        """Give lines to `ipset restore`; none, and nothing is run.

        Raises:
            ApplyError: one was refused.
        """
        if not lines:
            return
        text_ = "\n".join([*lines, ""])
        result = await self._execute.run(["ipset", "-exist", "restore"], text_.encode())
        if result.returncode:
            raise ApplyError(f"ipset restore: {result.message}")
