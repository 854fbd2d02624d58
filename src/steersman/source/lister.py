"""Fetch the complete list of a kind: as a stream (WatchList) where that works, else by pages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

import msgspec

from steersman.model.findings import Finding
from steersman.model.kube import KubeObject
from steersman.source.backoff import Timing
from steersman.source.body import pieces
from steersman.source.client import ApiClient, ApiError
from steersman.source.decode import decode_items, decode_object
from steersman.source.lines import LineSplitter, LineTooLongError
from steersman.source.spool import Spool
from steersman.source.stats import KindStats
from steersman.source.wire import (
    ObjectList,
    RelistError,
    Resource,
    decode_event,
    decode_list,
    initial_end,
)

FIRST_PAGE = 25
"""Objects asked for at first; then as many as make a page of about _PAGE_BYTES."""
LARGEST_PAGE = 500
"""client-go's number."""
_PAGE_BYTES = 1 << 20
"""Bytes of JSON that are decoded at a time, in about five milliseconds."""
MAX_BODY = 128 << 20
"""Bytes of one page; a server that ignores `limit` sends everything at once."""
LARGE_BODY = 16 << 20
"""Bytes of a page above which no other kind's page may be large at the same time."""
MAX_LIST = 1 << 30
"""Bytes of a whole list; that of 150,000 pods is about 40 MB."""
MAX_PAGES = 5000
_UNSUPPORTED = frozenset({400, 405, 422})
"""Answers of a server that does not know WatchList: it is not asked for again."""
_REFUSED = _UNSUPPORTED | {403, 404}
"""Answers after which pages are tried, whose answer then decides. A server that has just started
forbids for a moment what it allows."""

_RAW_LIST = msgspec.json.Decoder(list[msgspec.Raw])

log = logging.getLogger("steersman.source")


class Listing(NamedTuple):
    """A complete list."""

    objects: Iterable[KubeObject]
    """To be gone through once."""
    findings: Sequence[Finding]
    """Of the items that are malformed."""
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
        """List by pages the next time: some object is too long for a line of a stream."""
        self._avoid_once = True

    async def fetch(self) -> Listing:
        """Fetch a complete list.

        Raises:
            ApiError, ValueError: it could not be had, or was something else.
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
        for limit in (FIRST_PAGE, FIRST_PAGE):
            try:
                return await self._list_pages(limit)
            except ApiError as error:
                if error.status != 410:
                    raise
        return await self._list_pages(0)  # its pages expire too soon: all at once

    async def _list_by_watch(self) -> Listing:
        """Collect the initial events of a watch up to their end (KEP-3157)."""
        params = {
            "watch": "true",
            "sendInitialEvents": "true",
            "resourceVersionMatch": "NotOlderThan",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(round(self._timing.initial_total)),
        }
        objects = Spool(self._resource.kind)
        findings: list[Finding] = []
        try:
            async with asyncio.timeout(self._timing.initial_total):
                version = await self._initial_events(params, objects, findings)
        except TimeoutError as error:
            raise ApiError("no_watch_list", "its initial events did not end in time") from error
        return Listing(objects.drain(), findings, version)

    async def _initial_events(
        self, params: Mapping[str, str], objects: Spool, findings: list[Finding]
    ) -> str:
        """Fill objects and findings; return the resourceVersion of the list."""
        kind = self._resource.kind
        splitter, total = LineSplitter(), _Total()
        try:
            async with self._client.get(
                self._resource.path,
                {**self._resource.selectors, **params},
                self._timing.initial_quiet,
            ) as response:
                async for chunk in pieces(response):
                    self._stats.received(chunk, self._timing.now())
                    total.add(len(chunk))
                    for line in splitter.feed(chunk):
                        event = decode_event(line)
                        if event.type == "BOOKMARK":
                            return initial_end(event)
                        if event.type != "ADDED":
                            raise ApiError("no_watch_list", f"{event.type} among initial events")
                        decoded = decode_object(kind, event.object)
                        if isinstance(decoded, Finding):
                            findings.append(decoded)
                        else:
                            objects.add((decoded,), len(line))
        except ApiError as error:
            if error.reason == "timeout":
                raise ApiError("no_watch_list", "its initial events stalled") from error
            raise
        raise ApiError("no_watch_list", "its initial events broke off")

    async def _list_pages(self, limit: int) -> Listing:
        """Fetch a list by pages; by a single one if `limit` is 0."""
        objects = Spool(self._resource.kind)
        findings: list[Finding] = []
        params = {"limit": str(limit)} if limit else {}
        total = _Total()
        for _ in range(MAX_PAGES):
            count = 0
            async with AsyncExitStack() as alone:
                page, size = await self._page(params, alone)
                total.add(size)
                for items, bytes_ in _slices(page.items):
                    good, bad = decode_items(self._resource.kind, items)
                    objects.add(good, bytes_)
                    findings += bad
                    count += len(good) + len(bad)
                    await asyncio.sleep(0)
            if not page.metadata.continue_:
                return Listing(objects.drain(), findings, page.metadata.resource_version)
            limit = min(LARGEST_PAGE, max(1, count * _PAGE_BYTES // max(size, 1)))
            params = {"limit": str(limit), "continue": page.metadata.continue_}
        raise ApiError("too_long", f"a list of more than {MAX_PAGES} pages")

    async def _page(
        self, params: Mapping[str, str], alone: AsyncExitStack
    ) -> tuple[ObjectList, int]:
        """Return a page and how many bytes it has; `alone` ends when it was used."""
        body = bytearray()
        async with self._client.get(
            self._resource.path, {**self._resource.selectors, **params}, self._timing.answer
        ) as response:
            async for chunk in pieces(response):
                self._stats.received(chunk, self._timing.now())
                if len(body) <= LARGE_BODY < len(body) + len(chunk):
                    await alone.enter_async_context(self._client.large_body)
                body += chunk
                if len(body) > MAX_BODY:
                    raise ApiError("too_long", f"a page longer than {MAX_BODY} bytes")
        return decode_list(self._resource.kind, body), len(body)

    async def probe(self, version: str) -> None:
        """See whether the server's history reaches as far as ours.

        A server that lost its history (restored, made anew) accepts a watch from a resourceVersion
        of its future and stays silent; a list from there it refuses with 504, after 3 s.

        Raises:
            RelistError: it does not.
            ApiError, ValueError: no answer.
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


class _Total:
    """Counts the bytes of a list, which a broken server might send without end."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, count: int) -> None:
        self._bytes += count
        if self._bytes > MAX_LIST:
            raise ApiError("too_long", f"a list longer than {MAX_LIST} bytes")


def _slices(items: msgspec.Raw) -> Iterator[tuple[bytes | msgspec.Raw, int]]:
    """Cut a JSON array into arrays that are decoded quickly, each with its size in bytes."""
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
