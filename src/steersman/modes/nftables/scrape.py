"""Connections by ServicePort, read beside the transactions: a scrape holds nothing up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from steersman.host.netlink import Netlink
from steersman.model.errors import BusyError
from steersman.model.plan import ServicePlan
from steersman.model.stats import ConnectionStats
from steersman.modes.nftables.counters import Counted, Counters
from steersman.modes.nftables.relay import Relay
from steersman.modes.nftables.totals import Totals

_ATTEMPTS = 3


class Scrape:
    """What was counted so far; one scrape at a time."""

    def __init__(self, connect: Callable[[], Netlink], transactions: asyncio.Lock) -> None:
        """Take what opens a socket, and the lock that whoever sends transactions holds."""
        self._connect = connect
        self._transactions = transactions
        self._one = asyncio.Lock()
        self._totals = Totals()

    async def stats(
        self, counters: Counters, relay: Relay, plans: Iterable[ServicePlan]
    ) -> ConnectionStats:
        """Add up what elements and loopback's listeners count, for these plans.

        Raises:
            BusyError: others change the ruleset all the time.
        """
        plans = tuple(plans)  # they go on changing
        async with self._one:
            counted, before = await self._read(counters)
            counts = {**counted, **relay.counts()}
            return await asyncio.to_thread(self._totals.update, counts, plans, before)

    async def _read(self, counters: Counters) -> Counted:
        """Read beside transactions; where these never leave enough time, between them."""
        with self._connect() as netlink:
            for _ in range(_ATTEMPTS):
                counts = await asyncio.to_thread(counters.totals, netlink)
                if counts is not None:
                    return counts
            async with self._transactions:
                counts = await asyncio.to_thread(counters.totals, netlink)
        if counts is None:
            raise BusyError("nftables: others change the ruleset faster than it can be read")
        return counts
