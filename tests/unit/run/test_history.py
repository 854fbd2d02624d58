"""What the process remembers of its syncs: the last ones, in little memory whatever happens."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest

from steersman.model.drift import Drift, Writer
from steersman.model.history import History as Answer
from steersman.model.history import SyncRecord
from steersman.model.names import ObjectName
from steersman.run.pages.history import History, Lags
from steersman.run.sync.in_force import InForce
from steersman.run.sync.state import State, SyncReport, SyncResult, Written
from steersman.source.store import CONFIGURATION, Arrivals, Change

START = 1_000_000.0


def test_the_lag_is_that_of_the_oldest_change() -> None:
    lags = Lags()
    assert (lags.last, lags.p99(0.0)) == (None, None)
    lags.add(10.0, 9.5, ())
    assert lags.last == 0.5
    lags.add(10.0, 9.5, (3.0, 1.0))
    assert lags.last == 3.0
    lags.add(10.0, None, ())
    assert lags.last is None
    assert lags.p99(10.0) == 3.0


def test_the_percentile_is_of_the_last_minutes() -> None:
    lags = Lags()
    lags.add(0.0, None, (60.0,))
    for number in range(100):
        lags.add(200.0, None, (number / 100,))
    assert lags.p99(250.0) == 0.99
    assert lags.p99(301.0) == 0.99
    lags.add(302.0, None, (5.0,))
    assert lags.p99(302.0) == 0.99
    assert lags.p99(900.0) is None


class Node:
    """A history, and a clock that the test moves."""

    def __init__(self) -> None:
        self.now = START
        self.lags = Lags()
        self.in_force = InForce()
        self.history = History(lambda: self.now, self.lags, self.in_force)
        self.syncs = 0

    def sync(
        self,
        *names: str,
        reason: str = "changes",
        refusals: tuple[tuple[str, str], ...] = (),
        drift: Drift | None = None,
        result: bool = True,
    ) -> None:
        self.syncs += 1
        done = SyncResult(
            self.syncs, reason, 2, 1, 2, 3, {"plan": 0.25, "apply": 0.5}, len(refusals)
        )
        for name in names:
            self.in_force.log.touch(Change("Service", ObjectName("shop", name)))
        self.history.observe(
            SyncReport(
                State(at=self.now, result=done),
                done if result else None,
                Arrivals(self.now if names else None),
                Written(),
                compared=False,
                drift=drift,
                refusals=refusals,
            )
        )

    def records(self) -> tuple[SyncRecord, ...]:
        return self.history.answer("me").records


def test_a_sync_is_remembered() -> None:
    node = Node()
    node.now += 60
    node.lags.add(0.0, None, (0.75,))
    drift = Drift(at=1.0, missing=1)
    node.sync(*"gfedcba", refusals=(("shop/a:http", "no\nroom"),), drift=drift)
    node.sync(result=False)
    answer = node.history.answer("me")
    assert msgspec.structs.replace(answer, records=()) == Answer("me", node.now, START, START)
    (record,) = answer.records
    assert (record.at, record.until) == (node.now - 0.75, node.now)
    assert (record.reason, record.revision, record.seconds) == ("changes", 1, 0.75)
    assert record.phases == {"plan": 0.25, "apply": 0.5}
    assert (record.services, record.names) == (7, tuple(f"shop/{n}" for n in "abcde"))
    assert (record.planned, record.added, record.removed, record.changed) == (2, 1, 2, 3)
    assert (record.refused, record.refusals[0].owner) == (1, "shop/a:http")
    assert record.refusals[0].reason == "no\\nroom"
    assert record.drift == "1 kernel object (1 missing), by an unknown program"
    assert record.lag == 0.75


def test_only_changes_have_a_lag() -> None:
    node = Node()
    node.lags.add(0.0, None, (9.0,))
    node.sync("a", reason="start")
    node.sync(reason="drift")
    node.in_force.log.touch(CONFIGURATION)
    node.sync()
    first, second, third = node.records()
    assert [record.lag for record in (first, second, third)] == [None, None, None]
    assert [record.node for record in (first, second, third)] == [False, False, True]


def test_a_sync_whose_record_failed_is_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    with monkeypatch.context() as patch:
        patch.setattr("steersman.run.pages.history.clipped", None)
        with pytest.raises(TypeError):
            node.sync("a")
    node.sync("b")
    (record,) = node.records()
    assert (record.revision, record.services, record.names) == (2, 2, ("shop/a", "shop/b"))


def test_failures_are_remembered() -> None:
    node = Node()
    node.history.failed("somebody holds\nthe lock")
    (record,) = node.records()
    assert (record.failure, record.reason) == ("somebody holds\\nthe lock", "retry")


def test_an_hour_is_remembered() -> None:
    node = Node()
    for _ in range(3):
        node.sync("a")
        node.now += 1800
    assert [record.revision for record in node.records()] == [2, 3]
    node.now += 7200
    answer = node.history.answer("me")
    assert (answer.records, answer.since) == ((), node.now - 3600)


def test_the_last_thousand_are_remembered_and_since_when() -> None:
    node = Node()
    for number in range(1000):
        node.sync(f"s{number}")
        node.now += 0.5
    answer = node.history.answer("me")
    assert (len(answer.records), answer.since) == (1000, answer.records[0].at)
    for number in range(20):
        node.sync(f"t{number}")
        node.now += 0.5
    answer = node.history.answer("me")
    assert [record.revision for record in answer.records] == list(range(21, 1021))
    assert answer.since == answer.records[0].at == START + 10 - 0.75
    assert answer.started == START


@pytest.mark.parametrize(("hostile", "most"), [(False, 450_000), (True, 3_000_000)])
def test_the_memory_is_bounded(hostile: bool, most: int) -> None:
    letters = "abcdefgh" if hostile else "a"
    name, why = ("x" * 250, "the kernel refuses it " * 20) if hostile else ("web", "")
    refusals = tuple((f"{name}{n}", why) for n in range(9)) if hostile else ()
    drift = Drift(at=1.0, missing=1, writers=(Writer(name, 1),)) if hostile else None
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        node = Node()
        for number in range(3000):
            names = [f"{name}{number}{letter}" for letter in letters]
            node.sync(*names, refusals=refusals, drift=drift)
            node.now += 0.1
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert most / 3 < grown < most
    assert len(node.records()) == 1000
