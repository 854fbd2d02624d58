"""One instance for each node: a lock that the kernel holds, and the way to take over from it.

Two instances that program the same network namespace undo each other's work. The lock has to work
between containers that share nothing but that namespace, must be gone when its holder was killed,
and must not let other local users keep an instance from starting. So it is a table of nf_tables
with an owner (NFT_TABLE_F_OWNER, Linux 5.12):

- the kernel has one table of a name in a network namespace, for every mount and pid namespace;
- only CAP_NET_ADMIN can create one, so no one can block it who could not change the rules anyway;
- it belongs to the netlink socket that created it. No other socket can change or delete it (`nft
  flush ruleset` skips it), and it goes when the socket is closed, by kill -9, too;
- its comment identifies the holder, and can be read while the holder is stopped (SIGSTOP).

The table has no chains: packets never see it. To take over (`--take-over`):

    newcomer                                        holder
    creates a second table, with its comment
    connects to an abstract Unix socket  -------->  wakes, reads the comment of the second table
                                                    stops as after SIGTERM
    creates the first table, serves      <--------  releases the lock once it writes no more

The holder believes the kernel and not the message, so only CAP_NET_ADMIN can make an instance stop;
others can at most make it look, ten times a second. Rules stay in the kernel, so there is no moment
without them. The userspace mode, whose connections end with the process, releases the lock at once,
and ends when the newcomer has its listening sockets.

Without CAP_NET_ADMIN, or if the kernel has no such tables, the abstract socket itself is the lock.
Anyone can bind its name: a holder that is neither root nor our own user is not trusted, and then
there is no lock. Every instance binds the name if it is free, so that instances without the right
to read tables are kept out by those with it.

On Windows the lock is a mutex with a name, which the system releases when its process ends. No
instance takes over there.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from steersman.host.peers import is_trusted, peer
from steersman.model.times import rfc3339
from steersman.run.process.startup import StartError

if TYPE_CHECKING:
    from steersman.netfilter.nft.owned import OwnedTables

log = logging.getLogger("steersman")

NAME = "steersman-instance"
"""Name of the table that is the lock, and of the socket."""
NEXT = "steersman-next"
"""Name of the table by which a newcomer asks."""
_PAUSE = 0.1  # seconds between two looks
_MOST_AT_ONCE = 256
"""Connections of a look: all that may wait, and not all that strangers can make meanwhile."""
_SILENT = 2.0  # seconds that an unreachable socket may belong to an instance that ends
_ALREADY_EXISTS = 183  # ERROR_ALREADY_EXISTS of winerror.h
PATIENCE = 30.0
"""Seconds that the holder has to release the lock."""


class Holder(msgspec.Struct, frozen=True):
    """The identity of an instance."""

    pid: int
    """Its pid in its own pid namespace."""
    host: str
    mode: str
    since: int
    """Seconds since 1970."""
    door: str = ""
    """Name of the abstract socket that wakes it."""

    def __str__(self) -> str:
        since = rfc3339(self.since * 10**9)
        return f"pid {self.pid} on host {self.host}, {self.mode} mode, since {since}"

    @property
    def comment(self) -> str:
        """The comment of its table, at most 254 bytes."""
        parts = (f"pid={self.pid}", f"mode={self.mode}", f"since={self.since}", f"door={self.door}")
        return " ".join((*parts, f"host={self.host}"))[:254]

    @classmethod
    def of(cls, comment: str) -> Holder:
        """Parse a comment; missing fields are 0 or ?."""
        words = dict(word.split("=", 1) for word in comment.split() if "=" in word)

        def number(name: str) -> int:
            digits = words.get(name, "")
            return int(digits[:10]) if digits.isascii() and digits.isdigit() else 0

        return cls(
            number("pid"),
            words.get("host", "?"),
            words.get("mode", "?"),
            number("since"),
            words.get("door", ""),
        )


def running() -> Holder | None:
    """Return the instance that runs on this node, as far as this process may see it."""
    if sys.platform == "win32":
        return None
    from steersman.netfilter.nft.owned import NoTablesError, OwnedTables  # noqa: PLC0415 - it calls what Windows lacks

    try:
        tables = OwnedTables()
    except NoTablesError:
        return None
    try:
        return _holder(tables, NAME)
    finally:
        tables.close()


class NodeLock:
    """Makes this process the only instance on its node; this class locks nothing."""

    newcomer: asyncio.Future[Holder]
    """The instance that asks to take over, since the last `claim`."""

    async def claim(self) -> None:
        """Claim the lock.

        Raises:
            StartError: another instance runs, or does not release the lock.
        """
        self.newcomer = asyncio.get_running_loop().create_future()

    def release(self) -> None:
        """Release the lock. Idempotent."""

    def rename(self, mode: str) -> None:
        """Say in the lock that another mode runs; others only read it to name the holder."""


class MachineInstance(NodeLock):
    """This process as the one instance of a machine with Windows: it holds a mutex."""

    def __init__(self) -> None:
        self._mutex: int | None = None

    async def claim(self) -> None:
        """Create the mutex, as `NodeLock.claim`."""
        await super().claim()
        kernel32: Any = vars(ctypes)["WinDLL"]("kernel32", use_last_error=True)
        kernel32.CreateMutexW.restype = ctypes.c_void_p
        # A service and the sessions of users share the names that begin so.
        self._mutex = kernel32.CreateMutexW(None, False, f"Global\\{NAME}")
        error = vars(ctypes)["get_last_error"]()
        if self._mutex is None or error == _ALREADY_EXISTS:
            self.release()
            raise StartError("another instance runs on this machine; stop it first")

    def release(self) -> None:
        """Release the mutex."""
        if self._mutex is not None:
            vars(ctypes)["WinDLL"]("kernel32").CloseHandle(ctypes.c_void_p(self._mutex))
            self._mutex = None


class Instance(NodeLock):
    """This process as the one instance of its network namespace."""

    def __init__(
        self, mode: str, host: str, *, take_over: bool, patience: float = PATIENCE
    ) -> None:
        """Describe this process; nothing happens before `claim`.

        With `take_over` a running instance has `patience` seconds to release the lock.
        """
        name = host.encode("ascii", "replace").decode()[:64] or "?"
        self._me = Holder(os.getpid(), "".join(name.split()), mode, int(time.time()))
        self._take_over = take_over
        self._patience = patience
        self._tables: OwnedTables | None = None
        self._door: socket.socket | None = None

    async def claim(self) -> None:
        """Claim the lock of this network namespace, as `NodeLock.claim`."""
        from steersman.netfilter.nft.owned import NoTablesError, OwnedTables  # noqa: PLC0415 - it calls what Windows lacks

        await super().claim()
        try:
            self._tables = OwnedTables()
            await self._claim_table(self._tables)
        except NoTablesError as reason:
            log.debug("locking by a socket, not by a table: %s", reason)
            if self._tables is not None:
                self._tables.close()
                self._tables = None
            await self._claim_socket()
        if self._door is not None:
            asyncio.get_running_loop().add_reader(self._door, self._on_connection)

    def release(self) -> None:
        """Release the lock."""
        if self._door is not None:
            with contextlib.suppress(RuntimeError):  # no event loop runs any more
                asyncio.get_running_loop().remove_reader(self._door)
            self._door.close()
            self._door = None
        if self._tables is not None:
            self._tables.close()
            self._tables = None

    def rename(self, mode: str) -> None:
        """Write another comment into the table."""
        self._me = msgspec.structs.replace(self._me, mode=mode)
        if self._tables is not None and not self._tables.rename(NAME, self._me.comment):
            log.warning("the lock still names the previous mode: the kernel refused to change it")

    # By a table

    async def _claim_table(self, tables: OwnedTables) -> None:
        # If another process has bound the usual name, a random one still lets newcomers wake us.
        self._door = _bind(NAME) or _bind(f"{NAME}-{os.urandom(8).hex()}")
        door = self._door.getsockname()[1:].decode() if self._door else ""
        self._me = msgspec.structs.replace(self._me, door=door)
        if tables.make(NAME, self._me.comment):
            return
        first = _holder(tables, NAME)
        if first is not None and not self._take_over:
            self.release()
            raise StartError(_refusal(first, _connect(first.door)))
        try:
            async with asyncio.timeout(self._patience):
                await self._wait_for_table(tables)
        except TimeoutError:
            self.release()
            raise StartError(_timed_out(first, self._patience)) from None
        except BaseException:
            self.release()
            raise
        if first is not None:
            log.info("took over from the previous instance: %s", first)

    async def _wait_for_table(self, tables: OwnedTables) -> None:
        """Ask the holder to release the lock until it is ours."""
        # The lock may be released, or taken by another newcomer, between any two of these calls.
        asks = False
        while not tables.make(NAME, self._me.comment):
            now = _holder(tables, NAME)
            if now is None:
                tables.remove(NAME)  # without an owner: loaded from a file, or just released
            elif not self._take_over:  # another newcomer was faster
                raise StartError(_refusal(now, _connect(now.door)))
            else:
                asks = asks or tables.make(NEXT, self._me.comment)
                if asks:
                    _connect(now.door, self._me.comment)
            await asyncio.sleep(_PAUSE)
        if asks:
            tables.remove(NEXT)

    def _on_connection(self) -> None:
        """Look for a newcomer after a connection, at most ten times a second."""
        assert self._door is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._door)
        newcomer: Holder | None = None
        with contextlib.suppress(OSError):  # BlockingIOError: no more connections
            for _ in range(_MOST_AT_ONCE):
                other, _ = self._door.accept()
                with other, contextlib.suppress(OSError):
                    other.setblocking(False)
                    message = other.recv(255).decode(errors="replace")
                    if message and is_trusted(peer(other)[1]):
                        newcomer = Holder.of(message)
        if self._tables is not None:  # the kernel knows; a message proves nothing
            newcomer = _holder(self._tables, NEXT)
        if newcomer is not None:
            self.newcomer.set_result(newcomer)
        else:

            def listen_again() -> None:
                if self._door is not None:
                    loop.add_reader(self._door, self._on_connection)

            loop.call_later(_PAUSE, listen_again)

    # By a socket

    async def _claim_socket(self) -> None:
        if self._door is not None and self._door.getsockname()[1:].decode() != NAME:
            self._door.close()
            self._door = None
        self._door = self._door or _bind(NAME)
        message = self._me.comment if self._take_over else ""
        start = time.monotonic()
        while self._door is None:
            # The listener is an instance, a stranger that squats on the name, or just ended.
            pid, user = _connect(NAME, message)
            waited = time.monotonic() - start
            trusted = is_trusted(user)
            if trusted and not self._take_over:
                raise StartError(
                    f"another instance runs on this node (pid {pid}); stop it first, or give "
                    "--take-over"
                )
            if trusted and waited > self._patience:
                raise StartError(_timed_out(None, self._patience))
            if not trusted and (user >= 0 or waited > _SILENT):
                who = f"process {pid} of user {user}" if user >= 0 else "a process that is silent"
                log.warning(
                    "%s has bound the abstract socket %s and is not an instance: starting "
                    "without a lock",
                    *(who, NAME),
                )
                return
            await asyncio.sleep(_PAUSE)
            self._door = _bind(NAME)


def _holder(tables: OwnedTables, name: str) -> Holder | None:
    comment = tables.comment(name)
    return None if comment is None else Holder.of(comment)


def _bind(name: str) -> socket.socket | None:
    """Listen at an abstract name; return None if it is in use."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.bind(f"\0{name}")
    except OSError:
        sock.close()
        return None
    sock.listen(128)
    return sock


def _connect(name: str, message: str = "") -> tuple[int, int]:
    """Wake the listener at an abstract name; return its pid and user, (0, -1) if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(f"\0{name}")
        except OSError:
            return 0, -1
        found = peer(sock)
        with contextlib.suppress(OSError):  # it has already closed the connection
            sock.send(message.encode())
        return found


def _refusal(first: Holder, peer: tuple[int, int]) -> str:
    here = f", pid {peer[0]} as seen from here" if peer[0] not in (0, first.pid) else ""
    return f"another instance runs on this node ({first}{here}); stop it first, or give --take-over"


def _timed_out(first: Holder | None, seconds: float) -> str:
    who = f" ({first})" if first else ""
    text = f"the previous instance{who} did not release the lock within {seconds:g} s"
    return f"{text}; stop or kill it"
