"""The framework of doctor: results in order, checks that cannot harm each other, shared facts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
import pytest

from steersman.cli.output import lines_of
from steersman.compile.trace import Flow
from steersman.model import codes
from steersman.model.names import Family
from steersman.model.plan import SourceClass
from steersman.operate.answer import Line
from steersman.operate.doctor.check import Check, Needs
from steersman.operate.doctor.context import Context, Question
from steersman.operate.doctor.result import (
    UNSEEN,
    Cause,
    CheckResult,
    Verdict,
    error,
    notice,
    ok,
    skipped,
    unknown,
    warning,
)
from tests.support.builders.doctor import CART, context_of, only, run_checks
from tests.support.builders.objects import endpoint, port, service, slice_


def says(name: str, *results: CheckResult, cause: int = Cause.NODE) -> Check:
    async def run(_: Context) -> Iterable[CheckResult]:
        return results

    return Check(name, name.title(), run, cause=cause)


def lines(answer: object, wide: bool = False) -> list[str]:
    blocks = answer.blocks(wide)  # type: ignore[attr-defined]
    return [" " * block.indent + block.text for block in blocks if isinstance(block, Line)]


def test_a_run_that_only_took_longer_is_no_news() -> None:
    answer = run_checks(context_of(service()), says("fine", ok("it is fine")))
    later = msgspec.structs.replace(answer, seconds=answer.seconds + 1.0)
    assert later.watched == answer.watched
    assert msgspec.structs.replace(later, results=()).watched != answer.watched


def test_the_cause_is_the_error_that_explains_the_others() -> None:
    answer = run_checks(
        context_of(service()),
        says("fine", ok("it is fine")),
        says("warned", warning("it may fail", cause=Cause.OBJECT)),
        says("dial", error("nothing answers"), cause=Cause.SYMPTOM),
        says("ends", error("nothing is ready", "10.0.0.5: out", remedy="start a pod", cause=21)),
        says("asked", unknown("no rights")),
    )
    assert (answer.cause, answer.remedy) == ("nothing is ready", "start a pod")
    assert [result.check for result in answer.results] == [
        *("ends", "dial", "warned", "asked", "fine")
    ]
    assert answer.exit_code == 1


def test_a_warning_is_a_cause_only_without_errors() -> None:
    context = context_of(service())
    warned = says("warned", warning("clients stick to an endpoint"))
    answer = run_checks(context, says("fine", ok("it is fine")), warned)
    assert answer.cause == "clients stick to an endpoint"
    assert answer.exit_code == 0
    answer = run_checks(context_of(service()), says("asked", unknown("no rights")))
    assert (answer.cause, answer.exit_code) == ("", 0)


def test_a_suspect_explains_a_failed_connection_that_nothing_else_does() -> None:
    fails = says("dial", error("nothing answers"), cause=Cause.SYMPTOM)
    warned = says("warned", warning("packets may be lost", suspect=True))
    other = says("other", warning("the clock is wrong", cause=Cause.PROXY))
    dropped = says("rules", error("a rule drops it"))
    assert run_checks(context_of(), fails, warned, other).cause == "packets may be lost"
    assert run_checks(context_of(), fails, other).cause == "nothing answers"
    assert run_checks(context_of(), fails, warned, dropped).cause == "a rule drops it"
    assert run_checks(context_of(), other, warned).cause == "the clock is wrong"
    symptom = says("more", warning("a pod gets none", cause=Cause.SYMPTOM, suspect=True))
    assert run_checks(context_of(), fails, symptom).cause == "nothing answers"
    large = error("large packets vanish", cause=Cause.PATH)
    vague = says("mtu", msgspec.structs.replace(large, suspect=True))
    assert run_checks(context_of(), vague, warned).cause == "packets may be lost"
    assert run_checks(context_of(), says("mtu", large), warned).cause == "large packets vanish"


def test_pods_that_cannot_be_tried_leave_the_question_open() -> None:
    tried = says("tries", msgspec.structs.replace(ok("3 of 3 ways work"), untried=(UNSEEN,)))
    answer = run_checks(context_of(), tried)
    assert (answer.cause, answer.exit_code) == ("", 3)
    assert "Not everything was checked: pods cannot be seen from here" in lines(answer)
    odd = says("odd", notice("a rule changes packets of pods"))
    answer = run_checks(context_of(), tried, odd)
    assert (answer.cause, answer.exit_code) == ("a rule changes packets of pods", 3)
    assert run_checks(context_of(), says("tries", ok("all ways work")), odd).cause == ""


def test_checks_cannot_harm_each_other() -> None:
    async def raises(_: Context) -> Iterable[CheckResult]:
        raise ZeroDivisionError("by zero")

    async def waits(_: Context) -> Iterable[CheckResult]:
        await asyncio.Event().wait()
        return ()

    async def denied(_: Context) -> Iterable[CheckResult]:
        raise PermissionError(1, "Operation not permitted")

    async def slow_tool(_: Context) -> Iterable[CheckResult]:
        raise TimeoutError("nft did not end within 5 s")

    late = Check("waits", "Waits", waits, seconds=0.01)
    answer = run_checks(
        context_of(),
        Check("raises", "Raises", raises),
        late,
        Check("denied", "Denied", denied),
        Check("tool", "Tool", slow_tool),
        says("nothing"),
        says("fine", ok("it is fine")),
    )
    found = {result.check: (result.verdict, result.text) for result in answer.results}
    assert found == {
        "raises": (Verdict.UNKNOWN, "it could not be checked: by zero"),
        "waits": (Verdict.UNKNOWN, "it did not end within 0.01 s"),
        "denied": (Verdict.UNKNOWN, "this needs root: Operation not permitted"),
        "tool": (Verdict.UNKNOWN, "nft did not end within 5 s"),
        "nothing": (Verdict.SKIPPED, "there is nothing to check"),
        "fine": (Verdict.OK, "it is fine"),
    }
    assert answer.exit_code == 3
    assert answer.unfinished == ["Raises", "Waits", "Denied", "Tool"]
    assert lines(answer)[1:3] == [
        "Not everything was checked: no result of Raises, Waits, Denied, Tool",
        "",
    ]
    several = run_checks(
        context_of(),
        *(Check(f"c{number}", f"C{number}", raises) for number in range(6)),
        says("warned", warning("it may fail")),
    )
    assert several.exit_code == 3
    assert lines(several)[1:3] == [
        "No failure was found, but: it may fail",
        "Not everything was checked: no result of C0, C1, C2, C3 and 2 more",
    ]
    assert run_checks(context_of(), says("bad", error("broken")), late).exit_code == 1


def test_what_was_not_tried_is_in_the_headline() -> None:
    untried = ("clients outside", "UDP")
    parts = [
        Check("one", "One", lambda _: untold(untried)),
        Check("two", "Two", lambda _: untold(("UDP",))),
    ]
    answer = run_checks(context_of(), *parts)
    assert (answer.exit_code, answer.untried) == (0, ["clients outside", "UDP"])
    assert lines(answer)[1:3] == ["Nothing wrong was found", "Not tried: clients outside, UDP"]


async def untold(what: tuple[str, ...]) -> Iterable[CheckResult]:
    return [CheckResult(verdict=Verdict.SKIPPED, text="not all can be tried", untried=what)]


def test_the_answer_comes_in_time() -> None:
    async def waits(_: Context) -> Iterable[CheckResult]:
        await asyncio.Event().wait()
        return ()

    checks = Check("waits", "Waits", waits, seconds=0.05), says("fine", ok("it is fine"))
    answer = run_checks(context_of(), *checks)
    assert answer.results[0].text == "it did not end within 0.05 s"
    assert answer.results[1].text == "it is fine"


def test_checks_share_a_fact_also_its_failure() -> None:
    calls = 0

    async def fact(context: Context) -> int:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0)
        raise OSError(f"call {calls}")

    async def uses(context: Context) -> Iterable[CheckResult]:
        return [ok(str(await context.once(fact)))]

    answer = run_checks(context_of(), *(Check(str(n), "Uses", uses) for n in range(3)))
    assert {result.text for result in answer.results} == {"it could not be checked: call 1"}


def test_a_fact_outlives_a_check_that_gave_up() -> None:
    ready = asyncio.Event()

    async def fact(_: Context) -> str:
        await ready.wait()
        return "the rules"

    async def uses(context: Context) -> Iterable[CheckResult]:
        return [ok(await context.once(fact))]

    async def releases(_: Context) -> Iterable[CheckResult]:
        await asyncio.sleep(0.05)
        ready.set()
        return [ok("released")]

    answer = run_checks(
        context_of(),
        Check("hasty", "Hasty", uses, seconds=0.01),
        Check("patient", "Patient", uses),
        Check("releases", "Releases", releases),
    )
    found = {result.check: result.text for result in answer.results}
    assert found["hasty"] == "it did not end within 0.01 s"
    assert found["patient"] == "the rules"


def test_checks_of_the_machine_are_skipped_elsewhere() -> None:
    async def run(_: Context) -> Iterable[CheckResult]:
        return [ok("seen")]

    check = Check("machine", "Machine", run, Needs.NODE | Needs.SERVICE)
    elsewhere = only(check, context_of(service(), here=False))
    assert elsewhere.verdict is Verdict.SKIPPED
    assert elsewhere.text == "it looks at the machine: run it on node-1"
    assert only(check, context_of()).text == "no Service was asked for"
    assert only(check, context_of(service())).text == "seen"


def test_the_context_knows_the_plans_in_question() -> None:
    two = [port("http", 80, nodePort=30080), port("admin", 81, nodePort=30081)]
    things = service(type="NodePort", ports=two), slice_(endpoint("10.0.0.5"))
    other = service("other", clusterIP="10.96.0.11")
    context = context_of(*things, other)
    assert len(context.plans) == 2
    assert context.node_ports == {30080, 30081}
    assert context.families == (Family.IPV4,)
    for wanted, ports in (("http", {30080}), ("81", {30081}), ("nope", set[int]())):
        context = context_of(*things, other, question=Question(CART, wanted))
        assert context.node_ports == ports
    whole = context_of(*things, other, question=Question())
    assert len(whole.plans) == 3
    assert whole.families == (Family.IPV4,)  # no Service has an IPv6 address
    assert context_of(question=Question()).families == (Family.IPV4, Family.IPV6)


def test_people_see_problems_first_and_machines_see_everything() -> None:
    many = tuple(f"rule {number}" for number in range(10))
    answer = run_checks(
        context_of(service()),
        says("rules", error("a rule drops it", *many, remedy="delete the rule")),
        says("fine", ok("forwarding is on")),
        says("other", skipped("no node port")),
    )
    shown = lines(answer)
    assert shown[:4] == [
        "Service shop/cart, on node node-1 (memory mode)",
        "Likely cause: a rule drops it",
        "What to do: delete the rule",
        "",
    ]
    assert shown[4:] == [
        f"error    Rules: a rule drops it [{codes.CHECKS['rules']} rules]",
        *(" " * 9 + each for each in many[:8]),
        " " * 9 + "and 2 more lines (-o json)",
        " " * 9 + "remedy: delete the rule",
        "ok       Fine",
        f"1 error, 1 ok, 1 skipped; {answer.seconds:.1f} s",
    ]
    assert "ok       Fine: forwarding is on [fine]" in lines(answer, wide=True)
    coded = run_checks(context_of(), says("firewall", error("a rule drops it")))
    assert f"error    Firewall: a rule drops it [{codes.CHECKS['firewall']} firewall]" in lines(
        coded
    )
    about_a_finding = run_checks(context_of(), says("firewall", error("no", code=codes.LIMIT)))
    assert "error    Firewall: no [SM1005 firewall]" in lines(about_a_finding)
    data = msgspec.to_builtins(answer.data)
    assert list(data["results"][0]["evidence"]) == list(many)
    assert data["results"][0]["verdict"] == "error"


def test_a_remedy_is_broken_into_lines_but_its_command_is_not() -> None:
    command = "`ip neigh del 192.0.2.7 dev eth0`"
    remedy = f"the neighbour has another link-layer address: {command}, then look at the switch"
    answer = run_checks(context_of(), says("rules", error("no answer", remedy=remedy)))
    shown = ["".join(text for text, _ in each) for each in lines_of(answer.blocks(wide=False), 60)]
    assert sum(command in each for each in shown) == 2  # of the headline, and of the result
    assert max(map(len, shown)) <= 60


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (Question(), "Node node-1 (memory mode)"),
        (
            Question(flow=Flow(SourceClass.POD, "10.96.0.10", 80)),
            "pod to 10.96.0.10:80/TCP, on node node-1 (memory mode)",
        ),
    ],
)
def test_the_answer_says_what_was_asked(question: Question, words: str) -> None:
    answer = run_checks(context_of(question=question), says("fine", ok("it is fine")))
    assert lines(answer)[:2] == [words, "Nothing wrong was found"]
