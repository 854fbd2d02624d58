"""The counters of virtual and real servers, asked of the kernel at each scrape."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from steersman.host.netlink import NETLINK_GENERIC, Netlink
from steersman.model.plan import ServicePlan
from steersman.modes.base import BusyError, Made
from steersman.modes.ipvs.totals import Counted, Owners, Totals
from steersman.modes.ipvs.wire import Stats, list_destinations, list_services, resolve


class Counters:
    """What went through so far."""

    def __init__(self, inside: Any) -> None:
        """Take what runs a function in the network namespace to ask."""
        self._inside = inside
        self._totals = Totals()
        self._lock = asyncio.Lock()

    async def made(self, plans: Collection[ServicePlan]) -> Made:
        """Count by frontend and endpoint of these plans.

        What is counted after the last call and before a server goes is not in it.

        Raises:
            BusyError: the kernel does not say.
        """
        async with self._lock:
            owners = Owners(plans)
            try:
                counts = await asyncio.to_thread(self._read, owners)
            except OSError as error:
                raise BusyError(f"the counters of IPVS cannot be read: {error}") from error
            return self._totals.update(counts, owners)

    def _read(self, owners: Owners) -> dict[Counted, Stats]:
        """Counters of all servers that have an owner, on a socket of its own."""
        counts: dict[Counted, Stats] = {}
        with self._inside(lambda: Netlink(NETLINK_GENERIC, buffer=1 << 20)) as netlink:
            family = resolve(netlink)
            for listed in list(list_services(netlink, family)):
                if owners.of(listed.key) is not None:
                    counts[listed.key, None] = listed.stats
                    for target, stats in list_destinations(netlink, family, listed.key):
                        counts[listed.key, target] = stats
        return counts
