"""Counts of nodes for pages, asked for only while somebody looks at them.

    page -> Sampler.top -> GET /top of the node

Readers of the same counts share one request, and its answer for a second. The rates of a Service
are kept for the few minutes that its page shows, of the Services that were looked at last.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, TypeVar
from urllib.parse import urlencode

import msgspec

from steersman.model.kube import ObjectMeta, Pod, PodIP, PodSpec, PodStatus
from steersman.model.names import ObjectName
from steersman.model.top import TopSample
from steersman.model.world import World
from steersman.operate.answer import QuestionError
from steersman.operate.names import Names
from steersman.operate.traffic import RateHistory, ServiceRates, service_rates
from steersman.ui.fleet import Fleet

_K = TypeVar("_K")
_V = TypeVar("_V")

_FRESH = 1.0  # seconds for which an answer is given again
_STALE = 10.0  # seconds after which a World is read again, even if its node had no sync
_MOST_COUNTS = 256
_MOST_WATCHED = 32  # Services whose rates are kept: 200 kB each if they have many endpoints
_MOST_WORLDS = 16
_MOST_PODS = 256
_POD_STALE = 30.0
"""Seconds after which a pod is looked up again, whether it was found or not: that takes a whole
World, tens of megabytes in a large cluster."""


class _Known(NamedTuple):
    at: float
    sample: TopSample


class _Seen(NamedTuple):
    at: float
    revision: int
    world: World


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
        self._counts: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        self._asking: dict[tuple[str, str], asyncio.Lock] = {}
        self._histories: OrderedDict[tuple[str, str], RateHistory] = OrderedDict()
        self._worlds: OrderedDict[tuple[str, ObjectName], _Seen] = OrderedDict()
        self._pods: OrderedDict[tuple[str, ObjectName], tuple[float, Pod | None]] = OrderedDict()
        self._looking = asyncio.Lock()

    async def top(self, node: str, service: str = "") -> TopSample:
        """Return the counts of a node.

        Args:
            node: its name.
            service: `namespace/name` for the endpoints of a Service; "" for all ServicePorts.

        Raises:
            QuestionError: the node does not answer, or not as expected.
        """
        key = node, service
        lock = self._asking.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                known = self._counts.get(key)
                if known is None or self._clock() - known.at >= _FRESH:
                    words = {"sort": "rate"} | ({"service": service} if service else {})
                    data = await self._fleet.get(node, f"/top?{urlencode(words)}")
                    try:
                        sample = msgspec.msgpack.decode(data, type=TopSample)
                    except msgspec.DecodeError as error:
                        text = f"{node} sends counts of another version of steersman: {error}"
                        raise QuestionError(text) from error
                    known = _Known(self._clock(), sample)
                    _keep(self._counts, key, known, _MOST_COUNTS)
                return known.sample
        finally:
            if not lock.locked():
                self._asking.pop(key, None)

    async def rates(self, node: str, service: str) -> ServiceRates:
        """Return the rates of a Service through a node; raises as `top`."""
        sample = await self.top(node, service)
        key = node, service
        history = self._histories.get(key) or RateHistory()
        _keep(self._histories, key, history, _MOST_WATCHED)
        now = self._clock()
        history.add(now, sample)
        return service_rates(service, now, sample, history)

    async def world(self, node: str, service: ObjectName) -> World:
        """Return the part of a node's World about a Service, read again after each sync.

        Raises:
            QuestionError: the node cannot be asked, or does not know the Service.
        """
        key, now = (node, service), self._clock()
        state = self._fleet.nodes.get(node)
        revision = state.revision if state else 0
        seen = self._worlds.get(key)
        if seen is None or seen.revision != revision or now - seen.at >= _STALE:
            seen = _Seen(now, revision, await self._fleet.world(node, service))
            _keep(self._worlds, key, seen, _MOST_WORLDS)
        return seen.world

    async def pod(self, node: str, name: ObjectName) -> Pod | None:
        """Return a pod that a node knows behind any Service; None if it knows none of that name."""
        key = node, name
        async with self._looking:  # one whole World at a time
            at, pod = self._pods.get(key, (float("-inf"), None))
            if self._clock() - at >= _POD_STALE:
                try:
                    whole = await self._fleet.world(node)
                except (QuestionError, TimeoutError):
                    return None
                known = await asyncio.to_thread(lambda: Names(whole).pods.get(name))
                pod = None
                if known is not None:
                    pod = Pod(
                        ObjectMeta(name.name, name.namespace),
                        PodSpec(node_name=known.node),
                        PodStatus(pod_ips=[PodIP(ip) for ip in known.ips]),
                    )
                _keep(self._pods, key, (self._clock(), pod), _MOST_PODS)
        return pod


def _keep(known: OrderedDict[_K, _V], key: _K, value: _V, most: int) -> None:
    """Keep a value as the latest one of at most that many."""
    known[key] = value
    known.move_to_end(key)
    while len(known) > most:
        known.popitem(last=False)
