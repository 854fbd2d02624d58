"""What pages ask nodes for, only while somebody looks at them.

    page -> Sampler.top -> Shared -> GET /top of the node

Readers of the same thing share one request, and its answer for a while. The rates of a Service are
kept for the few minutes that its page shows, of the Services that were looked at last.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar
from urllib.parse import urlencode

import msgspec

from steersman.model.history import History
from steersman.model.names import ObjectName
from steersman.model.top import TopSample
from steersman.model.world import World
from steersman.operate.answer import QuestionError
from steersman.operate.client import understood
from steersman.operate.names import KnownPod, Names
from steersman.operate.traffic import RateHistory, ServiceRates, service_rates
from steersman.ui.fleet import Fleet

_K = TypeVar("_K")
_V = TypeVar("_V")

_HISTORY = msgspec.json.Decoder(History)

_STALE = 10.0
"""Seconds after which a World is read again, even if its node had no sync."""
_POD_STALE = 30.0
"""Seconds after which a pod is looked up again, whether it was found or not: that takes a whole
World, tens of megabytes in a large cluster."""
_HISTORY_STALE = 15.0
"""Seconds after which a history is asked for again though nothing happened: the hour moves on."""
_MOST_WATCHED = 32  # Services whose rates are kept: a megabyte each if they have many endpoints


class _Known(NamedTuple, Generic[_V]):
    at: float
    version: object
    value: _V


class Shared(Generic[_K, _V]):
    """The last answers by key. Readers who ask at the same time wait for one request."""

    def __init__(
        self, most: int, seconds: float, clock: Callable[[], float] = time.time, apart: float = 0.0
    ) -> None:
        """Remember nothing yet.

        Args:
            most: answers that are kept, those that were asked for last.
            seconds: after which an answer is asked for again.
            clock: seconds since 1970.
            apart: seconds between two requests of a key; who comes earlier waits.
        """
        self._most, self._seconds = most, seconds
        self._clock, self._apart = clock, apart
        self._known: OrderedDict[_K, _Known[_V]] = OrderedDict()
        self._asking: dict[_K, asyncio.Lock] = {}

    async def get(self, key: _K, ask: Callable[[], Awaitable[_V]], version: object = None) -> _V:
        """Return an answer; raises what `ask` raises, and then nothing is kept.

        Args:
            key: of the answer.
            ask: asks for it.
            version: an answer of another version is asked for again.
        """
        lock = self._asking.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                if (known := self._known.get(key)) is not None:
                    age = self._clock() - known.at
                    if known.version == version and age < self._seconds:
                        return known.value
                    if age < self._apart:
                        await asyncio.sleep(self._apart - age)
                value = await ask()
                keep(self._known, key, _Known(self._clock(), version, value), self._most)
                return value
        finally:
            if not lock.locked():
                self._asking.pop(key, None)

    def __len__(self) -> int:
        return len(self._known)


class Sampler:
    """Reads counts and small Worlds of a fleet's nodes."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float] = time.time) -> None:
        """Read nothing yet.

        Args:
            fleet: the nodes.
            clock: seconds since 1970.
        """
        self._fleet = fleet
        self._clock = clock
        self._counts = Shared[tuple[str, str], TopSample](256, 1.0, clock)
        self._rates: OrderedDict[tuple[str, str], RateHistory] = OrderedDict()
        self._worlds = Shared[tuple[str, ObjectName], World](16, _STALE, clock)
        self._histories = Shared[str, History](8, _HISTORY_STALE, clock, 1.0)
        self._pods = Shared[tuple[str, ObjectName], KnownPod | None](256, _POD_STALE, clock)
        self._looking = asyncio.Lock()

    async def top(self, node: str, service: str = "") -> TopSample:
        """Return the counts of a node.

        Args:
            node: its name.
            service: `namespace/name` for the endpoints of a Service; "" for all ServicePorts.

        Raises:
            QuestionError: the node does not answer, or not as expected.
        """

        async def ask() -> TopSample:
            words = {"sort": "rate"} | ({"service": service} if service else {})
            data = await self._fleet.get(node, f"/top?{urlencode(words)}")
            with understood(f"node {node}"):
                return msgspec.msgpack.decode(data, type=TopSample)

        return await self._counts.get((node, service), ask)

    async def rates(self, node: str, service: str) -> ServiceRates:
        """Return the rates of a Service through a node; raises as `top`."""
        sample = await self.top(node, service)
        key = node, service
        history = self._rates.get(key) or RateHistory()
        keep(self._rates, key, history, _MOST_WATCHED)
        now = self._clock()
        history.add(now, sample)
        return service_rates(service, now, sample, history)

    async def world(self, node: str, service: ObjectName) -> World:
        """Return the part of a node's World about a Service, read again after each sync.

        Raises:
            QuestionError: the node cannot be asked, or does not know the Service.
        """
        state = self._fleet.nodes.get(node)
        revision = state.revision if state else 0
        return await self._worlds.get(
            (node, service), lambda: self._fleet.world(node, (service,)), revision
        )

    async def history(self, node: str) -> History:
        """Return the history of a node's syncs; raises as `top`."""

        async def ask() -> History:
            data = await self._fleet.get(node, "/history")
            with understood(f"node {node}"):
                return _HISTORY.decode(data)

        state = self._fleet.nodes.get(node)
        version = (state.pid, state.revision, state.failure) if state else None
        return await self._histories.get(node, ask, version)

    async def pod(self, node: str, name: ObjectName) -> KnownPod | None:
        """Return a pod that a node knows behind any Service; None if it knows none of that name."""

        async def ask() -> KnownPod | None:
            async with self._looking:  # one whole World at a time
                whole = await self._fleet.world(node)
                return await asyncio.to_thread(lambda: Names(whole).pods.get(name))

        try:
            return await self._pods.get((node, name), ask)
        except (QuestionError, TimeoutError):
            return None


def keep(known: OrderedDict[_K, _V], key: _K, value: _V, most: int) -> None:
    """Keep a value as the latest one of at most that many."""
    known[key] = value
    known.move_to_end(key)
    while len(known) > most:
        known.popitem(last=False)
