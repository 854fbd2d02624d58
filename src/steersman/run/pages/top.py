"""The page of `steersman top`: a summary, and the rates of the busiest ServicePorts.

The process computes the rates itself and sends only the rows of one screen, so a refresh costs the
same on both sides however large the cluster is, apart from reading the mode's counters. These are
read at most as often as keeps their share of a core below `_SHARE`; in between the last ones are
shown again. All clients share them.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import ServicePortName
from steersman.model.plan import ServicePlan
from steersman.model.stats import ConnectionStats, NodeTotals, StatsKey
from steersman.model.top import TopRow, TopSample
from steersman.modes.base import Mode
from steersman.run.pages.node_state import NodeStates
from steersman.run.serve.http import Answer, Request
from steersman.run.sync.sync import Sync

_SHARE = 0.05
"""Largest share of a core for reading counters."""
_APART = 0.9
"""Least seconds between two counts: rates of shorter times jump."""
_FRESH = 20.0
"""Seconds for which rates are said to be those of now."""
MOST_ROWS = 500
_FINDINGS = (100, 100_000)
"""Number and characters of the listed Findings."""

Sums: TypeAlias = tuple[int, int, float]
"""Connections, failed dials, and seconds of successful dials."""
_NONE: Sums = (0, 0, 0.0)
_ORDERS: Mapping[str, Callable[[Sums, Sums], tuple[float, ...]]] = {
    "rate": lambda now, before: (now[0] - before[0], now[0]),
    "connections": lambda now, _: (now[0],),
    "failures": lambda now, before: (now[1] - before[1], now[1]),
    "latency": lambda now, before: ((now[2] - before[2]) / max(1, now[0] - before[0]),),
}
"""Keys of the orders by counts at two times; the largest is first."""
_Key: TypeAlias = ServicePortName | StatsKey | None
"""A ServicePort, one of its endpoints, or all ServicePorts."""
_Named: TypeAlias = tuple[str, _Key, int]
"""A row: its name, its key, its endpoints."""
_ALL: _Named = ("all", None, 0)


class Count(NamedTuple):
    """Counts of the mode at one time."""

    at: float
    stats: ConnectionStats
    totals: NodeTotals
    by_port: Mapping[ServicePortName, Sums]
    total: Sums
    """Over all ServicePorts."""

    def of(self, key: _Key) -> Sums:
        """Return the counts of a row."""
        if key is None:
            return self.total
        if isinstance(key, ServicePortName):
            return self.by_port.get(key, _NONE)
        failures, seconds = (self.stats.dials or {}).get(key, (0, 0.0))
        return self.stats.endpoints.get(key, 0), failures, seconds


class Rates(NamedTuple):
    """The last two counts; the same one twice as long as there is only one."""

    first: Count
    last: Count

    @property
    def seconds(self) -> float:
        """The time in between."""
        return self.last.at - self.first.at

    def row(self, named: _Named) -> TopRow:
        """Return the row of a ServicePort or of an endpoint; without two counts it has no rates."""
        name, key, ends = named
        protocol, now, seconds = _protocol(key), self.last.of(key), self.seconds
        dials = self.last.stats.dials is not None  # whether the mode knows anything of them
        failures = now[1] if dials else None
        if not seconds:
            return TopRow(name, protocol, ends, now[0], failures=failures)
        # Counts are lower than before only if an endpoint has come back: it begins at zero.
        before = self.first.of(key)
        more, failed, took = (max(0, new - old) for new, old in zip(now, before, strict=True))
        return TopRow(
            name,
            protocol,
            ends,
            now[0],
            more / seconds,
            failures,
            failed / seconds if dials else None,
            took / more if dials and more else None,
        )


def _protocol(key: _Key) -> str:
    if key is None:
        return ""
    name = key if isinstance(key, ServicePortName) else key[0]
    return name.protocol.value


class TopPage:
    """Keeps the last two counts, and answers with rows made of them."""

    def __init__(
        self,
        states: NodeStates,
        sync: Callable[[], Sync],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._states = states
        self._sync = sync
        self._clock = clock
        self._rates: Rates | None = None
        self._mode: Mode | None = None
        self._problem = ""
        self._not_before = 0.0
        self._counting = asyncio.Lock()

    def rates(self) -> tuple[float | None, float | None]:
        """Return new and failed connections per second by the last counts; None if unknown.

        Nothing is counted for it: the rates are known while somebody reads the page.
        """
        known = self._rates
        old = known is None or self._clock() - known.last.at > _FRESH
        if known is None or old or self._mode != self._sync().mode:
            return None, None
        total = known.row(_ALL)
        return total.rate, total.failure_rate

    async def serve(self, request: Request) -> Answer:
        """Answer with a TopSample: `?sort=`, `?filter=` and `?service=NAMESPACE/NAME`."""
        query = request.query
        sample = await self.sample(
            query.get("sort", "rate"), query.get("filter", ""), query.get("service", "")
        )
        return Answer(msgspec.msgpack.encode(sample), content_type="application/msgpack")

    async def sample(self, sort: str = "rate", text: str = "", service: str = "") -> TopSample:
        """Return a sample.

        Args:
            sort: rate, connections, failures, latency, endpoints or name.
            text: only ServicePorts whose name contains it.
            service: the endpoints of this Service instead of ServicePorts.
        """
        async with self._counting:
            await self.count()
        plans = tuple(self._sync().state.plan.services.values())

        def first_rows() -> tuple[int, list[TopRow]]:
            found = _endpoints(plans, service) if service else _ports(plans, text)
            return len(found), self.rows(found, sort)

        return self._summary(*await asyncio.to_thread(first_rows))

    def rows(self, found: Sequence[_Named], sort: str) -> list[TopRow]:
        """Return the first rows in an order; `found` is in the order of names."""
        if (rates := self._rates) is None:
            return [TopRow(n, _protocol(k), ends) for n, k, ends in found[:MOST_ROWS]]
        first, last = rates
        # Only the rows that are shown are made: a cluster has many more.
        if (order := _ORDERS.get(sort)) is not None:
            shown = heapq.nlargest(
                MOST_ROWS, found, key=lambda each: order(last.of(each[1]), first.of(each[1]))
            )
        elif sort == "endpoints":
            shown = heapq.nsmallest(MOST_ROWS, found, key=lambda each: each[2])
        else:
            shown = list(found[:MOST_ROWS])
        return [rates.row(each) for each in shown]

    async def count(self) -> None:
        """Count again unless it is too early, or another mode serves."""
        mode = self._sync().mode
        if mode is not self._mode:
            self._mode, self._rates, self._not_before = mode, None, 0.0
        if self._clock() < self._not_before:
            return
        began = self._clock()
        self._problem = ""
        try:
            plans = tuple(self._sync().state.plan.services.values())
            stats = await mode.worker.do_slowly(mode.stats(plans))
            if stats is not None:
                totals = await mode.worker.do(mode.totals)
                count = await asyncio.to_thread(count_of, began, stats, totals)
                self._rates = Rates(self._rates.last if self._rates else count, count)
        except (ApplyError, BusyError, OSError) as error:
            self._problem = str(error)
        took = self._clock() - began
        self._not_before = began + max(_APART, took / _SHARE)

    def _summary(self, matching: int, rows: Sequence[TopRow]) -> TopSample:
        known = self._rates
        proxy = known.last.totals.proxy if known else None
        return TopSample(
            status=self._states.now(_FINDINGS),
            counted=known is not None,
            total=known.row(_ALL) if known else TopRow(_ALL[0]),
            open_connections=proxy.open_connections if proxy else None,
            interval=known.seconds if known else 0.0,
            matching=matching,
            rows=tuple(rows),
            problem=self._problem,
        )


def _ports(plans: Iterable[ServicePlan], text: str) -> list[_Named]:
    ends: dict[ServicePortName, int] = {}
    for plan in plans:  # both families in one row
        ends[plan.key.name] = ends.get(plan.key.name, 0) + len(plan.reachable)
    named = ((printed(name), name, number) for name, number in ends.items())
    return sorted(each for each in named if text in each[0])


def _endpoints(plans: Iterable[ServicePlan], service: str) -> list[_Named]:
    return [
        (f"{end} ({name.port})" if name.port else str(end), (name, str(end)), 1)
        for plan in plans
        if str((name := plan.key.name).object_name) == service
        for end in plan.reachable
    ]


def printed(name: ServicePortName) -> str:
    """Return a ServicePort as `shop/web:http`."""
    port = f":{name.port}" if name.port else ""
    return f"{name.namespace}/{name.service}{port}"


def count_of(at: float, stats: ConnectionStats, totals: NodeTotals) -> Count:
    """Sum the counts of endpoints by ServicePort."""
    connections: dict[ServicePortName, int] = {}
    for (name, _), number in stats.endpoints.items():
        connections[name] = connections.get(name, 0) + number
    if stats.dials is None:
        sums: dict[ServicePortName, Sums] = {n: (c, 0, 0.0) for n, c in connections.items()}
        return Count(at, stats, totals, sums, (sum(connections.values()), 0, 0.0))
    failed: dict[ServicePortName, tuple[int, float]] = {}
    for (name, _), (failures, seconds) in stats.dials.items():
        before = failed.get(name, (0, 0.0))
        failed[name] = before[0] + failures, before[1] + seconds
    names = connections.keys() | failed.keys()
    sums = {name: (connections.get(name, 0), *failed.get(name, (0, 0.0))) for name in names}
    rows = failed.values()
    total = sum(connections.values()), sum(row[0] for row in rows), sum(row[1] for row in rows)
    return Count(at, stats, totals, sums, total)
