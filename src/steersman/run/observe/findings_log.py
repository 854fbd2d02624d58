"""Logs Findings when they appear and when they are resolved."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from steersman.model.findings import Finding, Severity
from steersman.run.sync.state import SyncReport

log = logging.getLogger(__name__)

_FINDING_LINES = 20
"""New Findings, and resolved ones, that are logged at a time; the rest are counted. The log as a
whole limits its lines per minute (run/process/klog.py)."""


class FindingsLog:
    """Logs each Finding once when it appears, and once when it is resolved."""

    def __init__(self) -> None:
        self._listed: frozenset[Finding] = frozenset()
        self._complete = True

    def observe(self, report: SyncReport) -> None:
        """Log the Findings of a report."""
        self.update(report.state.findings, report.state.unlisted)

    def update(
        self, findings: tuple[Finding, ...], unlisted: Mapping[Severity, int] | None = None
    ) -> None:
        """Log the difference to the Findings of the last call."""
        now, before = frozenset(findings), self._listed
        complete = not unlisted
        gone = "resolved" if complete and self._complete else "no longer listed"
        self._listed, self._complete = now, complete
        if now == before:
            return
        new, old = sorted(now - before), sorted(before - now)
        for finding in new[:_FINDING_LINES]:
            level = logging.ERROR if finding.severity is Severity.ERROR else logging.WARNING
            log.log(level, "%s", finding)
        for finding in old[:_FINDING_LINES]:
            log.info("%s: %s", gone, finding)
        more = len(new[_FINDING_LINES:]), len(old[_FINDING_LINES:])
        if any(more):
            log.warning("%d more new Findings, %d more %s: see /state", *more, gone)
