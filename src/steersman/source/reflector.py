"""Follow one kind of object: list, then watch, forever; resume, relist and retry as needed.

    list (WatchList, else pages) -> watch -> ended -> resume from the last resourceVersion
      ^                                       broken -> wait, probe, resume
      |______ 410, other history, line too long ______|

The state is only ever replaced by a complete list; anything else leads to a retry and keeps the
previous state. An object that cannot be decoded keeps its last good version in force.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import msgspec

from steersman.model.findings import Finding
from steersman.model.kube import KubeObject
from steersman.model.names import ObjectName
from steersman.source.base import Backoff, EventHandler, KindStats, Timing, upsert_in_batches
from steersman.source.client import ApiClient, body_chunks
from steersman.source.lister import Lister
from steersman.source.protobuf import LineTooLongError
from steersman.source.wire import (
    ApiError,
    RelistError,
    Resource,
    WatchEvent,
    decode_event,
    decode_metadata,
    decode_object,
    scope_of,
    splitter_for,
)

_ABSENT = frozenset({403, 404})
_UNREACHABLE = frozenset({"connect", "connection", "timeout", "tls"})
# Seconds before its end at which a watch that ends was ended by a server that shuts down.
_EARLY = 5.0

log = logging.getLogger("steersman.source")


class StoreUpdater:
    """Decodes the objects of one kind and passes them on to an EventHandler."""

    def __init__(self, kind: str, handler: EventHandler, stats: KindStats) -> None:
        self._kind = kind
        self._handler = handler
        self._stats = stats
        self._malformed: set[str] = set()  # scopes with a reported Finding

    def set_empty(self) -> None:
        """Report that there are no objects of this kind, so that nothing waits for its list."""
        self._handler.retain(self._kind, ())

    async def replace(self, objects: Iterable[KubeObject], findings: Iterable[Finding]) -> None:
        """Pass on a complete list; the last good version of its malformed objects is kept."""
        bad = {finding.object: finding for finding in findings}
        names = await upsert_in_batches(self._handler, objects)
        self._handler.retain(self._kind, names, bad)
        for scope in self._malformed - bad.keys():
            self._handler.report(scope, ())
        for scope, finding in bad.items():
            self._handler.report(scope, (finding,))
        self._malformed = set(bad)
        stats = self._stats
        stats.relists += stats.lists > 0
        stats.lists += 1
        stats.malformed += len(bad)

    def upsert(self, raw: bytes | msgspec.Raw) -> str:
        """Pass on an added or changed object; return its resourceVersion, "" if unknown."""
        self._stats.events += 1
        obj = decode_object(self._kind, raw)
        if isinstance(obj, Finding):
            self._stats.malformed += 1
            self._malformed.add(obj.object)
            self._handler.report(obj.object, (obj,))
            return decode_metadata(raw).resource_version
        self._handler.upsert(obj)
        if self._malformed:
            self._resolve(scope_of(self._kind, obj))
        return obj.metadata.resource_version

    def delete(self, raw: bytes | msgspec.Raw) -> str:
        """Pass on a deletion; return the resourceVersion, "" if unknown.

        The name is enough: other fields of the object may be malformed.
        """
        self._stats.events += 1
        meta = decode_metadata(raw)
        if not meta.name:
            raise RelistError(f"a {self._kind} without a name was deleted")
        name = ObjectName(meta.namespace, meta.name)
        self._handler.delete(self._kind, name)
        self._resolve(f"{self._kind} {name}")
        return meta.resource_version

    def _resolve(self, scope: str) -> None:
        if scope in self._malformed:
            self._malformed.remove(scope)
            self._handler.report(scope, ())


class Reflector:
    """Keeps an EventHandler up to date with the server's objects of one Resource."""

    def __init__(
        self,
        client: ApiClient,
        resource: Resource,
        handler: EventHandler,
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
        self._updater = StoreUpdater(resource.kind, handler, stats)
        self._backoff = Backoff(timing)
        self._version = ""
        self._suspect = False  # the connection broke: the server may have another history now
        self._logged: tuple[int, str] | None = None

    async def run(self) -> None:
        """Follow until cancelled."""
        stats, timing, backoff, pace = self._stats, self._timing, self._backoff, self._client.pace
        while True:
            failure = await self._attempt()
            if failure.status == 410 or failure.reason == "relist":
                self._version = ""
            stats.errors[failure.reason] += 1
            spread = pace.spread(timing.resume_spacing if self._version else timing.list_spacing)
            alone, delay = False, 0.0
            if self._resource.optional and failure.status in _ABSENT:
                # Continue without the kind, as if its list were empty.
                if not stats.lists:
                    self._updater.set_empty()
                    stats.connected = True
                delay = timing.optional_retry * (0.5 + timing.random())
                # A server that has just started forbids for a moment what it allows, so the first
                # attempts after a 403 come soon.
                if failure.status == 403 and not backoff.grown:
                    delay = min(delay, backoff.next(failure.retry_after, spread))
            else:
                self._suspect = True
                stats.connected = False
                stats.retries += 1
                alone = pace.unreachable and failure.reason in _UNREACHABLE
                delay = 0.0 if alone else backoff.next(failure.retry_after, spread)

            # Log the same failure again only when the delays have grown. A server that fails meets
            # all kinds; the throttle makes the first one log it.
            key = (backoff.level + pace.level, str(failure))
            known = key == self._logged
            level = logging.DEBUG if known else self._client.throttle.level(str(failure))
            self._logged = key
            when = "with delays that grow" if alone else f"in {delay:.1f}s"
            text = "%s: %s; keeping previous state, retrying %s"
            log.log(level, text, self._resource.kind, failure, when)
            await (pace.wait_for_server() if alone else timing.sleep(delay))

    async def _attempt(self) -> ApiError:
        """List or watch for as long as that works; return the failure that ended it."""
        try:
            while True:
                if not self._version:
                    listing = await self._lister.fetch()
                    objects = self._client.pace.counted(listing.objects)
                    await self._updater.replace(objects, listing.findings)
                    self._version, self._suspect = listing.version, False
                    del listing, objects  # free the list before the watch, which lasts
                elif self._suspect:
                    await self._lister.probe(self._version)
                await self._watch()
        except RelistError as error:
            return ApiError("relist", str(error))
        except ApiError as error:
            # Tracebacks would keep all received data in memory during the wait.
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            return ApiError("malformed", f"unexpected answer: {error}")

    async def _watch(self) -> None:
        """Watch from the last resourceVersion until the server ends it, as it does in time."""
        timing = self._timing
        span = timing.watch_longest - timing.watch_shortest
        seconds = timing.watch_shortest + timing.random() * span
        params = {
            **self._resource.selectors,
            "watch": "true",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(seconds))),
        }
        stats = self._stats
        began, received_before = timing.now(), stats.received_bytes
        # The server ends the watch after timeoutSeconds; our own timeout is for one that does not.
        try:
            async with (
                asyncio.timeout(seconds + timing.grace),
                self._client.get(
                    self._resource.path, params, timing.idle_timeout, negotiate=True
                ) as response,
            ):
                splitter = splitter_for(response.content_type)
                stats.watches += 1
                stats.connected = True
                if self._logged is not None:
                    self._logged = None
                    if self._client.throttle.resolved():
                        log.info("%s: connected again, watching", self._resource.kind)
                async for chunk in body_chunks(response):
                    stats.received(chunk, timing.now())
                    for line in splitter.feed(chunk):
                        self._handle(decode_event(line))
            if splitter.rest:
                raise ApiError("truncated", "the watch ended within an event")
        except TimeoutError as error:
            self._suspect = True
            raise ApiError("timeout", "the server did not end the watch in time") from error
        except LineTooLongError as error:
            self._lister.avoid_streaming()  # the same line would be in a WatchList
            raise RelistError(str(error)) from error
        finally:
            if timing.now() - began >= timing.steady:
                self._backoff.reset()
        if timing.now() - began < 1.0:  # or a server that ends each watch at once makes us spin
            raise ApiError("short_watch", "the watch ended at once")
        # Not even a bookmark: the server may wait for a resourceVersion that it will never reach.
        if stats.received_bytes == received_before:
            self._suspect = True
        # A server that shuts down ends the watches of all nodes at once.
        if timing.now() - began < seconds - _EARLY:
            spread = self._client.pace.spread(timing.resume_spacing)
            await timing.sleep(spread * timing.random())

    def _handle(self, event: WatchEvent) -> None:
        """Pass on one event, then move the resourceVersion.

        Raises:
            RelistError: the resourceVersion went back. A server that was restored accepts a watch
                from its future, for example when the HTTP client repeats a request on a new
                connection; nothing else shows that.
        """
        match event.type:
            case "ADDED" | "MODIFIED":
                version = self._updater.upsert(event.object)
            case "DELETED":
                version = self._updater.delete(event.object)
            case "BOOKMARK":
                self._stats.bookmarks += 1
                version = decode_metadata(event.object).resource_version
            case _:
                raise ApiError("malformed", f"an event of unknown type {event.type[:40]!r}")
        last = self._version
        if version.isdecimal() and last.isdecimal() and int(version) < int(last):
            raise RelistError(f"the resourceVersion went back from {last} to {version}")
        self._version = version or last
        self._backoff.reset()
        self._suspect = False
