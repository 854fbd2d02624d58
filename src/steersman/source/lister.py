"""Fetch the complete list of a kind: as a stream (WatchList) if the server can, else by pages.

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
from steersman.source.wire import (
    ApiError,
    LineSplitter,
    LineTooLongError,
    ObjectList,
    RelistError,
    Resource,
    decode_event,
    decode_items,
    decode_list,
    decode_object,
    initial_end,
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
        # A WatchList costs the server less memory than pages (KEP-3157).
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
        splitter = LineSplitter()
        try:
            async with (
                asyncio.timeout(timing.initial_total),
                self._client.get(
                    self._resource.path, params, timing.initial_idle_timeout
                ) as response,
            ):
                async for chunk in body_chunks(response):
                    self._stats.received(chunk, timing.now())
                    received = _checked_size(received + len(chunk))
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
        objects, findings, received = PackedObjects(self._resource.kind), list[Finding](), 0
        params = {"limit": str(limit)} if limit else {}
        for _ in range(MAX_PAGES):
            count = 0
            async with AsyncExitStack() as alone:  # see LARGE_BODY
                page, size = await self._page(params, alone)
                received = _checked_size(received + size)
                for items, part_size in _parts(page.items):
                    good, bad = decode_items(self._resource.kind, items)
                    objects.add(good, part_size)
                    findings += bad
                    count += len(good) + len(bad)
                    await asyncio.sleep(0)
            if not page.metadata.continue_:
                return Listing(objects.drain(), findings, page.metadata.resource_version)
            # The next page should have about _PAGE_BYTES, by the average size of these objects.
            limit = min(LARGEST_PAGE, max(1, count * _PAGE_BYTES // max(size, 1)))
            params = {"limit": str(limit), "continue": page.metadata.continue_}
        raise ApiError("too_long", f"a list of more than {MAX_PAGES} pages")

    async def _page(
        self, params: Mapping[str, str], alone: AsyncExitStack
    ) -> tuple[ObjectList, int]:
        """Return a page and its size in bytes; the caller closes `alone` after using it."""
        body = bytearray()
        async with self._client.get(
            self._resource.path, {**self._resource.selectors, **params}, self._timing.answer
        ) as response:
            async for chunk in body_chunks(response):
                self._stats.received(chunk, self._timing.now())
                if len(body) <= LARGE_BODY < len(body) + len(chunk):
                    await alone.enter_async_context(self._client.large_body)
                body += chunk
                if len(body) > MAX_BODY:
                    raise ApiError("too_long", f"a page longer than {MAX_BODY} bytes")
        return decode_list(self._resource.kind, body), len(body)

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
        try:
            async with AsyncExitStack() as alone:
                await self._page(params, alone)
        except ApiError as error:
            if "ResourceVersionTooLarge" in error.causes:
                raise RelistError(f"the server has another history: {error}") from error
            raise


def _checked_size(size: int) -> int:
    """Return the size of a list so far; a broken server might send one without end."""
    if size > MAX_LIST:
        raise ApiError("too_long", f"a list longer than {MAX_LIST} bytes")
    return size


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
