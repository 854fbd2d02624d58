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

_TOGETHER = 500
"""Objects that are packed at once: some 200 kB, which the system gives and takes as a whole."""
_ENCODER = msgspec.msgpack.Encoder()


class Spool:
    """Objects of one kind, packed, in the order in which they came."""

    def __init__(self, kind: str) -> None:
        self._decoder: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(
            list[KINDS[kind]]  # type: ignore[valid-type]
        )
        self._open: list[KubeObject] = []
        self._packed: deque[bytes] = deque()

    def add(self, objects: Iterable[KubeObject]) -> None:
        """Put objects aside."""
        self._open += objects
        if len(self._open) >= _TOGETHER:
            self._packed.append(_ENCODER.encode(self._open))
            self._open.clear()

    def drain(self) -> Iterator[KubeObject]:
        """Give all of them back, once: what was given is let go of."""
        while self._packed:
            yield from self._decoder.decode(self._packed.popleft())
        yield from self._open
        self._open = []
