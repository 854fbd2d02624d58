"""Split a stream of bytes into lines.

Not aiohttp's own `readline`: that is slower per event and refuses a line above its buffer, and one
EndpointSlice of 1,000 endpoints is a line of 260 kB.
"""

from __future__ import annotations

MAX_LINE = 8 << 20
"""Bytes of the longest line taken; etcd refuses objects above 1.5 MiB, so no event is as long."""


class LineTooLongError(ValueError):
    """A line is longer than any event can be."""


class LineSplitter:
    """Collects chunks; gives back the lines that are complete."""

    def __init__(self, max_line: int = MAX_LINE) -> None:
        self._max = max_line
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the lines that end in this chunk, without their newline and without empty ones.

        Raises:
            LineTooLongError: a line has more bytes than allowed, whether it ended or not.
        """
        *lines, rest = chunk.split(b"\n")
        if lines and self._parts:
            lines[0] = b"".join((*self._parts, lines[0]))
            self._parts, self._size = [], 0
        if rest:
            self._parts.append(rest)
            self._size += len(rest)
        if self._size > self._max or any(len(line) > self._max for line in lines):
            raise LineTooLongError(f"a line is longer than {self._max} bytes")
        return [line for line in lines if line and not line.isspace()]

    @property
    def rest(self) -> bytes:
        """The start of a line that has not ended yet."""
        return b"".join(self._parts)
