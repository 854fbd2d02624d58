"""Fetch the complete list of a kind: by pages, or as a stream (WatchList).

A page is compressed, a stream is not: a list of Services by pages takes a thirteenth of the bytes,
and half of the CPU that a stream costs the API server (docs/performance.md). A page in protobuf is
decoded while it arrives.

A list replaces the previous state only when its last object has been received. Until then it is
kept packed (`PackedObjects`): as objects it would take more memory than all that the Store keeps,
and CPython does not return such a peak to the system.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import msgspec

from steersman.model.findings import Finding
from steersman.model.kube import KINDS, KubeObject
from steersman.source.base import KindStats, Timing
from steersman.source.client import ApiClient, body_chunks
from steersman.source.http import Response
from steersman.source.protobuf import CONTENT_TYPE, LineTooLongError, ListReader
from steersman.source.wire import (
    MAX_LINE,
    ApiError,
    ListMeta,
    RelistError,
    Resource,
    decode_event,
    decode_items,
    decode_list,
    decode_list_meta,
    decode_object,
    initial_end,
    partition,
    splitter_for,
)

FIRST_PAGE = 25
"""Objects of the first page; later pages have as many as fit into about _PAGE_BYTES."""
LARGEST_PAGE = 500
"""client-go's number."""
_PAGE_BYTES = 1 << 20  # bytes of JSON decoded at a time, in about five milliseconds
MAX_BODY = 128 << 20
"""Maximum bytes of one page; a server that ignores `limit` sends all objects at once."""
LARGE_BODY = 16 << 20
"""Bytes above which only one kind's page may be in memory at a time."""
MAX_LIST = 1 << 30
"""Maximum bytes of a whole list; that of 150,000 pods is about 40 MB."""
MAX_PAGES = 5000
# Status codes of a server without WatchList: it is not tried again.
_UNSUPPORTED = frozenset({400, 405, 422})
# Status codes after which pages are tried, and their answer decides: a server that has just
# started forbids for a moment what it allows.
_REFUSED = _UNSUPPORTED | {403, 404}
# Bytes of JSON after which objects are packed, in about two milliseconds.
_PACKED_TOGETHER = 512 << 10
_DECODED_TOGETHER = 64  # items of a list in protobuf, in about two milliseconds

_ENCODER = msgspec.msgpack.Encoder()
_RAW_LIST = msgspec.json.Decoder(list[msgspec.Raw])

log = logging.getLogger("steersman.source")


class Listing(NamedTuple):
    """A complete list."""

    objects: Iterable[KubeObject]
    """Can be iterated once."""
    findings: Sequence[Finding]
    """About malformed items."""
    version: str
    """resourceVersion to watch from."""


class _Page(msgspec.Struct):
    """What has arrived of a list: all objects, and the numbers of the current page."""

    objects: PackedObjects
    findings: list[Finding]
    count: int = 0
    size: int = 0
    """Bytes."""
    before: int = 0
    """Bytes of the pages before it."""

    def received(self, size: int) -> None:
        """Count bytes; a broken server might send a list without end."""
        self.size += size
        if self.before + self.size > MAX_LIST:
            raise ApiError("too_long", f"a list longer than {MAX_LIST} bytes")

    def add(self, good: Sequence[KubeObject], bad: Sequence[Finding], size: int) -> None:
        """Add decoded items, which took this many bytes."""
        self.objects.add(good, size)
        self.findings += bad
        self.count += len(good) + len(bad)


