from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from steersman.model.history import History, Refusal, SyncRecord
from steersman.operate.answer import Chart, QuestionError
from steersman.operate.timeline import (
    BIN,
    PER_PAGE,
    Asked,
    Spread,
    charts,
    fits,
    read_asked,
    timeline,
)

NOW = 1_000_000.0


def sync(ago: float, seconds: float = 0.01, **fields: object) -> SyncRecord:
    usual = SyncRecord(
        NOW - ago - seconds,
        NOW - ago,
        seconds=seconds,
        phases={"plan": seconds / 4, "apply": seconds * 3 / 4},
        services=1,
        names=("shop/cart",),
        lag=seconds,
    )
    return msgspec.structs.replace(usual, **fields)


def history(*records: SyncRecord, **fields: object) -> History:
    usual = History("worker-1", NOW, started=NOW - 9000, since=NOW - 9000, records=records)
    return msgspec.structs.replace(usual, **fields)


def test_a_node_without_syncs() -> None:
    answer = timeline(history(started=NOW - 5, since=0.0))
    assert (answer.syncs, answer.duration, answer.lag, answer.busy) == (0, None, None, 0.0)
    assert answer.since == NOW - 5
    assert answer.pages == 1


def test_the_summary() -> None:
    records = [sync(100 - n, n / 100, added=2, changed=3, removed=1) for n in range(1, 101)]
    answer = timeline(history(*records))
    assert answer.syncs == answer.changes == 100
    assert answer.written == 600
    assert answer.duration == Spread(0.5, 1.0, 1.0)
    assert answer.lag == Spread(0.5, 1.0, 1.0)
    assert answer.busy == pytest.approx(50.5 / 3600)
    assert answer.since == NOW - 3600


def test_syncs_of_more_than_an_hour_ago_are_left_out() -> None:
    assert timeline(history(sync(3601), sync(10))).syncs == 1


def test_it_says_since_when_syncs_are_known() -> None:
    answer = timeline(history(sync(600), sync(10), since=NOW - 600))
    assert answer.since == NOW - 600
    assert answer.phases.times[0] >= NOW - 600


@pytest.mark.parametrize(
    ("fields", "verdict", "note"),
    [
        ({}, "ok", ""),
        ({"seconds": 1.5}, "slow", ""),
        ({"lag": 12.0}, "slow", ""),
        ({"lag": None}, "ok", ""),
        ({"drift": "2 objects, by nft"}, "drift", "repaired: 2 objects, by nft"),
        ({"refused": 3}, "refused", "3 refused by the kernel"),
        (
            {"refused": 1, "refusals": (Refusal("shop/x (TCP, IPv4)", "no"),)},
            "refused",
            "1 refused by the kernel, such as shop/x (TCP, IPv4)",
        ),
        ({"failure": "busy\n", "drift": "y"}, "failed", "failed: busy\\n; repaired: y"),
    ],
)
def test_the_worst_of_a_sync(fields: dict[str, object], verdict: str, note: str) -> None:
    answer = timeline(history(sync(10, **fields)))  # type: ignore[arg-type]
    (row,) = answer.rows
    assert (row.verdict, row.note) == (verdict, note)
    assert answer.verdicts[verdict] == 1


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({}, "1 Service: shop/cart"),
        ({"names": ()}, "1 Service"),
        ({"services": 2, "names": ("a/b", "c/d")}, "2 Services: a/b, c/d"),
        ({"services": 3, "names": ("a/b", "c/d", "e/f")}, "3 Services: a/b, c/d and 1 more"),
        ({"node": True}, "1 Service: shop/cart, the node"),
        ({"services": 0}, "nothing"),
        ({"services": 0, "reason": "drift"}, "drift"),
        ({"services": 0, "reason": "drift", "node": True}, "the node"),
        ({"names": ("a/\u202eb",)}, "1 Service: a/\\u202eb"),
    ],
)
def test_what_changed_in_words(fields: dict[str, object], what: str) -> None:
    assert timeline(history(sync(10, **fields))).rows[0].what == what  # type: ignore[arg-type]


def test_rows_are_newest_first_in_pages() -> None:
    records = [sync(ago, revision=ago) for ago in range(PER_PAGE + 5, 0, -1)]
    first = timeline(history(*records))
    assert [row.record.revision for row in first.rows[:2]] == [1, 2]
    assert (first.pages, len(first.rows), first.matching) == (2, PER_PAGE, PER_PAGE + 5)
    assert len(timeline(history(*records), Asked(page=2)).rows) == 5


def test_only_some_rows() -> None:
    records = (sync(30), sync(20, failure="x"), sync(10, drift="y"))
    problems = timeline(history(*records), Asked("problems"))
    assert [row.verdict for row in problems.rows] == ["drift", "failed"]
    assert problems.matching == 2
    assert problems.syncs == 3, "the summary is of all"
    assert fits("ok", "")
    assert fits("ok", "ok")
    assert not fits("ok", "failed")


def test_one_sync_is_found_by_its_id() -> None:
    records = (sync(30), sync(20))
    first = timeline(history(*records)).rows[1]
    answer = timeline(history(*records), Asked(sync=first.id))
    assert answer.chosen == first
    assert not answer.gone
    lost = timeline(history(*records), Asked(sync="1"))
    assert (lost.chosen, lost.gone) == (None, True)


def by_phase(chart: Chart) -> dict[str, Sequence[float | None]]:
    return {series.label: series.values for series in chart.series}


def test_a_column_of_the_chart_is_its_longest_sync() -> None:
    short, long, other = sync(4, 0.1, lag=7.0), sync(3, 0.4, lag=None), sync(40, 0.2)
    phases, lags = charts([other, long, short], NOW - 60, NOW)
    assert phases.times == lags.times == (999_940, 999_960, 999_980, 1_000_000)
    assert by_phase(phases) == {"plan": (None, 0.05, None, 0.1), "apply": (None, 0.15, None, 0.3)}
    assert by_phase(lags) == {"lag": (None, 0.2, None, 7.0)}


def test_phases_that_are_not_known_come_last() -> None:
    phases, _ = charts([sync(1, phases={"novel": 0.1, "diff": 0.2})], NOW - 10, NOW)
    assert [*by_phase(phases)] == ["diff", "novel"]


def test_columns_that_are_over_do_not_move() -> None:
    records = [sync(ago) for ago in range(0, 3000, 7)]
    before, _ = charts(records, NOW - 3600, NOW)
    after, _ = charts(records, NOW - 3593, NOW + 7)
    old, new = (dict(zip(c.times, by_phase(c)["plan"], strict=True)) for c in (before, after))
    common = sorted(old.keys() & new.keys())[1:]
    assert len(common) > 170
    assert [old[time] for time in common] == [new[time] for time in common]
    assert len(before.times) <= 3600 // BIN + 1


def test_what_is_asked_is_read_from_the_address() -> None:
    assert read_asked({"only": "problems", "page": "2", "sync": "x"}) == Asked("problems", 2, "x")
    assert read_asked({}) == Asked()
    with pytest.raises(QuestionError, match="no syncs of kind bad"):
        read_asked({"only": "bad"})
