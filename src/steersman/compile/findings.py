"""Collect the Findings about objects, and bound their number.

Those who write objects must not be able to flood those who read Findings. Three limits apply, one
after the other (docs/limits.md):

    FindingCollector   one Finding per field of an object, the other problems are counted in it
    FindingIndex       PER_SERVICE per Service and its EndpointSlices, the others are counted
                       IN_TOTAL in total, then each namespace has an equal share of the list
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice

import msgspec

from steersman.model import codes
from steersman.model.findings import Finding, Severity, safe
from steersman.model.kube import ObjectMeta
from steersman.model.names import ObjectName

PER_SERVICE = 16
"""Findings listed about one Service and its EndpointSlices."""
IN_TOTAL = 1000
"""Findings listed about all Services."""
_NAMED = 3  # entries of a list that are named besides the first one
_INDEX = re.compile(r"\[\d+\]")


class _FieldProblems(msgspec.Struct):
    """The first problem of a field, and the others."""

    field: str
    reason: str
    severity: Severity
    code: str
    others: dict[tuple[str, str], None]
    """(field, reason) of the other problems, in order."""


class FindingCollector:
    """Collects the problems of one object while it is read, one Finding per field.

    All entries of a list are one field: the first problem is described, the others are counted.
    """

    __slots__ = ("_code", "_kind", "_meta", "_problems")

    def __init__(self, kind: str, code: str, meta: ObjectMeta | None = None) -> None:
        self._kind = kind
        self._code = code
        self._meta = meta
        self._problems: dict[tuple[str, Severity], _FieldProblems] = {}

    def add(
        self, field: str, reason: str, severity: Severity = Severity.WARNING, code: str = ""
    ) -> None:
        """Add a problem of a field.

        Args:
            field: path of the field, such as `spec.ports[0].port`.
            reason: the problem, and how to fix it.
            severity: ERROR if a part of the object is not served.
            code: of the kind of problem; "" for that of the collector.
        """
        # Without indices all entries of a list are one field.
        key = _INDEX.sub("[]", field), severity
        first = self._problems.get(key)
        if first is None:
            self._problems[key] = _FieldProblems(field, reason, severity, code or self._code, {})
        elif (first.field, first.reason) != (field, reason):
            first.others[field, reason] = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The Findings, in the order of the first problems."""
        if not self._problems:
            return ()
        name = f"{self._kind} {self._meta.object_name}" if self._meta else self._kind
        found = []
        for first in self._problems.values():
            reason = first.reason
            if first.others:
                fields = dict.fromkeys(field for field, _ in first.others if field != first.field)
                named = ", ".join([*fields][:_NAMED]) + (", ..." if len(fields) > _NAMED else "")
                reason += f" (and {len(first.others)} more{': ' if fields else ''}{named})"
            found.append(Finding(name, first.field, reason, first.severity, first.code))
        return tuple(found)


class _ServiceFindings(msgspec.Struct, frozen=True):
    """The Findings about one Service: at most PER_SERVICE listed ones, and counts of the others."""

    listed: tuple[Finding, ...]
    unlisted: Mapping[Severity, int]
    """By severity. The last listed Finding may only report this number: it replaces one of them,
    so that the total stays right."""

    @property
    def count(self) -> Counter[Severity]:
        """The number of Findings by severity."""
        return Counter(finding.severity for finding in self.listed) + Counter(self.unlisted)

    @classmethod
    def limited(cls, name: ObjectName, findings: Sequence[Finding]) -> _ServiceFindings:
        """List the worst Findings about a Service."""
        # Sorted and without duplicates; equal Findings of two families are one.
        found = sorted({safe(finding) for finding in findings})
        if len(found) <= PER_SERVICE:
            return cls(tuple(found), {})
        # Errors first; one place is for the Finding that reports the number of the others.
        found.sort(key=lambda finding: finding.severity is not Severity.ERROR)
        unlisted = Counter(finding.severity for finding in found[PER_SERVICE - 1 :])
        reason = "Findings about this Service and its EndpointSlices are not listed; correct these"
        more = _count_finding(f"Service {name}", reason, unlisted)
        unlisted[more.severity] -= 1
        return cls((*sorted(found[: PER_SERVICE - 1]), safe(more)), unlisted)


class FindingIndex:
    """The Findings about all Services, kept up to date at the cost of the changed Services."""

    def __init__(self) -> None:
        self._by_service: dict[ObjectName, _ServiceFindings] = {}
        self._names: dict[str, list[ObjectName]] = {}
        """Services with Findings by namespace, sorted."""
        self._count: Counter[Severity] = Counter()
        self._lines = 0
        """Findings listed per Service, over all Services."""
        self._listed: tuple[Finding, ...] | None = ()
        """Cache of `listed`; None after a change."""

    def put(self, name: ObjectName, findings: Sequence[Finding]) -> None:
        """Replace the Findings about a Service and its EndpointSlices."""
        before = self._by_service.get(name)
        if before is None and not findings:
            return  # almost always
        # Replace the entry, and keep the counts and the sorted names of its namespace right.
        after = _ServiceFindings.limited(name, findings) if findings else None
        if before == after:
            return
        names = self._names.setdefault(name.namespace, [])
        if before is not None:
            self._count.subtract(before.count)
            self._lines -= len(before.listed)
            del self._by_service[name], names[bisect_left(names, name)]
        if after is not None:
            self._count.update(after.count)
            self._lines += len(after.listed)
            self._by_service[name] = after
            insort(names, name)
        if not names:
            del self._names[name.namespace]
        self._listed = None

    @property
    def listed(self) -> tuple[Finding, ...]:
        """The Findings to show; if there are too many, the last one says how many are left out."""
        if self._listed is None and self._lines <= IN_TOTAL:
            self._listed = tuple(chain.from_iterable(map(self._of_namespace, sorted(self._names))))
        elif self._listed is None:
            # Too many: each namespace gets an equal share, so that none can displace the others.
            share = max(1, (IN_TOTAL - 1) // len(self._names))
            shown: list[Finding] = []
            for namespace in sorted(self._names)[: IN_TOTAL - 1]:
                shown += islice(self._of_namespace(namespace), share)
            missing = self._count - Counter(finding.severity for finding in shown)
            reason = "Findings are not listed; each namespace has an equal share of the list"
            self._listed = (*shown, _count_finding("Findings", reason, missing))
        return self._listed

    @property
    def unlisted(self) -> dict[Severity, int]:
        """The number of Findings that are not listed, by severity."""
        if self._count.total() == len(self.listed):
            return {}
        shown = Counter(finding.severity for finding in self.listed)
        return {each: more for each in Severity if (more := self._count[each] - shown[each])}

    def _of_namespace(self, namespace: str) -> Iterator[Finding]:
        names = self._names[namespace]
        return chain.from_iterable(self._by_service[name].listed for name in names)


def _count_finding(about: str, reason: str, unlisted: Mapping[Severity, int]) -> Finding:
    """Return the Finding that reports the number of unlisted ones."""
    severity = Severity.ERROR if unlisted.get(Severity.ERROR) else Severity.WARNING
    return Finding(about, "", f"{sum(unlisted.values())} more {reason}", severity, codes.LIMIT)
