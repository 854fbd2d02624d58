"""Listening sockets that a running process gives to the one that follows it (SCM_RIGHTS, unix(7)).

Both meet at a name that is there once in each network namespace (an abstract Unix socket), and
prove themselves to each other (proof.py). What waits to be accepted belongs to the sockets, so
nothing is lost, whoever closes them first. The connection between the two, the link, stays open:
where the successor goes, also by kill -9, its predecessor serves again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator
from typing import Protocol

from steersman.proxy.proof import trusts
from steersman.proxy.sockets import ListenerKey, Sockets

log = logging.getLogger(__name__)
_AT_ONCE = 200  # descriptors of one message; the kernel takes 253
_MOST = 1 << 18  # bytes of a message
_PATIENCE = 2.0  # seconds for each message of the other process
_UNTIL_SERVING = 60.0
"""Seconds that a successor may take until it serves; then it counts as gone."""
_ATTEMPTS = 40
_PAUSE = 0.05  # seconds
_END = b"[]"  # after the last list of sockets
_SERVING = b"serving"
"""The successor's listeners work, and whatever leads to them."""
_PASSED_ON = b"passed on"
"""The successor has a successor of its own: its predecessor is not needed again."""


class Predecessor(Protocol):
    """What a process does about the one that follows it."""

    def offer(self) -> Sockets:
        """The sockets to give away; from now on the other one may use them, too."""
        ...

    def retire(self) -> None:
        """The other one serves."""
        ...

    def resume(self) -> None:
        """The other one has gone: serve again."""
        ...


class HandoffChannel:
    """Takes over from the process before, then waits for the one that follows."""

    def __init__(self, name: str, predecessor: Predecessor) -> None:
        """Nothing happens before `take`; the name is the same in both processes."""
        self._name = f"\0{name}"
        self._predecessor = predecessor
        self._waiting: socket.socket | None = None
        self._before: socket.socket | None = None
        """The link to the process before."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._warned: set[str] = set()

    # As the successor

    def take(self) -> dict[ListenerKey, socket.socket]:
        """The sockets of the process before; {} where there is none, or it does not answer."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        found: dict[ListenerKey, socket.socket] = {}
        try:
            sock.settimeout(_PATIENCE)
            sock.connect(self._name)
            if not trusts(sock):
                self._warn(
                    "listening sockets are not taken over: the other process has not "
                    "proved to have the same user and rights"
                )
            elif _receive(sock, found):
                self._before = sock
                return found
        except ConnectionRefusedError:
            pass
        except (OSError, ValueError, TypeError) as error:
            self._warn(f"not all listening sockets could be taken over: {error}")
        sock.close()
        return found

    async def wait(self) -> None:
        """Say that we serve, and be the one that is asked from now on; on the running loop."""
        self._tell(_SERVING)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        for _ in range(_ATTEMPTS):
            try:
                sock.bind(self._name)
            except OSError:  # the process before lets go of it just now, or never heard of us
                if self._before is None:
                    for spare in (await asyncio.to_thread(self.take)).values():
                        spare.close()
                    self._tell(_SERVING)
                await asyncio.sleep(_PAUSE)
                continue
            sock.listen(1)
            self._waiting = sock
            self._ask_again()
            return
        sock.close()
        log.warning("another process does not let go of the listening sockets")

    def _tell(self, message: bytes) -> None:
        if self._before is not None:
            try:
                self._before.send(message)
            except OSError:  # it has gone
                self._before.close()
                self._before = None

    # As the predecessor

    def _ask_again(self) -> None:
        if self._waiting is not None:
            asyncio.get_running_loop().add_reader(self._waiting, self._asked)

    def _asked(self) -> None:
        """Serve one that asks; others wait meanwhile."""
        if self._waiting is None:
            return
        try:
            other, _ = self._waiting.accept()
        except OSError:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._waiting)
        task = loop.create_task(self._follow(other))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, other: socket.socket) -> None:
        """Give all away to a successor that proves itself, and look what becomes of it."""
        with other:
            other.settimeout(_PATIENCE)
            if not await asyncio.to_thread(self._is_trusted, other):
                self._ask_again()
                return
            served = False
            try:
                other.setblocking(False)
                async with asyncio.timeout(_UNTIL_SERVING) as limit:
                    await _give(other, self._predecessor.offer())
                    async for message in _heard(other):
                        limit.reschedule(None)
                        if message == _PASSED_ON:
                            return
                        self._step_back()
                        served = True
            except OSError as error:
                log.warning("the listening sockets could not be handed over: %s", error)
        log.warning("the process that took over has gone; this one serves again")
        self._predecessor.resume()
        if served:
            await self.wait()
        else:
            self._ask_again()

    def _is_trusted(self, other: socket.socket) -> bool:
        with contextlib.suppress(OSError):
            if trusts(other):
                return True
        self._warn(
            "a process that has not proved to have the same user and rights asked for the "
            "listening sockets; it did not get them"
        )
        return False

    def _warn(self, message: str) -> None:
        """Log something once: others can cause it as often as they like."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s", message)

    def _step_back(self) -> None:
        self._release()
        log.warning("another process has taken over; this one only keeps its connections")
        self._predecessor.retire()
        self._tell(_PASSED_ON)

    def _release(self) -> None:
        if self._waiting is not None:
            asyncio.get_running_loop().remove_reader(self._waiting)
            self._waiting.close()
            self._waiting = None

    def close(self) -> None:
        """Be asked no more; a successor that has not begun yet keeps what it was given."""
        self._release()
        for task in self._tasks:
            task.cancel()
        if self._before is not None:
            self._before.close()
            self._before = None


async def _heard(sock: socket.socket) -> AsyncIterator[bytes]:
    """What the successor says, until it goes."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        while message := await loop.sock_recv(sock, len(_PASSED_ON)):
            yield message


def _receive(sock: socket.socket, found: dict[ListenerKey, socket.socket]) -> bool:
    """Add the sockets that are sent; False where the other end goes before the last one."""
    while (message := socket.recv_fds(sock, _MOST, _AT_ONCE))[0]:
        if message[0] == _END:
            return True
        sockets = [socket.socket(fileno=fd) for fd in message[1]]
        places = [ListenerKey(*place) for place in json.loads(message[0])]
        found.update(zip(places, sockets, strict=True))
    return False


async def _give(sock: socket.socket, sockets: Sockets) -> None:
    """Send sockets, as fast as they are taken; those that were closed meanwhile are left out."""
    items = list(sockets.items())
    for start in range(0, len(items), _AT_ONCE):
        while True:
            some = [item for item in items[start : start + _AT_ONCE] if item[1].fileno() >= 0]
            places = json.dumps([place for place, _ in some]).encode()
            try:
                socket.send_fds(sock, [places], [each.fileno() for _, each in some])
            except BlockingIOError:
                await _writable(sock)
            else:
                break
    await asyncio.get_running_loop().sock_sendall(sock, _END)


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    room = asyncio.Event()
    loop.add_writer(sock, room.set)
    try:
        await room.wait()
    finally:
        loop.remove_writer(sock)
