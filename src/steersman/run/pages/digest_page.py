"""The page `/digests`: a hash of each Service, for whether nodes serve the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import msgspec

from steersman.compile.digest import Digests, digest_of
from steersman.model.names import ObjectName
from steersman.run.serve.http import Answer, Request
from steersman.run.sync.in_force import InForce, services_of
from steersman.source.store import Store

_AT_ONCE = 50
"""Digests that are made before other tasks may run, a few milliseconds."""


class DigestPage:
    """Keeps the digests of all Services once somebody has asked, and serves `/digests`."""

    def __init__(
        self, store: Store, in_force: InForce, ready: Callable[[], None] = lambda: None
    ) -> None:
        """Create the page.

        Args:
            ready: called when all digests are known for the first time.
        """
        self._store = store
        self._in_force = in_force
        self._cursor = in_force.log.cursor()
        self.ready = ready
        self._digests = Digests()
        self._made: asyncio.Task[None] | None = None

    def total(self) -> str:
        """Return the digest of all Services; "" for the first moments, while it is made."""
        if self._made is None:
            self._made = asyncio.create_task(self._make())
        return self._digests.total if self._made.done() else ""

    async def observe(self, _: object = None) -> None:
        """Take the Services that a sync has brought into force; yields to the loop."""
        names, revision = self._cursor.changed()
        if self._made is not None:
            await self._put(services_of(names))
        self._cursor.move(revision)

    async def serve(self, _: Request) -> Answer:
        """Answer `/digests`: the digest of each Service by its name."""
        self.total()
        assert self._made is not None
        await asyncio.shield(self._made)
        found = self._digests.by_name()
        body = await asyncio.to_thread(msgspec.json.encode, found)
        return Answer(body, content_type="application/json")

    async def _make(self) -> None:
        await self._put(tuple(self._store.snapshot.services))
        asyncio.get_running_loop().call_soon(self.ready)

    async def _put(self, names: Collection[ObjectName]) -> None:
        snapshot, in_force = self._store.snapshot, self._in_force
        for number, name in enumerate(names, 1):
            # Another version than the Store's is in force: its digest stays, if there is one.
            if in_force.has_newest(name, self._store.log):
                service, slices = snapshot.services.get(name), snapshot.slices.get(name, ())
                digest = digest_of(name, service, slices) if service is not None else 0
                self._digests.put(name, digest)
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
