"""`/time?node=`: the last hour of syncs of a node, from `/history` of its process."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from weakref import WeakKeyDictionary

import msgspec

from steersman.model.history import History
from steersman.operate.answer import QuestionError
from steersman.operate.timeline import Timeline, read_asked, timeline
from steersman.ui.fleet import Fleet
from steersman.ui.site import Page, Query, Site

_FRESH = 1.0
"""Seconds between two requests to a node, whatever happens there."""
_OLD = 15.0
"""Seconds after which it is asked for again though nothing happened: the hour moves on."""
_REMEMBERED = 8
"""Nodes whose history is kept, at most 1 MB each."""

_DECODER = msgspec.json.Decoder(History)
_Known = OrderedDict[str, tuple[float, object, History]]
_known: WeakKeyDictionary[Fleet, _Known] = WeakKeyDictionary()


async def answer(site: Site, query: Query) -> Timeline:
    """Return the timeline of a node."""
    asked = read_asked(query)
    node = query.get("node", "") or site.fleet.default_node
    if not node:
        raise QuestionError(site.fleet.problem or "no node is known yet")
    history = await _history(site.fleet, node)
    found = await asyncio.to_thread(timeline, history, asked)
    return msgspec.structs.replace(found, nodes=tuple(sorted(site.fleet.nodes)))


async def _history(fleet: Fleet, node: str) -> History:
    """Return the history of a node; several readers share it."""
    known = _known.setdefault(fleet, OrderedDict())
    now = asyncio.get_running_loop().time()
    state = fleet.nodes.get(node)
    version = (state.pid, state.revision, state.failure) if state else None
    if node in known:
        at, before, history = known[node]
        if version == before and now - at < _OLD:
            return history
        await asyncio.sleep(_FRESH - (now - at))  # what changed shows then, without another change
    try:
        history = _DECODER.decode(await fleet.get(node, "/history"))
    except msgspec.DecodeError as error:
        text = f"node {node} runs another version of steersman: {error}"
        raise QuestionError(text) from error
    known[node] = now, version, history
    known.move_to_end(node)
    while len(known) > _REMEMBERED:
        known.popitem(last=False)
    return history


PAGE = Page("/time", "time.html", answer, "Time", nav="Time")
