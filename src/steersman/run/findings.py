"""Findings in the log: each once when it comes, and once when it is gone."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from steersman.model.findings import Finding, Severity

log = logging.getLogger(__name__)

_LINES = 20
"""Logged at a time of those that are new, and of those that are gone; the rest are counted. How
many lines there may be in a minute is limited for the log as a whole (run/klog.py)."""


class FindingsLog:
    """Remembers which Findings were listed."""

    def __init__(self) -> None:
        self._listed: frozenset[Finding] = frozenset()
        self._complete = True

    def tell(
        self, findings: tuple[Finding, ...], unlisted: Mapping[Severity, int] | None = None
    ) -> None:
        """Log what is new among the Findings of now, and what is gone.

        Args:
            findings: those that are listed.
            unlisted: how many there are beyond them, by severity.
        """
        now, before = frozenset(findings), self._listed
        complete = not unlisted
        gone = "resolved" if complete and self._complete else "no longer listed"
        self._listed, self._complete = now, complete
        if now == before:
            return
        new, old = sorted(now - before), sorted(before - now)
        for finding in new[:_LINES]:
            level = logging.ERROR if finding.severity is Severity.ERROR else logging.WARNING
            log.log(level, "%s", finding)
        for finding in old[:_LINES]:
            log.info("%s: %s", gone, finding)
        more = len(new[_LINES:]), len(old[_LINES:])
        if any(more):
            log.warning("%d more new Findings, %d more %s: see /state", *more, gone)
