"""`/`: every node of the cluster, worst first."""

from __future__ import annotations

import time
from weakref import WeakKeyDictionary

from steersman.operate.fleet_view import FleetQuery, FleetView, fleet_view, query_of
from steersman.ui.fleet import Fleet
from steersman.ui.site import Page, Query, Site

_last: WeakKeyDictionary[Fleet, tuple[int, int, FleetQuery, FleetView]] = WeakKeyDictionary()
"""The last answer: with 1,000 nodes it takes 30 ms, and most open pages ask for the same."""


async def cluster(site: Site, query: Query) -> FleetView:
    """Answer with the nodes that the address asks for."""
    fleet, now, wanted = site.fleet, time.time(), query_of(query)
    # Ages are shown in seconds at most.
    key = (fleet.version, int(now), wanted)
    last = _last.get(fleet)
    if last is not None and last[:3] == key:
        return last[3]
    view = fleet_view(
        fleet.seen, now, wanted, disagreements=fleet.disagreements, problem=fleet.problem
    )
    _last[fleet] = (*key, view)
    return view


PAGE = Page("/", "cluster.html", cluster, "Cluster", nav="Cluster")
