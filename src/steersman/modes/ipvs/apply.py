"""The doors to the kernel: virtual servers over netlink, ipsets by the ipset command.

Everything is told so that telling it twice does no harm: what is there already is brought to its
value, what is gone already is no failure.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from steersman.host.exec import Exec, run_program
from steersman.host.netlink import Netlink, NetlinkError, Request
from steersman.host.nlmsg import NLMSG_NOOP
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Protocol
from steersman.modes.ipvs.names import MemberKey, Server, ServerKey, SetKey, Target
from steersman.modes.ipvs.parse import Real, is_drained, parse_servers, parse_sets
from steersman.modes.ipvs.wire import Command, destination, list_services, service

_TABLE = Path("/proc/thread-self/net/ip_vs")
_BATCH = 100
_NOTHING = Request(NLMSG_NOOP, b"")
_GONE = (errno.ESRCH, errno.ENOENT)
_PASSING = (errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EINTR, errno.EBUSY)
"""Refusals that have nothing to do with the object: trying again may help."""

Inside = Callable[[Callable[[], str]], str]


class Step(NamedTuple):
    """A request, and what to do where the kernel refuses it."""

    what: Callable[[], str]
    """Whom it concerns, for people."""
    request: Request
    harmless: tuple[int, ...] = ()
    """Refusals that mean that it is so already."""
    instead: tuple[int, Callable[[], Request]] | None = None
    """A refusal that means that it is there already, or not there, and what to ask then."""


def send(netlink: Netlink, steps: Iterable[Step]) -> None:
    """Send requests in batches, in order.

    Raises:
        ApplyError: one was refused, for a reason that is not harmless.
        BusyError: the kernel had no memory for one; all can be sent again.
    """
    steps = list(steps)
    for start in range(0, len(steps), _BATCH):
        part = steps[start : start + _BATCH]
        # A refused first message ends the wait for the others, so the first of several is none.
        lead = [_NOTHING] if len(part) > 1 else []
        refused = netlink.batch([*lead, *[step.request for step in part]])
        if refused:
            judged = [_judge(part[index - len(lead)], error) for index, error in refused.items()]
            send(netlink, [step for step in judged if step is not None])


def _judge(step: Step, error: NetlinkError) -> Step | None:
    if step.instead is not None and error.errno == step.instead[0]:
        return Step(step.what, step.instead[1]())
    if error.errno in step.harmless:
        return None
    if error.errno in _PASSING:
        raise BusyError(f"{step.what()}: {error.strerror}") from error
    raise ApplyError(f"{step.what()}: {error.strerror}") from error


class Servers:
    """The kernel's virtual servers, over generic netlink."""

    def __init__(self, netlink: Netlink, family: int, inside: Inside) -> None:
        """Take a socket, the number of the IPVS family, and how to read files of its namespace."""
        self._netlink = netlink
        self._family = family
        self._inside = inside
        self._drained: dict[ServerKey, list[Real]] = {}
        self._draining: set[tuple[ServerKey, Target]] = set()

    def table(self) -> str:
        """Return what the kernel prints of its virtual and real servers."""
        return self._inside(_TABLE.read_text)

    def read(self) -> dict[ServerKey, Server]:
        """List the virtual servers, everybody's.

        Real servers of weight 0 are not in the result: they only keep the connections they have.
        """
        reals = parse_servers(self.table())
        self._draining = {
            (k, r.target) for k, group in reals.items() for r in group if not r.weight
        }
        self._drained = {key: list(filter(is_drained, group)) for key, group in reals.items()}
        found = {}
        for listed in list_services(self._netlink, self._family):
            ends = sorted((r.target, r.weight) for r in reals.get(listed.key, ()) if r.weight)
            weights = tuple(weight for _, weight in ends)
            found[listed.key] = Server(
                listed.scheduler,
                listed.flags,
                listed.timeout,
                False,
                tuple(target for target, _ in ends),
                weights if set(weights) - {1} else (),
            )
        return found

    def end_drained(self, keys: Iterable[ServerKey]) -> None:
        """Delete real servers that had weight 0 and no connections at the last `read`."""
        drained = [(key, real.target) for key in keys for real in self._drained.pop(key, ())]
        self._draining.difference_update(drained)
        send(self._netlink, [self._remove(*which) for which in drained])

    def write(self, changes: Iterable[tuple[ServerKey, Server | None, Server]]) -> None:
        """Make and change virtual servers: each with what it is now (None: nothing) and is to be.

        Raises:
            ApplyError: the kernel refused one.
        """
        send(self._netlink, [step for change in changes for step in self._steps(*change)])

    def delete(self, keys: Iterable[ServerKey]) -> None:
        """Delete virtual servers."""
        command = Command.DEL_SERVICE
        send(self._netlink, [Step(_say(k), service(self._family, command, k), _GONE) for k in keys])

    def _steps(self, key: ServerKey, old: Server | None, new: Server) -> Iterator[Step]:
        family = self._family
        scheduled = f" with the scheduler {new.scheduler}"
        if old is None:
            again = partial(service, family, Command.SET_SERVICE, key, new)
            make = service(family, Command.NEW_SERVICE, key, new)
            yield Step(_say(key, scheduled), make, (), (errno.EEXIST, again))
        elif old.settings != new.settings:
            yield Step(_say(key, scheduled), service(family, Command.SET_SERVICE, key, new))
        had = old.weighed if old else {}
        wanted = new.weighed
        for target, weight in wanted.items():
            if target not in had:
                yield self._add(key, target, weight)
            elif had[target] != weight:
                change = destination(family, Command.SET_DEST, key, target, weight)
                yield Step(_say(key, " to ", target), change)
        for target in had:
            if target not in wanted:
                yield self._end(key, target)

    def _add(self, key: ServerKey, target: Target, weight: int) -> Step:
        """Take a real server in; one that still drains gets its weight back."""
        words = Command.NEW_DEST, Command.SET_DEST
        drains = (key, target) in self._draining
        self._draining.discard((key, target))
        first, then = reversed(words) if drains else words
        request = destination(self._family, first, key, target, weight)
        otherwise = partial(destination, self._family, then, key, target, weight)
        code = errno.ENOENT if drains else errno.EEXIST
        return Step(_say(key, " to ", target), request, (), (code, otherwise))

    def _end(self, key: ServerKey, target: Target) -> Step:
        """Let a real server go: without new connections until it has none, UDP at once."""
        if key.protocol is Protocol.UDP:
            return self._remove(key, target)
        self._draining.add((key, target))
        drain = destination(self._family, Command.SET_DEST, key, target, weight=0)
        return Step(_say(key, " without ", target), drain, (errno.ENOENT,))

    def _remove(self, key: ServerKey, target: Target) -> Step:
        request = destination(self._family, Command.DEL_DEST, key, target)
        return Step(_say(key, " without ", target), request, _GONE)


def _say(key: ServerKey, what: str = "", target: Target | None = None) -> Callable[[], str]:
    """Name a virtual server, and a real one; the words are put together when they are needed."""
    return lambda: (
        f"virtual server {key.protocol} {key.address} port {key.port}{what}"
        + (f"{target[0]}:{target[1]}" if target else "")
    )


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
        text = await self.save()
        return await asyncio.to_thread(lambda: dict(parse_sets(text)))

    async def save(self) -> str:
        """Return all sets as ipset prints them, everybody's.

        Raises:
            BusyError: ipset does not say.
        """
        result = await run_program(self._execute, ["ipset", "save"], package="ipset")
        if result.returncode:
            raise BusyError(f"ipset save: {result.message}")
        return result.stdout.decode(errors="replace")

    async def restore(self, lines: Sequence[str]) -> None:
        """Give lines to `ipset restore`; none, and nothing is run.

        Raises:
            ApplyError: one was refused.
            BusyError: ipset could not be run.
        """
        if not lines:
            return
        text = "\n".join([*lines, ""])
        argv = ["ipset", "-exist", "restore"]
        result = await run_program(self._execute, argv, text.encode(), package="ipset")
        if result.returncode:
            raise ApplyError(f"ipset restore: {result.message}")
