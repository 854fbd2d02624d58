"""`/time?node=`: the last hour of syncs of a node, from `/history` of its process."""

from __future__ import annotations

import asyncio

import msgspec

from steersman.operate.answer import QuestionError
from steersman.operate.timeline import Timeline, read_asked, timeline
from steersman.ui.site import Page, Query, Site


async def answer(site: Site, query: Query) -> Timeline:
    """Return the timeline of a node."""
    asked = read_asked(query)
    node = query.get("node", "") or site.fleet.default_node
    if not node:
        raise QuestionError(site.fleet.problem or "no node is known yet")
    history = await site.sampler.history(node)
    found = await asyncio.to_thread(timeline, history, asked)
    return msgspec.structs.replace(found, nodes=tuple(sorted(site.fleet.nodes)))


PAGE = Page("/time", "time.html", answer, "Time", nav="Time")
