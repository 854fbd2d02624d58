"""The connections that doctor makes to try its ways: from which places, and where they went."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from itertools import chain
from pathlib import Path

from steersman.model.addresses import canonical_ip, is_loopback
from steersman.model.plan import Traits
from steersman.modes.base import Requirements
from steersman.netfilter.conntrack.flows import Tracked, tracked
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.facts import requirements
from steersman.operate.doctor.pod_views import namespaces, pods
from steersman.operate.doctor.result import UNSEEN
from steersman.operate.doctor.traffic_dial import dial
from steersman.operate.doctor.tries import (
    Tried,
    Way,
    first_round,
    next_round,
    trouble,
)
from steersman.operate.places import NODE, Place, client_outside, uplink

TIMEOUT = 2.0
"""Seconds for TCP to connect: its second packet is sent after one second."""
_DIALLING = 5.0
"""Seconds after which no further round begins."""
_MOST_ROUNDS = 4
_SETTLE = 0.3
"""Seconds that a mode may need until it serves a new device."""


async def find_places(context: Context, stack: AsyncExitStack) -> tuple[list[Place], list[str]]:
    """Return the places to try from, and what cannot be one."""
    if not context.linux:
        return [NODE], ["pods and clients outside (only on Linux)"]
    places, untried = [NODE], []
    every, found = await context.once(namespaces), await context.once(pods)
    if asked := context.question.netns:
        mine = [place for place in every.found if place.netns and _same(place.netns, Path(asked))]
        places += [place._replace(name=f"the pod {context.question.pod}") for place in mine[:1]]
    else:
        ends = {end.ip for plan in context.plans for end in plan.reachable}
        behind = [place for place in found if not ends.isdisjoint(place.addresses.values())]
        places += [place for place in found if place not in behind][:1] + behind[:1]
    if every.unseen and len(places) == 1:
        untried.append(UNSEEN)
    try:
        node = context.world.snapshot.node
        own = [
            ip for each in (node.addresses if node else ()) if (ip := canonical_ip(each.address))
        ]
        by = await asyncio.to_thread(uplink, own)
        places.append(await stack.enter_async_context(client_outside(by)))
    except OSError as failure:
        untried.append(f"clients outside ({failure.strerror or failure})")
    return places, untried


def _same(one: Path, other: Path) -> bool:
    with suppress(OSError):
        return os.path.samefile(one, other)
    return False


async def _make(context: Context, ways: Sequence[Way]) -> list[Tried]:
    """Make one connection of each way, all at once, and see where they went."""
    dials = await asyncio.gather(
        *(dial(way.target, way.place.netns, TIMEOUT, way.source) for way in ways)
    )
    traits, needs = context.world.plan.settings.traits, await context.once(requirements)
    known_by = [_tracked_as(way, traits, needs) for way in ways]
    entries: dict[tuple[object, ...], Tracked] = {}
    with suppress(OSError):  # then only the outcome is known
        for family in context.families:
            own = [
                some for way, some in zip(ways, known_by, strict=True) if way.key.family is family
            ]
            targets = set(chain.from_iterable(own))
            for each in await asyncio.to_thread(tracked, family, targets) if targets else ():
                key = each.protocol, each.client, each.client_port, each.address, each.port
                entries[key] = each
    out = []
    for way, made, some in zip(ways, dials, known_by, strict=True):
        found = (entries.get((made.target.protocol, *made.client, *each)) for each in some)
        out.append(Tried(way, made, next(filter(None, found), None)))
    return out


def _tracked_as(way: Way, traits: Traits, needs: Requirements) -> Sequence[tuple[str, int]]:
    """Return the destinations that conntrack may know connections of a way by."""
    target, result = way.target, way.predicted
    if not traits.tracks_connections or traits.terminates_connections:
        return ()
    if traits.relays_localhost and is_loopback(target.address):
        return ()
    if needs.delivery != "translated":
        return ((target.address, target.port),)
    # Packets have the endpoint's address before conntrack sees them, but for those that are to be
    # masqueraded, which still have the client's.
    if result.masquerade:
        return ()
    return [(each.ip, each.port) for each in result.endpoints if each not in result.hairpins]


async def make_rounds(
    context: Context, ways: Sequence[Way], most: int, began: float
) -> dict[Way, list[Tried]]:
    """Try ways in rounds, until each endpoint was met or the budget is spent.

    Args:
        context: has the mode, which says how conntrack knows connections.
        ways: the ways to try.
        most: the number of connections that may be made.
        began: when the check began, by the monotonic clock.
    """
    made: dict[Way, list[Tried]] = {way: [] for way in ways}
    sticky = {p.key for p in context.plans if p.affinity_seconds or p.maglev}
    todo = first_round(ways, most)
    for number in range(_MOST_ROUNDS):
        if not todo or (number and time.monotonic() - began > _DIALLING):
            break
        most -= len(todo)
        for tried in await _make(context, todo):
            made[tried.way].append(tried)
        bad = _troubled(made)
        if number == 0 and 0 < len(bad) <= most and all(w.place.kind == "outside" for w in bad):
            # Only the client outside fails: its device is new.
            await asyncio.sleep(_SETTLE)
            todo = first_round(bad, most)
            most -= len(todo)
            made.update((way, []) for way in bad)
            for tried in await _make(context, todo):
                made[tried.way].append(tried)
            bad = _troubled(made)
        # What fails is followed now; only what works is worth more connections.
        if bad:
            break
        todo = next_round(made, sticky, most)
    return {way: tries for way, tries in made.items() if tries}


def _troubled(made: Mapping[Way, Sequence[Tried]]) -> list[Way]:
    return [way for way, tries in made.items() if any(trouble(each, ()) for each in tries)]
