"""Keeps the servers of health check node ports as the plans in force want them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from steersman.model.names import Family
from steersman.model.plan import NodeSettings
from steersman.run.observe.endpoint_counts import EndpointCounts
from steersman.run.serve.health import ServiceHealthServers
from steersman.run.sync.state import SyncReport


class HealthCheckUpdater:
    """Keeps the health check servers up to date, beside the syncs: closing one takes time."""

    def __init__(
        self,
        servers: Mapping[Family, ServiceHealthServers],
        counts: EndpointCounts,
        complain: Callable[[str], None],
    ) -> None:
        self._servers = servers
        self._counts = counts
        self._complain = complain
        self._wanted = self._served = (0, NodeSettings())
        self._due = asyncio.Event()

    def observe(self, report: SyncReport) -> None:
        """Update the servers soon, if something changed for them or a port failed before."""
        self._wanted = (self._counts.health_changes, report.state.plan.settings)
        if self._served != self._wanted:
            self._due.set()

    async def run(self) -> None:
        """Update the servers until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            wanted, counts = self._wanted, self._counts
            try:
                for family, servers in self._servers.items():
                    await servers.sync(counts.health_ports(family), counts.ready_here(family))
            except Exception:
                self._complain("health checks")
            else:
                if not any(servers.failing for servers in self._servers.values()):
                    self._served = wanted  # else they are retried after the next sync
