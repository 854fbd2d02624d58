"""Active checks: when they run, how many at a time, and what their results mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.failover import tuning
from steersman.failover.checks import Checks
from steersman.failover.policy import Policy
from steersman.model.failover import Backend, Check, Observation, Settings
from tests.support.failover import endpoints

ANSWERED, SILENT = Observation.ANSWERED, Observation.SILENT
MEMBERS = endpoints(3)
A, B, C = MEMBERS
CHECK = Check(interval=10, failures=3, successes=2)


def half() -> float:
    return 0.5


def rounds(
    checks: Checks[str], number: int, down: set[Backend], now: float = 0
) -> list[bool | None]:
    """Run checks of all endpoints some times; return what they mean for A."""
    found = []
    for index in range(number):
        at = now + 5 + 10 * index
        for probe in checks.advance(at):
            what = checks.checked(at, probe.backend, SILENT if probe.backend in down else ANSWERED)
            found += [what] if probe.backend == A else []
    return found


def test_checks_are_spread_over_the_interval() -> None:
    numbers = iter([0.0, 0.3, 0.9, 0.0, 1.0])
    checks: Checks[str] = Checks(lambda: next(numbers))
    checks.serve(100, "pool", MEMBERS, CHECK)
    assert checks.deadline == 100
    [first] = checks.advance(100)
    assert (first.backend, first.timeout, first.path, first.check) == (A, 1.0, "", True)
    assert checks.deadline == 103
    assert [each.backend for each in checks.advance(105)] == [B]
    checks.checked(100.5, A, ANSWERED)
    checks.checked(105.5, B, ANSWERED)
    assert [each.backend for each in checks.advance(109.2)] == [C]
    assert checks.deadline == 109.5  # 0.9 of the interval
    assert [each.backend for each in checks.advance(109.5)] == [A]
    assert checks.deadline == 116.5


def test_thresholds_are_counted_in_a_row() -> None:
    checks: Checks[str] = Checks(half)
    checks.serve(0, "pool", MEMBERS, CHECK)
    assert rounds(checks, 3, set()) == [None, True, True]
    assert rounds(checks, 4, {A}, 30) == [None, None, False, False]
    assert rounds(checks, 2, set(), 70) == [None, True]


def test_defaults_are_those_of_the_settings() -> None:
    checks: Checks[str] = Checks(half, Settings(check_interval=10, check_timeout=2))
    checks.serve(0, "pool", MEMBERS, Check(failures=1))
    for probe in checks.advance(5):
        assert probe.timeout == 2
        assert checks.checked(5, probe.backend, ANSWERED) is True
    assert rounds(checks, 1, {A}, 10) == [False]


def test_nothing_fails_if_all_fail() -> None:
    checks: Checks[str] = Checks(half)
    checks.serve(0, "pool", MEMBERS, CHECK)
    rounds(checks, 2, set())
    assert rounds(checks, 5, set(MEMBERS), 20) == [None] * 5


def test_an_endpoint_of_two_services_needs_a_witness_in_both() -> None:
    checks: Checks[str] = Checks(half)
    checks.serve(0, "pool", MEMBERS, CHECK)
    checks.serve(0, "alone", [A], Check(path="/x", interval=5, failures=1))
    rounds(checks, 1, set())
    assert {each.path for each in checks.advance(15) if each.backend == A} == {"/x"}
    assert checks.checked(15, A, SILENT) is None
    checks.forget("alone")
    checks.advance(30)
    assert checks.checked(30, A, SILENT) is None
    checks.advance(60)
    assert checks.checked(60, A, SILENT) is False


def test_endpoints_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MOST_CHECKS", 1)
    checks: Checks[str] = Checks(half)
    checks.serve(0, "pool", MEMBERS, CHECK)
    assert checks
    [probe] = checks.advance(5)
    assert checks.deadline is None
    checks.serve(5, "pool", [each for each in MEMBERS if each != probe.backend], CHECK)
    assert checks.checked(6, probe.backend, SILENT) is None
    assert checks.deadline == 5
    checks.serve(6, "pool", [], CHECK)
    assert checks.advance(100) == []
    assert not checks
    assert checks.deadline is None


def test_checks_without_a_result_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MOST_CHECKS", 2)
    checks: Checks[str] = Checks(half)
    checks.serve(0, "pool", MEMBERS, CHECK)
    first = [each.backend for each in checks.advance(5)]
    for backend in (*first, *first, Backend("10.9.9.9", 80, A.protocol)):
        checks.lose(6, backend)
    assert checks.checked(6, first[0], ANSWERED) is None
    [third] = [each.backend for each in checks.advance(6)]
    assert third not in first
    checks.checked(6, third, ANSWERED)
    assert checks.deadline == 7
    assert [each.backend for each in checks.advance(7)] == first


def test_an_endpoint_that_comes_again_is_checked_once_at_a_time() -> None:
    checks: Checks[str] = Checks(half)
    checks.serve(0, "pool", [A], CHECK)
    checks.forget("pool")
    checks.serve(0, "pool", [A], CHECK)
    assert [each.backend for each in checks.advance(6)] == [A]


@given(st.integers(1, 300), st.integers(1, 8), st.lists(st.booleans(), max_size=400))
def test_never_more_at_a_time_than_the_limit_and_each_once_per_interval(
    number: int, most: int, answers: list[bool]
) -> None:
    """Law: at most MOST_CHECKS run, and none is lost: all run again and again."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tuning, "MOST_CHECKS", most)
        run_all(number, most, answers)


