"""Hand the listening sockets of a running process to its successor (SCM_RIGHTS, unix(7)).

Both meet at an abstract Unix socket, of which each network namespace has one:

    successor                                     predecessor
    connect                          ───────>     accept
    prove itself                     <──────>     prove itself
                                     <───────     the sockets, in batches, then []
    start listeners, write rules                  both processes serve
    "serving"                        ───────>     retire: stop accepting, let go of the name
    bind the name
    "passed on", when it retires     ───────>     nothing more to do

The connection between the two, the link, stays open. If the successor disappears (kill -9, too)
before "passed on", the predecessor serves again. Clients that wait to be accepted belong to the
sockets, so none is lost, whichever process closes them first.

To prove itself, a process must have our user and, if we have CAP_NET_ADMIN, that capability. To
find out, each side sends a new socket and the other side sets SO_DEBUG on it (harmless, and
reserved for CAP_NET_ADMIN in the host's user namespace: socket(7)). So the kernel itself checks the
capability at that moment. A reused process ID or root in another user namespace gains nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Protocol

from steersman.model.errors import BusyError
from steersman.proxy.engine import Proxy
from steersman.proxy.listeners import FrontendKey, ListenerPlan
from steersman.proxy.sockets import ListenerKey, Sockets

log = logging.getLogger(__name__)
_BATCH = 200  # descriptors of one message; the kernel allows 253
_MAX_MESSAGE = 1 << 18  # bytes
_TIMEOUT = 2.0  # seconds for each message of the other process
_UNTIL_SERVING = 60.0
"""Seconds until a successor that does not serve is taken for gone."""
_ATTEMPTS = 40
_PAUSE = 0.05  # seconds between attempts
_UNCLAIMED = 10.0
"""Seconds until inherited sockets that no listener has claimed are closed. Not at once: a batch
that is refused comes again in parts."""
_PEER = struct.Struct("iII")  # struct ucred: process, user, group

# Messages. A newer version of this program must still understand them.
_CHALLENGE, _DONE = b"set SO_DEBUG", b"done"
_END = b"[]"  # after the last batch of sockets
_SERVING = b"serving"
_PASSED_ON = b"passed on"


class Predecessor(Protocol):
    """The part of a process that reacts to its successor."""

    def offer(self) -> Sockets:
        """Return the sockets to hand over; from now on the successor may use them, too."""
        ...

    def retire(self) -> None:
        """Leave new clients to the successor, which serves now."""
        ...

    def resume(self) -> None:
        """Serve again: the successor has gone."""
        ...


class HandoffChannel:
    """Receives the predecessor's sockets, then listens for a successor."""

    def __init__(self, name: str, process: Predecessor) -> None:
        """Make a channel; both processes must use the same name."""
        self._name = f"\0{name}"
        self._process = process
        self._listening: socket.socket | None = None
        self._link: socket.socket | None = None
        """The link to the predecessor."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._warned: set[str] = set()

    # As the successor

    def receive(self) -> dict[ListenerKey, socket.socket]:
        """Return the predecessor's sockets; {} if there is none, or it does not answer.

        This blocks; call it in a thread.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        found: dict[ListenerKey, socket.socket] = {}
        try:
            sock.settimeout(_TIMEOUT)
            sock.connect(self._name)
            if not trusts(sock):
                self._warn_once(
                    "not taking over listening sockets: the other process has not proved that "
                    "it has the same user and capabilities"
                )
            else:
                while (message := socket.recv_fds(sock, _MAX_MESSAGE, _BATCH))[0]:
                    if message[0] == _END:
                        self._link = sock
                        return found
                    sockets = [socket.socket(fileno=fd) for fd in message[1]]
                    keys = [ListenerKey(*key) for key in json.loads(message[0])]
                    found.update(zip(keys, sockets, strict=True))
        except ConnectionRefusedError:  # there is no predecessor
            pass
        except (OSError, ValueError, TypeError) as error:
            self._warn_once(f"could not take over all listening sockets: {error}")
        sock.close()
        return found

    async def listen(self) -> None:
        """Tell the predecessor that this process serves, and listen for a successor."""
        self._tell_predecessor(_SERVING)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        # The name is free once the predecessor has read our message, within milliseconds.
        for _ in range(_ATTEMPTS):
            try:
                sock.bind(self._name)
            except OSError:
                # It may have been too slow to answer `receive`, and not know of us. Ask again: our
                # own sockets serve by now, so its sockets are not needed.
                if self._link is None:
                    for spare in (await asyncio.to_thread(self.receive)).values():
                        spare.close()
                    self._tell_predecessor(_SERVING)
                await asyncio.sleep(_PAUSE)
                continue
            sock.listen(1)
            self._listening = sock
            self._accept_next()
            return
        sock.close()
        log.warning("another process does not release the listening sockets")

    def _tell_predecessor(self, message: bytes) -> None:
        if self._link is not None:
            try:
                self._link.send(message)
            except OSError:  # it has gone
                self._link.close()
                self._link = None

    # As the predecessor

    def _accept_next(self) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        """Accept one process; others wait until it turns out not to be the successor."""
        if self._listening is None:
            return
        try:
            other, _ = self._listening.accept()
        except OSError:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listening)
        task = loop.create_task(self._hand_over(other))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hand_over(self, other: socket.socket) -> None:
        """Hand the sockets to a process that proves itself, and follow its progress."""
        loop = asyncio.get_running_loop()
        with other:
            other.settimeout(_TIMEOUT)
            try:
                trusted = await asyncio.to_thread(trusts, other)
            except OSError:
                trusted = False
            # 1. Refuse a process that is not ours.
            if not trusted:
                self._warn_once(
                    "refused to hand over the listening sockets: the process that asked has not "
                    "proved that it has the same user and capabilities"
                )
                self._accept_next()
                return
            # 2. Hand over, and wait for its messages until it ends.
            retired = False
            try:
                other.setblocking(False)
                async with asyncio.timeout(_UNTIL_SERVING) as limit:
                    await _send_sockets(other, self._process.offer())
                    with contextlib.suppress(ConnectionError):
                        while message := await loop.sock_recv(other, len(_PASSED_ON)):
                            limit.reschedule(None)  # it serves, and may do so for months
                            if message == _PASSED_ON:
                                return
                            self._release_name()
                            log.warning(
                                "another process has taken over; "
                                "this one only keeps its connections"
                            )
                            self._process.retire()
                            self._tell_predecessor(_PASSED_ON)
                            retired = True
            except OSError as error:
                log.warning("could not hand over the listening sockets: %s", error)
        # 3. It has gone: serve again.
        log.warning("the process that took over has gone; this one serves again")
        self._process.resume()
        if retired:
            await self.listen()
        else:
            self._accept_next()

    def _warn_once(self, message: str) -> None:
        """Log a warning that other processes can cause as often as they like."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s", message)

    def _release_name(self) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None

    def close(self) -> None:
        """Stop listening for a successor; one that is starting keeps the sockets it received."""
        self._release_name()
        for task in self._tasks:
            task.cancel()
        if self._link is not None:
            self._link.close()
            self._link = None


async def _send_sockets(sock: socket.socket, sockets: Sockets) -> None:
    """Send sockets as fast as they are received; leave out those that are closed by then."""
    loop = asyncio.get_running_loop()
    items = list(sockets.items())
    for start in range(0, len(items), _BATCH):
        while True:
            # A listener may stop while this waits. Its socket is closed then and cannot be sent.
            batch = [item for item in items[start : start + _BATCH] if item[1].fileno() >= 0]
            keys = json.dumps([key for key, _ in batch]).encode()
            try:
                socket.send_fds(sock, [keys], [each.fileno() for _, each in batch])
            except BlockingIOError:
                writable = asyncio.Event()
                loop.add_writer(sock, writable.set)
                try:
                    await writable.wait()
                finally:
                    loop.remove_writer(sock)
            else:
                break
    await loop.sock_sendall(sock, _END)


def trusts(sock: socket.socket) -> bool:
    """Whether the process at the other end proves itself; it must call this at the same time.

    Raises:
        OSError: it does not answer in time, or has gone.
    """
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    if int(_PEER.unpack(data)[1]) != os.geteuid():
        return False
    with _unix_socket() as probe, _unix_socket() as ours:
        socket.send_fds(sock, [_CHALLENGE], [ours.fileno()])
        # Their challenge: mark the socket that they sent, if we can.
        message, descriptors, *_ = socket.recv_fds(sock, len(_CHALLENGE) + 1, 1)
        for descriptor in descriptors:
            with socket.socket(fileno=descriptor) as theirs:
                _set_debug(theirs)
        if message != _CHALLENGE:
            return False
        sock.send(_DONE)
        if sock.recv(len(_DONE) + 1) != _DONE:
            return False
        # Our challenge: they must have marked ours, if we could have marked theirs.
        we_are_capable = _set_debug(probe)
        return not we_are_capable or bool(ours.getsockopt(socket.SOL_SOCKET, socket.SO_DEBUG))


def _unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def _set_debug(sock: socket.socket) -> bool:
    """Set SO_DEBUG; False without the capability."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_DEBUG, 1)
    except OSError:
        return False
    return True


