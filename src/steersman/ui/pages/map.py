"""`/map`: which nodes send connections through which Services to which endpoints, right now."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from steersman.model.top import TopSample
from steersman.operate.answer import QuestionError
from steersman.operate.traffic import NOT_COUNTED
from steersman.operate.traffic_map import TrafficMap, busiest, traffic_graph
from steersman.ui.site import Page, Query, Site

_MOST_NODES = 8
"""Nodes that are asked at a time: each counts its connections for it."""
_MOST_PAIRS = 20
"""Streams from nodes to Services."""
_MOST_ENDS = 4
"""Endpoints of each Service."""


async def map_of(site: Site, query: Query) -> TrafficMap:
    """Return the map of the busiest nodes, or of the one in the query."""
    states = site.fleet.nodes
    node = query.get("node", "")
    ranked = sorted(states, key=lambda name: (-(states[name].connections or 0.0), name))
    chosen = [node] if node else ranked[:_MOST_NODES]
    problems: list[str] = []
    samples = await _samples(site, ((each, "") for each in chosen), problems)
    for (each, _), sample in samples.items():
        if sample.problem or not sample.counted:
            problems.append(f"node {each}: {sample.problem or NOT_COUNTED}")
    pairs = busiest({each: sample for (each, _), sample in samples.items()}, _MOST_PAIRS)
    details = await _samples(site, ((each.node, each.service) for each in pairs), problems)
    return TrafficMap(
        node=node,
        nodes=tuple(sorted(states)),
        shown=tuple(sorted(chosen)),
        graph=traffic_graph(pairs, details, _MOST_ENDS),
        problems=tuple(problems),
    )


async def _samples(
    site: Site, asked: Iterable[tuple[str, str]], problems: list[str]
) -> dict[tuple[str, str], TopSample]:
    """Return the counts of nodes and Services; what fails is added to the problems."""
    asked = list(asked)
    replies = await asyncio.gather(
        *(site.sampler.top(*each) for each in asked), return_exceptions=True
    )
    found: dict[tuple[str, str], TopSample] = {}
    for each, reply in zip(asked, replies, strict=True):
        if isinstance(reply, TopSample):
            found[each] = reply
        elif isinstance(reply, QuestionError | TimeoutError):
            problems.append(f"node {each[0]}: {str(reply) or 'it did not answer in time'}")
        else:
            raise reply
    return found


PAGE = Page("/map", "map.html", map_of, "Traffic", "Traffic", live=False)
