"""The page with the connections so far: of all plans, and of one Service."""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import Any, cast

import msgspec
import pytest

from steersman.model.errors import BusyError
from steersman.model.plan import ServicePlan
from steersman.model.stats import ConnectionStats, DialCounters, TimedStats, TrafficCounters
from steersman.run.pages.cluster_pages import ClusterPages
from tests.support.http import asking
from tests.support.modes.memory import MemoryMode, World


class CountingMode(MemoryMode):
    """A mode that has counted one connection to each endpoint of the plans that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[int] = []

    def stats(self, plans: Collection[ServicePlan]) -> Generator[None, None, ConnectionStats]:
        yield
        self.counted.append(len(plans))
        names = [plan.key.name for plan in plans]
        return ConnectionStats(
            frontends={(name, "vip"): 2 for name in names},
            endpoints={(name, "end"): 1 for name in names},
            traffic_by_endpoint={(name, "end"): TrafficCounters(1, 2, 3, 4) for name in names},
            dials={(name, "end"): DialCounters(1, 0.5) for name in names},
        )


async def test_counts_of_one_service_are_a_part_of_those_of_all() -> None:
    """A mode forgets the totals of plans that are left out of a count."""
    world = World(3)
    world.mode = mode = CountingMode()
    world.start()
    await world.run()
    page = ClusterPages(lambda: world.sync, cast(Any, None), cast(Any, None)).pages["GET", "/stats"]

    async def counts(target: str) -> ConnectionStats:
        answer = await cast(Any, page(asking(target)))
        stats: ConnectionStats | None
        _, stats = msgspec.msgpack.decode(answer.body, type=TimedStats)
        assert stats is not None
        return stats

    every = await counts("/stats")
    key = next(iter(every.endpoints))
    one = await counts(f"/stats?service={key[0].object_name}")
    assert mode.counted == [3, 3]
    assert len(every.endpoints) == 3
    assert [*one.endpoints] == [*one.traffic_by_endpoint] == [*(one.dials or {})] == [key]
    assert [*one.frontends] == [(key[0], "vip")]
    assert one.traffic_by_frontend == {}


@pytest.mark.parametrize("error", [BusyError("a lock is held"), OSError(1, "not permitted")])
async def test_counts_that_cannot_be_read_now_are_no_defect(error: Exception) -> None:
    class Busy(CountingMode):
        def stats(self, plans: Collection[ServicePlan]) -> Generator[None, None, ConnectionStats]:
            yield
            raise error

    world = World(1)
    world.mode = Busy()
    world.start()
    await world.run()
    page = ClusterPages(lambda: world.sync, cast(Any, None), cast(Any, None)).pages["GET", "/stats"]
    answer = await cast(Any, page(asking("/stats")))
    assert answer.status == 503
    assert str(error) in str(answer.body)
