"""The change log, against a model that forgets nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from steersman.model.change_log import ChangeLog, Cursor


def entries(log: ChangeLog[str]) -> list[str]:
    return log.cursor().changed()[0]


def test_a_consumer_gets_each_name_once_in_the_order_of_its_last_change() -> None:
    log: ChangeLog[str] = ChangeLog()
    cursor = log.cursor()
    for name in "abcab":
        log.touch(name)
    assert cursor.changed() == (["c", "a", "b"], 5)
    assert cursor.behind
    cursor.move(5)
    assert not cursor.behind
    assert cursor.changed() == ([], 5)


def test_a_consumer_that_failed_gets_the_same_names_and_later_ones() -> None:
    log: ChangeLog[str] = ChangeLog()
    cursor = log.cursor()
    log.touch("a")
    cursor.changed()  # and then its work fails
    log.touch("b")
    names, revision = cursor.changed()
    log.touch("c")  # while it works
    cursor.move(revision)
    assert names == ["a", "b"]
    assert cursor.changed()[0] == ["c"]


def test_a_cursor_never_goes_back() -> None:
    log: ChangeLog[str] = ChangeLog()
    cursor = log.cursor()
    log.touch("a")
    cursor.move(1)
    cursor.move(0)
    assert not cursor.behind


def test_what_comes_later_can_be_left_out() -> None:
    log: ChangeLog[str] = ChangeLog()
    for name in "abc":
        log.touch(name)
    cursor = log.cursor()
    assert cursor.changed(until=2) == (["a", "b"], 2)
    cursor.move(1)
    assert cursor.changed(until=2) == (["b"], 2)


def test_a_name_is_dropped_once_the_slowest_has_passed_it() -> None:
    log: ChangeLog[str] = ChangeLog()
    fast, slow = log.cursor(), log.cursor()
    for name in "ab":
        log.touch(name)
    fast.move(2)
    assert len(log) == 2
    slow.move(1)
    assert entries(log) == ["b"]
    assert (log.revision_of("a"), log.revision_of("b")) == (0, 2)
    slow.move(2)
    assert entries(log) == []


def test_a_new_consumer_is_behind_though_all_names_are_dropped() -> None:
    log: ChangeLog[str] = ChangeLog()
    cursor = log.cursor()
    log.touch("a")
    cursor.move(1)
    late = log.cursor()
    assert late.behind
    assert late.changed() == ([], 1)


def test_a_consumer_that_is_gone_holds_nothing_up() -> None:
    log: ChangeLog[str] = ChangeLog()
    log.cursor()  # nobody holds it
    cursor = log.cursor()
    log.touch("a")
    cursor.move(1)
    assert len(log) == 0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), st.sampled_from("abcd")),
        st.tuples(st.just("work"), st.sampled_from("012")),
        st.tuples(st.just("fail"), st.sampled_from("012")),
    ),
    max_size=40,
)


@given(STEPS)
def test_no_interleaving_loses_a_name(steps: list[tuple[str, str]]) -> None:
    log: ChangeLog[str] = ChangeLog()
    cursors: list[Cursor[str]] = [log.cursor() for _ in range(3)]
    unseen: list[dict[str, None]] = [{} for _ in cursors]
    for what, which in steps:
        match what:
            case "touch":
                log.touch(which)
                for names in unseen:
                    names.pop(which, None)
                    names[which] = None
            case "work":
                found, revision = cursors[int(which)].changed()
                assert found == [*unseen[int(which)]]
                unseen[int(which)] = {}
                cursors[int(which)].move(revision)
            case _:
                assert cursors[int(which)].changed()[0] == [*unseen[int(which)]]
    assert len(log) <= 4
