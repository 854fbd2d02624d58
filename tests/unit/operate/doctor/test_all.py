"""The table of all checks of doctor."""

from __future__ import annotations

import re

from steersman.model import codes
from steersman.operate.doctor import CHECKS
from steersman.operate.doctor.context import Question
from steersman.operate.doctor.result import Verdict
from tests.support.builders.doctor import context_of, run_checks
from tests.support.builders.objects import node, service


def test_every_check_has_a_name_of_its_own() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in names)
    assert all(check.title and check.run.__doc__ for check in CHECKS)
    assert all(check.seconds < 15.0 for check in CHECKS)  # as docs/doctor.md says


def test_every_check_has_a_code_of_its_own() -> None:
    assert set(codes.CHECKS) == {check.name for check in CHECKS}
    assert len({*codes.CHECKS.values()}) == len(CHECKS)
    assert all(re.fullmatch(r"SM5\d{3}", code) for code in codes.CHECKS.values())
    results = run_checks(context_of(service(), node()), *CHECKS).results
    assert {result.check: result.code for result in results} == codes.CHECKS


def test_off_the_node_nothing_of_this_machine_is_looked_at() -> None:
    """The context has no /proc and no network: a check that looked would not be skipped."""
    for context in (context_of(service(), here=False), context_of(question=Question(), here=False)):
        answer = run_checks(context, *CHECKS)
        assert not [result for result in answer.results if "could not be checked" in result.text]
        skipped = {result.check for result in answer.of(Verdict.SKIPPED)}
        assert {"process", "rules", "firewall", "forwarding", "conntrack-table"} <= skipped


def test_on_windows_nothing_of_linux_is_looked_at() -> None:
    """The context has neither /proc nor a client outside."""
    context = context_of(service(), linux=False)
    answer = run_checks(context, *CHECKS)
    assert not [result for result in answer.results if "could not be checked" in result.text]
    skipped = {result.check for result in answer.of(Verdict.SKIPPED)}
    assert {"rules", "firewall", "forwarding", "conntrack-table", "failover", "load"} <= skipped
    assert skipped.isdisjoint({"process", "source", "service"})
