"""`steersman status`: the answer, a process that cannot be reached, waiting."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from steersman.cli.output import plain_lines
from steersman.model.findings import Finding, Severity
from steersman.model.node_state import Condition, ConditionStatus, NodeState, SourceStatus
from steersman.operate.answer import QuestionError
from steersman.operate.client import Client, NotRunningError
from steersman.operate.status import Status, ask_status, wait_for_status
from steersman.run.process.instance import Holder

NOON = 1_700_000_000.0


def page(status: ConditionStatus = "True", **more: Any) -> NodeState:
    fields: dict[str, Any] = {
        "node": "node-a",
        "mode": "nftables",
        "services": 2,
        "endpoint_slices": 3,
        "service_ports": 4,
        "pid": 4211,
        "version": "1.0",
        "started": NOON - 7200,
        "now": NOON,
        "revision": 5,
        "synced_at": NOON - 60,
        "sync_reason": "changes",
        "phases": {"plan": 0.001, "apply": 0.002},
        "objects": 40,
        "source": SourceStatus("apiserver", "https://api:6443", quiet_seconds=3.2),
        "conditions": (Condition("Synced", status, "Why", "because", NOON - 600),),
    }
    return NodeState(**(fields | more))


class Fake(Client):
    def __init__(self, answer: NodeState | bytes | Exception) -> None:
        super().__init__()
        self._answer = answer

    def get(self, path: str) -> bytes:
        assert path == "/status"
        match self._answer:
            case Exception():
                raise self._answer
            case bytes():
                return self._answer
        return msgspec.json.encode(self._answer)


def ask(answer: NodeState | bytes | Exception, holder: Holder | None = None) -> Status:
    return asyncio.run(ask_status(Fake(answer), lambda: holder))


def text(status: Status, wide: bool = False) -> list[str]:
    return [" ".join(line.split()) for line in plain_lines(status.blocks(wide))]


def test_services_in_trouble_are_counted_and_listed() -> None:
    bad = Finding("Service shop/a", "port TCP IPv4", "no endpoint", Severity.ERROR, "SM1014")
    counts = {Severity.ERROR: 1, Severity.WARNING: 2}
    status = ask(page(troubled=(bad,), trouble_counts=counts))
    assert status.exit_code == 0, "no fault of this node"
    lines = text(status)
    assert "trouble 3 Services, 1 without any endpoint" in lines
    assert "error: Service shop/a port TCP IPv4: no endpoint [SM1014]" in lines
    assert status.data["troubleCounts"] == {"error": 1, "warning": 2}


def test_a_status_is_a_summary_and_conditions() -> None:
    status = ask(page())
    assert status.exit_code == 0
    assert text(status) == [
        "steersman 1.0, nftables mode, node node-a, pid 4211, up 2h",
        "sync revision 5 (changes), 60s ago, 3.0 ms",
        "source https://api:6443, connected, last event 3s ago",
        "objects 2 Services, 3 EndpointSlices, 4 ServicePorts, 40 kernel objects",
        "findings no Findings",
        "CONDITION STATUS SINCE MESSAGE",
        "Running True 2h the process answers",
        "Synced True 10m because",
    ]
    assert "Synced True 10m Why because" in text(status, wide=True)
    assert status.source == "the running process (pid 4211, nftables mode)"


def test_json_has_times_that_other_programs_read() -> None:
    data = ask(page()).data
    assert data["conditions"][1] == {
        "type": "Synced",
        "status": "True",
        "reason": "Why",
        "message": "because",
        "since": "2023-11-14T22:03:20Z",
    }
    assert (data["node"], data["mode"], data["pid"]) == ("node-a", "nftables", 4211)
    assert data["connection"]["lastEvent"] == "2023-11-14T22:13:16Z"
    assert (data["endpointSlices"], "now" in data) == (3, False)
    assert data["synced"] == {
        "at": "2023-11-14T22:12:20Z",
        "reason": "changes",
        "phases": {"plan": 0.001, "apply": 0.002},
        "refused": 0,
    }
    some = page(findings=(Finding("a", "", "b"),), finding_counts={Severity.WARNING: 3})
    assert (data["unlisted"], ask(some).data["unlisted"]) == ({}, {"warning": 2})
    assert ask(page(synced_at=0.0)).data["synced"] is None


@pytest.mark.parametrize("status", ["False", "Unknown"])
def test_a_condition_that_is_not_true_is_bad_news(status: ConditionStatus) -> None:
    assert ask(page(status)).exit_code == 1


def test_what_is_not_well_is_in_the_summary() -> None:
    errors = tuple(
        Finding(f"Service shop/s{number}", "", "is broken", Severity.ERROR) for number in range(14)
    )
    source = SourceStatus("apiserver", "https://api:6443", connected=False)
    bad = page(
        source=source,
        synced_at=NOON,
        sync_reason="drift",
        phases={},
        refused=2,
        owes=True,
        healthy=False,
        findings=(*errors, Finding("Node a", "", "is odd")),
        finding_counts={Severity.ERROR: 14, Severity.WARNING: 1},
    )
    lines = text(ask(bad))
    assert "source https://api:6443, NOT CONNECTED" in lines
    assert "sync revision 5 (drift), 0s ago, 0.0 ms, changes wait, 2 refused by the kernel" in lines
    assert "health NOT HEALTHY: a change waits for too long" in lines
    assert "findings 14 errors, 1 warning" in lines
    assert lines[-1] == "and 3 more; see steersman status -o wide"
    assert text(ask(bad), wide=True)[-1] == "warning: Node a: is odd"
    early = page(synced_at=0.0, source=SourceStatus(), variant="legacy")
    lines = text(ask(early))
    assert "sync none has reached the kernel yet" in lines
    assert "source manifests" in lines
    assert "nftables mode (legacy)" in lines[0]


def test_nothing_that_runs_is_bad_news_not_an_error() -> None:
    status = ask(NotRunningError("nobody"))
    assert (status.exit_code, status.state) == (1, None)
    assert text(status) == [
        "CONDITION STATUS SINCE MESSAGE",
        "Running False - no steersman runs in this network namespace",
    ]
    assert status.data["conditions"][0]["since"] is None


@pytest.mark.parametrize("failure", [NotRunningError("refused"), QuestionError("no answer"), b"x"])
def test_an_instance_that_cannot_be_asked_is_named(failure: Exception | bytes) -> None:
    holder = Holder(4211, "node-a", "nftables", int(NOON))
    (condition,) = ask(failure, holder).conditions
    assert (condition.status, condition.reason) == ("Unknown", "Unreachable")
    assert "an instance runs (pid 4211 on host node-a, nftables mode" in condition.message
    assert condition.since == NOON


def test_a_process_that_does_not_answer_is_unreachable() -> None:
    (condition,) = ask(QuestionError("the process did not answer within 30 s")).conditions
    assert (condition.status, condition.message) == (
        "Unknown",
        "the process did not answer within 30 s",
    )


def test_waiting_ends_when_all_is_well_or_time_is_up() -> None:
    slept: list[float] = []
    answers: list[NodeState | Exception] = [
        NotRunningError("nobody"),
        page("False"),
        page("Unknown"),
        page(),
    ]

    async def ask_next() -> Status:
        return await ask_status(Fake(answers[min(len(slept), 3)]), lambda: None)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    def clock() -> float:
        return sum(slept)

    assert asyncio.run(wait_for_status(0, ask_next, sleep, clock)).exit_code == 0
    assert len(slept) == 3
    slept.clear()
    late = asyncio.run(wait_for_status(1.0, ask_next, sleep, clock))
    assert (late.exit_code, late.conditions[1].status) == (1, "Unknown")
