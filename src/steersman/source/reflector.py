"""Follow one kind of object: list, then watch, forever; resume, relist and retry as needed.

    list (or WatchList) -> watch -> ended -> resume from the last resourceVersion
      ^                              broken -> wait, probe, resume
      |__ 410, other history, event malformed or too long __|

The state is only ever replaced by a complete list; anything else leads to a retry and keeps the
previous state. An object that cannot be decoded keeps its last good version in force.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from steersman.model.findings import Finding
from steersman.model.names import ObjectName
from steersman.source.base import replace_all
from steersman.source.client import ApiClient
from steersman.source.framing import LineTooLongError, Message
from steersman.source.http import Response
from steersman.source.lister import Lister, Listing, read_initial
from steersman.source.objects import decode_object
from steersman.source.pace import Backoff, Timing
from steersman.source.stats import KindStats
from steersman.source.store import Store
from steersman.source.wire import (
    ApiError,
    RelistError,
    Resource,
    WatchEvent,
    decode_event,
    decode_metadata,
    splitter_for,
)

_ABSENT = frozenset({403, 404})
# Status codes of a server without WatchList: it is not tried again.
_UNSUPPORTED = frozenset({400, 405, 422})
# Status codes after which a list is tried, and its answer decides: a server that has just started
# forbids for a moment what it allows.
_REFUSED = _UNSUPPORTED | _ABSENT
_UNREACHABLE = frozenset({"connect", "connection", "timeout", "tls"})
# Seconds before its end at which a watch that ends was ended by a server that shuts down.
_EARLY = 5.0

log = logging.getLogger("steersman.source")


class Reflector:
    """Keeps the Store up to date with the server's objects of one Resource."""

    def __init__(
        self,
        client: ApiClient,
        resource: Resource,
        store: Store,
        stats: KindStats,
        timing: Timing,
        *,
        watch_list: bool = True,
    ) -> None:
        self._client = client
        self._resource = resource
        self._stats = stats
        self._timing = timing
        self._lister = Lister(client, resource, stats, timing)
        self._store = store
        self._backoff = Backoff(timing)
        self._watch_list = watch_list
        self._list_plainly = False  # the next list is to be none by WatchList
        self._version = "0"  # the last resourceVersion seen; "" to list the newest state
        self._listed = False  # whether a watch can begin at this version
        self._suspect = False  # the connection broke: the server may have another history now
        self._logged: tuple[int, str] | None = None

    async def run(self) -> None:
        """Follow until cancelled."""
        stats, timing, backoff, pace = self._stats, self._timing, self._backoff, self._client.pace
        while True:
            failure = await self._attempt()
            stats.errors[failure.reason] += 1
            spread = pace.spread(timing.resume_spacing if self._listed else timing.list_spacing)
            alone, delay = False, 0.0
            if self._resource.optional and failure.status in _ABSENT and not stats.lists:
                # Continue without the kind, as if its list were empty. One that was there before
                # is waited for: its objects are in use.
                self._store.retain(self._resource.kind, ())
                stats.connected = True
                delay = timing.optional_retry * (0.5 + timing.random())
                # A server that has just started forbids for a moment what it allows, so the first
                # attempts come soon.
                if not backoff.grown:
                    delay = min(delay, backoff.next(failure.retry_after, spread))
            else:
                self._suspect = True
                stats.connected = False
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
                if self._listed:
                    if self._suspect:
                        await self._lister.probe(self._version)
                elif self._list_plainly or not self._watch_list:
                    self._list_plainly = False
                    await self._replace(await self._lister.fetch(self._version))
                await self._watch()
        except RelistError as error:
            self._listed = False
            return ApiError("relist", str(error))
        except ApiError as error:
            # As client-go: a list must have reached what was seen, unless there is no such list.
            if error.other_history or (error.status == 410 and not self._listed):
                self._version = ""
            if error.other_history:
                self._listed = False
                return ApiError("relist", f"the server has another history: {error}")
            self._listed = self._listed and error.status != 410
            # Tracebacks would keep all received data in memory during the wait.
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            return ApiError("malformed", f"unexpected answer: {error}")

    async def _replace(self, listing: Listing) -> None:
        """Pass on a complete list; a watch can begin at its resourceVersion."""
        objects = self._client.pace.counted(listing.objects)
        await replace_all(self._store, self._resource.kind, objects, listing.findings)
        self._stats.lists += 1
        self._version, self._listed, self._suspect = listing.version, True, False

    async def _watch(self) -> None:
        """Watch until the server ends it, as it does in time."""
        timing, stats = self._timing, self._stats
        span = timing.watch_longest - timing.watch_shortest
        seconds = timing.watch_shortest + timing.random() * span
        began, received_before = timing.now(), stats.received_bytes
        # The server ends the watch after timeoutSeconds; our own timeout is for one that does not.
        try:
            async with asyncio.timeout(seconds + timing.grace):
                await self._follow(seconds)
        except TimeoutError as error:
            self._suspect = True
            raise ApiError("timeout", "the server did not end the watch in time") from error
        except LineTooLongError as error:
            self._list_plainly = True  # it would be in a WatchList, too
            raise RelistError(str(error)) from error
        except ApiError as error:
            refused = error.status in _REFUSED or error.reason in ("no_watch_list", "timeout")
            if self._listed or not refused:
                raise
            log.info("%s: no WatchList (%s), listing instead", self._resource.kind, error)
            self._watch_list = error.status not in _UNSUPPORTED
            self._list_plainly = True
            return
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

    async def _follow(self, seconds: float) -> None:
        """Watch from the last resourceVersion for some seconds, and pass on the events.

        Where there is no list yet, the watch begins with one (WatchList, KEP-3157).
        """
        timing, stats, resource = self._timing, self._stats, self._resource
        params = {
            **resource.selectors,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(seconds))),
        }
        if self._listed:
            params["resourceVersion"], patience = self._version, timing.idle_timeout
        else:
            params |= {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
            patience = timing.initial_idle_timeout
        async with (
            self._client.get(resource.path, params, patience, negotiate=True) as response,
            aclosing(watch_events(response, stats, timing.now)) as events,
        ):
            if not self._listed:
                await self._replace(await read_initial(resource.kind, events, timing))
                response.wait_up_to(timing.idle_timeout)
            stats.connected = True
            if self._logged is not None:
                self._logged = None
                if self._client.throttle.resolved():
                    log.info("%s: connected again, watching", resource.kind)
            async for event in events:
                self._handle(event)

    def _handle(self, event: WatchEvent) -> None:
        """Pass on one event, then move the resourceVersion.

        Raises:
            RelistError: the resourceVersion went back. A server that was restored accepts a watch
                from its future, for example when the HTTP client repeats a request on a new
                connection; nothing else shows that.
        """
        match event.type:
            case "ADDED" | "MODIFIED":
                self._stats.events += 1
                version = self._upsert(event.object)
            case "DELETED":
                self._stats.events += 1
                version = self._delete(event.object)
            case "BOOKMARK":
                self._stats.bookmarks += 1
                version = decode_metadata(event.object).resource_version
            case _:
                raise RelistError(f"an event of unknown type {event.type[:40]!r}")
        last = self._version
        if version.isdecimal() and last.isdecimal() and int(version) < int(last):
            self._version = ""  # of another history
            raise RelistError(f"the resourceVersion went back from {last} to {version}")
        self._version = version or last
        self._backoff.reset()
        self._suspect = False

    def _upsert(self, raw: msgspec.Raw | Message) -> str:
        """Pass on an added or changed object; return its resourceVersion, "" if unknown."""
        obj = decode_object(self._resource.kind, raw)
        if isinstance(obj, Finding):
            self._store.reject(obj)
            return decode_metadata(raw).resource_version
        self._store.upsert(obj)
        return obj.metadata.resource_version

    def _delete(self, raw: msgspec.Raw | Message) -> str:
        """Pass on a deletion; return the resourceVersion, "" if unknown.

        The name is enough: other fields of the object may be malformed.
        """
        kind, meta = self._resource.kind, decode_metadata(raw)
        if not meta.name:
            raise RelistError(f"a {kind} without a name was deleted")
        self._store.delete(kind, ObjectName(meta.namespace, meta.name))
        return meta.resource_version


async def watch_events(
    response: Response, stats: KindStats, now: Callable[[], float]
) -> AsyncGenerator[WatchEvent, None]:
    """Yield the events of a watch as they arrive.

    Raises:
        RelistError: one is malformed. A resumed watch would begin with it again.
        LineTooLongError: one is longer than allowed.
        ApiError: the server reports an error, or the watch ends within an event.
    """
    splitter = splitter_for(response.content_type)
    async for chunk in response.chunks():
        stats.received(chunk, now())
        for line in splitter.feed(chunk):
            try:
                event = decode_event(line)
            except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
                raise RelistError(f"a malformed event: {error}") from error
            yield event
    if splitter.rest:
        raise ApiError("truncated", "the watch ended within an event")
