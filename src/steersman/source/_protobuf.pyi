"""The decoder of protobuf.py in C; missing where it could not be compiled."""

from typing import Generic, TypeVar

T = TypeVar("T")

class Decoder(Generic[T]):
    def __init__(
        self,
        struct: type[T],
        blank: tuple[object, ...],
        rows: tuple[tuple[object, ...], ...],
        error: type[ValueError],
    ) -> None: ...
    def decode(self, message: bytes, /) -> T: ...
