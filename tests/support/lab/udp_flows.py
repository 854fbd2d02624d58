"""Clients of UDP that never pause: the entry that conntrack has for each never ends by itself."""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Way(NamedTuple):
    """Where a client is, and what it asks."""

    source: str
    address: str
    port: int


class Flows:
    """Clients that ask all the time, each from one socket; served by one thread."""

    def __init__(self, make: Callable[[str], socket.socket], every: float = 0.02) -> None:
        """Start without clients.

        Args:
            make: returns a new socket of who has an address.
            every: seconds between two questions of a client.
        """
        self._make, self._every = make, every
        self._selector = selectors.DefaultSelector()
        self._answers: dict[Way, tuple[float, str]] = {}
        """When each client was last answered, and by which endpoint."""
        self._moved: dict[Way, float] = {}
        """When it was first answered by that endpoint."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, ways: Sequence[Way]) -> None:
        """Let a client ask on each way from now on; twice is once."""
        known = {key.data for key in self._selector.get_map().values()}
        for way in ways:
            if way not in known:
                sock = self._make(way.source)
                sock.setblocking(False)
                sock.bind((way.source, 0))
                sock.connect((way.address, way.port))
                self._selector.register(sock, selectors.EVENT_READ, way)

    def answer(self, way: Way, since: float) -> str:
        """Return who last answered a client; "" if nobody has since a time (monotonic)."""
        at, who = self._answers.get(way, (0.0, ""))
        return who if at >= since else ""

    def moved(self, way: Way) -> float:
        """Return when a client was first answered by the endpoint that it has (monotonic)."""
        return self._moved[way]

    def _run(self) -> None:
        while not self._stop.is_set():
            end = time.monotonic() + self._every
            for key in list(self._selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                try:
                    key.fileobj.send(b"who are you?")
                except OSError as error:  # refused, or no route: it goes on asking
                    if error.errno == errno.EBADF:
                        return
            while (left := end - time.monotonic()) > 0:
                for key, _ in self._selector.select(left):
                    assert isinstance(key.fileobj, socket.socket)
                    try:
                        who = key.fileobj.recv(100).decode().partition(" ")[0]
                    except OSError:
                        continue
                    now = time.monotonic()
                    if who != self._answers.get(key.data, (0.0, ""))[1]:
                        self._moved[key.data] = now
                    self._answers[key.data] = now, who

    def close(self) -> None:
        """Stop all clients."""
        self._stop.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
