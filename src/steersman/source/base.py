"""The interface of sources of objects, which feed the Store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from steersman.model.findings import Finding
from steersman.model.kube import EndpointSlice, KubeObject
from steersman.model.names import ObjectName
from steersman.source.stats import SourceStats
from steersman.source.store import Store

# Microseconds until the event loop gets its turn; an object costs 10, an endpoint 1.
_BATCH_COST = 3000


class Source(Protocol):
    """Reads Services, EndpointSlices and so on, and follows their changes."""

    @property
    def stats(self) -> SourceStats | None:
        """Counts of the connection to the API server; None if there is none."""
        ...

    async def run(self, store: Store) -> None:
        """Feed the Store until cancelled; external failures are retried inside, forever."""
        ...


async def upsert_in_batches(store: Store, objects: Iterable[KubeObject]) -> set[ObjectName]:
    """Upsert many objects without blocking the event loop for long; return their names."""
    names: set[ObjectName] = set()
    cost = 0
    for obj in objects:
        names.add(obj.metadata.object_name)
        store.upsert(obj)
        cost += 10 + (len(obj.endpoints or ()) if isinstance(obj, EndpointSlice) else 0)
        if cost >= _BATCH_COST:
            cost = 0
            await asyncio.sleep(0)
    return names


async def replace_all(
    store: Store, kind: str, objects: Iterable[KubeObject], findings: Iterable[Finding]
) -> None:
    """Feed the Store with a complete list; malformed objects keep their last good version."""
    malformed = {finding.object: finding for finding in findings}
    store.retain(kind, await upsert_in_batches(store, objects), malformed)
    for finding in malformed.values():
        store.reject(finding)
