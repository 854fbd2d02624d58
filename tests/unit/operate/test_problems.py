from __future__ import annotations

import msgspec
import pytest

from steersman.model import codes
from steersman.model.drift import Drift, Writer
from steersman.model.findings import Finding, Severity
from steersman.model.node_state import Condition, NodeState
from steersman.operate.answer import Line, QuestionError
from steersman.operate.doctor.result import CheckResult, Verdict
from steersman.operate.node_trouble import Disagreement, SeenNode
from steersman.operate.problems import (
    PER_PAGE,
    DoctorResult,
    Filter,
    Problems,
    find_problems,
    named_nodes,
    read_filter,
)

NOW = 1_000_000.0
BAD_PORT = Finding(
    "Service shop/cart",
    "spec.ports[0].port",
    "70000 must be 1",
    Severity.ERROR,
    codes.SERVICE_FIELD,
)
BAD_WORD = Finding(
    "Service shop/cart", "spec.type", "'Foo' is unknown and was ignored", code=codes.SERVICE_FIELD
)
FIGHT = Finding(
    *("the node", "rules", "another program rewrites our rules every 12 s: nft"),
    code=codes.REWRITTEN_RULES,
)
NOT_SYNCED = Condition("Synced", "False", "SyncFailed", "timed out after 5 s", NOW - 60)


def seen(name: str = "a", **fields: object) -> SeenNode:
    state = msgspec.structs.replace(NodeState(name, "nftables", now=NOW), **fields)
    return SeenNode(name, "http://" + name, state, NOW, NOW)


def drift(**fields: object) -> Drift:
    usual = Drift(NOW - 30, missing=2, examples=("add rule x",), writers=(Writer("nft", 41),))
    return msgspec.structs.replace(usual, **fields)


def texts(answer: Problems) -> list[str]:
    return [f"{each.severity} {each.object} {each.text}" for each in answer.problems]


def test_a_cluster_without_problems() -> None:
    answer = find_problems([seen()], now=NOW)
    assert answer.problems == ()
    assert answer.exit_code == 0
    assert next(iter(answer.blocks(wide=False))) == Line("no problems on 1 node", "title")


def test_nodes_that_cannot_be_found() -> None:
    answer = find_problems([], now=NOW, trouble="the API server is not reached")
    assert answer.exit_code == 1
    assert next(iter(answer.blocks(wide=False))) == Line("the API server is not reached", "bad")


def test_the_same_finding_of_many_nodes_is_one_problem() -> None:
    answer = find_problems([seen(f"n{i:03}", findings=(BAD_PORT,)) for i in range(900)], now=NOW)
    (problem,) = answer.problems
    assert len(problem.nodes) == 900
    assert problem.service == "shop/cart"
    assert problem.namespace == "shop"
    assert problem.field == "spec.ports[0].port"
    assert problem.command == "kubectl -n shop get service cart -o yaml"
    assert "Correct the field" in problem.remedy
    assert answer.affected == 900
    assert answer.exit_code == 1


def test_services_in_trouble_are_problems_of_the_nodes_that_say_so() -> None:
    none = Finding("Service shop/cart", "port TCP IPv4", "no endpoint", Severity.ERROR, "SM1014")
    counts = {Severity.ERROR: 3}
    nodes = [seen(name, troubled=(none,), trouble_counts=counts) for name in "ab"]
    answer = find_problems(nodes, now=NOW, why={none.object: ["none of 1 is ready"]})
    (problem,) = answer.problems
    assert (problem.kind, problem.service, problem.nodes) == ("trouble", "shop/cart", ("a", "b"))
    assert problem.evidence == ("none of 1 is ready",)
    assert "See why no pod is ready: `steersman explain shop/cart`" in problem.remedy
    assert (answer.exit_code, answer.unlisted) == (1, 2)


def test_worst_first_then_what_concerns_most() -> None:
    nodes = [
        seen("a", findings=(BAD_WORD, BAD_PORT), conditions=(NOT_SYNCED,)),
        seen("b", findings=(BAD_WORD,)),
        SeenNode("c", "http://c"),
    ]
    other = Finding("Service a/a", "spec.type", "'Bar' is unknown and was ignored")
    answer = find_problems([*nodes, seen("d", findings=(other,))], now=NOW)
    assert texts(answer) == [
        "error Condition Synced is False: SyncFailed",
        "error Service shop/cart 70000 must be 1",
        "warning Service shop/cart 'Foo' is unknown and was ignored",
        "warning Service a/a 'Bar' is unknown and was ignored",
        "unknown Node has not answered yet",
    ]
    assert answer.counts == {"error": 2, "warning": 2, "unknown": 1}


def test_a_node_that_cannot_be_reached_keeps_its_last_findings() -> None:
    gone = SeenNode(
        "a", "http://a", seen(findings=(BAD_PORT,)).state, NOW, NOW - 300, "refused", NOW - 290
    )
    never = SeenNode("b", "http://b", problem="no route", since=NOW - 100)
    answer = find_problems([gone, never], now=NOW)
    assert answer.problems[-1].text == BAD_PORT.reason
    by_text = {each.text: each for each in answer.problems}
    known = by_text["cannot be reached; its last state is shown"]
    assert known.evidence == ("a: refused, last heard of 5m ago",)
    assert known.since == NOW - 290
    assert by_text["cannot be reached"].evidence == ("b: no route",)


