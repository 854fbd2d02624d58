"""Listening sockets that a running process gives to the one that follows it (SCM_RIGHTS, unix(7)).

Both meet at a name that is there once in each network namespace (an abstract Unix socket). What
waits to be accepted belongs to the sockets, so nothing is lost, whoever closes them first.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator

from steersman.modes.diff import Diff
from steersman.modes.userspace.apply import Proxy
from steersman.modes.userspace.names import left_without_endpoints, listeners_of
from steersman.modes.userspace.sockets import Place, Sockets

log = logging.getLogger(__name__)
_AT_ONCE = 200  # descriptors of one message; the kernel takes 253
_MOST = 1 << 18  # bytes of a message
_PATIENCE = 2.0  # seconds for each message of the other process
_PEER = struct.Struct("iII")  # struct ucred: process, user, group
_ATTEMPTS = 8
_PAUSE = 0.05  # seconds
_REST = 10.0
"""Seconds until sockets that no listener wants are closed: a refused batch comes in parts."""


class Handover:
    """Takes over from the process before, then waits for the one that follows."""

    def __init__(self, name: str, offer: Callable[[], Sockets], given: Callable[[], None]) -> None:
        """Nothing happens before `take`.

        Args:
            name: what is handed over, the same in both processes.
            offer: the sockets to give away.
            given: called once they are given.
        """
        self._name = f"\0{name}"
        self._offer = offer
        self._given = given
        self._waiting: socket.socket | None = None

    def take(self) -> dict[Place, socket.socket]:
        """The sockets of the process before; {} where there is none, or it does not answer."""
        found: dict[Place, socket.socket] = {}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(_PATIENCE)
            try:
                sock.connect(self._name)
                if not _same_user(sock):
                    return {}
                while (message := socket.recv_fds(sock, _MOST, _AT_ONCE))[0]:
                    places = [Place(*place) for place in json.loads(message[0])]
                    sockets = [socket.socket(fileno=fd) for fd in message[1]]
                    found.update(zip(places, sockets, strict=True))
            except ConnectionRefusedError:
                return {}
            except (OSError, ValueError, TypeError) as error:
                log.warning("not all listening sockets could be taken over: %s", error)
        return found

    async def wait(self) -> None:
        """Be the one that is asked from now on; on the running loop."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        for _ in range(_ATTEMPTS):
            try:
                sock.bind(self._name)
            except OSError:  # the process before did not hear of us yet, or lets go of it just now
                for spare in (await asyncio.to_thread(self.take)).values():
                    spare.close()
                await asyncio.sleep(_PAUSE)
                continue
            sock.listen(1)
            self._waiting = sock
            asyncio.get_running_loop().add_reader(sock, self._asked)
            return
        sock.close()
        log.warning("another process does not let go of the listening sockets")

    def _asked(self) -> None:
        """Give all away, to a process of ours."""
        if self._waiting is None:
            return
        try:
            other, _ = self._waiting.accept()
        except OSError:
            return
        with other:
            other.settimeout(_PATIENCE)
            if not _same_user(other):
                return
            try:
                for places, descriptors in _messages(self._offer()):
                    socket.send_fds(other, [places], descriptors)
            except OSError as error:
                log.warning("the listening sockets could not be handed over: %s", error)
                return
        self.close()
        log.warning("another process has taken over; this one only keeps its connections")
        self._given()

    def close(self) -> None:
        """Be asked no more."""
        if self._waiting is not None:
            asyncio.get_running_loop().remove_reader(self._waiting)
            self._waiting.close()
            self._waiting = None


class Succession:
    """What a mode does about it: begins with what the process before had, steps back at the end."""

    def __init__(self, name: str, proxy: Proxy) -> None:
        """Take what is handed over; "" for nothing, ever."""
        self._proxy = proxy
        self._handover = Handover(name, proxy.sockets, self._step_back) if name else None
        self._begun = self._served = False
        self._rest: asyncio.TimerHandle | None = None
        self.over = False
        """Another process has taken over: rules and new listeners are its business."""

    async def begin(self) -> None:
        """Before the first listener is started: take those that there are."""
        if self._handover is not None and not self._begun:
            self._begun = True
            sockets = await asyncio.to_thread(self._handover.take)
            self._proxy.inherit(sockets)
            if sockets:
                log.info("took over %d listening sockets", len(sockets))

    async def serve(self) -> None:
        """Once listeners are started: let go of what nobody wants, and be the one to ask."""
        if self._handover is not None and not self._served:
            self._served = True
            loop = asyncio.get_running_loop()
            self._rest = loop.call_later(_REST, self._proxy.inherit, {})
            await self._handover.wait()

    async def follow(self, change: Diff) -> None:
        """Change the plans of those that still accept, while clients come to both processes."""
        have = self._proxy.listeners
        wanted = {k: plan for k, plan in listeners_of(change).items() if k in have}
        same = {k: p for k, p in wanted.items() if (p.bind, p.port) == (have[k].bind, have[k].port)}
        await self._proxy.start(same)
        self._proxy.cut(left_without_endpoints(change))

    def _step_back(self) -> None:
        self.over = True
        self._proxy.step_back()

    def close(self) -> None:
        """Be asked no more."""
        if self._rest is not None:
            self._rest.cancel()
        self._proxy.inherit({})
        if self._handover is not None:
            self._handover.close()


def _messages(sockets: Sockets) -> Iterator[tuple[bytes, list[int]]]:
    items = list(sockets.items())
    for start in range(0, len(items), _AT_ONCE):
        some = items[start : start + _AT_ONCE]
        yield json.dumps([place for place, _ in some]).encode(), [s.fileno() for _, s in some]


def _same_user(sock: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        return int(_PEER.unpack(data)[1]) == os.geteuid()
    return False
