"""Findings in the log."""

from __future__ import annotations

import logging

import pytest

from steersman.model.findings import Finding, Severity
from steersman.run.observe.findings_log import FindingsLog

WARNING, ERROR = Severity.WARNING, Severity.ERROR


def finding(field: str, about: str = "Service shop/web", severity: Severity = WARNING) -> Finding:
    return Finding(about, field, "is odd", severity)


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return lines


def test_each_finding_is_logged_when_it_comes_and_when_it_goes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    log = FindingsLog()
    log.update((finding("a"), finding("b", severity=ERROR)))
    assert logged(caplog) == [
        ("WARNING", "Service shop/web a: is odd"),
        ("ERROR", "Service shop/web b: is odd"),
    ]
    log.update((finding("a"), finding("b", severity=ERROR)))
    assert logged(caplog) == []
    log.update((finding("a"),))
    assert logged(caplog) == [("INFO", "resolved: Service shop/web b: is odd")]


def test_a_flood_of_findings_is_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = FindingsLog()
    many = tuple(finding(f"f{n}") for n in range(500))
    log.update(many)
    lines = logged(caplog)
    assert len(lines) == 21
    assert lines[-1] == ("WARNING", "480 more new Findings, 0 more resolved: see /state")
    log.update(many[:-1], {WARNING: 7})
    assert logged(caplog) == [("INFO", "no longer listed: Service shop/web f499: is odd")]
    log.update(())  # some were not listed before: nobody knows whether these are resolved
    assert logged(caplog)[-1][1] == "0 more new Findings, 479 more no longer listed: see /state"
