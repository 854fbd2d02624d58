"""Doctor's tries: connections through every kind of frontend from every place that it can stand in.

What fails is tried once more while the kernel is watched (where.py): the place where the packet
left the predicted way is the likely cause, the failed connection only the symptom.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from steersman.compile.trace import trace
from steersman.model.addresses import canonical_ip, is_loopback
from steersman.model.names import Family, PlanKey, Protocol
from steersman.model.plan import Traits
from steersman.model.world import World
from steersman.netfilter.conntrack.flows import Tracked, tracked
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.facts import requirements
from steersman.operate.doctor.result import (
    UNSEEN,
    Cause,
    CheckResult,
    Found,
    Verdict,
    error,
    ok,
    result_of,
    skipped,
    warning,
)
from steersman.operate.doctor.traffic_checks import MOST as MOST_ENDPOINTS
from steersman.operate.doctor.traffic_checks import dials_from_node, sampled
from steersman.operate.doctor.traffic_dial import Target, dial
from steersman.operate.doctor.traffic_load import connections_before
from steersman.operate.doctor.tries import (
    MOST,
    Choice,
    Tried,
    Way,
    choose,
    first_round,
    is_pod,
    next_round,
    trouble,
    wrong_source,
)
from steersman.operate.doctor.where import where_lost
from steersman.operate.places import NODE, Place, client_outside, find_pods, source_to, uplink
from steersman.operate.trace_question import TraceQuestion

_TIMEOUT = 2.0
"""Seconds for TCP to connect: its second packet is sent after one second."""
_FOLLOWED = 1.0
"""Seconds that an answer to a packet that is followed may take."""
_DIALLING = 5.0
"""Seconds after which no further round begins."""
_TRACING = 12.0
"""Seconds after which no packet is followed any more: to stop that takes time under load, and the
check must end within its own."""
_MOST_ROUNDS = 4
_MOST_TRACED = 2
_MOST_CUT_OFF = 4
_RESERVED = 20
"""Connections that are kept for looking into failures."""
_ATTEMPTS = 4
"""Packets of a way that are followed if only some of its connections fail."""
_SETTLE = 0.3
"""Seconds that a mode may need until it serves a new device."""
_POLICY = re.compile(r"NetworkPolic|network polic|NWPLCY|cali|Cilium|felix", re.IGNORECASE)
"""Owners of rules that drop packets between pods because a NetworkPolicy asks for it."""


class Failure(NamedTuple):
    """A way of which connections fail."""

    way: Way
    why: str
    """What came of the first one that failed."""
    failed: int
    made: int
    consequence: str = ""
    """The endpoints behind it that do not answer when they are dialled themselves."""

    @property
    def times(self) -> str:
        """How often it fails, for people."""
        return f"{self.failed} of {self.made} times" if self.failed < self.made else "each time"


# Places


async def find_places(context: Context, stack: AsyncExitStack) -> tuple[list[Place], list[str]]:
    """Return the places to try from, and what cannot be one."""
    if not context.linux:
        return [NODE], ["pods and clients outside (only on Linux)"]
    places, untried = [NODE], []
    pods = await asyncio.to_thread(find_pods)
    world = context.world
    found = [each for each in pods.found if is_pod(each.addresses.values(), each.device, world)]
    if asked := context.question.netns:
        mine = [place for place in pods.found if place.netns and _same(place.netns, Path(asked))]
        places += [place._replace(name=f"the pod {context.question.pod}") for place in mine[:1]]
    else:
        ends = {end.ip for plan in context.plans for end in plan.reachable}
        behind = [place for place in found if not ends.isdisjoint(place.addresses.values())]
        places += [place for place in found if place not in behind][:1] + behind[:1]
    if pods.unseen and len(places) == 1:
        untried.append(UNSEEN)
    try:
        node = world.snapshot.node
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


# Connections


async def _make(context: Context, ways: Sequence[Way]) -> list[Tried]:
    """Make one connection of each way, all at once, and see where they went."""
    dials = await asyncio.gather(
        *(
            dial(way.target, way.place.netns, _TIMEOUT, way.place.addresses.get(way.key.family, ""))
            for way in ways
        )
    )
    traits, needs = context.world.plan.settings.traits, await context.once(requirements)
    tracks = traits.tracks_connections and not traits.terminates_connections
    early = needs.delivery == "translated"
    destinations = [_tracked_as(way, traits, early=early) if tracks else () for way in ways]
    wanted: dict[Family, set[tuple[str, int]]] = defaultdict(set)
    for way, some in zip(ways, destinations, strict=True):
        wanted[way.key.family].update(some)
    entries: dict[tuple[object, ...], Tracked] = {}
    with suppress(OSError):  # then only the outcome is known
        for family, targets in wanted.items():
            for each in await asyncio.to_thread(tracked, family, targets) if targets else ():
                key = each.protocol, each.client, each.client_port, each.address, each.port
                entries[key] = each
    out = []
    for way, made, some in zip(ways, dials, destinations, strict=True):
        client = made.target.protocol, *made.client
        found = (entry for each in some if (entry := entries.get((*client, *each))))
        out.append(Tried(way, made, next(found, None)))
    return out


def _tracked_as(way: Way, traits: Traits, *, early: bool) -> Sequence[tuple[str, int]]:
    """Return the destinations that conntrack may know connections of a way by.

    Args:
        way: the way.
        traits: of the mode.
        early: packets have the endpoint's address before conntrack sees them, if it does; those
            that are to be masqueraded still have the client's.
    """
    target, result = way.target, way.predicted
    if traits.relays_localhost and is_loopback(target.address):
        return ()
    if not early:
        return ((target.address, target.port),)
    if result.masquerade:
        return ()
    return [(each.ip, each.port) for each in result.endpoints if each not in result.hairpins]


async def make_rounds(
    context: Context, choice: Choice, most: int, began: float
) -> dict[Way, list[Tried]]:
    """Try the ways in rounds, until each endpoint was met or the budget is spent."""
    made: dict[Way, list[Tried]] = {way: [] for way in choice.ways}
    sticky = {p.key for p in context.plans if p.affinity_seconds or p.maglev}
    todo = first_round(choice.ways, most)
    for number in range(_MOST_ROUNDS):
        if not todo or (number and time.monotonic() - began > _DIALLING):
            break
        most -= len(todo)
        for tried in await _make(context, todo):
            made[tried.way].append(tried)
        bad = {way for way, tries in made.items() if any(trouble(each, ()) for each in tries)}
        late = [way for way in bad if way.place.kind == "outside"]
        if number == 0 and len(late) == len(bad) and 0 < len(late) <= most:
            # Only the client outside fails: its device is new.
            await asyncio.sleep(_SETTLE)
            for way in late:
                made[way].clear()
            todo = first_round(late, most)
            most -= len(todo)
            for tried in await _make(context, todo):
                made[tried.way].append(tried)
        # What fails is followed now; only what works is worth more connections.
        if any(trouble(tried, ()) for tries in made.values() for tried in tries):
            break
        todo = next_round(made, sticky, most)
    return {way: tries for way, tries in made.items() if tries}


# Results


async def tries(context: Context) -> Found:
    """Try every kind of frontend from every place, and follow a packet where that fails."""
    if not context.question.dial:
        return replace(skipped("--no-dial was given"), untried=("connections (--no-dial)",))
    began = time.monotonic()
    plans = await context.once(sampled)
    if not plans:
        return skipped("no Service with endpoints is served here")
    with suppress(OSError):  # the check of the load says why they cannot be listed
        await context.once(connections_before)
    async with AsyncExitStack() as stack:
        places, untried = await find_places(context, stack)
        choice = choose(context.world.plan, plans, places, source_to)
        ends = len({(end.ip, end.port) for plan in plans for end in plan.reachable})
        dials, made = await asyncio.gather(
            context.once(dials_from_node),
            make_rounds(context, choice, MOST - _RESERVED - min(ends, MOST_ENDPOINTS), began),
        )
        answering = {
            str(d.target)
            for d in dials
            if d.target.protocol is Protocol.UDP and d.outcome == "connected"
        }
        broken = {str(d.target) for d in dials if not d.good}
        failures = [f for w, tried in made.items() if (f := _failure(w, tried, answering, broken))]
        failures = await _still(context, failures)
        out = await _explain(context, failures, began)
        out += await _sources(context, made, began)
    silent = {way.words for way, t in made.items() if t[0].dial.outcome == "silent"}
    unknown_udp = [f"answers of {words} (UDP, the server is silent)" for words in sorted(silent)]
    fine = [way for way in made if way not in {failure.way for failure in failures}]
    left_out = (*choice.untried, *untried, *unknown_udp)
    if fine:
        good = ok(
            f"{len(fine)} of {len(made)} ways work", *(f"{w}: {made[w][0].dial}" for w in fine)
        )
        return [*out, replace(good, untried=left_out)]
    if not made:
        return replace(skipped("the plan forwards nothing from here"), untried=left_out)
    return [replace(out[0], untried=left_out), *out[1:]]


def _failure(
    way: Way, made: Sequence[Tried], answering: set[str], broken: set[str]
) -> Failure | None:
    """Return what fails of a way, None if nothing does."""
    bad = [(each, why) for each in made if (why := trouble(each, answering))]
    if not bad:
        return None
    first, why = bad[0]
    dead = sorted(way.endpoints & broken)
    if first.met and first.met not in way.endpoints:
        dead = []  # it went elsewhere: that is no consequence
    if first.met in way.endpoints:
        dead = [first.met] if first.met in broken else []
    return Failure(way, why, len(bad), len(made), ", ".join(dead))


async def _still(context: Context, failures: Sequence[Failure]) -> list[Failure]:
    """Leave out the failures of ways that the plan has changed since it was read."""
    if not failures or context.renew is None:
        return list(failures)
    try:
        services = {failure.way.key.name.object_name for failure in failures}
        later: World = await context.renew(context.world, services)
    except Exception:  # the process may have ended: the check of the process says so
        return list(failures)
    return [
        failure
        for failure in failures
        if trace(later.plan, failure.way.flow).endpoints == failure.way.predicted.endpoints
    ]


async def _explain(
    context: Context, failures: Sequence[Failure], began: float
) -> list[CheckResult]:
    """Return the causes of the first failures, then the symptoms: one result of each kind."""
    causes: dict[str, CheckResult] = {}
    failing: list[Failure] = []
    unanswered: list[Failure] = []
    cut_off: list[Failure] = []
    traced: set[tuple[PlanKey, str]] = set()
    async with asyncio.TaskGroup() as group:
        looking: dict[tuple[PlanKey, str], asyncio.Task[bool]] = {}
        for way in (failure.way for failure in failures):
            pair = way.key, way.place.name
            by_chance = way.place.kind == "pod" and not context.question.netns
            if by_chance and pair not in looking and len(looking) < _MOST_CUT_OFF:
                looking[pair] = group.create_task(_is_cut_off(way))
        for failure in failures:
            way, why = failure.way, failure.why
            found: CheckResult | None = None
            if (way.key, way.place.kind) not in traced and len(traced) < _MOST_TRACED:
                traced.add((way.key, way.place.kind))
                found = await _follow(context, failure, began)
            if found and found.verdict is not Verdict.ERROR:
                why += f"; not followed: {found.text}"
                found = None
            if failure.consequence:
                # The silent endpoint is the cause, unless the packet was lost before it.
                by_policy = False
                if found is not None and found.cause >= Cause.ENDPOINT:
                    found = None
                unanswered.append(failure._replace(why=why))
            else:
                pair = way.key, way.place.name
                unreachable = pair in looking and await looking[pair]
                by_policy = unreachable and bool(found and _POLICY.search(found.text))
                if found is None and unreachable:
                    cut_off.append(failure._replace(why=why))
                elif not by_policy:
                    failing.append(failure._replace(why=why))
            if found is not None:
                located = replace(found, text=f"{way}: {found.text}")
                if by_policy:
                    located = replace(located, verdict=Verdict.WARNING, cause=Cause.POLICY)
                causes.setdefault(found.text, located)
    return [*causes.values(), *_symptoms(failing, unanswered, cut_off)]


def _symptoms(
    failing: Sequence[Failure], unanswered: Sequence[Failure], cut_off: Sequence[Failure]
) -> Iterator[CheckResult]:
    """Yield what fails.

    Args:
        failing: ways whose endpoints answer.
        unanswered: ways whose endpoints do not answer either.
        cut_off: ways of pods that do not reach the endpoints themselves.
    """
    remedy = "`steersman trace --to {}` shows the way of a packet"
    if failing:
        first = failing[0]
        text, evidence = _listed(failing, first.why)
        yield error(text, *evidence, remedy=remedy.format(first.way.target))
    if unanswered:
        why = f"its endpoint {unanswered[0].consequence} does not answer either"
        text, evidence = _listed(unanswered, why)
        yield error(text, *evidence, cause=Cause.SYMPTOM + 5)
    if cut_off:
        first = cut_off[0]
        text, evidence = _listed(
            cut_off, f"{first.why}; that pod gets no answer of endpoints, either"
        )
        remedy = f"a NetworkPolicy may ask for it; {remedy.format(first.way.target)}"
        yield warning(text, *evidence, remedy=remedy, suspect=True)


def _listed(failures: Sequence[Failure], why: str) -> tuple[str, list[str]]:
    """Return a sentence about the first of some failures and their number, and a line of each."""
    first, *others = failures
    text = f"{first.way.words} does not work from {first.way.place.name} ({first.times}): {why}"
    if len(others) == 1:
        text += f"; nor does {others[0].way}"
    elif others:
        text += f"; nor do {len(others)} more ways, such as {others[0].way}"
    return text, [f"{each.way} ({each.times}): {each.why}" for each in failures]


async def _is_cut_off(way: Way) -> bool:
    """Whether no endpoint answers that place when it is dialled itself."""
    source, protocol = way.place.addresses.get(way.key.family, ""), way.target.protocol
    dials = await asyncio.gather(
        *(
            dial(Target(end.ip, end.port, protocol), way.place.netns, _TIMEOUT, source)
            for end in [end for end in way.predicted.endpoints if end.ip != source][:3]
        )
    )
    return bool(dials) and not any(each.good for each in dials)


async def _follow(context: Context, failure: Failure, began: float) -> CheckResult | None:
    """Follow a packet of a way that fails; None if none left the predicted way."""
    if not context.linux:
        return None
    way = failure.way
    question = TraceQuestion(
        way.target.address,
        way.target.port,
        way.target.protocol,
        way.place.addresses.get(way.key.family, ""),
        way.place.netns,
        timeout=_FOLLOWED,
    )
    left = _TRACING - (time.monotonic() - began)
    with suppress(TimeoutError):
        async with asyncio.timeout(left):
            for _ in range(1 if failure.failed == failure.made else _ATTEMPTS):
                if (found := await where_lost(context, question)) is not None:
                    return found
    return None


async def _sources(
    context: Context, made: dict[Way, list[Tried]], began: float
) -> list[CheckResult]:
    """Return the ways whose endpoints see another source than the plan says, followed once.

    Without the masquerade that the plan says, answers may not come back through this node. Clients
    outside whose packets are not masqueraded are those of policy Local, which keeps their address.
    """
    severe: list[tuple[Way, str]] = []
    odd: list[tuple[Way, str]] = []
    for way, made_ways in made.items():
        local = context.world.plan.settings.family(way.key.family).local_addresses
        if why := next((why for each in made_ways if (why := wrong_source(each, local))), ""):
            bad = way.predicted.masquerade or way.place.kind == "outside"
            (severe if bad else odd).append((way, why))
    out: list[CheckResult] = []
    for verdict, ways in ((Verdict.ERROR, severe), (Verdict.WARNING, odd)):
        if not ways:
            continue
        way, why = ways[0]
        failure = Failure(way, why, 1, len(made[way]))
        followed = None if out else await _follow(context, failure, began)
        found = followed if followed and followed.verdict is Verdict.ERROR else None
        more = f" (and {len(ways) - 1} more)" if len(ways) > 1 else ""
        out.append(
            result_of(
                verdict,
                f"{way}{more}: {found.text if found else why}",
                *(f"{each}: {seen}" for each, seen in ways),
                *(found.evidence if found else ()),
                remedy=found.remedy if found else "",
                cause=Cause.SYMPTOM,
            )
        )
    return out
