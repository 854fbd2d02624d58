"""Follow one kind of object: list, then watch, for ever; resume, relist and wait as needed.

    list (WatchList, else pages) -> watch -> ended -> resume from the last resourceVersion
      ^                                       broken -> wait, probe, resume
      |______ 410, other history, line too long ______|

The world is only ever replaced by a complete list; everything else that comes is a retry.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

import msgspec
from aiohttp import ClientResponse

from steersman.model.kube import KubeObject
from steersman.model.names import ObjectName
from steersman.model.plan import Finding
from steersman.source.backoff import Backoff, Timing
from steersman.source.base import Sink
from steersman.source.client import ApiClient, ApiError, Status
from steersman.source.decode import decode_items, decode_object, scope_of
from steersman.source.lines import LineSplitter, LineTooLongError
from steersman.source.stats import KindStats

PAGE = 500
"""Objects asked for at once; client-go's number."""
MAX_BODY = 256 << 20
"""Bytes of one page; a server that ignores `limit` sends everything at once."""
_UNSUPPORTED = frozenset({400, 403, 404, 405, 422})
"""Answers after which WatchList is left for pages (whose answer then decides)."""
_ABSENT = frozenset({403, 404})
_INITIAL_END = "k8s.io/initial-events-end"

log = logging.getLogger("steersman.source")


class Resource(msgspec.Struct, frozen=True):
    """A kind and which of its objects are wanted (SPEC 2)."""

    kind: str
    path: str
    selectors: Mapping[str, str] = {}
    optional: bool = False
    """The others are served without it: where it is absent or forbidden, it counts as empty."""


class RelistError(Exception):
    """What was watched cannot be resumed: only a fresh list helps. The message says why."""


class _ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _List(msgspec.Struct, frozen=True):
    kind: str
    metadata: _ListMeta
    items: msgspec.Raw = msgspec.Raw(b"[]")


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    namespace: str = ""
    resource_version: str = ""
    annotations: dict[str, str] | None = None


class _Outline(msgspec.Struct, frozen=True):
    metadata: _Meta = _Meta()


