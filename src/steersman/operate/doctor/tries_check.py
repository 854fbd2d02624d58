"""Doctor's tries: connections through every kind of frontend from every place that it can stand in.

What fails is tried once more while the kernel is watched (where.py): the place where the packet
left the predicted way is the likely cause, the failed connection only the symptom.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import NamedTuple

from msgspec.structs import replace

from steersman.compile.trace import trace
from steersman.model.names import PlanKey, Protocol
from steersman.model.world import World
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.result import (
    Cause,
    CheckResult,
    Found,
    Verdict,
    error,
    first_of,
    ok,
    result_of,
    skipped,
    warning,
)
from steersman.operate.doctor.traffic_checks import MOST_ENDPOINTS, dials_from_node, sampled
from steersman.operate.doctor.traffic_dial import Target, dial
from steersman.operate.doctor.traffic_load import connections_before
from steersman.operate.doctor.tries import MOST, Tried, Way, choose, trouble, wrong_source
from steersman.operate.doctor.tries_made import TIMEOUT, find_places, make_rounds
from steersman.operate.doctor.where import where_lost
from steersman.operate.places import source_to
from steersman.operate.trace_question import TraceQuestion

_FOLLOWED = 1.0
"""Seconds that an answer to a packet that is followed may take."""
_TRACING = 12.0
"""Seconds after which no packet is followed any more: to stop that takes time under load, and the
check must end within its own."""
_MOST_TRACED = 2
_MOST_CUT_OFF = 4
_RESERVED = 20
"""Connections that are kept for looking into failures."""
_ATTEMPTS = 4
"""Packets of a way that are followed if only some of its connections fail."""
_NAMED = 3
"""Silent endpoints that a text names."""
_POLICY = re.compile(r"NetworkPolic|network polic|NWPLCY|cali|Cilium|felix", re.IGNORECASE)
"""Owners of rules that drop packets between pods because a NetworkPolicy asks for it."""


class Failure(NamedTuple):
    """A way of which connections fail."""

    way: Way
    why: str
    """What came of the first one that failed."""
    failed: int
    made: int
    silent: Sequence[str] = ()
    """The endpoints behind it that do not answer when they are dialled themselves."""

    @property
    def times(self) -> str:
        """How often it fails, for people."""
        return f"{self.failed} of {self.made} times" if self.failed < self.made else "each time"


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
            make_rounds(context, choice.ways, MOST - _RESERVED - min(ends, MOST_ENDPOINTS), began),
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
    return Failure(way, why, len(bad), len(made), dead)


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


# Causes and symptoms


async def _explain(
    context: Context, failures: Sequence[Failure], began: float
) -> list[CheckResult]:
    """Return the causes of the first failures, then the symptoms: one result of each kind."""
    cut_off, followed = await asyncio.gather(
        _cut_off(context, failures), _follow_first(context, failures, began)
    )
    causes: dict[str, CheckResult] = {}
    failing: list[Failure] = []
    unanswered: list[Failure] = []
    of_pods: list[Failure] = []
    for failure in failures:
        way, why, found = failure.way, failure.why, followed.get(failure.way)
        if found is not None and found.verdict is not Verdict.ERROR:
            why, found = f"{why}; not followed: {found.text}", None
        shown = failure._replace(why=why)
        if failure.silent:
            unanswered.append(shown)
            # The silent endpoint is the cause, unless the packet was lost before it.
            if found is not None and found.cause >= Cause.ENDPOINT:
                found = None
        elif (way.key, way.place.name) not in cut_off:
            failing.append(shown)
        elif found is None:
            of_pods.append(shown)
        elif _POLICY.search(found.text):
            found = replace(found, verdict=Verdict.WARNING, cause=Cause.POLICY)
        else:
            failing.append(shown)
        if found is not None:
            causes.setdefault(found.text, replace(found, text=f"{way}: {found.text}"))
    return [*causes.values(), *symptoms(failing, unanswered, of_pods)]


async def _cut_off(context: Context, failures: Sequence[Failure]) -> set[tuple[PlanKey, str]]:
    """Return the ServicePorts, and names of pods, to which no endpoint answers when it is dialled.

    A pod that the question names is none of them: it should reach the Service.
    """
    pods: dict[tuple[PlanKey, str], Way] = {}
    for way in (failure.way for failure in failures):
        if way.place.kind == "pod" and not context.question.netns and len(pods) < _MOST_CUT_OFF:
            pods.setdefault((way.key, way.place.name), way)
    found = await asyncio.gather(*map(_is_cut_off, pods.values()))
    return {pair for pair, is_cut_off in zip(pods, found, strict=True) if is_cut_off}


async def _is_cut_off(way: Way) -> bool:
    """Whether no endpoint answers that place when it is dialled itself."""
    ends = [end for end in way.predicted.endpoints if end.ip != way.source][:3]
    targets = [Target(end.ip, end.port, way.target.protocol) for end in ends]
    dials = await asyncio.gather(
        *(dial(target, way.place.netns, TIMEOUT, way.source) for target in targets)
    )
    return bool(dials) and not any(each.good for each in dials)


async def _follow_first(
    context: Context, failures: Sequence[Failure], began: float
) -> dict[Way, CheckResult]:
    """Follow the first failures, one of each ServicePort and kind of place, one after the other."""
    found: dict[Way, CheckResult] = {}
    followed: set[tuple[PlanKey, str]] = set()
    for failure in failures:
        kind = failure.way.key, failure.way.place.kind
        if kind not in followed and len(followed) < _MOST_TRACED:
            followed.add(kind)
            if (result := await _follow(context, failure, began)) is not None:
                found[failure.way] = result
    return found


async def _follow(context: Context, failure: Failure, began: float) -> CheckResult | None:
    """Follow a packet of a way that fails; None if none left the predicted way."""
    if not context.linux:
        return None
    way = failure.way
    question = TraceQuestion(
        way.target.address,
        way.target.port,
        way.target.protocol,
        way.source,
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


def symptoms(
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
        silent = unanswered[0].silent
        ends = f"its endpoint{'s' * (len(silent) > 1)} {first_of(silent, _NAMED)}"
        why = f"{ends} {'do' if len(silent) > 1 else 'does'} not answer either"
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


async def _sources(
    context: Context, made: Mapping[Way, Sequence[Tried]], began: float
) -> list[CheckResult]:
    """Return the ways whose endpoints see another source than the plan says, followed once.

    Without the masquerade that the plan says, answers may not come back through this node. Clients
    outside whose packets are not masqueraded are those of policy Local, which keeps their address.
    """
    wrong: dict[Verdict, list[tuple[Way, str]]] = {Verdict.ERROR: [], Verdict.WARNING: []}
    for way, some in made.items():
        local = context.world.plan.settings.family(way.key.family).local_addresses
        if why := next(filter(None, (wrong_source(each, local) for each in some)), ""):
            severe = way.predicted.masquerade or way.place.kind == "outside"
            wrong[Verdict.ERROR if severe else Verdict.WARNING].append((way, why))
    out: list[CheckResult] = []
    for verdict, ways in wrong.items():
        if not ways:
            continue
        way, why = ways[0]
        found = None if out else await _follow(context, Failure(way, why, 1, len(made[way])), began)
        if found is None or found.verdict is not Verdict.ERROR:
            found = result_of(verdict, why)
        more = f" (and {len(ways) - 1} more)" if len(ways) > 1 else ""
        out.append(
            result_of(
                verdict,
                f"{way}{more}: {found.text}",
                *(f"{each}: {seen}" for each, seen in ways),
                *found.evidence,
                remedy=found.remedy,
                cause=Cause.SYMPTOM,
            )
        )
    return out
