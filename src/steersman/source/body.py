"""Bodies of answers, decompressed piece by piece.

Not aiohttp's own decompression, which takes whatever a chunk expands to at once: a few kilobytes
of gzip can be hundreds of megabytes of zeros.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator

import aiohttp

_PIECE = 256 << 10
"""Bytes decompressed at a time: about a millisecond."""


class BrokenBodyError(aiohttp.ClientPayloadError):
    """A body that is not compressed as its headers say, or broke off."""


async def pieces(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield a body as it arrives; the session must not decompress itself.

    Raises:
        BrokenBodyError: it cannot be decompressed.
    """
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding == "identity":
        async for chunk in response.content.iter_any():
            yield chunk
        return
    if encoding not in ("gzip", "x-gzip"):
        raise BrokenBodyError(f"it is compressed by {encoding[:40]!r}, which was not asked for")
    gzip = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    async for chunk in response.content.iter_any():
        rest = chunk
        while True:
            try:
                piece = gzip.decompress(rest, _PIECE)
            except zlib.error as error:
                raise BrokenBodyError(f"it is not gzip: {error}") from None
            rest = gzip.unconsumed_tail
            if piece:
                yield piece
            if not rest and len(piece) < _PIECE:
                break
            await asyncio.sleep(0)
    if not gzip.eof:
        raise BrokenBodyError("it broke off within compressed data")
