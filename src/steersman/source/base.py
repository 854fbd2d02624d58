"""The seam between where objects come from and the Store that holds them."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Sequence
from typing import Protocol

from steersman.model.findings import Finding
from steersman.model.kube import EndpointSlice, KubeObject
from steersman.model.names import ObjectName

_SLICE = 3000
"""Cost of the objects taken at a time, about a microsecond each: 10 for one, 1 for an endpoint."""


class Sink(Protocol):
    """Takes what a Source reads. Calls are cheap and never fail; all come from the event loop.

    What `upsert` and `delete` return is of no use to a Source.
    """

    def retain(self, kind: str, names: Container[ObjectName], keep: Container[str] = ()) -> None:
        """End a complete list of a kind, all objects of which were given to `upsert`.

        Objects of other names are gone, except for those whose scope (`Service shop/cart`) is in
        `keep`: they could not be read now, so their last good version stays.

        The first call for a kind also says that the kind's initial list is in.
        """
        ...

    def upsert(self, obj: KubeObject) -> object:
        """Take one object that was added or changed."""
        ...

    def delete(self, kind: str, name: ObjectName) -> object:
        """Take note that one object is gone; an unknown one is no change."""
        ...

    def report(self, scope: str, findings: Sequence[Finding]) -> None:
        """Replace the Findings of a scope (an object's name or a file) by these; () clears it."""
        ...


async def upsert_in_slices(sink: Sink, objects: Iterable[KubeObject]) -> set[ObjectName]:
    """Give many objects to a Sink without holding the event loop; return their names."""
    names: set[ObjectName] = set()
    cost = 0
    for obj in objects:
        names.add(obj.metadata.object_name)
        sink.upsert(obj)
        cost += 10 + (len(obj.endpoints or ()) if isinstance(obj, EndpointSlice) else 0)
        if cost >= _SLICE:
            cost = 0
            await asyncio.sleep(0)
    return names


class Source(Protocol):
    """Somewhere that Services and EndpointSlices come from."""

    async def run(self, sink: Sink) -> None:
        """Feed the sink until cancelled; faults of the outside are retried inside, for ever."""
        ...