class Lister:
    """Fetches lists of one Resource."""

    def __init__(
        self,
        client: ApiClient,
        resource: Resource,
        stats: KindStats,
        timing: Timing,
        *,
        watch_list: bool,
    ) -> None:
        self._client = client
        self._resource = resource
        self._stats = stats
        self._timing = timing
        self._watch_list = watch_list
        self._avoid_once = False

    def avoid_streaming(self) -> None:
        """List by pages the next time: an object is too long for a line of a stream."""
        self._avoid_once = True

    async def fetch(self) -> Listing:
        """Fetch a complete list.

        Raises:
            ApiError, ValueError: the request failed, or the answer is something else.
        """
        streaming = self._watch_list and not self._avoid_once
        self._avoid_once = False
        if streaming:
            try:
                return await self._list_by_watch()
            except ApiError as error:
                if error.status not in _REFUSED and error.reason != "no_watch_list":
                    raise
                self._watch_list = error.status not in _UNSUPPORTED
                log.info("%s: no WatchList (%s), listing by pages", self._resource.kind, error)
            except LineTooLongError as error:
                log.info("%s: WatchList: %s, listing by pages", self._resource.kind, error)
        # Pages expire (410) if etcd compacts their revision: try once more.
        for limit in (FIRST_PAGE, FIRST_PAGE):
            try:
                return await self._list_pages(limit)
            except ApiError as error:
                if error.status != 410:
                    raise
        return await self._list_pages(0)  # pages expire too soon: all objects at once

    async def _list_by_watch(self) -> Listing:
        """Collect the initial events of a watch up to their end (KEP-3157)."""
        kind, timing = self._resource.kind, self._timing
        params = {
            **self._resource.selectors,
            "watch": "true",
            "sendInitialEvents": "true",
            "resourceVersionMatch": "NotOlderThan",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(round(timing.initial_total)),
        }
        objects, findings, received = PackedObjects(kind), list[Finding](), 0
        try:
            async with (
                asyncio.timeout(timing.initial_total),
                self._client.get(
                    self._resource.path, params, timing.initial_idle_timeout, negotiate=True
                ) as response,
            ):
                splitter = splitter_for(response.content_type)
                async for chunk in body_chunks(response):
                    self._stats.received(chunk, timing.now())
                    received += len(chunk)
                    if received > MAX_LIST:
                        raise ApiError("too_long", f"a list longer than {MAX_LIST} bytes")
                    for line in splitter.feed(chunk):
                        event = decode_event(line)
                        if event.type == "BOOKMARK":
                            return Listing(objects.drain(), findings, initial_end(event))
                        if event.type != "ADDED":
                            raise ApiError("no_watch_list", f"{event.type} among initial events")
                        decoded = decode_object(kind, event.object)
                        if isinstance(decoded, Finding):
                            findings.append(decoded)
                        else:
                            objects.add((decoded,), len(line))
        except TimeoutError as error:
            raise ApiError("no_watch_list", "its initial events did not end in time") from error
        except ApiError as error:
            if error.reason == "timeout":
                raise ApiError("no_watch_list", "its initial events stalled") from error
            raise
        raise ApiError("no_watch_list", "its initial events ended early")

    async def _list_pages(self, limit: int) -> Listing:
        """Fetch a list by pages; as a single page if `limit` is 0."""
        page = _Page(PackedObjects(self._resource.kind), [])
        params = {"limit": str(limit)} if limit else {}
        for _ in range(MAX_PAGES):
            page.count = page.size = 0
            async with AsyncExitStack() as alone:  # see LARGE_BODY
                metadata = await self._page(params, alone, page)
            page.before += page.size
            if not metadata.continue_:
                return Listing(page.objects.drain(), page.findings, metadata.resource_version)
            # The next page should have about _PAGE_BYTES, by the average size of these objects.
            limit = min(LARGEST_PAGE, max(1, page.count * _PAGE_BYTES // max(page.size, 1)))
            params = {"limit": str(limit), "continue": metadata.continue_}
        raise ApiError("too_long", f"a list of more than {MAX_PAGES} pages")

    async def _page(
        self, params: Mapping[str, str], alone: AsyncExitStack, page: _Page
    ) -> ListMeta:
        """Fetch a page; the caller closes `alone` after using it."""
        async with self._client.get(
            self._resource.path,
            {**self._resource.selectors, **params},
            self._timing.answer,
            negotiate=True,
        ) as response:
            if response.content_type == CONTENT_TYPE:
                return await self._protobuf_page(response, page)
            body = bytearray()
            async for chunk in body_chunks(response):
                self._stats.received(chunk, self._timing.now())
                if len(body) <= LARGE_BODY < len(body) + len(chunk):
                    await alone.enter_async_context(self._client.large_body)
                body += chunk
                if len(body) > MAX_BODY:
                    raise ApiError("too_long", f"a page longer than {MAX_BODY} bytes")
        decoded = decode_list(self._resource.kind, body)
        page.received(len(body))
        for items, size in _parts(decoded.items):
            page.add(*decode_items(self._resource.kind, items), size)
            await asyncio.sleep(0)
        return decoded.metadata

    async def _protobuf_page(self, response: Response, page: _Page) -> ListMeta:
        """Read a page in protobuf: decode its items as they arrive."""
        kind, reader = self._resource.kind, ListReader(MAX_LINE)
        async for chunk in body_chunks(response):
            self._stats.received(chunk, self._timing.now())
            page.received(len(chunk))
            items = reader.feed(chunk)
            for start in range(0, len(items), _DECODED_TOGETHER):
                some = items[start : start + _DECODED_TOGETHER]
                good, bad = partition(decode_object(kind, item) for item in some)
                page.add(good, bad, sum(map(len, some)))
                await asyncio.sleep(0)
        metadata = decode_list_meta(kind, reader.kind, reader.metadata)
        if not reader.complete:
            raise ApiError("truncated", "the list ended early")
        return metadata

    async def probe(self, version: str) -> None:
        """Check that the server's history includes a resourceVersion.

        A server that lost its history (restored from a backup, or a new one) accepts a watch from a
        resourceVersion of its future and stays silent; it refuses a list from there with 504, after
        3 seconds.

        Raises:
            RelistError: it does not.
            ApiError, ValueError: the request failed.
        """
        params = {
            "limit": "1",
            "resourceVersion": version,
            "resourceVersionMatch": "NotOlderThan",
        }
        unused = _Page(PackedObjects(self._resource.kind), [])
        try:
            async with AsyncExitStack() as alone:
                await self._page(params, alone, unused)
        except ApiError as error:
            if "ResourceVersionTooLarge" in error.causes:
                raise RelistError(f"the server has another history: {error}") from error
            raise


def _parts(items: msgspec.Raw) -> Iterator[tuple[bytes | msgspec.Raw, int]]:
    """Split a JSON array into smaller ones, each with its size in bytes."""
    whole = memoryview(items)
    if len(whole) <= 2 * _PAGE_BYTES:
        yield items, len(whole)
        return
    part: list[msgspec.Raw] = []
    size = 0
    for item in _RAW_LIST.decode(items):
        part.append(item)
        size += len(memoryview(item))
        if size >= _PAGE_BYTES // 2:
            yield msgspec.json.encode(part), size
            part, size = [], 0
    yield msgspec.json.encode(part), size


class PackedObjects:
    """Objects of one kind as msgpack, in the order in which they came."""

    def __init__(self, kind: str) -> None:
        self._decoder: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(
            list[KINDS[kind]]  # type: ignore[valid-type]
        )
        self._open: list[KubeObject] = []
        self._size = 0
        self._packed: deque[bytes] = deque()

    def add(self, objects: Iterable[KubeObject], size: int) -> None:
        """Add objects that took this many bytes of JSON."""
        self._open += objects
        self._size += size
        if self._size >= _PACKED_TOGETHER:
            self._packed.append(_ENCODER.encode(self._open))
            self._open.clear()
            self._size = 0

    def drain(self) -> Iterator[KubeObject]:
        """Yield all objects once, freeing them on the way."""
        while self._packed:
            yield from self._decoder.decode(self._packed.popleft())
        yield from self._open
        self._open = []
