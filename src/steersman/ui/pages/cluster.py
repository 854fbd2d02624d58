"""`/`: every node of the cluster, worst first."""

from __future__ import annotations

import time

from steersman.operate.fleet_view import FleetView, fleet_view, query_of
from steersman.ui.site import Page, Query, Site


async def cluster(site: Site, query: Query) -> FleetView:
    """Answer with the nodes that the address asks for."""
    fleet, wanted = site.fleet, query_of(query)

    async def view() -> FleetView:
        return fleet_view(
            fleet.seen,
            time.time(),
            wanted,
            disagreements=fleet.disagreements,
            problem=fleet.problem,
        )

    # With 1,000 nodes it takes 30 ms, and most open pages ask for the same. Ages are in seconds.
    return await site.clusters.get(wanted, view, fleet.version)


PAGE = Page("/", "cluster.html", cluster, "Cluster", nav="Cluster")
