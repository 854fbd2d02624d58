"""Findings in the log: each once when it comes, and once when it is mended."""

from __future__ import annotations

import logging

from steersman.model.plan import Finding, Severity

log = logging.getLogger(__name__)


class FindingsLog:
    """Remembers what was said."""

    def __init__(self) -> None:
        self._said: frozenset[Finding] = frozenset()

    def tell(self, findings: tuple[Finding, ...]) -> None:
        """Log what is new among the Findings of now, and what is gone."""
        now = frozenset(findings)
        for finding in sorted(now - self._said):
            level = logging.ERROR if finding.severity is Severity.ERROR else logging.WARNING
            log.log(level, "%s", finding)
        for finding in sorted(self._said - now):
            log.info("mended: %s", finding)
        self._said = now
