"""What the process remembers of its syncs: an hour, within a megabyte whatever happens."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.compile.planner import PlanChange
from steersman.model.drift import Drift
from steersman.model.history import History as Answer
from steersman.model.history import SyncRecord
from steersman.model.names import ObjectName
from steersman.run.pages.history import History, Lags, merged
from steersman.run.sync.state import State, SyncReport, SyncResult, Written
from steersman.source.store import Changes

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

    def __init__(self, room: int = 350_000) -> None:
        self.now = START
        self.lags = Lags()
        self.history = History(lambda: self.now, self.lags, room)
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
        services = frozenset(ObjectName("shop", name) for name in names)
        self.history.observe(
            SyncReport(
                State(at=self.now, result=done),
                done if result else None,
                Changes(services),
                PlanChange(),
                Written(),
                False,
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
    assert (record.lag, record.merged) == (0.75, 1)


def test_only_changes_have_a_lag() -> None:
    node = Node()
    node.lags.add(0.0, None, (9.0,))
    node.sync("a", reason="start")
    node.sync(reason="drift")
    assert [record.lag for record in node.records()] == [None, None]


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


def test_bursts_are_merged_and_rare_events_are_kept() -> None:
    node = Node(room=100_000)
    node.history.failed("busy")
    node.now += 1
    for number in range(20_000):
        node.sync(f"s{number}")
        node.now += 0.02
    records = node.records()
    assert len(records) > 100
    assert records[0].failure == "busy"
    assert records[0].merged == 1
    assert sum(record.merged for record in records) == 20_001, "no sync is lost"
    assert sum(record.added for record in records) == sum(r.merged for r in records[1:])
    assert records[-1].merged == 1, "the last ones are exact"
    assert [r.at for r in records] == sorted(r.at for r in records)
    assert records[1].until - records[1].at < 60


def test_kinds_that_alternate_are_merged_in_the_end() -> None:
    node = Node(room=20_000)
    for number in range(5000):
        node.sync(f"s{number}")
        node.history.failed("busy")
        node.now += 0.25
    records = node.records()
    assert sum(record.merged for record in records) == 10_000
    assert any(record.failure and record.merged > 2 for record in records)


@pytest.mark.parametrize(("name", "syncs"), [("web", 5000), ("x" * 250, 1200)])
def test_a_busy_hour_of_hostile_names_stays_below_a_megabyte(name: str, syncs: int) -> None:
    refusals = tuple((f"{name}{n}", "the kernel refuses it " * 20) for n in range(9))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        node = Node()
        for number in range(syncs):
            names = [f"{name}{number}{letter}" for letter in "abcdef"]
            node.sync(*names, refusals=refusals if len(name) > 9 else ())
            node.now += 0.4
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 200_000 < grown < 1_000_000
    assert sum(record.merged for record in node.records()) == syncs


RECORDS = st.builds(
    SyncRecord,
    at=st.just(1.0),
    until=st.just(2.0),
    lag=st.none() | st.floats(0, 9),
    names=st.lists(st.sampled_from("abcdefgh"), max_size=5, unique=True).map(tuple),
    phases=st.dictionaries(st.sampled_from(["plan", "apply"]), st.just(0.5)),
    added=st.integers(0, 9),
    failure=st.sampled_from(["", "x", "y"]),
    merged=st.integers(1, 5),
)


@given(RECORDS, RECORDS, RECORDS)
def test_it_does_not_matter_how_records_are_grouped(
    one: SyncRecord, two: SyncRecord, three: SyncRecord
) -> None:
    assert merged(merged(one, two), three) == merged(one, merged(two, three))
