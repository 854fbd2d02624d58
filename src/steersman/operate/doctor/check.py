"""The framework of `steersman doctor`: checks as rows, run together, their results put in order.

    Check      a row: name, title, when it applies, the function that looks
    Context    what a check may use: the World, the question, this machine (context.py)
    results    what it found, with a cause (result.py)
    Diagnosis  the answer: every result, worst first, and the likely cause

A check never stops another one: if it raises or takes too long, its result is "unknown" with the
reason. Checks that need the same slow fact (a listing of all rules) share one call: Context.once.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from msgspec.structs import replace

from steersman.model import codes
from steersman.operate.answer import Answer, Block, Line, Style
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.result import (
    UNSEEN,
    Cause,
    CheckResult,
    Found,
    Verdict,
    first_of,
    skipped,
    unknown,
)

USUAL = 6.0
"""Seconds that one check may take, unless it says otherwise."""
_INCOMPLETE = 3
"""Exit status if nothing wrong was found and not everything was checked."""
_LISTED = 4
"""Checks without a result that the headline names."""
_EVIDENCE = 8
"""Lines of evidence that are shown of one result; the data has all of them."""
_RANKS = {verdict: rank for rank, verdict in enumerate(Verdict)}
_STYLES: Mapping[Verdict, Style] = {
    Verdict.ERROR: "bad",
    Verdict.WARNING: "warn",
    Verdict.UNKNOWN: "dim",
    Verdict.NOTICE: "dim",
    Verdict.OK: "good",
    Verdict.SKIPPED: "dim",
}


class Needs(enum.Flag):
    """What a check cannot do without."""

    NODE = enum.auto()
    LINUX = enum.auto()
    SERVICE = enum.auto()
    CONNECTION = enum.auto()
    API = enum.auto()
    DIALS = enum.auto()
    SYSCTLS = enum.auto()
    CONNTRACK = enum.auto()


def missing(context: Context, needs: Needs) -> str:
    """Return why a check cannot be done, by the first thing that it lacks; "" if it can."""
    asked, settings = context.question, context.world.plan.settings
    node, tracks = settings.node_name or "another machine", settings.traits.tracks_connections
    known: tuple[tuple[Needs, object, str], ...] = (
        (Needs.NODE, context.here, f"it looks at the machine: run it on {node}"),
        (Needs.LINUX, context.linux, "it looks at Linux"),
        (Needs.SERVICE, asked.service, "no Service was asked for"),
        (Needs.CONNECTION, asked.flow, "no connection was asked for (--to)"),
        (
            Needs.API,
            context.ask_api,
            "no API server is known: give --kubeconfig, with rights to list pods",
        ),
        (Needs.DIALS, asked.dial, "--no-dial was given"),
        (Needs.SYSCTLS, context.path("proc/sys/net").exists(), "/proc/sys/net is not there"),
        (Needs.CONNTRACK, tracks, "this mode does not use conntrack"),
    )
    return next((why for need, there, why in known if need in needs and not there), "")


class Check(NamedTuple):
    """One check."""

    name: str
    """Such as `forwarding`: it never changes its meaning. model/codes.py has its code."""
    title: str
    """What it looks at, in a few words."""
    run: Callable[[Context], Awaitable[Found]]
    needs: Needs = Needs(0)
    """It is skipped if one of them is missing."""
    cause: int = Cause.NODE
    """Of its results that name none."""
    seconds: float = USUAL
    """It is given up after this time. Only the one that follows packets of connections that fail
    takes more than ten."""


class Diagnosis(Answer, frozen=True, kw_only=True, rename="camel"):
    """The answer of `steersman doctor`."""

    asked: str
    """What was asked, such as `Service shop/web on node-a`."""
    cause: str = ""
    """The likely cause in a sentence; "" if nothing is wrong."""
    remedy: str = ""
    """What to do about it."""
    results: tuple[CheckResult, ...] = ()
    """Worst first; of equally bad ones, the one that explains the others first."""
    seconds: float = 0.0
    """How long the checks took together."""

    @property
    def exit_code(self) -> int:
        """1 if a check found an error, otherwise 3 if one could not look, or not at pods."""
        if any(result.verdict is Verdict.ERROR for result in self.results):
            return 1
        return _INCOMPLETE if self.unfinished or UNSEEN in self.untried else 0

    @property
    def unfinished(self) -> Sequence[str]:
        """The titles of the checks that could not be carried out."""
        return [*dict.fromkeys(each.title for each in self.results if each.unfinished)]

    @property
    def untried(self) -> Sequence[str]:
        """What was not tried although it belongs to the question."""
        return [*dict.fromkeys(what for each in self.results for what in each.untried)]

    @property
    def watched(self) -> Any:
        """The answer without the time that it took."""
        return replace(self, seconds=0.0)

    def of(self, verdict: Verdict) -> Sequence[CheckResult]:
        """Return the results with a verdict, in order."""
        return [result for result in self.results if result.verdict is verdict]

    def blocks(self, wide: bool) -> Iterator[Block]:
        """Yield the cause, every problem with evidence and remedy, then the good checks."""
        counts = {verdict: len(self.of(verdict)) for verdict in Verdict}
        yield Line(self.asked, style="title")
        failed = bool(counts[Verdict.ERROR])
        if self.cause:
            first = "Likely cause" if failed else "No failure was found, but"
            yield Line(f"{first}: {self.cause}", style="bad" if failed else "warn", hang=2)
            if self.remedy:
                yield Line(f"What to do: {self.remedy}", hang=2)
        if late := self.unfinished:
            some = first_of(late, _LISTED)
            yield Line(f"Not everything was checked: no result of {some}", style="warn")
        elif UNSEEN in self.untried:
            yield Line("Not everything was checked: pods cannot be seen from here", style="warn")
        elif not self.cause:
            yield Line("Nothing wrong was found", style="good")
        if untried := self.untried:
            yield Line(f"Not tried: {', '.join(untried)}", style="dim")
        yield Line("")
        for result in self.results:
            shown = result.verdict not in (Verdict.OK, Verdict.SKIPPED)
            if not (shown or wide):
                continue
            tag = f"{result.code} {result.check}".lstrip()
            words = f"{result.verdict.value:8} {result.title}: {result.text} [{tag}]"
            yield Line(words, style=_STYLES[result.verdict], hang=9)
            for line in result.evidence[:_EVIDENCE]:
                yield Line(line, style="dim", indent=9)
            if (more := len(result.evidence) - _EVIDENCE) > 0:
                yield Line(f"and {more} more lines (-o json)", style="dim", indent=9)
            if result.remedy:
                yield Line(f"remedy: {result.remedy}", indent=9, hang=9)
        # A check that found some ways fine and others not has both kinds of results.
        bad = {each.title for each in (*self.of(Verdict.ERROR), *self.of(Verdict.WARNING))}
        fine = [each.title for each in self.of(Verdict.OK) if each.title not in bad]
        if fine and not wide:
            yield Line(f"{'ok':8} {', '.join(dict.fromkeys(fine))}", style="good", hang=9)
        words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        yield Line(f"{words}; {self.seconds:.1f} s", style="dim")


async def diagnose(context: Context, checks: Sequence[Check], *, source: str = "") -> Diagnosis:
    """Run the checks that apply, all at once, and put their results in order.

    Args:
        context: the question, and the place to look at.
        checks: the rows.
        source: for `Answer.source`.
    """
    began = time.monotonic()
    # All at once: most of them wait for programs, dials or counters.
    found = await asyncio.gather(*(_finish(context, check) for check in checks))
    await context.aclose()
    results = sorted(
        chain.from_iterable(found), key=lambda each: (_RANKS[each.verdict], each.cause)
    )
    first = likely_cause(results)
    return Diagnosis(
        source=source,
        asked=_asked(context),
        cause=first.text if first else "",
        remedy=first.remedy if first else "",
        results=tuple(results),
        seconds=round(time.monotonic() - began, 3),
    )


def likely_cause(results: Sequence[CheckResult]) -> CheckResult | None:
    """Return the result that explains the others, None if nothing is wrong.

    Args:
        results: in the order of a Diagnosis.
    """
    bad = [each for each in results if each.verdict in (Verdict.ERROR, Verdict.WARNING)]
    if not bad:  # an oddity may break what could not be tried
        blind = any(UNSEEN in each.untried for each in results)
        return next((each for each in results if blind and each.suspect), None)
    failed = bad[0].verdict is Verdict.ERROR
    # A failed connection alone explains nothing: a suspect nearer to the root does.
    if bad[0].cause >= Cause.ENDPOINT or (failed and bad[0].suspect):
        suspects = [each for each in results if each.suspect and each.cause < bad[0].cause]
        return min(suspects, key=lambda each: each.cause >= Cause.ENDPOINT, default=bad[0])
    return bad[0]


async def _finish(context: Context, check: Check) -> list[CheckResult]:
    """Run one check; whatever happens to it is a result."""
    try:
        if why := missing(context, check.needs):
            return [_named(check, skipped(why))]
        async with asyncio.timeout(check.seconds):
            found = await check.run(context)
    except TimeoutError as late:
        why = str(late) or f"it did not end within {check.seconds:g} s"
        return [_named(check, unknown(why, unfinished=True))]
    except PermissionError as denied:
        why = f"this needs root: {denied.strerror or denied}"
        return [_named(check, unknown(why, remedy="run it as root", unfinished=True))]
    except Exception as failure:
        why = f"it could not be checked: {str(failure) or type(failure).__name__}"
        return [_named(check, unknown(why, unfinished=True))]
    results = (found,) if isinstance(found, CheckResult) else found
    return [_named(check, result) for result in results] or [
        _named(check, skipped("there is nothing to check"))
    ]


def _named(check: Check, result: CheckResult) -> CheckResult:
    cause, code = result.cause or check.cause, result.code or codes.CHECKS.get(check.name, "")
    return replace(result, check=check.name, title=check.title, cause=cause, code=code)


def _asked(context: Context) -> str:
    """Describe the question, for people."""
    asked, settings = context.question, context.world.plan.settings
    node = f"node {settings.node_name}" if settings.node_name else "this node"
    what = f"{node} ({context.world.mode} mode)"
    if asked.flow is not None:
        return f"{asked.flow}, on {what}"
    if asked.service is not None:
        return f"Service {asked.service}, on {what}"
    return what[0].upper() + what[1:]
