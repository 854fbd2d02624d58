"""A conntrack table in memory, and a StaleEntryCleaner on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

import msgspec

from steersman.compile.planner import Planner
from steersman.model.conntrack import Cleanup, Confirm, Stale
from steersman.model.inputs import NodeConfig
from steersman.model.kube import KubeObject
from steersman.model.names import Family
from steersman.model.plan import ServicePlan
from steersman.modes.base import Mode
from steersman.run.observe.metrics import Metrics
from steersman.run.observe.stale_entries import Delete, StaleEntryCleaner
from steersman.run.sync.sync import Sync
from steersman.source.store import Store
from tests.support.clock import FakeClock, settle
from tests.support.modes.memory import FACTS, MemoryMode


class Table:
    """Stands in for conntrack: notes the destinations that were looked at."""

    def __init__(self) -> None:
        self.looked: list[list[str]] = []
        self.asked: list[Stale] = []
        self.confirmed: Stale | None = None
        """The answer to the last pass that found something, with `during`."""
        self.answers: list[Cleanup | Exception] = []
        """Of the next passes; then nothing is stale any more."""
        self.during: Callable[[], Awaitable[None]] | None = None
        self.untranslated: list[Cleanup | Exception] = []
        """Of the next passes over untranslated connections."""
        self.untranslated_looked: list[set[str]] = []

    async def delete_untranslated(self, _family: Family, plans: Collection[ServicePlan]) -> Cleanup:
        self.untranslated_looked.append({plan.key.name.service for plan in plans})
        answer = self.untranslated.pop(0) if self.untranslated else Cleanup(0, 0, True)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def delete(self, stale: Stale, confirm: Confirm) -> Cleanup:
        self.asked.append(stale)
        self.looked.append(sorted(map(printed, stale.by_address)))
        if self.during is not None:
            await self.during()
            self.confirmed = await confirm()
            assert self.confirmed
        answer = self.answers.pop(0) if self.answers else Cleanup(0, 0, True)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def take(self) -> list[list[str]]:
        looked, self.looked = self.looked, []
        return looked


def printed(destination: bytes) -> str:
    return ".".join(map(str, destination[1:-2]))


class World:
    """A cluster whose syncs are reported to a StaleEntryCleaner that runs."""

    def __init__(
        self,
        mode: Mode | None = None,
        *,
        families: Collection[Family] = (Family.IPV4,),
        delete: Delete | None = None,
    ) -> None:
        facts = msgspec.structs.replace(FACTS, ipv6=Family.IPV6 in families)
        self.store, self.clock, self.table = Store("me", facts=facts), FakeClock(), Table()
        self.kernel = MemoryMode()
        config = NodeConfig(node_name="me", families=tuple(families))
        planner = Planner(config, self.kernel.traits)
        self.sync = Sync(self.store, planner, self.kernel)
        self.metrics = Metrics("iptables")
        self.stale_entries = StaleEntryCleaner(
            self.metrics,
            self.sync.in_force,
            mode=mode or self.kernel,
            delete=delete or self.table.delete,
            untranslated=self.table.delete_untranslated,
            clock=self.clock,
        )

    async def change(self, *objects: KubeObject) -> list[list[str]]:
        """Sync some changes and report them; return the destinations that are looked at then."""
        for obj in objects:
            self.store.upsert(obj)
        await self.report()
        return self.table.take()

    async def report(self) -> None:
        if report := await self.sync.run():
            self.stale_entries.note(report)
        await self.settle()

    async def settle(self) -> None:
        """Wait until the StaleEntryCleaner waits: its threads included."""
        for _ in range(5):
            await settle()
            await asyncio.to_thread(lambda: None)
            await settle()

    async def advance(self, seconds: float) -> list[list[str]]:
        await self.clock.advance(seconds)
        await self.settle()
        return self.table.take()
