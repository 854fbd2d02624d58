"""Fetch the complete list of a kind: from the server's watch cache, at once; else by pages.

As client-go does, the first list accepts any state that the server has in memory
(`resourceVersion=0`), and later ones any that is not older than what was seen already. So a list
costs etcd nothing, however many nodes ask for it. Only a list that is too large is read by pages,
which come from etcd on API servers before 1.34. A list in protobuf is decoded while it arrives; one
in JSON is held as a whole.

A list replaces the previous state only when its last object has been received. Until then it is
kept packed (`ArrivingList`): as objects it would take more memory than all that the Store keeps,
and CPython does not return such a peak to the system.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import msgspec

from steersman.model.findings import Finding
from steersman.model.kube import KINDS, KubeObject
from steersman.source.client import ApiClient
from steersman.source.framing import CONTENT_TYPE, ListReader
from steersman.source.http import Response
from steersman.source.objects import decode_items, decode_object, partition
from steersman.source.pace import Timing
from steersman.source.stats import KindStats
from steersman.source.wire import (
    MAX_LINE,
    ApiError,
    ListMeta,
    Resource,
    WatchEvent,
    decode_list,
    decode_list_meta,
    initial_end,
)

FIRST_PAGE = 25
"""Objects of the first page; later pages have as many as fit into about _PAGE_BYTES."""
LARGEST_PAGE = 500
"""client-go's number."""
_PAGE_BYTES = 1 << 20  # bytes of JSON decoded at a time, in about five milliseconds
MAX_BODY = 128 << 20
"""Maximum bytes of one answer in JSON; a list beyond it is read by pages."""
LARGE_BODY = 16 << 20
"""Bytes of JSON above which only one kind's answer may be in memory at a time."""
MAX_LIST = 1 << 30
"""Maximum bytes of a whole list; that of 150,000 pods is about 40 MB."""
MAX_PAGES = 5000
# Bytes of JSON after which objects are packed, in about two milliseconds.
_PACKED_TOGETHER = 512 << 10
_DECODED_TOGETHER = 64  # items of a list in protobuf, in about two milliseconds

_ENCODER = msgspec.msgpack.Encoder()
_RAW_LIST = msgspec.json.Decoder(list[msgspec.Raw])


class Listing(NamedTuple):
    """A complete list."""

    objects: Iterable[KubeObject]
    """Can be iterated once."""
    findings: Sequence[Finding]
    """About malformed items."""
    version: str
    """resourceVersion to watch from."""


class ArrivingList:
    """A list while it arrives: its objects as msgpack, and the numbers of the current page."""

    def __init__(self, kind: str) -> None:
        self._decoder: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(
            list[KINDS[kind]]  # type: ignore[valid-type]
        )
        self._packed: deque[bytes] = deque()
        self._unpacked: list[KubeObject] = []
        """The last objects."""
        self._unpacked_size = 0
        self._findings: list[Finding] = []
        self.count = 0
        """Items of the page."""
        self.size = 0
        """Bytes of the page."""
        self._size_before = 0
        """Bytes of the pages before it."""

    def next_page(self) -> None:
        """Begin another page."""
        self._size_before += self.size
        self.count = self.size = 0

    def received(self, size: int) -> None:
        """Count bytes; a broken server might send a list without end."""
        self.size += size
        if self._size_before + self.size > MAX_LIST:
            raise ApiError("too_long", f"a list longer than {MAX_LIST} bytes")

    def add(self, objects: Sequence[KubeObject], findings: Sequence[Finding], size: int) -> None:
        """Add decoded items, and Findings about malformed ones; together they took these bytes."""
        self._findings += findings
        self.count += len(objects) + len(findings)
        self._unpacked += objects
        self._unpacked_size += size
        if self._unpacked_size >= _PACKED_TOGETHER:
            self._packed.append(_ENCODER.encode(self._unpacked))
            self._unpacked.clear()
            self._unpacked_size = 0

    def complete(self, version: str) -> Listing:
        """Return the whole list; `version` is its resourceVersion."""
        return Listing(self._drain(), self._findings, version)

    def _drain(self) -> Iterator[KubeObject]:
        """Yield all objects once, freeing them on the way."""
        while self._packed:
            yield from self._decoder.decode(self._packed.popleft())
        yield from self._unpacked
        self._unpacked = []


