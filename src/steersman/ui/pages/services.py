"""`/services`: all Services, as one node serves them."""

from __future__ import annotations

import asyncio
import time
from weakref import WeakKeyDictionary

import msgspec

from steersman.model.world import World
from steersman.operate.answer import QuestionError
from steersman.operate.services_view import ServicesView, choose, names_of, rows_of
from steersman.ui.fleet import Fleet
from steersman.ui.site import Page, Query, Site

_AT_ONCE = 5000
"""Characters of names in one request; servers refuse long addresses."""
_KEPT, _KEPT_SECONDS = 8, 10.0
"""Answers that are shown again while the node has not synced, and for how long."""
_NAMES = msgspec.json.Decoder(tuple[str, ...])

_Shown = dict[tuple[object, ...], tuple[float, ServicesView]]
_shown: WeakKeyDictionary[Fleet, _Shown] = WeakKeyDictionary()


async def services(site: Site, query: Query) -> ServicesView:
    """Read the names from a node, and the World of those on this page."""
    fleet, text, now = site.fleet, query.get("q", "").strip(), time.time()
    nodes = tuple(sorted(fleet.nodes))
    node = query.get("node", "") or fleet.default_node
    if node not in fleet.nodes:
        problem = f"there is no node {node}, or it has not answered yet"
        raise QuestionError(problem if node else fleet.problem or "no node has answered yet")
    number = query.get("page", "")
    page = int(number) if number.isascii() and number.isdigit() and len(number) < 10 else 1
    # A page stays open, and the fleet changes all the time: the node is asked if it has synced.
    state = fleet.nodes[node]
    key = (node, text, page, state.revision, state.started, tuple(state.finding_counts.items()))
    shown = _shown.setdefault(fleet, {})
    if key in shown and now - shown[key][0] < _KEPT_SECONDS:
        return shown[key][1]
    names = _NAMES.decode(await fleet.get(node, "/names?kind=service"))
    chosen = await asyncio.to_thread(choose, names, text, page)
    worlds = await worlds_of(fleet, node, chosen.names)
    view = ServicesView(
        node=node,
        nodes=nodes,
        text=text,
        total=chosen.total,
        matching=chosen.matching,
        page=chosen.page,
        pages=chosen.pages,
        rows=await asyncio.to_thread(rows_of, worlds, chosen.names, now),
    )
    while len(shown) >= _KEPT:
        del shown[next(iter(shown))]
    shown[key] = now, view
    return view


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
