"""What the simulated ends of connections share: virtual time has two kinds of networks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any


class SimulatedTransport(asyncio.Transport):
    """An end of a connection without a socket; subclasses carry the bytes."""

    def __init__(self, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self._protocol: Any = protocol
        self._closing = False
        self._paused = False
        self._held: deque[Callable[[], object]] = deque()
        """Calls to make when the process reads again."""

    def _when_reading(self, call: Callable[[], object]) -> bool:
        """Hold a call back while reading is paused; whether it was held."""
        if self._paused:
            self._held.append(call)
        return self._paused

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        while self._held and not self._paused:
            self._held.popleft()()

    def is_reading(self) -> bool:
        return not self._paused

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self._closing

    def get_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self._protocol
        return protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("192.0.2.250", 40000) if name in ("peername", "sockname") else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is ever buffered here."""

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return False
