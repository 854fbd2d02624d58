"""Hand the listening sockets of a running process to its successor (SCM_RIGHTS, unix(7)).

Both meet at an abstract Unix socket, of which each network namespace has one:

    successor                                     predecessor
    connect                          ───────>     accept
    prove itself                     <──────>     prove itself
                                     <───────     the sockets, in batches, then []
    start listeners, write rules                  both processes serve
    "serving"                        ───────>     retire, let go of the name
    bind the name

If the successor ends before "serving" (kill -9, too), the predecessor goes on alone. Clients that
wait to be accepted belong to the sockets, so none is lost, whichever process closes them first.

To prove itself, a process must have our user and, if we have CAP_NET_ADMIN, that capability: root
without it must not get other programs' clients. A process ID would not tell; it is 0 for a process
of another container. So each side sends a new socket and the other side sets SO_DEBUG on it, for
which the kernel wants CAP_NET_ADMIN in the host's user namespace (socket(7)).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Collection, Mapping
from functools import cached_property

from steersman.host.peers import peer
from steersman.host.worker import Changes
from steersman.model.errors import BusyError
from steersman.proxy.engine import Proxy
from steersman.proxy.listeners import FrontendKey, ListenerPlan
from steersman.proxy.sockets import ListenerKey, Sockets

log = logging.getLogger(__name__)
_BATCH = 200  # descriptors of one message; the kernel allows 253
_MAX_MESSAGE = 1 << 18  # bytes
_TIMEOUT = 5.0  # seconds for each message of the other process
_UNTIL_SERVING = 60.0
"""Seconds until a successor that does not serve is taken for gone."""
_PAUSE = 0.02  # seconds between two attempts
_ATTEMPTS = 250  # to bind the name
_UNCLAIMED = 10.0
"""Seconds for which the predecessor's sockets stay open: a listener may have to start again."""

# Messages. A newer version of this program must still understand them.
_CHALLENGE, _DONE = b"set SO_DEBUG", b"done"
_END = b"[]"  # after the last batch of sockets
_SERVING = b"serving"


class SocketHandoff:
    """Makes sure that one process at a time changes rules and opens listeners.

    `take_over` and `changes` are for the mode's thread, the other methods for the event loop.
    """

    def __init__(self, name: str, proxy: Proxy) -> None:
        """Prepare to hand over a proxy's sockets under a name."""
        self._address = f"\0{name}"
        self._proxy = proxy
        self._link: socket.socket | None = None
        """The connection to the predecessor, which notices if this process dies."""
        self._waiting: asyncio.Task[None] | None = None
        """Waits for successors."""
        self._asked = self._warned = False
        self.alone = True
        """Whether no successor starts or serves."""
        self.retired = asyncio.Event()
        """A successor serves."""

    @cached_property
    def _gone(self) -> int:
        """An eventfd that counts successors that have gone before they served."""
        return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def changes(self) -> Changes:
        """Hear of successors that have gone before they served: they may have changed the rules."""

        def judge() -> bool:
            with contextlib.suppress(BlockingIOError):
                return bool(os.eventfd_read(self._gone))
            return False

        return Changes(self._gone, judge)

    def take_over(self) -> None:
        """Take over the predecessor's sockets, once, before the first listener is started. Blocks.

        Call it in the thread that has listeners started.
        """
        if self._asked:
            return
        self._asked = True
        self._link, sockets = receive(self._address)
        self._proxy.inherit(sockets)
        if sockets:
            log.info("took over %d listening sockets", len(sockets))

    async def started(self) -> None:
        """Replace the predecessor and wait for a successor; call it once listeners serve."""
        if self._waiting is not None:
            return
        if self._link is not None:
            with contextlib.suppress(OSError):  # it has gone
                self._link.send(_SERVING)
        loop = asyncio.get_running_loop()
        loop.call_later(_UNCLAIMED, self._proxy.inherit, {})
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door.setblocking(False)
        self._waiting = loop.create_task(self._wait_for_successors(door))
        self._waiting.add_done_callback(lambda _: door.close())
        for _ in range(_ATTEMPTS):
            try:
                door.bind(self._address)
            except OSError:  # the predecessor lets go of it once it has our message
                await asyncio.sleep(_PAUSE)
            else:
                door.listen(1)
                return
        log.warning("another process does not release the listening sockets")

    async def follow(
        self, wanted: Mapping[FrontendKey, ListenerPlan], without_endpoints: Collection[FrontendKey]
    ) -> None:
        """Change the plans of existing listeners while clients may come to both processes.

        Args:
            wanted: new plans; those of new listeners are left to the successor.
            without_endpoints: listeners whose connections are reset if their plans say so.

        Raises:
            BusyError: always, as rules have to wait.
        """
        have = {key: plan for key, plan in wanted.items() if self._proxy.listens_at(key, plan)}
        await self._proxy.start(have)
        self._proxy.reset_connections(without_endpoints)
        raise BusyError("another process is taking over")

    async def wait(self) -> None:
        """Return once a successor serves; at once if there is nothing to hand over."""
        if self._waiting is not None:
            await self.retired.wait()

    async def _wait_for_successors(self, door: socket.socket) -> None:
        while not self.retired.is_set():
            try:
                other, _ = await asyncio.get_running_loop().sock_accept(door)
            except OSError:  # it does not listen yet, or there are no descriptors
                await asyncio.sleep(_PAUSE)
            else:
                with other:
                    await self._hand_over(other)

    async def _hand_over(self, other: socket.socket) -> None:
        """Hand the sockets to a process that proves itself, and wait until it serves."""
        other.settimeout(_TIMEOUT)
        if not await asyncio.to_thread(trusts, other):
            if not self._warned:  # others can cause it as often as they like
                self._warned = True
                log.warning(
                    "refused to hand over the listening sockets: the process that asked has not "
                    "proved that it has the same user and capabilities"
                )
            return
        self.alone = False
        try:
            async with asyncio.timeout(_UNTIL_SERVING):
                await _send_sockets(other, self._proxy.sockets())
                said = await asyncio.get_running_loop().sock_recv(other, len(_SERVING))
        except OSError as error:
            log.warning("could not hand over the listening sockets: %s", str(error) or "no answer")
            said = b""
        if said == _SERVING:
            log.warning("another process has taken over; this one only keeps its connections")
            self._proxy.retire()
            self.retired.set()
        else:
            log.warning("the process that took over has gone; this one serves again")
            self.alone = True
            os.eventfd_write(self._gone, 1)

    def close(self) -> None:
        """Wait for no successor; one that is starting keeps the sockets it received.

        A mode that is cancelled while it closes does this twice.
        """
        self._proxy.inherit({})
        if (gone := vars(self).pop("_gone", None)) is not None:
            os.close(gone)
        if self._waiting is not None:
            self._waiting.cancel()
        if self._link is not None:
            self._link.close()


