"""The decoder of protobuf.py in C; missing where it could not be compiled."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

class Decoder(Generic[T]):
    def __init__(
        self,
        struct: type[T],
        blank: tuple[object, ...],
        rows: tuple[tuple[object, ...], ...],
        twin: Callable[[bytes], T],
    ) -> None: ...
    def decode(self, message: bytes, /) -> T: ...
