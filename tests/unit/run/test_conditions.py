"""The conditions of the running process, and since when each has its status."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from steersman.model.drift import Drift
from steersman.model.findings import Finding, Severity
from steersman.model.node_state import Condition, NodeState, SourceStatus
from steersman.run.pages.conditions import ConditionLog, count_words

WELL: dict[str, Any] = {"synced_at": 5.0, "now": 10.0, "objects": 7}
ERROR = Finding("Service shop/web", "spec", "is broken", Severity.ERROR)
WARNING = Finding("Service shop/cart", "spec", "is odd")


def conditions(*findings: Finding, unlisted: Any = None, **process: Any) -> dict[str, Condition]:
    counts = Counter(finding.severity for finding in findings)
    counts.update(unlisted or {})
    process |= {"findings": findings, "finding_counts": counts}
    return {each.type: each for each in ConditionLog(1.0).update(NodeState(**(WELL | process)))}


def test_a_process_that_is_well_has_only_true_conditions() -> None:
    found = conditions()
    assert list(found) == ["Synced", "SourceConnected", "KernelMatches", "NoFindings", "Healthy"]
    assert {each.status for each in found.values()} == {"True"}
    assert found["KernelMatches"].message == "7 kernel objects are in force"
    assert found["NoFindings"].message == "no Findings"


@pytest.mark.parametrize(
    ("process", "type_", "status", "reason", "message"),
    [
        ({"waiting": 'node "a"'}, "Synced", "False", "Waiting", 'waiting for node "a"'),
        ({"failure": "no\nnft"}, "Synced", "False", "SyncFailed", "no\\nnft; it is tried again"),
        ({"owes": True}, "Synced", "True", "UpToDate", "changes wait for the next sync"),
        (
            {"source": SourceStatus("apiserver", "https://api:6443")},
            "SourceConnected",
            "True",
            "Connected",
            "https://api:6443",
        ),
        (
            {"source": SourceStatus("apiserver", "https://x", False, errors={"http_401": 2})},
            "SourceConnected",
            "False",
            "NotConnected",
            "https://x is not reached (so far: 2 http_401)",
        ),
        (
            {"source": SourceStatus("apiserver", "https://x", False)},
            "SourceConnected",
            "False",
            "NotConnected",
            "https://x is not reached",
        ),
        ({"synced_at": 0.0}, "KernelMatches", "Unknown", "NotSynced", "no sync has reached"),
        (
            {"refused": 2},
            "KernelMatches",
            "False",
            "Refused",
            "the kernel refuses the rules of 2 owners; see the Findings",
        ),
        ({"failure": "no nft"}, "KernelMatches", "Unknown", "SyncFailed", "parts may be missing"),
        (
            {"drift": Drift(4.0, missing=1)},
            "KernelMatches",
            "False",
            "Drift",
            "other programs changed it: 1 kernel object (1 missing), by an unknown program",
        ),
        (
            {"drift": Drift(4.0, missing=1, repaired_at=5.0)},
            "KernelMatches",
            "True",
            "Matches",
            "in force",
        ),
        ({"healthy": False}, "Healthy", "False", "Late", "twice the sync period"),
    ],
)
def test_what_is_wrong_is_said(
    process: dict[str, Any], type_: str, status: str, reason: str, message: str
) -> None:
    found = conditions(**process)[type_]
    assert (found.status, found.reason) == (status, reason)
    assert message in found.message


def test_errors_are_findings_to_mend_and_warnings_are_not() -> None:
    bad = conditions(ERROR, WARNING, unlisted={Severity.WARNING: 3})["NoFindings"]
    assert (bad.status, bad.reason) == ("False", "Errors")
    assert bad.message == f"1 error, 4 warnings, such as: {ERROR}"
    fair = conditions(WARNING)["NoFindings"]
    assert (fair.status, fair.reason) == ("True", "Warnings")
    unlisted = conditions(unlisted={Severity.ERROR: 1})["NoFindings"]
    assert (unlisted.status, unlisted.message) == ("False", "1 error")


def test_since_changes_with_the_status_only() -> None:
    log = ConditionLog(1.0)

    def since(now: float, **more: Any) -> float:
        return log.update(NodeState(**(WELL | {"now": now} | more)))[0].since

    assert since(5.0, waiting="a node") == 1.0
    assert since(6.0, waiting="the lists") == 1.0
    assert since(7.0) == 7.0
    assert since(8.0, owes=True) == 7.0
    assert since(9.0, failure="no") == 9.0


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({}, "no Findings"),
        ({Severity.ERROR: 1}, "1 error"),
        ({Severity.WARNING: 2, Severity.ERROR: 2}, "2 errors, 2 warnings"),
    ],
)
def test_counts_in_words(counts: dict[Severity, int], words: str) -> None:
    assert count_words(counts) == words