def test_conditions_of_several_nodes_are_one_problem_with_their_messages() -> None:
    late = msgspec.structs.replace(NOT_SYNCED, message="timed out after 9 s", since=NOW - 600)
    nodes = [seen("a", conditions=(NOT_SYNCED,)), seen("b", conditions=(late,))]
    (problem,) = find_problems(nodes, now=NOW).problems
    assert problem.nodes == ("a", "b")
    assert problem.evidence == ("a: timed out after 5 s", "b: timed out after 9 s")
    assert problem.since == NOW - 600


def test_conditions_that_sum_up_are_listed_only_if_nothing_else_tells() -> None:
    refused = Condition("KernelMatches", "False", "Refused", "the kernel refuses 1 owner")
    unsure = Condition("KernelMatches", "Unknown", "SyncFailed", "parts may be missing")
    good = Condition("Synced", "True", "UpToDate", "all changes are in force")
    told = find_problems([seen(findings=(BAD_PORT,), conditions=(refused, unsure, good))], now=NOW)
    assert [each.kind for each in told.problems] == ["finding"]
    alone = find_problems([seen(conditions=(refused,))], now=NOW)
    assert texts(alone) == ["error Condition KernelMatches is False: Refused"]
    starting = Condition("KernelMatches", "Unknown", "NotSynced", "no sync yet")
    assert texts(find_problems([seen(conditions=(starting,))], now=NOW)) == [
        "unknown Condition KernelMatches is Unknown: NotSynced"
    ]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"drift": drift()}, "error Rules were changed by nft; they are not repaired yet"),
        (
            {"drift": drift(repaired_at=NOW - 29)},
            "warning Rules were changed by nft; they are repaired",
        ),
        (
            {"drift": drift(repaired_at=NOW - 29), "findings": (FIGHT,)},
            "error Rules are rewritten again and again by nft",
        ),
        (
            {"drift": drift(writers=())},
            "error Rules were changed by an unknown program; they are not repaired yet",
        ),
    ],
)
def test_drift(state: dict[str, object], expected: str) -> None:
    answer = find_problems([seen("a", **state)], now=NOW)
    assert texts(answer) == [expected]
    lines = answer.problems[0].evidence
    assert lines[0].startswith("a: 2 kernel objects (2 missing), changed by ")
    assert "a: add rule x" in lines


def test_drift_of_several_nodes_is_one_problem_though_numbers_differ() -> None:
    nodes = [seen("a", drift=drift()), seen("b", drift=drift(writers=(Writer("nft", 99),)))]
    (problem,) = find_problems(nodes, now=NOW).problems
    assert problem.nodes == ("a", "b")
    assert len(problem.evidence) == 4


def test_drift_that_was_repaired_long_ago_is_no_problem() -> None:
    old = drift(at=NOW - 4000, repaired_at=NOW - 4000)
    assert find_problems([seen(drift=old)], now=NOW).problems == ()


def test_a_fight_is_told_though_the_drift_is_not_known() -> None:
    answer = find_problems([seen(findings=(FIGHT,))], now=NOW)
    (problem,) = answer.problems
    assert problem.evidence == (f"a: {FIGHT.reason}",)
    assert problem.severity == "error"


def test_nodes_that_disagree() -> None:
    known = Disagreement(("b", "c"), "a", ("shop/cart",), 3)
    unknown = Disagreement(("d",), "a", problem="node d: refused")
    answer = find_problems([seen()], (known, unknown), now=NOW)
    by_object = {(each.object, each.nodes): each for each in answer.problems}
    service = by_object["Service shop/cart", ("b", "c")]
    assert (service.service, service.namespace) == ("shop/cart", "shop")
    both = by_object["Nodes", ("b", "c", "d")]
    assert both.evidence == ("2 more Services differ", "node d: refused")
    exact = find_problems([seen()], (Disagreement(("b",), "a", ("x/y",), 1),), now=NOW)
    assert [each.object for each in exact.problems] == ["Service x/y"]


def test_results_of_doctor_are_problems_unless_they_are_good() -> None:
    result = CheckResult(
        verdict=Verdict.ERROR,
        title="Selector",
        text="matches no pod",
        evidence=("x",),
        remedy="fix",
        code="SM5104",
    )
    bad = DoctorResult("a", "shop/web:http", NOW, result)
    fine = bad._replace(result=msgspec.structs.replace(result, verdict=Verdict.OK))
    unknown = msgspec.structs.replace(result, verdict=Verdict.UNKNOWN, remedy="")
    node = bad._replace(question="", result=unknown)
    answer = find_problems([seen()], doctor=(bad, fine, node), now=NOW)
    first, second = answer.problems
    assert (first.object, first.service, first.namespace) == (
        "Service shop/web:http",
        "shop/web",
        "shop",
    )
    assert (first.remedy, first.evidence, first.docs, first.field) == (
        "fix",
        ("x",),
        "doctor.md",
        "Selector",
    )
    assert first.code == "SM5104"
    assert (second.object, second.severity, second.service) == ("Node", "unknown", "")
    lines = [each.text for each in answer.blocks(wide=False) if isinstance(each, Line)]
    assert sum(line.startswith("remedy: ") for line in lines) == 1


