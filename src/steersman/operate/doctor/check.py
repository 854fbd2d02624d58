"""The framework of `steersman doctor`: checks as rows, run together, their results put in order.

    Check      a row: name, title, when it applies, the function that looks
    Context    what a check may use: the World, the question, this machine
    Diagnosis  the answer: every result, worst first, and the likely cause

A check never stops another one: if it raises or takes too long, its result is "unknown" with the
reason. Checks that need the same slow fact (a listing of all rules) share one call: Context.once.

Several errors often have one cause. So each result has a Cause, from the cluster's objects down to
the packets: an error is explained by the errors above it, and the uppermost is the likely cause.
"""

from __future__ import annotations

import asyncio
import enum
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from steersman.compile.trace import Flow
from steersman.host.exec import Exec
from steersman.host.link_state import Link, list_links
from steersman.model.names import Family, ObjectName
from steersman.model.plan import FrontendKind, ServicePlan
from steersman.model.world import World
from steersman.modes.base import Mode, Requirements
from steersman.netfilter.nft.tables import list_tables
from steersman.operate.answer import Answer, Block, Line, Style
from steersman.operate.trace_lookups import look_up
from steersman.operate.trace_loss import Hop

T = TypeVar("T")

LONGEST = 15.0
"""Seconds after which the answer is given, whatever is still unknown. Only if a connection fails, a
check takes more than ten: it is followed."""
USUAL = 6.0
"""Seconds that one check may take."""
_INCOMPLETE = 3
"""Exit status if nothing wrong was found and not everything was checked."""
UNSEEN = "pods (their namespaces are not visible: hostPID)"
"""What is not tried in a pod that sees only its own processes; most ways begin there."""
_LISTED = 4
"""Checks without a result that the headline names."""
_EVIDENCE = 8
"""Lines of evidence that are shown of one result; the data has all of them."""


class Verdict(enum.StrEnum):
    """The result of a check, the worst first."""

    ERROR = "error"  # traffic fails because of it
    WARNING = "warning"  # some traffic may fail, or it will
    UNKNOWN = "unknown"  # it could not be checked
    NOTICE = "notice"  # it is odd, and harmless unless a connection fails
    OK = "ok"
    SKIPPED = "skipped"  # it has nothing to do with the question


_RANKS = {verdict: rank for rank, verdict in enumerate(Verdict)}
_STYLES: Mapping[Verdict, Style] = {
    Verdict.ERROR: "bad",
    Verdict.WARNING: "warn",
    Verdict.UNKNOWN: "dim",
    Verdict.NOTICE: "dim",
    Verdict.OK: "good",
    Verdict.SKIPPED: "dim",
}


class Cause(enum.IntEnum):
    """Where a problem is. A problem is explained by those of smaller numbers.

    Numbers are ten apart: a result may use one in between, such as `Cause.NODE + 1`.
    """

    OBJECT = 10  # the Service is missing or malformed
    ENDPOINTS = 20  # its endpoints: selector, readiness, names of ports
    POLICY = 30  # what the Service asks for: traffic policies, source ranges, affinity, hints
    PROXY = 40  # our process: not running, cut off from the API server, another proxy
    RULES = 50  # the kernel does not have what the plan says
    NODE = 60  # this machine: firewall, sysctls, modules, full tables
    PATH = 70  # between the node and the endpoints: routes, MTU
    ENDPOINT = 80  # the endpoint itself refuses or does not answer
    SYMPTOM = 90  # a connection to the Service fails