class Lister:
    """Fetches lists of one Resource."""

    def __init__(
        self, client: ApiClient, resource: Resource, stats: KindStats, timing: Timing
    ) -> None:
        self._client = client
        self._resource = resource
        self._stats = stats
        self._timing = timing
        self._by_pages = False

    async def fetch(self, oldest: str = "") -> Listing:
        """Fetch a complete list.

        Args:
            oldest: a resourceVersion that the list must have reached, "0" to accept any state, or
                "" for the newest one.

        Raises:
            ApiError, ValueError: the request failed, or the answer is something else. The error's
                `other_history` is set if the server has not reached `oldest`.
        """
        if self._by_pages:
            return await self._fetch_pages()
        arrived = ArrivingList(self._resource.kind)
        params = {"resourceVersion": oldest} if oldest else {}
        try:
            metadata = await self._page(params, arrived)
        except ApiError as error:
            self._by_pages = error.reason == "too_long"
            raise
        if metadata.continue_:  # it had no limit: this server makes pages in any case
            return await self._fetch_pages()
        return arrived.complete(metadata.resource_version)

    async def _fetch_pages(self) -> Listing:
        """Fetch the newest list by pages."""
        arrived = ArrivingList(self._resource.kind)
        params = {"limit": str(FIRST_PAGE)}
        for _ in range(MAX_PAGES):
            arrived.next_page()
            metadata = await self._page(params, arrived)
            if not metadata.continue_:
                return arrived.complete(metadata.resource_version)
            # The next page should have about _PAGE_BYTES, by the average size of these objects.
            fitting = arrived.count * _PAGE_BYTES // max(arrived.size, 1)
            limit = min(LARGEST_PAGE, max(1, fitting))
            params = {"limit": str(limit), "continue": metadata.continue_}
        raise ApiError("too_long", f"a list of more than {MAX_PAGES} pages")

    async def _page(self, params: Mapping[str, str], arrived: ArrivingList) -> ListMeta:
        """Fetch a page, or all of the list."""
        query, timeout = {**self._resource.selectors, **params}, self._timing.answer
        async with AsyncExitStack() as alone:  # see LARGE_BODY
            async with self._client.get(
                self._resource.path, query, timeout, negotiate=True
            ) as response:
                if response.content_type == CONTENT_TYPE:
                    return await self._protobuf_page(response, arrived)
                body = bytearray()
                async for chunk in response.chunks():
                    self._stats.received(chunk, self._timing.now())
                    if len(body) <= LARGE_BODY < len(body) + len(chunk):
                        await alone.enter_async_context(self._client.large_body)
                    body += chunk
                    if len(body) > MAX_BODY:
                        raise ApiError("too_long", f"an answer longer than {MAX_BODY} bytes")
            decoded = decode_list(self._resource.kind, body)
            arrived.received(len(body))
            for items, size in _parts(decoded.items):
                arrived.add(*decode_items(self._resource.kind, items), size)
                await asyncio.sleep(0)
            return decoded.metadata

    async def _protobuf_page(self, response: Response, arrived: ArrivingList) -> ListMeta:
        """Read a page in protobuf: decode its items as they arrive."""
        kind, reader = self._resource.kind, ListReader(MAX_LINE)
        async for chunk in response.chunks():
            self._stats.received(chunk, self._timing.now())
            arrived.received(len(chunk))
            items = reader.feed(chunk)
            for start in range(0, len(items), _DECODED_TOGETHER):
                some = items[start : start + _DECODED_TOGETHER]
                good, bad = partition(decode_object(kind, item) for item in some)
                arrived.add(good, bad, sum(map(len, some)))
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
            ApiError, ValueError: the request failed. The error's `other_history` is set if the
                history does not include it.
        """
        params = {"limit": "1", "resourceVersion": version, "resourceVersionMatch": "NotOlderThan"}
        await self._page(params, ArrivingList(self._resource.kind))


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


async def read_initial(kind: str, events: AsyncIterator[WatchEvent], timing: Timing) -> Listing:
    """Return the list that a watch begins with (WatchList); the events after it are left.

    Raises:
        ApiError: there is none (`no_watch_list`), or it is too long.
    """
    arrived = ArrivingList(kind)
    try:
        async with asyncio.timeout(timing.initial_total):
            async for event in events:
                if event.type == "BOOKMARK":
                    return arrived.complete(initial_end(event))
                if event.type != "ADDED":
                    raise ApiError("no_watch_list", f"{event.type} among initial events")
                length = len(memoryview(event.object))
                arrived.received(length)
                arrived.add(*partition([decode_object(kind, event.object)]), length)
    except TimeoutError as error:
        raise ApiError("no_watch_list", "its initial events did not end in time") from error
    raise ApiError("no_watch_list", "its initial events ended early")
