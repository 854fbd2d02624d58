"""Proxy ports: any free one, or those of a range in turn."""

from __future__ import annotations

import errno
import random
import socket
import time
from collections.abc import Callable

_COOL_DOWN = 0.5  # seconds until a freed proxy port is given out again


class PortError(OSError):
    """No proxy port is free."""


class PortAllocator:
    """Gives out proxy ports: any free one, or those of a range in turn."""

    def __init__(
        self,
        chosen: tuple[int, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an allocator for a range (first and last port); None lets the kernel choose."""
        self._range = range(chosen[0], chosen[1] + 1) if chosen else range(1)
        self._next = -1  # the first is chosen when it is needed
        self._freed: dict[int, float] = {}
        self._clock = clock

    def bind(self, sock: socket.socket, address: str) -> int:
        """Bind a socket to a proxy port and return it.

        Raises:
            PortError: all ports of the range are in use.
            OSError: the address cannot be bound.
        """
        if self._next < 0:
            self._next = random.randrange(len(self._range))
        for _ in self._range:
            # If the kernel chooses, the range is just port 0.
            port = self._range[self._next]
            self._next = (self._next + 1) % len(self._range)
            if port and self._freed.get(port, 0.0) > self._clock():
                continue
            try:
                sock.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            self._freed.pop(port, None)
            return int(sock.getsockname()[1])
        words = f"{self._range[0]}-{self._range[-1]}"
        raise PortError(errno.EADDRINUSE, f"no proxy port of {words} is free; widen the range")

    def allows(self, port: int) -> bool:
        """Whether the allocator could have given out a port."""
        return self._range == range(1) or port in self._range

    def release(self, port: int) -> None:
        """Return a port. It cools down before it is given out again."""
        if port in self._range:
            self._freed[port] = self._clock() + _COOL_DOWN
