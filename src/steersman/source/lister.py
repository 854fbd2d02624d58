"""Fetch the complete list of a kind: as a stream (WatchList) where that works, else by pages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from steersman.model.kube import KubeObject
from steersman.model.plan import Finding
from steersman.source.backoff import Timing
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

PAGE = 500
"""Objects asked for at once; client-go's number."""
MAX_BODY = 256 << 20
"""Bytes of one page; a server that ignores `limit` sends everything at once."""
_UNSUPPORTED = frozenset({400, 403, 404, 405, 422})
"""Answers after which WatchList is left for pages (whose answer then decides)."""

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

    def avoid_streaming(self) -> None:
        """Take note that some object is too long for a line of a stream."""
        self._watch_list = False

    async def fetch(self) -> Listing:
        """Fetch a complete list.

        Raises:
            ApiError, ValueError: it could not be had, or was something else.
        """
        if self._watch_list:
            try:
                return await self._list_by_watch()
            except ApiError as error:
                if error.status not in _UNSUPPORTED and error.reason != "no_watch_list":
                    raise
                # Refused for good; silence may pass, so that is not remembered.
                self._watch_list = error.reason == "no_watch_list"
                log.info("%s: no WatchList (%s), listing by pages", self._resource.kind, error)
            except LineTooLongError as error:
                log.info("%s: WatchList: %s, listing by pages", self._resource.kind, error)
        try:
            return await self._list_pages(PAGE)
        except ApiError as error:
            if error.status != 410:
                raise
        return await self._list_pages(0)  # its pages expired under way: all at once

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
        splitter = LineSplitter()
        try:
            async with self._client.get(
                self._resource.path,
                {**self._resource.selectors, **params},
                self._timing.initial_quiet,
            ) as response:
                async for chunk in response.content.iter_any():
                    self._stats.received(chunk, self._timing.now())
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
                            objects.add((decoded,))
        except ApiError as error:
            if error.reason == "timeout":
                raise ApiError("no_watch_list", "its initial events stalled") from error
            raise
        raise ApiError("no_watch_list", "its initial events broke off")

    async def _list_pages(self, limit: int) -> Listing:
        objects = Spool(self._resource.kind)
        findings: list[Finding] = []
        params = {"limit": str(limit)} if limit else {}
        while True:
            page = await self._page(params)
            good, bad = decode_items(self._resource.kind, page.items)
            objects.add(good)
            findings += bad
            if not page.metadata.continue_:
                return Listing(objects.drain(), findings, page.metadata.resource_version)
            params["continue"] = page.metadata.continue_

    async def _page(self, params: Mapping[str, str]) -> ObjectList:
        body = bytearray()
        async with self._client.get(
            self._resource.path, {**self._resource.selectors, **params}, self._timing.answer
        ) as response:
            async for chunk in response.content.iter_any():
                self._stats.received(chunk, self._timing.now())
                body += chunk
                if len(body) > MAX_BODY:
                    raise ApiError("too_long", f"a list longer than {MAX_BODY} bytes")
        return decode_list(self._resource.kind, body)

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
            await self._page(params)
        except ApiError as error:
            if "ResourceVersionTooLarge" in error.causes:
                raise RelistError(f"the server has another history: {error}") from error
            raise
