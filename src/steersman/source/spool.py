"""A complete list, put aside until it is whole.

The world is replaced by a list only when the last object of it has come; as objects, the list would
meanwhile take more than the world itself does, and what it leaves behind is never given back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from steersman.model.kube import KINDS, KubeObject

_TOGETHER = 512 << 10
"""Bytes of JSON whose objects are packed at once, in about two milliseconds."""
_ENCODER = msgspec.msgpack.Encoder()


class Spool:
    """Objects of one kind, packed, in the order in which they came."""

    def __init__(self, kind: str) -> None:
        self._decoder: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(
            list[KINDS[kind]]  # type: ignore[valid-type]
        )
        self._open: list[KubeObject] = []
        self._size = 0
        self._packed: deque[bytes] = deque()

    def add(self, objects: Iterable[KubeObject], size: int) -> None:
        """Put objects aside that took this many bytes of JSON."""
        self._open += objects
        self._size += size
        if self._size >= _TOGETHER:
            self._packed.append(_ENCODER.encode(self._open))
            self._open.clear()
            self._size = 0

    def drain(self) -> Iterator[KubeObject]:
        """Give all of them back, once: what was given is let go of."""
        while self._packed:
            yield from self._decoder.decode(self._packed.popleft())
        yield from self._open
        self._open = []