def test_evidence_is_bounded() -> None:
    nodes = [
        seen(f"n{i:02}", conditions=(msgspec.structs.replace(NOT_SYNCED, message=f"{i}" * 400),))
        for i in range(20)
    ]
    (problem,) = find_problems(nodes, now=NOW).problems
    assert len(problem.evidence) == 13
    assert problem.evidence[-1] == "and 8 more"
    assert all(len(line) < 340 for line in problem.evidence)


def test_the_identity_of_a_problem_does_not_depend_on_nodes() -> None:
    one = find_problems([seen("a", findings=(BAD_PORT,))], now=NOW).problems[0]
    two = find_problems([seen(n, findings=(BAD_PORT,)) for n in "bc"], now=NOW + 9).problems[0]
    assert one.id == two.id
    assert len({BAD_PORT, BAD_WORD}) == 2
    other = find_problems([seen("a", findings=(BAD_WORD,))], now=NOW).problems[0]
    assert other.id != one.id


@pytest.mark.parametrize(
    ("asked", "number"),
    [
        (Filter(), 3),
        (Filter(severity="error"), 1),
        (Filter(namespace="shop"), 2),
        (Filter(namespace="other"), 0),
        (Filter(node="b"), 1),
        (Filter(text="CART ignored"), 1),
        (Filter(severity="error", node="b"), 0),
    ],
)
def test_filters(asked: Filter, number: int) -> None:
    nodes = [
        seen("a", findings=(BAD_PORT, BAD_WORD)),
        seen("b", findings=(Finding("configuration", "families", "none"),)),
    ]
    answer = find_problems(nodes, asked=asked, now=NOW)
    assert answer.matching == len(answer.problems) == number
    assert answer.namespaces == ("shop",)
    assert answer.names == ("a", "b")


def test_pages() -> None:
    many = tuple(Finding(f"Service s/n{i:03}", "spec.type", "x") for i in range(PER_PAGE + 7))
    first = find_problems([seen(findings=many)], now=NOW)
    last = find_problems([seen(findings=many)], asked=Filter(page=2), now=NOW)
    assert (first.pages, len(first.problems), len(last.problems)) == (2, PER_PAGE, 7)
    assert any("page 1 of 2" in getattr(each, "text", "") for each in first.blocks(wide=False))
    beyond = find_problems([seen(findings=many)], asked=Filter(page=9), now=NOW)
    assert (beyond.asked.page, beyond.problems) == (2, last.problems)


def test_findings_that_nodes_do_not_list_are_counted() -> None:
    counts = {Severity.ERROR: 5, Severity.WARNING: 1}
    answer = find_problems([seen(findings=(BAD_PORT,), finding_counts=counts)], now=NOW)
    assert answer.unlisted == 5
    assert any("up to 5 more" in getattr(each, "text", "") for each in answer.blocks(wide=True))


def test_blocks_show_nodes_evidence_and_remedy() -> None:
    hostile = Finding("Service shop/cart", "spec.type", "bad\u202e\nline", Severity.ERROR)
    nodes = [seen("a", findings=(hostile,), conditions=(NOT_SYNCED,)), SeenNode("b", "http://b")]
    blocks = find_problems(nodes, now=NOW).blocks(wide=True)
    lines = [each.text for each in blocks if isinstance(each, Line)]
    assert "2 errors, 1 unknown on 2 nodes" in lines
    assert "error    Service shop/cart spec.type: bad\\u202e\\nline" in lines
    assert "a: timed out after 5 s" in lines
    assert "kubectl -n shop get service cart -o yaml" in lines
    assert any(line.startswith("remedy: ") for line in lines)


def test_names_of_nodes_in_words() -> None:
    assert named_nodes(["a"]) == "node a"
    assert named_nodes(["a", "b"]) == "nodes a, b"
    assert named_nodes([*"abcdefg"]) == "7 nodes: a, b, c, d, e and 2 more"


def test_a_node_that_is_still_gone_is_no_news() -> None:
    before, later, back = (
        find_problems([SeenNode("a", "", problem=problem, since=since)], now=NOW)
        for problem, since in (("refused", NOW - 9), ("refused", NOW), ("", 0.0))
    )
    assert before != later
    assert before.watched == later.watched
    assert back.watched != later.watched


def test_filters_are_read_from_the_address() -> None:
    asked = read_filter({"severity": "error", "namespace": "n", "q": " a b ", "page": "3"})
    assert asked == Filter("error", "n", "", "a b", 3)
    assert read_filter({"page": ""}) == Filter()
    with pytest.raises(QuestionError, match="no severity fatal"):
        read_filter({"severity": "fatal"})
