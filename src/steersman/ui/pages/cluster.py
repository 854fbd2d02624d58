"""`/`: every node of the cluster, worst first."""

from __future__ import annotations

import time

from steersman.operate.fleet_view import FleetView, fleet_view, query_of
from steersman.ui.site import Page, Query, Site


async def cluster(site: Site, query: Query) -> FleetView:
    """Answer with the nodes that the address asks for."""
    fleet = site.fleet
    return fleet_view(
        fleet.seen,
        time.time(),
        query_of(query),
        disagreements=fleet.disagreements,
        problem=fleet.problem,
    )


PAGE = Page("/", "cluster.html", cluster, "Cluster", nav="Cluster")
