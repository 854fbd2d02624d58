"""What several readers of Kubernetes objects share: collecting Findings, numbers, protocols.

Whoever writes objects must not be able to flood those who read Findings, so they are bounded three
times: one per field of an object, so many per Service, so many in total (docs/limits.md).
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice

import msgspec

from steersman.model.findings import Finding, Severity, clipped, printable
from steersman.model.kube import ObjectMeta
from steersman.model.names import ObjectName, Protocol

MAX_PORT = 65535
PER_SERVICE = 16
"""Findings listed about one Service and its EndpointSlices; the rest are counted."""
IN_TOTAL = 1000
"""Findings listed about all Services; where there are more, each namespace has an equal share."""
PROTOCOLS: Mapping[str | None, Protocol] = {
    None: Protocol.TCP,
    "": Protocol.TCP,
    **{protocol.value: protocol for protocol in Protocol},
}
"""By their spelling in objects; TCP where absent."""
_NAMED = 3  # entries of a list that are named besides the first one
_NAME, _REASON = 400, 600  # characters
_INDEX = re.compile(r"\[\d+\]")


class _Noted(msgspec.Struct):
    """The first thing wrong with a field, and what else is wrong with it."""

    field: str
    reason: str
    severity: Severity
    others: dict[tuple[str, str], None]

    def finding(self, name: str) -> Finding:
        reason = self.reason
        if self.others:
            fields = dict.fromkeys(field for field, _ in self.others if field != self.field)
            listed = ", ".join([*fields][:_NAMED]) + (", ..." if len(fields) > _NAMED else "")
            reason += f" (and {len(self.others)} more{': ' if fields else ''}{listed})"
        return Finding(name, self.field, reason, self.severity)


class Notes:
    """Collects Findings about one object while it is read, in order and one per field.

    All entries of a list are one field: the first bad one is described, others are counted.
    """

    __slots__ = ("_kind", "_meta", "_noted")

    def __init__(self, kind: str, meta: ObjectMeta | None = None) -> None:
        self._kind = kind
        self._meta = meta
        self._noted: dict[tuple[str, Severity], _Noted] = {}

    def add(self, field: str, reason: str, severity: Severity = Severity.WARNING) -> None:
        """Note what is wrong with a field, and what to do about it."""
        key = _INDEX.sub("[]", field), severity
        first = self._noted.get(key)
        if first is None:
            self._noted[key] = _Noted(field, reason, severity, {})
        elif (first.field, first.reason) != (field, reason):
            first.others[field, reason] = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was noted."""
        if not self._noted:
            return ()
        name = f"{self._kind} {self._meta.object_name}" if self._meta else self._kind
        return tuple(noted.finding(name) for noted in self._noted.values())


class _About(msgspec.Struct, frozen=True):
    """The Findings about one Service: those to list, and how many there are beyond them."""

    listed: tuple[Finding, ...]
    beyond: Mapping[Severity, int]
    """By severity; a last Finding that only says how many there are stands for one of them."""

    @property
    def count(self) -> Counter[Severity]:
        """How many there are, by severity."""
        return Counter(finding.severity for finding in self.listed) + Counter(self.beyond)


class FindingIndex:
    """The Findings about all Services, kept up to date at the cost of what changes."""

    def __init__(self) -> None:
        self._about: dict[ObjectName, _About] = {}
        self._names: dict[str, list[ObjectName]] = {}
        """Services with Findings by namespace, sorted."""
        self._count: Counter[Severity] = Counter()
        self._lines = 0
        self._listed: tuple[Finding, ...] | None = ()

    def put(self, name: ObjectName, findings: Sequence[Finding]) -> None:
        """Replace the Findings about a Service and its EndpointSlices."""
        before = self._about.get(name)
        if before is None and not findings:
            return  # by far the most
        about = _about(name, sorted({_safe(finding) for finding in findings}))
        if before == about:
            return
        names = self._names.setdefault(name.namespace, [])
        if before is not None:
            self._count.subtract(before.count)
            self._lines -= len(before.listed)
            del self._about[name], names[bisect_left(names, name)]
        if about is not None:
            self._count.update(about.count)
            self._lines += len(about.listed)
            self._about[name] = about
            insort(names, name)
        if not names:
            del self._names[name.namespace]
        self._listed = None

    @property
    def listed(self) -> tuple[Finding, ...]:
        """The Findings to show; where there are too many, the last one says how many more."""
        if self._listed is None:
            self._listed = tuple(self._list())
        return self._listed

    @property
    def beyond(self) -> dict[Severity, int]:
        """How many Findings there are beyond those that are listed, by severity."""
        if self._count.total() == len(self.listed):
            return {}
        shown = Counter(finding.severity for finding in self.listed)
        return {each: more for each in Severity if (more := self._count[each] - shown[each])}

    def _list(self) -> list[Finding]:
        if self._lines <= IN_TOTAL:
            return [each for ns in sorted(self._names) for each in self._of_namespace(ns)]
        share = max(1, (IN_TOTAL - 1) // len(self._names))
        out: list[Finding] = []
        for namespace in sorted(self._names)[: IN_TOTAL - 1]:
            out += islice(self._of_namespace(namespace), share)
        missing = self._count - Counter(finding.severity for finding in out)
        reason = "Findings are not listed; each namespace has an equal share of the list"
        return [*out, _more("Findings", reason, missing)]

    def _of_namespace(self, namespace: str) -> Iterator[Finding]:
        return chain.from_iterable(self._about[name].listed for name in self._names[namespace])


def _about(name: ObjectName, found: list[Finding]) -> _About | None:
    if len(found) <= PER_SERVICE:
        return _About(tuple(found), {}) if found else None
    found.sort(key=lambda finding: finding.severity is not Severity.ERROR)
    beyond = Counter(finding.severity for finding in found[PER_SERVICE - 1 :])
    reason = "Findings about this Service and its EndpointSlices are not listed; correct these"
    more = _more(f"Service {name}", reason, beyond)
    beyond[more.severity] -= 1
    return _About((*sorted(found[: PER_SERVICE - 1]), _safe(more)), beyond)


def _more(about: str, reason: str, beyond: Mapping[Severity, int]) -> Finding:
    severity = Severity.ERROR if beyond.get(Severity.ERROR) else Severity.WARNING
    return Finding(about, "", f"{sum(beyond.values())} more {reason}", severity)


def _safe(finding: Finding) -> Finding:
    return Finding(
        printable(clipped(finding.object, _NAME)),
        printable(clipped(finding.field, _NAME)),
        printable(clipped(finding.reason, _REASON)),
        finding.severity,
    )


def port_number(field: str, number: int, notes: Notes) -> int:
    """Return a port number, 0 where it is none."""
    if 0 <= number <= MAX_PORT:
        return number
    notes.add(field, f"{number} must be 1 to {MAX_PORT}; ignored")
    return 0
