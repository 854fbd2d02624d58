"""Everything that is wrong in a cluster, worst first: what the page `/problems` shows. Pure.

Problems of all nodes are put together: the same Finding of 900 nodes is one Problem of 900 nodes.
What differs between nodes only in numbers (ages, process IDs, addresses of nodes) is not part of
what makes two problems the same; it is shown as evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import msgspec

from steersman.model import codes
from steersman.model.findings import Finding, Severity, clipped, printable
from steersman.operate.answer import (
    Answer,
    Block,
    Line,
    QuestionError,
    Style,
    page_number,
    rows_of_page,
)
from steersman.operate.node_trouble import Disagreement, Level, SeenNode, troubles_of
from steersman.operate.remedies import about

if TYPE_CHECKING:
    from steersman.operate.doctor.result import CheckResult

Kind: TypeAlias = Literal["node", "drift", "disagreement", "doctor", "finding", "trouble"]
"""The source of a Problem."""

LEVELS: tuple[Level, ...] = ("error", "warning", "unknown")
"""The worst first."""
_KINDS: tuple[Kind, ...] = ("node", "drift", "disagreement", "doctor", "finding", "trouble")
"""Those that concern all Services of a node first."""
PER_PAGE = 50
_EVIDENCE, _LONGEST = 12, 300
"""Lines of evidence of a Problem, and their characters."""
_NAMED = 5
"""Nodes that are named in a text."""


class DoctorResult(NamedTuple):
    """A result of a run of doctor that this server has started."""

    node: str
    question: str
    """What was asked, such as `shop/web`; "" for the node."""
    at: float
    """When, in seconds since 1970."""
    result: CheckResult


class Problem(msgspec.Struct, frozen=True, rename="camel"):
    """One problem, of one node or of many."""

    id: str
    """Stays the same for as long as the problem is there."""
    severity: Level
    kind: Kind
    object: str
    """The object, the node or the condition that it is about."""
    text: str
    nodes: tuple[str, ...]
    """Names of the nodes that have it, sorted."""
    field: str = ""
    """Path of the field of the object."""
    namespace: str = ""
    service: str = ""
    """The Service as `namespace/name`, if it is about one."""
    evidence: tuple[str, ...] = ()
    """Lines that prove it; the first ones, if there are many."""
    code: str = ""
    """Of the kind of problem, such as `SM1003`; "" for a result of doctor without one."""
    remedy: str = ""
    docs: str = ""
    """A page of the documentation."""
    command: str = ""
    """A command that shows more."""
    since: float = 0.0
    """Since when, in seconds since 1970; 0 if that is not known."""

    @property
    def rank(self) -> tuple[int, int, int, str, str, str]:
        """Orders problems, the worst first."""
        level, kind = LEVELS.index(self.severity), _KINDS.index(self.kind)
        return level, kind, -len(self.nodes), self.object, self.field, self.text


class Filter(msgspec.Struct, frozen=True):
    """Which problems are asked for; an empty word means all."""

    severity: str = ""
    namespace: str = ""
    node: str = ""
    text: str = ""
    """Words that the object, the field or the text contain."""
    page: int = 1
    """Page of PER_PAGE problems."""


class Problems(Answer, frozen=True, kw_only=True):
    """The problems of a cluster that were asked for."""

    asked: Filter
    problems: tuple[Problem, ...]
    """Those of the page that was asked for."""
    matching: int
    """The number of those that the filter lets through."""
    counts: Mapping[str, int]
    """The number by severity, of those that fit the other words of the filter."""
    nodes: int
    """The number of all nodes."""
    affected: int
    """The number of nodes with an error."""
    unlisted: int = 0
    """The largest number of Findings and Services in trouble that one node does not list."""
    namespaces: tuple[str, ...] = ()
    """Those that have problems, without regard to the filter."""
    names: tuple[str, ...] = ()
    """Nodes that have problems, without regard to the filter."""
    trouble: str = ""
    """Why the nodes cannot be found; "" if they can."""
    pages: int = 1
    page_size: int = PER_PAGE

    @property
    def exit_code(self) -> int:
        """1 if a problem that was asked for is an error."""
        return int(bool(self.trouble) or any(each.severity == "error" for each in self.problems))

    @property
    def watched(self) -> Any:
        """The answer without times: a node that is asked anew is gone since just now each time."""
        timeless = tuple(msgspec.structs.replace(each, since=0.0) for each in self.problems)
        return msgspec.structs.replace(self, problems=timeless)

    def blocks(self, wide: bool) -> Iterator[Block]:
        """Yield each problem with its nodes, evidence and remedy."""
        words = [
            f"{count} {level}{'s' * (count != 1 and level != 'unknown')}"
            for level in LEVELS
            if (count := self.counts.get(level))
        ]
        many = f"{self.nodes} node{'s' * (self.nodes != 1)}"
        if self.trouble:
            yield Line(self.trouble, "bad")
        yield Line(f"{', '.join(words) or 'no problems'} on {many}", "title")
        styles: dict[str, Style] = {"error": "bad", "warning": "warn", "unknown": "dim"}
        for each in self.problems:
            where = " ".join(part for part in (each.object, each.field) if part)
            text = f"{each.severity:8} {where}: {each.text}" + f" [{each.code}]" * bool(each.code)
            yield Line(printable(text), styles[each.severity], hang=9)
            yield Line(f"on {named_nodes(each.nodes)}", indent=9, hang=9)
            for line in each.evidence if wide else each.evidence[:2]:
                yield Line(printable(line), "dim", indent=9)
            if each.remedy:
                yield Line(f"remedy: {each.remedy}", indent=9, hang=9)
            if wide and each.command:
                yield Line(each.command, indent=9)
        if self.pages > 1:
            yield Line(f"page {self.asked.page} of {self.pages}; {self.matching} problems in all")
        if self.unlisted:
            yield Line(f"nodes do not list up to {self.unlisted} more problems each", "dim")


def named_nodes(names: Sequence[str]) -> str:
    """Return nodes in words: `node a`, `nodes a, b`, `12 nodes: a, b, c, d, e and 7 more`."""
    if len(names) == 1:
        return f"node {names[0]}"
    if len(names) <= _NAMED:
        return f"nodes {', '.join(names)}"
    return f"{len(names)} nodes: {', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"


def find_problems(
    nodes: Iterable[SeenNode],
    disagreements: Iterable[Disagreement] = (),
    doctor: Iterable[DoctorResult] = (),
    asked: Filter | None = None,
    why: Mapping[str, Sequence[str]] | None = None,
    *,
    now: float,
    trouble: str = "",
    page_size: int = PER_PAGE,
) -> Problems:
    """Return the problems of a cluster.

    Args:
        nodes: all nodes, as last seen.
        disagreements: nodes that serve other things than most.
        doctor: results of doctor, of the last run of each question.
        asked: which problems to return.
        why: further evidence about Services in trouble, by object.
        now: seconds since 1970, by the clock of the reader of these states.
        trouble: why the nodes cannot be found.
        page_size: problems on a page.
    """
    asked = asked or Filter()
    nodes = tuple(nodes)
    found = _Collector(why or {})
    for node in nodes:
        found.note_node(node, now)
    for each in disagreements:
        found.note_disagreement(each)
    for result in doctor:
        if result.result.verdict in LEVELS:
            found.note_doctor(result)
    answer = _answer(found.problems(), nodes, asked, page_size)
    return msgspec.structs.replace(answer, trouble=trouble) if trouble else answer


def read_filter(query: Mapping[str, str]) -> Filter:
    """Return the filter of a query string.

    Raises:
        QuestionError: there is no such severity.
    """
    severity = query.get("severity", "")
    if severity and severity not in LEVELS:
        raise QuestionError(f"there is no severity {clipped(severity, 40)}: {', '.join(LEVELS)}")
    return Filter(
        severity,
        query.get("namespace", ""),
        query.get("node", ""),
        query.get("q", "").strip(),
        page_number(query),
    )


# What makes two problems the same, and which lines are only evidence


class _Key(NamedTuple):
    """What problems of several nodes that are shown as one have in common."""

    severity: Level
    kind: Kind
    object: str
    field: str
    text: str


class _Same(msgspec.Struct):
    """The nodes and the evidence of one Problem, while nodes are read."""

    code: str
    remedy: str
    docs: str
    nodes: dict[str, None]
    evidence: dict[str, None]
    """The lines in order, without repetitions."""
    since: float
    command: str = ""
    namespace: str = ""
    service: str = ""


class _Collector:
    """Puts the same problems of several nodes together."""

    def __init__(self, why: Mapping[str, Sequence[str]]) -> None:
        self._why = why
        """Further evidence about Services in trouble, by object."""
        self._same: dict[_Key, _Same] = {}
        self._findings: dict[Finding, _Same] = {}
        """The same objects by Finding: most problems are found by one look-up."""

    def add(
        self,
        key: _Key,
        nodes: Iterable[str],
        code: str,
        evidence: Iterable[str] = (),
        since: float = 0.0,
    ) -> _Same:
        """Add a problem of some nodes, and return it."""
        same = self._same.get(key)
        if same is None:
            row = codes.remedy_of(code)
            same = self._same[key] = _Same(code, row.remedy, row.docs, {}, {}, since)
        same.nodes.update(dict.fromkeys(nodes))
        same.since = min(filter(None, (same.since, since)), default=0.0)
        for line in evidence:
            same.evidence.setdefault(clipped(line, _LONGEST))
        return same

    def add_finding(self, finding: Finding, node: str, kind: Kind = "finding") -> None:
        """Add a Finding of a node, or a Service in trouble."""
        if (same := self._findings.get(finding)) is not None:
            same.nodes[node] = None
            return
        level: Level = "error" if finding.severity is Severity.ERROR else "warning"
        key = _Key(level, kind, finding.object, finding.field, finding.reason)
        same = self.add(key, (node,), finding.code, self._why.get(finding.object, ()))
        if (object_ := about(finding)) is not None:
            same.namespace, same.service = object_.namespace, object_.service
            same.command = object_.command
            if object_.command and object_.service:
                same.remedy = same.remedy.replace("SERVICE", object_.service)
        self._findings[finding] = same

    def note_node(self, node: SeenNode, now: float) -> None:
        """Note the troubles of a node, its Findings, and Services in trouble there."""
        for trouble in troubles_of(node, now):
            if not trouble.told:
                kind: Kind = "drift" if trouble.health == "drifted" else "node"
                key = _Key(trouble.level, kind, trouble.object, "", trouble.text)
                lines = [f"{node.name}: {line}" for line in trouble.details]
                self.add(key, (node.name,), trouble.code, lines, trouble.since)
        if node.state is None:
            return
        for finding in node.state.findings:
            if finding.code != codes.REWRITTEN_RULES:  # a trouble of the node says so
                self.add_finding(finding, node.name)
        for finding in node.state.troubled:
            self.add_finding(finding, node.name, "trouble")

    def note_disagreement(self, each: Disagreement) -> None:
        """Note each Service that some nodes serve differently, or that it is not known which."""
        code = codes.DISAGREEMENT
        for service in each.services:
            text = f"is served differently than on most nodes, such as {each.reference}"
            key = _Key("error", "disagreement", f"Service {service}", "", text)
            same = self.add(key, each.nodes, code)
            same.service, same.namespace = service, service.partition("/")[0]
        if (more := each.number - len(each.services)) > 0 or not each.services:
            text = f"have other Services or endpoints than most nodes, such as {each.reference}"
            lines = [each.problem] if each.problem else []
            lines += [f"{more} more Services differ"] if more > 0 else []
            key = _Key("error", "disagreement", "Nodes", "", text)
            self.add(key, each.nodes, code, lines)

    def note_doctor(self, found: DoctorResult) -> None:
        """Note a result of doctor that is not good."""
        about_what = f"Service {found.question}" if "/" in found.question else "Node"
        result = found.result
        level = next(level for level in LEVELS if level == result.verdict)
        key = _Key(level, "doctor", about_what, result.title, result.text)
        same = self.add(key, (found.node,), result.code, result.evidence, found.at)
        same.remedy, same.docs = result.remedy, "doctor.md"
        if about_what != "Node":
            same.service = found.question.partition(":")[0]
            same.namespace = same.service.partition("/")[0]

    def problems(self) -> Iterator[Problem]:
        """Yield the problems, in no order."""
        for key, same in self._same.items():
            evidence = tuple(same.evidence)
            if (more := len(evidence) - _EVIDENCE) > 0:
                evidence = (*evidence[:_EVIDENCE], f"and {more} more")
            yield Problem(
                id=blake2b("\0".join(key).encode(), digest_size=6).hexdigest(),
                severity=key.severity,
                kind=key.kind,
                object=key.object,
                field=key.field,
                text=key.text,
                nodes=tuple(sorted(same.nodes)),
                namespace=same.namespace,
                service=same.service,
                evidence=evidence,
                code=same.code,
                remedy=same.remedy,
                docs=same.docs,
                command=same.command,
                since=same.since,
            )


# The answer


def _answer(
    problems: Iterable[Problem], nodes: Sequence[SeenNode], asked: Filter, page_size: int
) -> Problems:
    """Put problems in order, and return those that were asked for."""
    found = sorted(problems, key=lambda each: each.rank)
    words = asked.text.lower().split()
    fitting = [
        each
        for each in found
        if (not asked.namespace or each.namespace == asked.namespace)
        and (not asked.node or asked.node in each.nodes)
        and all(word in f"{each.object} {each.field} {each.text}".lower() for word in words)
    ]
    matching = [each for each in fitting if asked.severity in ("", each.severity)]
    counts: dict[str, int] = {
        level: sum(each.severity == level for each in fitting) for level in LEVELS
    }
    shown = rows_of_page(matching, asked.page, page_size)
    states = [node.state for node in nodes if node.state is not None]
    hidden = (
        max(0, sum(s.finding_counts.values()) - len(s.findings))
        + max(0, sum(s.trouble_counts.values()) - len(s.troubled))
        for s in states
    )
    return Problems(
        source=f"{len(nodes)} node{'s' * (len(nodes) != 1)}",
        pages=shown.pages,
        page_size=page_size,
        asked=msgspec.structs.replace(asked, page=shown.page),
        problems=tuple(shown.rows),
        matching=len(matching),
        counts=counts,
        nodes=len(nodes),
        affected=len({name for p in found if p.severity == "error" for name in p.nodes}),
        unlisted=max(hidden, default=0),
        namespaces=tuple(sorted({each.namespace for each in found} - {""})),
        names=tuple(sorted({name for each in found for name in each.nodes})),
    )
