"""Read the body of an answer as it arrives, decompressed within bounds."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator

from steersman.source.http import Response
from steersman.source.http_connection import HttpError

_PIECE = 256 << 10  # bytes decompressed at a time, in about a millisecond


async def body_chunks(response: Response) -> AsyncIterator[bytes]:
    """Yield a body as it arrives, decompressed in small pieces.

    A few kilobytes of gzip can be hundreds of megabytes of zeros.

    Raises:
        HttpError: the connection breaks, or the body cannot be decompressed.
    """
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        while chunk := await response.read():
            yield chunk
        return
    if encoding not in ("gzip", "x-gzip"):
        raise _broken(f"it is compressed by {encoding[:40]!r}, which was not requested")
    # Other tasks run between two pieces, so that a bomb does not block the event loop either.
    gzip = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    while rest := await response.read():
        while True:
            try:
                piece = gzip.decompress(rest, _PIECE)
            except zlib.error as error:
                raise _broken(f"it is not gzip: {error}") from None
            rest = gzip.unconsumed_tail
            if piece:
                yield piece
            if gzip.unused_data:  # zlib would keep all of it
                raise _broken("more follows the compressed data")
            if not rest and len(piece) < _PIECE:
                break
            await asyncio.sleep(0)
    if not gzip.eof:
        raise _broken("it ended within compressed data")


def _broken(why: str) -> HttpError:
    return HttpError("connection", f"the body of an answer cannot be read: {why}")
