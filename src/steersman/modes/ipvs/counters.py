"""The counters of virtual and real servers, asked of the kernel at each scrape."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

from steersman.host.netlink import NETLINK_GENERIC, Netlink
from steersman.model.errors import BusyError
from steersman.model.plan import ServicePlan
from steersman.model.stats import ConnectionStats, NodeTotals
from steersman.modes.ipvs.totals import Counted, Owners, Totals, parse_totals
from steersman.modes.ipvs.wire import Stats, list_destinations, list_services, resolve

_STATS = Path("/proc/thread-self/net/ip_vs_stats")
"""Of the network namespace of the thread that reads it."""


class Counters:
    """What went through so far."""

    def __init__(self, inside: Any) -> None:
        """Take what runs a function in the network namespace to ask."""
        self._inside = inside
        self._totals = Totals()
        self._lock = asyncio.Lock()

    async def stats(self, plans: Collection[ServicePlan]) -> ConnectionStats:
        """Return the counts by frontend and endpoint of these plans.

        What is counted after the last call and before a server goes is not in it.

        Raises:
            BusyError: the kernel does not answer.
        """
        async with self._lock:
            try:
                return await asyncio.to_thread(self._stats, plans)
            except OSError as error:
                raise BusyError(f"the counters of IPVS cannot be read: {error}") from error

    async def totals(self) -> NodeTotals:
        """Return the kernel's sums over all virtual servers, foreign ones included."""
        try:
            return parse_totals(await asyncio.to_thread(self._inside, _STATS.read_text))
        except (OSError, IndexError, ValueError) as error:
            raise BusyError(f"{_STATS} cannot be read: {error}") from error

    def _stats(self, plans: Collection[ServicePlan]) -> ConnectionStats:
        owners = Owners(plans)
        return self._totals.update(self._read(owners), owners)

    def _read(self, owners: Owners) -> dict[Counted, Stats]:
        """Counters of all servers that have an owner, on a socket of its own."""
        counts: dict[Counted, Stats] = {}
        with self._inside(lambda: Netlink(NETLINK_GENERIC, buffer=1 << 20)) as netlink:
            family = resolve(netlink)
            for listed in list(list_services(netlink, family)):
                # what a virtual server has not counted, none of its real servers has
                if any(listed.stats) and owners.of(listed.key) is not None:
                    counts[listed.key, None] = listed.stats
                    for target, stats in list_destinations(netlink, family, listed.key):
                        counts[listed.key, target] = stats
        return counts
