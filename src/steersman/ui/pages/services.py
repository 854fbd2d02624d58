"""`/services`: all Services, as one node serves them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from steersman.model.world import World
from steersman.operate.answer import QuestionError, page_number, rows_of_page
from steersman.operate.fleet_view import PAGE_SIZE
from steersman.operate.services_view import ServicesView, matching_names, names_of, rows_of
from steersman.ui.fleet import Fleet
from steersman.ui.site import Page, Query, Site

_AT_ONCE = 5000
"""Characters of names in one request; servers refuse long addresses."""
_NAMES = msgspec.json.Decoder(tuple[str, ...])


async def services(site: Site, query: Query) -> ServicesView:
    """Read the names from a node, and the World of those on this page."""
    fleet, text = site.fleet, query.get("q", "").strip()
    nodes = tuple(sorted(fleet.nodes))
    node = query.get("node", "") or fleet.default_node
    if node not in fleet.nodes:
        problem = f"there is no node {node}, or it has not answered yet"
        raise QuestionError(problem if node else fleet.problem or "no node has answered yet")
    page, trouble = page_number(query), bool(query.get("trouble"))

    async def view() -> ServicesView:
        kind = "trouble" if trouble else "service"
        names = _NAMES.decode(await fleet.get(node, f"/names?kind={kind}"))
        found = await asyncio.to_thread(matching_names, names, text)
        shown = rows_of_page(found, page, PAGE_SIZE)
        worlds = await worlds_of(fleet, node, shown.rows)
        return ServicesView(
            node=node,
            nodes=nodes,
            text=text,
            trouble=trouble,
            total=len(names),
            matching=len(found),
            page=shown.page,
            pages=shown.pages,
            rows=await asyncio.to_thread(rows_of, worlds, shown.rows, time.time()),
        )

    # A page stays open, and the fleet changes all the time: the node is asked if it has synced.
    state = fleet.nodes[node]
    version = (state.revision, state.started, tuple(state.finding_counts.items()))
    return await site.services.get((node, text, page, trouble), view, version)


async def worlds_of(fleet: Fleet, node: str, names: Sequence[str]) -> list[World]:
    """Return parts of the World of a node that together have these Services."""
    groups: list[list[str]] = []
    room = 0
    for name in names:
        if room < len(name):
            groups.append([])
            room = _AT_ONCE
        groups[-1].append(name)
        room -= len(name) + len("&service=")
    return list(await asyncio.gather(*(fleet.world(node, names_of(group)) for group in groups)))


PAGE = Page("/services", "services.html", services, "Services", nav="Services")