class CheckResult(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One thing that a check has found; a check may find several."""

    verdict: Verdict
    text: str
    """A sentence without a full stop that states the fact."""
    evidence: tuple[str, ...] = ()
    """Lines that prove it, as a tool or the kernel prints them."""
    remedy: str = ""
    """What to do."""
    cause: int = 0
    """A Cause, or a number in between; 0 for that of the check."""
    suspect: bool = False
    """For a warning or notice: it may well be the reason why connections fail. If some do and no
    error explains it, this is the likely cause. For an error: such a suspect may explain it."""
    untried: tuple[str, ...] = ()
    """What was not tried although it belongs to the question, in a few words each."""
    unfinished: bool = False
    """The check could not be carried out, so the whole question has no answer."""
    check: str = ""
    """Name of the check that it is of, once that has ended: the code of the result."""
    title: str = ""


def result_of(
    verdict: Verdict,
    text: str,
    *evidence: str,
    remedy: str = "",
    cause: int = 0,
    suspect: bool = False,
    unfinished: bool = False,
) -> CheckResult:
    """Return a result with lines of evidence; see the fields of CheckResult."""
    return CheckResult(
        verdict=verdict,
        text=text,
        evidence=evidence,
        remedy=remedy,
        cause=cause,
        suspect=suspect,
        unfinished=unfinished,
    )


error = partial(result_of, Verdict.ERROR)
warning = partial(result_of, Verdict.WARNING)
unknown = partial(result_of, Verdict.UNKNOWN)
notice = partial(result_of, Verdict.NOTICE, suspect=True)
"""An oddity: the likely cause if a connection fails and no error explains it."""
ok = partial(result_of, Verdict.OK)
skipped = partial(result_of, Verdict.SKIPPED)


# What a check may use


class Question(msgspec.Struct, frozen=True):
    """What the operator asked; without a Service, the whole node."""

    service: ObjectName | None = None
    port: str | None = None
    """Name or number of one port; None for all of them."""
    flow: Flow | None = None
    """A connection, if one was asked for."""
    pod: str = ""
    """The pod to dial from, as the operator named it."""
    netns: str = ""
    """Path of that pod's network namespace."""
    dial: bool = True
    """Whether connections may be made."""


class ApiReply(NamedTuple):
    """An answer of the API server."""

    status: int
    """HTTP status; 403 if the credentials may not ask this."""
    headers: Mapping[str, str]
    """By name in lower case."""
    body: Any
    """Decoded from JSON; None if it is not JSON."""


@dataclass
class Context:
    """The World, the question and this machine, for all checks of one run."""

    world: World
    """Everything known."""
    question: Question = field(default_factory=Question)
    """The operator's; about the whole node if it names nothing."""
    _: KW_ONLY
    execute: Exec
    """Runs programs, on the node of the World."""
    mode: Mode | None = None
    """The mode of the World, to read the kernel with; None if it cannot be built here."""
    list_links: Callable[[], Mapping[str, Link]] = list_links
    """Returns the interfaces of this network namespace by name."""
    look_up: Callable[[str], Hop] = look_up
    """Returns where packets to an address go next."""
    list_tables: Callable[[], list[tuple[str, str]]] = list_tables
    """Returns family and name of the tables of nft."""
    root: Path = Path("/")
    """Of the file system with /proc and /sys."""
    here: bool = True
    """Whether this machine is the node of the World. If not, the checks that look at the machine
    are skipped."""
    linux: bool = sys.platform == "linux"
    """Whether this machine runs Linux. If not, the checks that look at it are skipped."""
    now: Callable[[], float] = time.time
    """Returns the time, in seconds since 1970."""
    ask_api: Callable[[str], Awaitable[ApiReply]] | None = None
    """Sends a GET request to the API server; None if it is not known."""
    renew: Callable[[World], Awaitable[World]] | None = None
    """Returns the World as it is now; None if it cannot change."""
    server_pid: int = 0
    """Of the running process, in the pid namespace of this one; 0 if none runs or it cannot be seen
    from here."""
    _shared: dict[object, asyncio.Future[Any]] = field(default_factory=dict, init=False)

    async def once(self, fact: Callable[[Context], Awaitable[T]]) -> T:
        """Return what `fact` returns for this context; it is called once for all checks.

        An exception is shared, too. The fact goes on if a check that waits for it is cancelled.
        """
        if (found := self._shared.get(fact)) is None:
            found = self._shared[fact] = asyncio.ensure_future(fact(self))
            # If a fact fails after every check stopped waiting for it, that does not matter.
            found.add_done_callback(lambda done: done.cancelled() or done.exception())
        result: T = await asyncio.shield(found)
        return result

    async def aclose(self) -> None:
        """End the facts that nobody waits for any more."""
        for task in self._shared.values():
            task.cancel()
        await asyncio.gather(*self._shared.values(), return_exceptions=True)

    @property
    def plans(self) -> tuple[ServicePlan, ...]:
        """The plans that the question is about; all of them if it names no Service."""
        return self.plans_of(self.world)

    def plans_of(self, world: World) -> tuple[ServicePlan, ...]:
        """Return those plans as a World has them."""
        asked, plans = self.question, world.plan.services.items()
        if asked.service is None:
            return tuple(plan for _, plan in plans)
        return tuple(
            plan
            for key, plan in plans
            if key.name.object_name == asked.service
            and asked.port in (None, key.name.port, *(str(f.port) for f in plan.frontends))
        )

    @property
    def families(self) -> tuple[Family, ...]:
        """The families that the question is about: a node may serve one that no Service has."""
        families = self.world.plan.settings.families
        used = {plan.key.family for plan in self.plans}
        return tuple(family for family in families if not used or family in used)

    @property
    def node_ports(self) -> frozenset[int]:
        """Numbers of the node ports that the question is about."""
        return frozenset(
            frontend.port
            for plan in self.plans
            for frontend in plan.frontends
            if frontend.kind is FrontendKind.NODE_PORT
        )

    def requirements(self) -> Requirements:
        """Return what the mode needs of the node; the defaults if the mode cannot be built."""
        return self.mode.requirements() if self.mode else Requirements()

    def path(self, name: str) -> Path:
        """Return a file of the node, such as `proc/sys/net/ipv4/ip_forward`."""
        return self.root / name

    def read(self, name: str) -> str:
        """Return the content of a file of the node without white space at its ends; see `path`.

        Raises:
            OSError: it cannot be read.
        """
        return self.path(name).read_text(errors="replace").strip()


# Checks, and the run of all of them

Found: TypeAlias = CheckResult | Iterable[CheckResult]
"""What a check found: one result or several."""
Applies: TypeAlias = Callable[[Context], str]
"""Returns "" if a check applies to a context, else why it does not."""


def on_the_node(context: Context) -> str:
    """The check looks at the machine: it applies where the World's node is this machine."""
    if context.here:
        return ""
    node = context.world.plan.settings.node_name or "another machine"
    return f"it looks at the machine: run it on {node}"


def on_linux(context: Context) -> str:
    """The check looks at Linux: it applies where the World's node is this machine, and runs it."""
    return on_the_node(context) or ("" if context.linux else "it looks at Linux")


def with_service(context: Context) -> str:
    """The check is about one Service."""
    return "" if context.question.service else "no Service was asked for"


class Check(NamedTuple):
    """One check."""

    name: str
    """Its code, in texts and JSON, such as `forwarding`: it never changes its meaning."""
    title: str
    """What it looks at, in a few words."""
    run: Callable[[Context], Awaitable[Found]]
    needs: Sequence[Applies] = ()
    """All have to apply."""
    cause: int = Cause.NODE
    """Of its results that name none."""
    seconds: float = USUAL
    """It is given up after this time."""


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
            yield Line(f"{first}: {self.cause}", style="bad" if failed else "warn")
            if self.remedy:
                yield Line(f"What to do: {self.remedy}")
        if late := self.unfinished:
            some = ", ".join(late[:_LISTED]) + f" and {len(late) - _LISTED} more" * (
                len(late) > _LISTED
            )
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
            words = f"{result.verdict.value:8} {result.title}: {result.text} [{result.check}]"
            yield Line(words, style=_STYLES[result.verdict])
            for line in result.evidence[:_EVIDENCE]:
                yield Line(line, style="dim", indent=9)
            if (more := len(result.evidence) - _EVIDENCE) > 0:
                yield Line(f"and {more} more lines (-o json)", style="dim", indent=9)
            if result.remedy:
                yield Line(f"remedy: {result.remedy}", indent=9)
        fine = dict.fromkeys(result.title for result in self.of(Verdict.OK))
        if fine and not wide:
            yield Line(f"{'ok':8} {', '.join(fine)}", style="good")
        words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        yield Line(f"{words}; {self.seconds:.1f} s", style="dim")


async def diagnose(
    context: Context, checks: Sequence[Check], *, longest: float = LONGEST, source: str = ""
) -> Diagnosis:
    """Run the checks that apply, all at once, and put their results in order.

    Args:
        context: the question, and the place to look at.
        checks: the rows.
        longest: seconds after which unfinished checks are given up.
        source: for `Answer.source`.
    """
    began = time.monotonic()
    # All at once: most of them wait for programs, dials or counters.
    tasks = [asyncio.create_task(_finish(context, check)) for check in checks]
    _, late = await asyncio.wait(tasks, timeout=longest) if tasks else (tasks, set())
    for task in late:
        task.cancel()
    done: list[CheckResult] = []
    for check, task in zip(checks, tasks, strict=True):
        if task in late:
            why = f"it did not end within {longest:g} s"
            done.append(_named(check, unknown(why, unfinished=True)))
        else:
            done += task.result()
    await asyncio.gather(*late, return_exceptions=True)
    await context.aclose()
    done.sort(key=lambda result: (_RANKS[result.verdict], result.cause))
    first = likely_cause(done)
    return Diagnosis(
        source=source,
        asked=_asked(context),
        cause=first.text if first else "",
        remedy=first.remedy if first else "",
        results=tuple(done),
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
        if why := next(filter(None, (need(context) for need in check.needs)), ""):
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
    cause = result.cause or check.cause
    return replace(result, check=check.name, title=check.title, cause=cause)


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
