"""Follow one kind of object: list, then watch, for ever; resume, relist and wait as needed.

    list (WatchList, else pages) -> watch -> ended -> resume from the last resourceVersion
      ^                                       broken -> wait, probe, resume
      |______ 410, other history, line too long ______|

The world is only ever replaced by a complete list; everything else that comes is a retry.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from steersman.source.backoff import Backoff, Timing
from steersman.source.base import Sink
from steersman.source.body import pieces
from steersman.source.client import ApiClient, ApiError
from steersman.source.lines import LineSplitter, LineTooLongError
from steersman.source.lister import Lister
from steersman.source.mirror import Mirror
from steersman.source.stats import KindStats
from steersman.source.wire import Event, RelistError, Resource, decode_event, outline

_ABSENT = frozenset({403, 404})

log = logging.getLogger("steersman.source")


class Reflector:
    """Keeps a Sink like the server's objects of one Resource."""

    def __init__(
        self,
        client: ApiClient,
        resource: Resource,
        sink: Sink,
        stats: KindStats,
        timing: Timing,
        *,
        watch_list: bool = True,
    ) -> None:
        self._client = client
        self._resource = resource
        self._stats = stats
        self._timing = timing
        self._lister = Lister(client, resource, stats, timing, watch_list=watch_list)
        self._mirror = Mirror(resource.kind, sink, stats)
        self._backoff = Backoff(timing)
        self._version = ""
        self._suspect = False  # the connection broke: the server may have another history now
        self._logged: tuple[int, str] | None = None

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            failure = await self._attempt()
            if failure.status == 410 or failure.reason == "relist":
                self._version = ""
            if self._resource.optional and failure.status in _ABSENT:
                await self._absent(failure)
            else:
                self._suspect = True
                await self._wait(failure)

    async def _attempt(self) -> ApiError:
        """List or watch for as long as that goes well; return what ended it.

        Without its traceback, which would hold whatever was received during the wait.
        """
        try:
            while True:
                await self._step()
        except RelistError as error:
            return ApiError("relist", str(error))
        except ApiError as error:
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            return ApiError("malformed", f"not what was asked for: {error}")

    async def _step(self) -> None:
        if not self._version:
            await self._list()
        elif self._suspect:
            await self._lister.probe(self._version)
        await self._watch()

    async def _list(self) -> None:
        """List, and let go of the list: what the Sink keeps of the objects is far smaller."""
        listing = await self._lister.fetch()
        await self._mirror.replace(listing.objects, listing.findings)
        self._version, self._suspect = listing.version, False

    # When something failed

    async def _absent(self, error: ApiError) -> None:
        """Go on without an optional kind; whoever waits for its first list is not held up.

        A server that has just started forbids for a moment what it allows: soon it is asked again.
        """
        stats = self._stats
        stats.errors[error.reason] += 1
        if not stats.lists:
            self._mirror.empty()
            stats.connected = True
        delay = self._timing.seldom * (0.5 + self._timing.random())
        if error.status == 403 and not self._backoff.grown:
            delay = min(delay, self._backoff.next(error.retry_after))
        self._log(error, delay)
        await self._timing.sleep(delay)

    async def _wait(self, error: ApiError) -> None:
        self._stats.connected = False
        self._stats.errors[error.reason] += 1
        self._stats.retries += 1
        delay = self._backoff.next(error.retry_after)
        self._log(error, delay)
        await self._timing.sleep(delay)

    def _log(self, error: ApiError, delay: float) -> None:
        """Log a failure, but the same one again only when the waits have grown.

        What is wrong with the server meets every kind: only the first one says so.
        """
        key = (self._backoff.level, str(error))
        known = key == self._logged
        level = logging.DEBUG if known else self._client.complaints.level(str(error))
        self._logged = key
        kind = self._resource.kind
        log.log(level, "%s: %s; what is known stays, next try in %.1f s", kind, error, delay)

    def _worked(self) -> None:
        self._backoff.reset()
        self._suspect = False

    # Watch

    async def _watch(self) -> None:
        """Watch from the last resourceVersion until the server ends it, as it does in time."""
        timing = self._timing
        span = timing.watch_longest - timing.watch_shortest
        seconds = timing.watch_shortest + timing.random() * span
        params = {
            "watch": "true",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(seconds))),
        }
        began = timing.now()
        before = self._stats.received_bytes
        try:
            async with asyncio.timeout(seconds + timing.grace):
                await self._events(params)
        except TimeoutError as error:
            self._suspect = True
            raise ApiError("timeout", "the server did not end the watch in time") from error
        except LineTooLongError as error:
            self._lister.avoid_streaming()  # the line would be in there, too
            raise RelistError(str(error)) from error
        finally:
            if timing.now() - began >= timing.steady:
                self._backoff.reset()
        if timing.now() - began < 1.0:  # a server that ends each watch at once
            raise ApiError("short_watch", "the watch ended at once")
        if self._stats.received_bytes == before:
            self._suspect = True

    async def _events(self, params: Mapping[str, str]) -> None:
        splitter = LineSplitter()
        query = {**self._resource.selectors, **params}
        async with self._client.get(self._resource.path, query, self._timing.quiet) as response:
            self._stats.watches += 1
            self._stats.connected = True
            if self._logged is not None:
                self._logged = None
                if self._client.complaints.resolved():
                    log.info("%s: connected again, watching", self._resource.kind)
            async for chunk in pieces(response):
                self._stats.received(chunk, self._timing.now())
                for line in splitter.feed(chunk):
                    self._event(decode_event(line))
        if splitter.rest:
            raise ApiError("truncated", "the watch broke off within an event")

    def _event(self, event: Event) -> None:
        """Take one event; the resourceVersion moves only after it was taken."""
        match event.type:
            case "ADDED" | "MODIFIED":
                self._advance(self._mirror.upsert(event.object))
            case "DELETED":
                self._advance(self._mirror.delete(event.object))
            case "BOOKMARK":
                self._stats.bookmarks += 1
                self._advance(outline(event.object).resource_version)
            case _:
                raise ApiError("malformed", f"an event of unknown type {event.type[:40]!r}")
        self._worked()

    def _advance(self, version: str) -> None:
        """Take the resourceVersion of an event.

        A server that was restored meanwhile accepts a watch from its future, for example when the
        HTTP client repeats a request on a new connection. Nothing else shows that.

        Raises:
            RelistError: it is below the last one: the server has another history.
        """
        if version.isdecimal() and self._version.isdecimal() and int(version) < int(self._version):
            raise RelistError(f"the resourceVersion went back from {self._version} to {version}")
        self._version = version or self._version