def run_all(number: int, most: int, answers: list[bool]) -> None:
    checks: Checks[str] = Checks(half)
    members = endpoints(number)
    checks.serve(0, "pool", members, Check(interval=10))
    running: list[Backend] = []
    seen: set[Backend] = set()
    results = iter(answers)
    now = 5.0
    while len(seen) < number:
        running += [each.backend for each in checks.advance(now)]
        assert 0 < len(running) <= most
        backend = running.pop(0)
        seen.add(backend)
        checks.checked(now, backend, ANSWERED if next(results, True) else SILENT)
        now += 0.001
    assert len(seen) == number


# What the policy makes of it


def policy() -> Policy[str]:
    found: Policy[str] = Policy(Settings())
    found.serve("pool", MEMBERS)
    for probe in found.advance(50):  # each new endpoint is tried once
        found.probed(50, probe.backend, ANSWERED)
    found.observe(99, B, ANSWERED)
    return found


def test_a_failing_endpoint_is_ejected_and_returns_by_a_check_after_the_hold() -> None:
    ours = policy()
    ours.fail_check(100, A, Observation.UNHEALTHY)
    [ejection] = ours.ejected("pool")
    assert (ejection.backend, ejection.reason, ejection.until) == (A, Observation.UNHEALTHY, 110)
    assert "has answered checks with an error" in ejection.why
    ours.fail_check(101, A, SILENT)
    assert ours.ejected("pool") == (ejection,)
    assert A not in [each.backend for each in ours.advance(120)], "only a check brings it back"
    ours.pass_check(109, A)
    assert ours.ejected("pool") == (ejection,)
    ours.pass_check(111, A)
    assert ours.ejected("pool") == ()
    ours.fail_check(112, A, SILENT)
    [again] = ours.ejected("pool")
    assert again.until == 132


def test_limits_hold_for_checks_too() -> None:
    ours = policy()
    for backend in MEMBERS:
        ours.fail_check(100, backend, SILENT)
    assert ours.ejected("pool") == ()
    assert len(list(ours.ejections)) == 3


def test_an_endpoint_that_is_not_served_has_no_checks() -> None:
    ours = policy()
    stranger = Backend("10.9.9.9", 80, A.protocol)
    ours.fail_check(100, stranger, SILENT)
    ours.pass_check(100, stranger)
    assert list(ours.ejections) == []


def test_a_check_that_passes_answers_a_suspicion_and_ends_no_other_ejection_early() -> None:
    ours = policy()
    ours.observe(100, A, SILENT)
    ours.pass_check(100.1, A)
    assert ours.deadline is None or ours.deadline < 200
    ours.advance(105)
    assert list(ours.ejections) == []
