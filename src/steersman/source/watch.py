"""An open watch: its events, and the list that a WatchList begins with (KEP-3157)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from steersman.model.findings import Finding
from steersman.source.http import Response
from steersman.source.lister import MAX_LIST, Listing, PackedObjects
from steersman.source.objects import decode_object
from steersman.source.pace import Timing
from steersman.source.stats import KindStats
from steersman.source.wire import (
    ApiError,
    RelistError,
    WatchEvent,
    decode_event,
    initial_end,
    splitter_for,
)


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


async def read_initial(kind: str, events: AsyncIterator[WatchEvent], timing: Timing) -> Listing:
    """Return the list that a watch begins with; the events after it are left.

    Raises:
        ApiError: there is none (`no_watch_list`), or it is too long.
    """
    objects, findings, size = PackedObjects(kind), list[Finding](), 0
    try:
        async with asyncio.timeout(timing.initial_total):
            async for event in events:
                if event.type == "BOOKMARK":
                    return Listing(objects.drain(), findings, initial_end(event))
                if event.type != "ADDED":
                    raise ApiError("no_watch_list", f"{event.type} among initial events")
                length = len(memoryview(event.object))
                size += length
                if size > MAX_LIST:
                    raise ApiError("too_long", f"a list longer than {MAX_LIST} bytes")
                decoded = decode_object(kind, event.object)
                if isinstance(decoded, Finding):
                    findings.append(decoded)
                else:
                    objects.add((decoded,), length)
    except TimeoutError as error:
        raise ApiError("no_watch_list", "its initial events did not end in time") from error
    raise ApiError("no_watch_list", "its initial events ended early")