class Stage(Enum):
    """Which process serves.

    SERVING ── sockets handed over ──> OFFERED ── the successor serves ──> RETIRED
       ^                                  │                                   │
       └────────────────── the successor has gone ──────────────┴─────────────┘
    """

    SERVING = "this process"
    OFFERED = "this process, until its successor does"
    RETIRED = "the successor"


class SocketHandoff:
    """Makes sure that one process at a time changes rules and opens listeners."""

    def __init__(self, name: str, proxy: Proxy) -> None:
        """Prepare to hand over a proxy's sockets under a name; "" never hands over anything."""
        self._proxy = proxy
        self._channel = HandoffChannel(name, self) if name else None
        self._taken_over = self._listens = False
        self._receiving: asyncio.Task[dict[ListenerKey, socket.socket]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._resumed = asyncio.Event()
        self._retired = asyncio.Event()
        self.stage = Stage.SERVING

    async def take_over(self) -> None:
        """Take over the predecessor's sockets; call it before the first listener is started.

        If it is cancelled, the sockets are for the next call, or for `close`: the thread receives
        them all the same, and the predecessor changes nothing until it hears from us.
        """
        if self._channel is not None and not self._taken_over:
            if self._receiving is None:
                receive = asyncio.to_thread(self._channel.receive)
                self._receiving = asyncio.create_task(receive)
            sockets = await asyncio.shield(self._receiving)
            self._taken_over = True
            self._proxy.inherited.replace(sockets)
            if sockets:
                log.info("took over %d listening sockets", len(sockets))

    async def started(self) -> None:
        """Replace the predecessor and listen for a successor; call it once listeners serve."""
        if self._channel is not None and not self._listens:
            self._listens = True
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_UNCLAIMED, self._proxy.inherited.replace, {})
            await self._channel.listen()

    async def follow(
        self,
        wanted: Mapping[FrontendKey, ListenerPlan],
        without_endpoints: Collection[FrontendKey],
        gone: Collection[FrontendKey],
    ) -> None:
        """Change the plans of existing listeners while clients come to both processes.

        Args:
            wanted: new plans; those of new listeners are left to the successor.
            without_endpoints: listeners whose connections are reset if their plans say so.
            gone: listeners to stop.

        Raises:
            BusyError: it is not clear yet which process serves; rules have to wait.
        """
        have = self._proxy.listeners
        same = {
            key: plan
            for key, plan in wanted.items()
            if key in have and (plan.bind, plan.port) == (have[key].bind, have[key].port)
        }
        await self._proxy.start(same)
        self._proxy.reset_connections(without_endpoints)
        if self.stage is Stage.OFFERED:
            raise BusyError("another process is taking over")
        self._proxy.stop(self._proxy.take(gone))

    async def wait_until_resumed(self) -> None:
        """Return when a successor that served has gone: it may have changed the rules."""
        await self._resumed.wait()
        self._resumed.clear()

    async def wait_until_retired(self) -> None:
        """Return once a successor serves; at once if there is nothing to hand over."""
        if self._listens:
            await self._retired.wait()

    # The HandoffChannel calls these.

    def offer(self) -> Sockets:
        """Return all sockets; continue to serve until the successor does."""
        self.stage = Stage.OFFERED
        return self._proxy.sockets()

    def retire(self) -> None:
        """Leave rules and new listeners to the successor."""
        self.stage = Stage.RETIRED
        self._retired.set()
        self._proxy.retire()

    def resume(self) -> None:
        """Serve again."""
        self.stage = Stage.SERVING
        self._retired.clear()
        self._proxy.resume()
        self._resumed.set()

    def close(self) -> None:
        """Stop listening for a successor."""
        if self._timer is not None:
            self._timer.cancel()
        self._proxy.inherited.replace({})
        if self._channel is not None:
            self._channel.close()
        if self._receiving is not None and not self._taken_over:
            self._receiving.add_done_callback(self._refuse)

    def _refuse(self, receiving: asyncio.Task[dict[ListenerKey, socket.socket]]) -> None:
        """Let go of sockets that came too late: then the predecessor serves again."""
        if not receiving.cancelled() and receiving.exception() is None:
            for sock in receiving.result().values():
                sock.close()
        if self._channel is not None:
            self._channel.close()
