"""`/services`: all Services, as one node serves them."""

from __future__ import annotations

import asyncio
import time

import msgspec

from steersman.model.world import World
from steersman.operate.answer import QuestionError
from steersman.operate.services_view import ServicesView, choose, names_of, rows_of
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
    number = query.get("page", "")
    page = int(number) if number.isascii() and number.isdigit() and len(number) < 10 else 1

    trouble = bool(query.get("trouble"))

    async def view() -> ServicesView:
        kind = "trouble" if trouble else "service"
        names = _NAMES.decode(await fleet.get(node, f"/names?kind={kind}"))
        chosen = await asyncio.to_thread(choose, names, text, page)
        worlds = await worlds_of(fleet, node, chosen.names)
        return ServicesView(
            node=node,
            nodes=nodes,
            text=text,
            trouble=trouble,
            total=chosen.total,
            matching=chosen.matching,
            page=chosen.page,
            pages=chosen.pages,
            rows=await asyncio.to_thread(rows_of, worlds, chosen.names, time.time()),
        )

    # A page stays open, and the fleet changes all the time: the node is asked if it has synced.
    state = fleet.nodes[node]
    version = (state.revision, state.started, tuple(state.finding_counts.items()))
    return await site.services.get((node, text, page, trouble), view, version)


async def worlds_of(fleet: Fleet, node: str, names: tuple[str, ...]) -> list[World]:
    """Return parts of the World of a node that together have these Services."""
    groups: list[list[str]] = []
    room = 0
    for name in names:
        if room < len(name):
            groups.append([])
            room = _AT_ONCE
        groups[-1].append(name)
        room -= len(name) + len("&service=")
    return list(await asyncio.gather(*(fleet.part(node, names_of(group)) for group in groups)))


PAGE = Page("/services", "services.html", services, "Services", nav="Services")