def receive(address: str) -> tuple[socket.socket | None, Sockets]:
    """Return the connection to the predecessor and its sockets; None and {} if there is none.

    This blocks; call it in a thread.
    """
    found: dict[ListenerKey, socket.socket] = {}
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(_TIMEOUT)
    try:
        link.connect(address)
        if not trusts(link):
            raise OSError("the other process has not proved that it has our user and capabilities")
        while (message := socket.recv_fds(link, _MAX_MESSAGE, _BATCH))[0] != _END:
            sockets = [socket.socket(fileno=descriptor) for descriptor in message[1]]
            keys = [ListenerKey(*key) for key in json.loads(message[0])]
            found.update(zip(keys, sockets, strict=True))
        return link, found
    except ConnectionRefusedError:  # there is no predecessor
        pass
    except (OSError, ValueError, TypeError) as error:
        log.warning("could not take over all listening sockets: %s", error)
    link.close()
    return None, found


async def _send_sockets(link: socket.socket, sockets: Sockets) -> None:
    """Send sockets as fast as they are received."""
    link.setblocking(False)
    waiting = list(sockets.items())
    # A listener may stop while this waits. Its socket is closed then and cannot be sent.
    while waiting := [item for item in waiting if item[1].fileno() >= 0]:
        batch = waiting[:_BATCH]
        keys = json.dumps([key for key, _ in batch]).encode()
        try:
            socket.send_fds(link, [keys], [sock.fileno() for _, sock in batch])
        except BlockingIOError:
            await asyncio.sleep(_PAUSE)
        else:
            del waiting[:_BATCH]
    await asyncio.get_running_loop().sock_sendall(link, _END)


def trusts(link: socket.socket) -> bool:
    """Whether the process at the other end proves itself; it must call this at the same time."""
    if peer(link)[1] != os.geteuid():
        return False
    ours, probe = socket.socketpair()
    with ours, probe, contextlib.suppress(OSError):
        socket.send_fds(link, [_CHALLENGE], [ours.fileno()])
        # Their challenge: mark the socket that they sent, if we can.
        message, descriptors, *_ = socket.recv_fds(link, len(_CHALLENGE) + 1, 1)
        for descriptor in descriptors:
            with socket.socket(fileno=descriptor) as theirs:
                _set_debug(theirs)
        link.send(_DONE)
        if (message, link.recv(len(_DONE) + 1)) != (_CHALLENGE, _DONE):
            return False
        # Our challenge: they must have marked ours, if we could have marked theirs.
        return not _set_debug(probe) or bool(ours.getsockopt(socket.SOL_SOCKET, socket.SO_DEBUG))
    return False


def _set_debug(sock: socket.socket) -> bool:
    """Set SO_DEBUG; False without the capability."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_DEBUG, 1)
        return True
    return False