_LIST = msgspec.json.Decoder(_List)
_EVENT = msgspec.json.Decoder(_Event)
_OUTLINE = msgspec.json.Decoder(_Outline)
_STATUS = msgspec.json.Decoder(Status)


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
        self._sink = sink
        self._stats = stats
        self._timing = timing
        self._watch_list = watch_list
        self._backoff = Backoff(timing)
        self._version = ""
        self._suspect = False  # the connection broke: the server may have another history now
        self._known: dict[ObjectName, KubeObject] = {}
        self._malformed: set[str] = set()
        self._logged: tuple[int, str] | None = None

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            try:
                await self._step()
            except RelistError as error:
                self._version = ""
                await self._wait(ApiError("relist", str(error)))
            except ApiError as error:
                await self._failed(error)
            except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
                await self._wait(ApiError("malformed", f"not what was asked for: {error}"))

    async def _step(self) -> None:
        if not self._version:
            await self._list()
        elif self._suspect:
            await self._probe()
        await self._watch()

    # When something failed

    async def _failed(self, error: ApiError) -> None:
        if error.status == 410:
            self._version = ""
        if self._resource.optional and error.status in _ABSENT:
            await self._absent(error)
        else:
            self._suspect = True
            await self._wait(error)

    async def _absent(self, error: ApiError) -> None:
        """Go on without an optional kind; whoever waits for its first list is not held up."""
        stats = self._stats
        stats.errors[error.reason] += 1
        if not stats.lists:
            self._sink.replace(self._resource.kind, ())
            stats.connected = True
        self._log(error, self._timing.seldom)
        await self._timing.sleep(self._timing.seldom * (0.5 + self._timing.random()))

    async def _wait(self, error: ApiError) -> None:
        self._stats.connected = False
        self._stats.errors[error.reason] += 1
        self._stats.retries += 1
        delay = self._backoff.next(error.retry_after)
        self._log(error, delay)
        await self._timing.sleep(delay)

    def _log(self, error: ApiError, delay: float) -> None:
        """Log a failure, but the same one again only when the waits have grown."""
        key = (self._backoff.level, str(error))
        level = logging.DEBUG if key == self._logged else logging.WARNING
        self._logged = key
        kind = self._resource.kind
        log.log(level, "%s: %s; what is known stays, next try in %.1f s", kind, error, delay)

    def _worked(self) -> None:
        self._backoff.reset()
        self._suspect = False

    # List

    async def _list(self) -> None:
        """Take a complete list, and only then hand it over."""
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

    async def _list_by_watch(self) -> None:
        """Collect the initial events of a watch up to their end (KEP-3157)."""
        params = {
            "watch": "true",
            "sendInitialEvents": "true",
            "resourceVersionMatch": "NotOlderThan",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(round(self._timing.initial_total)),
        }
        objects: list[KubeObject] = []
        findings: list[Finding] = []
        try:
            async with asyncio.timeout(self._timing.initial_total):
                version = await self._initial_events(params, objects, findings)
        except TimeoutError as error:
            raise ApiError("no_watch_list", "its initial events did not end in time") from error
        self._take(objects, findings, version)

    async def _initial_events(
        self, params: Mapping[str, str], objects: list[KubeObject], findings: list[Finding]
    ) -> str:
        """Fill objects and findings; return the resourceVersion of the list."""
        kind = self._resource.kind
        splitter = LineSplitter()
        try:
            async with self._get(params, self._timing.initial_quiet) as response:
                async for chunk in response.content.iter_any():
                    self._received(chunk)
                    for line in splitter.feed(chunk):
                        event = _event(line)
                        if event.type == "BOOKMARK":
                            return _initial_end(event)
                        if event.type != "ADDED":
                            raise ApiError("no_watch_list", f"{event.type} among initial events")
                        decoded = decode_object(kind, event.object)
                        if isinstance(decoded, Finding):
                            findings.append(decoded)
                        else:
                            objects.append(decoded)
        except ApiError as error:
            if error.reason == "timeout":
                raise ApiError("no_watch_list", "its initial events stalled") from error
            raise
        raise ApiError("no_watch_list", "its initial events broke off")

    async def _list_pages(self, limit: int) -> None:
        objects: list[KubeObject] = []
        findings: list[Finding] = []
        params = {"limit": str(limit)} if limit else {}
        while True:
            page = await self._page(params)
            good, bad = decode_items(self._resource.kind, page.items)
            objects += good
            findings += bad
            if not page.metadata.continue_:
                return self._take(objects, findings, page.metadata.resource_version)
            params["continue"] = page.metadata.continue_

    async def _page(self, params: Mapping[str, str]) -> _List:
        """Fetch one page and see that it is one: `{}` would empty the world."""
        body = bytearray()
        async with self._get(params, self._timing.answer) as response:
            async for chunk in response.content.iter_any():
                self._received(chunk)
                body += chunk
                if len(body) > MAX_BODY:
                    raise ApiError("too_long", f"a list longer than {MAX_BODY} bytes")
        page = _LIST.decode(body)
        wanted = f"{self._resource.kind}List"
        if page.kind != wanted:
            raise ApiError("malformed", f"asked for a {wanted}, was given a {page.kind!r}")
        if not page.metadata.resource_version:
            raise ApiError("malformed", f"the {wanted} has no resourceVersion")
        if memoryview(page.items).nbytes == 4:  # null, Go's empty list
            return msgspec.structs.replace(page, items=msgspec.Raw(b"[]"))
        return page

    def _take(
        self, objects: Sequence[KubeObject], findings: Iterable[Finding], version: str
    ) -> None:
        """Hand a complete list over; of what is malformed in it, the last good version stays."""
        kind = self._resource.kind
        known = {obj.metadata.object_name: obj for obj in objects}
        bad = {finding.object: finding for finding in findings}
        if bad:
            for name, obj in self._known.items():
                if scope_of(kind, obj) in bad:
                    known.setdefault(name, obj)
        self._known = known
        self._sink.replace(kind, known.values())
        for scope in self._malformed - bad.keys():
            self._sink.report(scope, ())
        for scope, finding in bad.items():
            self._sink.report(scope, (finding,))
        self._malformed = set(bad)
        self._version = version
        self._suspect = False
        stats = self._stats
        stats.relists += stats.lists > 0
        stats.lists += 1
        stats.malformed += len(bad)
        stats.objects = len(known)

    async def _probe(self) -> None:
        """See whether the server's history reaches as far as ours.

        A server that lost its history (restored, made anew) accepts a watch from a resourceVersion
        of its future and stays silent; a list from there it refuses with 504, after 3 s.
        """
        params = {
            "limit": "1",
            "resourceVersion": self._version,
            "resourceVersionMatch": "NotOlderThan",
        }
        try:
            await self._page(params)
        except ApiError as error:
            if "ResourceVersionTooLarge" in error.causes:
                raise RelistError(f"the server has another history: {error}") from error
            raise

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
        before = self._stats.bytes
        try:
            async with asyncio.timeout(seconds + timing.grace):
                await self._events(params)
        except TimeoutError as error:
            self._suspect = True
            raise ApiError("timeout", "the server did not end the watch in time") from error
        except LineTooLongError as error:
            self._watch_list = False  # the line would be in there, too
            raise RelistError(str(error)) from error
        finally:
            if timing.now() - began >= timing.steady:
                self._backoff.reset()
        if timing.now() - began < 1.0:  # a server that ends each watch at once
            raise ApiError("short_watch", "the watch ended at once")
        if self._stats.bytes == before:
            self._suspect = True

    async def _events(self, params: Mapping[str, str]) -> None:
        splitter = LineSplitter()
        async with self._get(params, self._timing.quiet) as response:
            self._stats.watches += 1
            self._stats.connected = True
            async for chunk in response.content.iter_any():
                self._received(chunk)
                for line in splitter.feed(chunk):
                    self._event(_event(line))
        if splitter.rest:
            raise ApiError("truncated", "the watch broke off within an event")

    def _event(self, event: _Event) -> None:
        """Take one event; the resourceVersion moves only after it was taken."""
        match event.type:
            case "ADDED" | "MODIFIED":
                self._version = self._upsert(event.object) or self._version
            case "DELETED":
                self._version = self._delete(event.object) or self._version
            case "BOOKMARK":
                self._stats.bookmarks += 1
                self._version = _outline(event.object).resource_version or self._version
            case _:
                raise ApiError("malformed", f"an event of unknown type {event.type[:40]!r}")
        self._worked()

    def _upsert(self, raw: msgspec.Raw) -> str:
        self._stats.events += 1
        obj = decode_object(self._resource.kind, raw)
        if isinstance(obj, Finding):
            self._stats.malformed += 1
            self._malformed.add(obj.object)
            self._sink.report(obj.object, (obj,))
            return _outline(raw).resource_version
        self._known[obj.metadata.object_name] = obj
        self._stats.objects = len(self._known)
        self._sink.upsert(obj)
        if self._malformed:
            self._mended(scope_of(self._resource.kind, obj))
        return obj.metadata.resource_version

    def _delete(self, raw: msgspec.Raw) -> str:
        """Take a deletion; the name is enough, whatever else is wrong with the object."""
        self._stats.events += 1
        meta = _outline(raw)
        name = ObjectName(meta.namespace, meta.name)
        self._known.pop(name, None)
        self._stats.objects = len(self._known)
        self._sink.delete(self._resource.kind, name)
        self._mended(f"{self._resource.kind} {name}")
        return meta.resource_version

    def _mended(self, scope: str) -> None:
        if scope in self._malformed:
            self._malformed.remove(scope)
            self._sink.report(scope, ())

    # Both

    def _get(
        self, params: Mapping[str, str], quiet: float
    ) -> AbstractAsyncContextManager[ClientResponse]:
        return self._client.get(self._resource.path, {**self._resource.selectors, **params}, quiet)

    def _received(self, chunk: bytes) -> None:
        self._stats.bytes += len(chunk)
        self._stats.last_event = self._timing.now()


def _event(line: bytes) -> _Event:
    """Decode a line of a watch; an ERROR event becomes the ApiError that it tells of."""
    event = _EVENT.decode(line)
    if event.type == "ERROR":
        raise _STATUS.decode(event.object).error()
    return event


def _outline(raw: msgspec.Raw) -> _Meta:
    """Name and resourceVersion, as far as they can be made out."""
    try:
        return _OUTLINE.decode(raw).metadata
    except (ValueError, RecursionError):
        return _Meta()


def _initial_end(event: _Event) -> str:
    """Return the resourceVersion of the bookmark that ends the initial events."""
    meta = _outline(event.object)
    if (meta.annotations or {}).get(_INITIAL_END) != "true":
        raise ApiError("no_watch_list", "a bookmark before the end of the initial events")
    if not meta.resource_version:
        raise ApiError("malformed", "the bookmark has no resourceVersion")
    return meta.resource_version
