"""The lock of a node's one instance: tables that belong to a socket, and doors that wake its owner.

The program's own `Instance` runs on them, and a process loses what it holds when it ends, however
it ends. So two processes write at the same time only if the lock is wrong.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.sim.universe import SimLoop, Universe

ROOT = (1, 0)
"""Pid and user of a process of root."""
_NOBODY = (0, -1)


class Locks:
    """The owned tables and the abstract sockets of a node."""

    def __init__(self, universe: Universe) -> None:
        self.universe = universe
        self.tables: dict[str, tuple[OwnedTables, str]] = {}
        """By name: the owner and the comment."""
        self.doors: dict[str, Door] = {}

    def open_tables(self) -> OwnedTables:
        return OwnedTables(self)

    def bind(self, name: str) -> Door | None:
        """Listen at a name; None if somebody else does."""
        if name in self.doors:
            return None
        door = self.doors[name] = Door(self, name)
        return door

    def connect(self, name: str, message: str = "") -> tuple[int, int]:
        """Wake the listener at a name; return its pid and user."""
        door = self.doors.get(name)
        if door is None:
            return _NOBODY
        self.universe.after(self.universe.dice.uniform(1e-5, 1e-3), lambda: door.knock(message))
        return ROOT

    def forget(self, loop: SimLoop) -> None:
        """Release what a process held that has ended."""
        for name, (owner, _) in tuple(self.tables.items()):
            if owner.loop is loop:
                del self.tables[name]
        for name, door in tuple(self.doors.items()):
            if door.loop is loop:
                del self.doors[name]


class OwnedTables:
    """Stands in for `steersman.netfilter.nft.owned.OwnedTables`."""

    def __init__(self, locks: Locks) -> None:
        self.loop = asyncio.get_running_loop()
        self._tables = locks.tables

    def make(self, name: str, comment: str) -> bool:
        if name in self._tables:
            return False
        self._tables[name] = self, comment
        return True

    def comment(self, name: str) -> str | None:
        return self._tables[name][1] if name in self._tables else None

    def remove(self, name: str) -> None:
        if name in self._tables and self._tables[name][0] is self:
            del self._tables[name]

    def rename(self, name: str, comment: str) -> bool:
        if name not in self._tables or self._tables[name][0] is not self:
            return False
        self._tables[name] = self, comment
        return True

    def close(self) -> None:
        for name in [name for name, (owner, _) in self._tables.items() if owner is self]:
            del self._tables[name]


class Door:
    """A listening abstract socket."""

    def __init__(self, locks: Locks, name: str) -> None:
        self.loop: Any = asyncio.get_running_loop()
        self._locks = locks
        self._name = name
        self._messages: deque[str] = deque()
        self._reader: Callable[[], object] | None = None

    @property
    def reader(self) -> Callable[[], object] | None:
        """Called while somebody waits to be accepted."""
        return self._reader

    @reader.setter
    def reader(self, call: Callable[[], object] | None) -> None:
        self._reader = call
        self._wake()

    def knock(self, message: str) -> None:
        self._messages.append(message)
        self._wake()

    def _wake(self) -> None:
        if self._messages and self._reader is not None and not self.loop.is_closed():
            self.loop.call_soon(self._reader)

    def accept(self) -> tuple[Caller, None]:
        if not self._messages:
            raise BlockingIOError(errno.EAGAIN, "nobody waits")
        return Caller(self._messages.popleft()), None

    def getsockname(self) -> bytes:
        return b"\0" + self._name.encode()

    def close(self) -> None:
        self._locks.doors.pop(self._name, None)


class Caller:
    """A connection to a door, as it is accepted."""

    def __init__(self, message: str) -> None:
        self._message = message.encode()

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def setblocking(self, _on: bool) -> None:
        pass

    def recv(self, _size: int) -> bytes:
        return self._message
