"""The interface between sources of objects and the Store: Source, EventHandler."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Sequence
from typing import Protocol

from steersman.model.findings import Finding
from steersman.model.kube import EndpointSlice, KubeObject
from steersman.model.names import ObjectName
from steersman.source.stats import SourceStats

# Microseconds until the event loop gets its turn; an object costs 10, an endpoint 1.
_BATCH_COST = 3000


class EventHandler(Protocol):
    """Receives objects from a Source. Calls are cheap, never fail, and come from the event loop.

    Sources ignore the results of `upsert` and `delete`.
    """

    def retain(self, kind: str, names: Container[ObjectName], keep: Container[str] = ()) -> None:
        """End a complete list of a kind, after `upsert` of each of its objects.

        Objects of other names are removed, except for those with a scope (`Service shop/cart`) in
        `keep`: they could not be read now, so their last good version is kept.

        The first call for a kind also completes its initial list.
        """
        ...

    def upsert(self, obj: KubeObject) -> object:
        """Add or replace one object."""
        ...

    def delete(self, kind: str, name: ObjectName) -> object:
        """Remove one object; an unknown one is no change."""
        ...

    def report(self, scope: str, findings: Sequence[Finding]) -> None:
        """Replace the Findings of a scope (an object's name or a file); () clears it."""
        ...


class Source(Protocol):
    """Reads Services, EndpointSlices and so on, and follows their changes."""

    @property
    def stats(self) -> SourceStats | None:
        """Counts of the connection to the API server; None if there is none."""
        ...

    async def run(self, handler: EventHandler) -> None:
        """Feed the handler until cancelled; external failures are retried inside, forever."""
        ...


async def upsert_in_batches(
    handler: EventHandler, objects: Iterable[KubeObject]
) -> set[ObjectName]:
    """Upsert many objects without blocking the event loop for long; return their names."""
    names: set[ObjectName] = set()
    cost = 0
    for obj in objects:
        names.add(obj.metadata.object_name)
        handler.upsert(obj)
        cost += 10 + (len(obj.endpoints or ()) if isinstance(obj, EndpointSlice) else 0)
        if cost >= _BATCH_COST:
            cost = 0
            await asyncio.sleep(0)
    return names
