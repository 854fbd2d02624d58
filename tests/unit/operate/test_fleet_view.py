"""All nodes in one answer: the problems of each, worst first, and in numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from steersman.model.drift import Drift, Writer
from steersman.model.findings import Severity
from steersman.model.node_state import Condition, NodeState
from steersman.operate.agreement import Agreement
from steersman.operate.answer import Line, Table
from steersman.operate.fleet_view import (
    SORTS,
    FleetQuery,
    FleetView,
    NodeRow,
    fleet_view,
    natural,
    query_of,
)
from steersman.operate.node_trouble import Disagreement, SeenNode
from steersman.run.pages.conditions import judge

NOW = 1_800_000_000.0
WRITER = Writer("kube-router", 4711, "systemd (1)")


def seen(name: str = "a", **fields: Any) -> SeenNode:
    values: dict[str, Any] = {"mode": "nftables", "version": "1.0.0", "synced_at": NOW - 5}
    state = NodeState(name, **{**values, "now": NOW, **fields})
    conditions = state.conditions or tuple(judge(state))
    return SeenNode(name, "url", structs.replace(state, conditions=conditions), NOW, NOW)


def row(node: SeenNode, *disagreements: Disagreement) -> NodeRow:
    return fleet_view([node], NOW, disagreements=disagreements).rows[0]


def test_a_node_that_is_well() -> None:
    found = row(seen(lag=0.5, cpu=0.01, memory=1 << 20, revision=7))
    assert (found.health, found.problems) == ("ok", ())
    assert (found.synced, found.lag, found.memory, found.revision) == (NOW - 5, 0.5, 1 << 20, 7)
    assert fleet_view([seen()], NOW).exit_code == 0


@pytest.mark.parametrize(
    ("fields", "health", "problem"),
    [
        (
            {"failure": "nft: no"},
            "failing",
            "Synced is False: SyncFailed: nft: no; it is tried again",
        ),
        ({"healthy": False}, "failing", "Healthy is False: Late: a change waits"),
        (
            {"conditions": (Condition("SourceConnected", "False", "R", "no server"),)},
            "failing",
            "SourceConnected is False: R: no server",
        ),
        (
            {"synced_at": 0.0, "waiting": "lists"},
            "waiting",
            "Synced is False: Waiting: waiting for lists",
        ),
        ({"synced_at": 0.0}, "waiting", "KernelMatches is Unknown: NotSynced: no sync"),
        (
            {"drift": Drift(NOW - 9, missing=1, writers=(WRITER,))},
            "drifted",
            "Rules were changed by kube-router; they are not repaired yet: 1 kernel object "
            "(1 missing), changed by kube-router (pid 4711, started by systemd (1)), 9s ago",
        ),
        ({"drift": Drift(NOW - 9, missing=1, repaired_at=NOW)}, "drifted", "they are repaired"),
        ({"lag_p99": 12.0}, "late", "Changes take long: 12 s until they are in force"),
        ({"refused": 2}, "findings", "the kernel refuses the rules of 2 owners"),
        (
            {"finding_counts": {Severity.ERROR: 1}},
            "findings",
            "NoFindings is False: Errors: 1 error",
        ),
        (
            {"finding_counts": {Severity.ERROR: 3}},
            "findings",
            "NoFindings is False: Errors: 3 errors",
        ),
    ],
)
def test_what_is_wrong_with_a_node(fields: dict[str, Any], health: str, problem: str) -> None:
    found = row(seen(**fields))
    assert found.health == health
    assert problem in found.problems[0]
    assert fleet_view([seen(**fields)], NOW).exit_code == 1


def test_drift_counts_for_ten_minutes_after_it_was_repaired() -> None:
    old = Drift(NOW - 700, missing=1, repaired_at=NOW - 699)
    found = row(seen(drift=old))
    assert found.health == "ok"
    assert found.drift.startswith("1 kernel object")
    assert found.drift_at == NOW - 700
    assert fleet_view([seen(drift=old), seen("b", drift=Drift(NOW - 700))], NOW).drifted == 1


def test_what_follows_from_another_condition_is_not_told_twice() -> None:
    told = (
        Condition("KernelMatches", "False", "Drift", "told with the program"),
        Condition("KernelMatches", "Unknown", "SyncFailed", "parts may be missing"),
    )
    assert row(seen(conditions=(*told, Condition("Healthy", "True", "R", "m")))).health == "ok"


def test_a_node_that_cannot_be_asked() -> None:
    never = row(SeenNode("a", "url", problem="refused"))
    assert (never.health, never.problems) == (
        "unreachable",
        ("Node cannot be reached: refused",),
    )
    assert (never.mode, never.synced, never.cpu) == ("", 0.0, None)
    lost = SeenNode("a", "url", seen().state, NOW - 90, NOW - 90, "it\nbroke", NOW - 60)
    found = row(lost)
    assert found.problems == (
        "Node cannot be reached; its last state is shown: it\\nbroke, last heard of 90s ago",
    )
    assert found.mode == "nftables"
    assert row(SeenNode("a", "url")).problems == ("Node has not answered yet: asked just now",)
    assert fleet_view([SeenNode("a", "url")], NOW).not_healthy == 1


def test_only_the_worst_thing_is_the_health_of_a_node() -> None:
    found = row(seen(failure="no", finding_counts={Severity.ERROR: 1}, lag_p99=50.0))
    assert found.health == "failing"
    assert len(found.problems) == 3
    assert found.problems[-1] == "NoFindings is False: Errors: 1 error"


def test_a_clock_that_is_wrong_does_not_change_ages() -> None:
    wrong = seen(now=NOW + 3600, synced_at=NOW + 3595, started=NOW)
    assert row(wrong).synced == NOW - 5
    assert row(wrong).started == NOW - 3600
    assert row(seen(now=NOW + 1)).synced == NOW - 5
    assert row(seen(now=NOW + 3600, synced_at=0.0)).synced == 0.0


def test_long_and_hostile_text_is_bounded() -> None:
    found = row(seen(failure="<script>\u202e" + "x" * 5000))
    assert len(found.problems[0]) < 400
    assert "\u202e" not in found.problems[0]


def test_disagreements() -> None:
    one = Disagreement(("a",), "b", ("shop/web",), 1)
    two = Disagreement(("a", "c"), "b", ("shop/cart", "shop/web"), 2)
    vague = Disagreement(("a", "c", "d", "e", "f"), "b", problem="it is down")
    assert row(seen(), one).problems == ("disagrees with b about 1 Service",)
    assert row(seen(), two).problems == ("disagrees with b about 2 Services",)
    assert row(seen(), vague).problems == ("disagrees with b with the others",)
    assert row(seen("b"), one).health == "ok"
    view = fleet_view([seen()], NOW, disagreements=(one, two, vague))
    many = Disagreement(("a",), "b", tuple(f"shop/{n}" for n in range(9)), 12)
    lines = texts(fleet_view([seen()], NOW, disagreements=(many,)))
    assert lines[-1].endswith("shop/3, shop/4 and 7 more Services")
    assert texts(view)[-3:] == [
        "a serves something else than b: shop/web",
        "a, c serve something else than b: shop/cart, shop/web",
        "a, c, d and 2 more serve something else than b: it is down",
    ]


def texts(view: FleetView, wide: bool = False) -> list[str]:
    return [each.text for each in view.blocks(wide) if isinstance(each, Line)]


def table(view: FleetView, wide: bool = False) -> Table:
    return next(each for each in view.blocks(wide) if isinstance(each, Table))


FLEET = (
    seen("node-10", lag_p99=1.0, cpu=0.5, synced_at=NOW - 50),
    seen("node-9", version="0.9.0", memory=5, finding_counts={Severity.WARNING: 4}),
    seen("node-1", mode="ipvs", failure="no", lag=3.0),
    SeenNode("node-2", "url", problem="refused"),
)


def names(**query: Any) -> list[str]:
    return [each.name for each in fleet_view(FLEET, NOW, FleetQuery(**query)).rows]


def test_the_worst_comes_first_then_names_in_natural_order() -> None:
    assert names() == ["node-2", "node-1", "node-9", "node-10"]


@pytest.mark.parametrize(
    ("sort", "first"),
    [
        ("name", "node-1"),
        ("sync", "node-2"),
        ("lag", "node-1"),
        ("findings", "node-9"),
        ("cpu", "node-10"),
        ("memory", "node-9"),
    ],
)
def test_orders(sort: str, first: str) -> None:
    assert names(sort=sort)[0] == first


def test_filters() -> None:
    assert names(mode="ipvs") == ["node-1"]
    assert names(version="0.9.0") == ["node-9"]
    assert names(health="unreachable") == ["node-2"]
    assert names(text="NODE-1") == ["node-1", "node-10"]
    assert names(text="tried again") == ["node-1"]
    assert names(text="nothing") == []


def test_pages() -> None:
    view = fleet_view(FLEET, NOW, FleetQuery(page=2), page_size=3)
    assert ([r.name for r in view.rows], view.pages, view.matching) == (["node-10"], 2, 4)
    beyond = fleet_view(FLEET, NOW, FleetQuery(page=9), page_size=3)
    assert beyond.query.page == 2
    assert beyond.rows == view.rows
    assert texts(beyond)[-1] == "and 3 more"


def test_numbers_of_the_whole_fleet() -> None:
    view = fleet_view(FLEET, NOW, FleetQuery(text="node-9"))
    assert (view.total, view.unreachable, view.not_healthy, view.warnings) == (4, 1, 2, 4)
    assert [(g.name, g.nodes) for g in view.modes] == [("ipvs", 1), ("nftables", 2)]
    assert [(g.name, g.nodes) for g in view.versions] == [("0.9.0", 1), ("1.0.0", 2)]
    assert {g.name: g.nodes for g in view.healths if g.nodes} == {
        "unreachable": 1,
        "failing": 1,
        "ok": 2,
    }
    assert view.slowest == 1.0
    assert fleet_view([], NOW).slowest is None


def test_as_text() -> None:
    view = fleet_view(FLEET, NOW, problem="the pods cannot be listed")
    lines = texts(view)
    assert lines[0] == "4 nodes: 1 unreachable, 1 failing, 2 ok"
    assert lines[1] == "the pods cannot be listed"
    assert lines[2] == "versions  0.9.0: 1, 1.0.0: 2"
    rows = table(view).rows
    assert rows[0][:5] == ["node-2", ("unreachable", "bad"), "-", "-", "never"]
    assert rows[0][-1] == "Node cannot be reached: refused"
    assert rows[1][5] == "3.00 s"
    assert rows[2][6:9] == ["4 warnings", "0.0%", "0 MiB"]
    assert table(view, wide=True).columns[-2] == "WHERE"
    assert table(view, wide=True).rows[0][-2] == "url"
    empty = fleet_view([], NOW)
    assert texts(empty) == ["0 nodes: none"]
    assert empty.exit_code == 1
    assert texts(fleet_view([seen()], NOW)) == ["1 node: 1 ok"]


def test_the_address_of_a_page_is_a_query() -> None:
    values = {"q": " web ", "mode": "m", "version": "v", "health": "h", "sort": "cpu", "page": "3"}
    assert query_of(values) == FleetQuery("web", "m", "v", "h", "cpu", 3)
    for page in ("", "x", "-1", "9" * 40, "\u0663"):
        assert query_of({"page": page, "sort": "nothing"}) == FleetQuery()
    assert all(query_of({"sort": each}).sort == each for each in SORTS)


@given(st.lists(st.text("ab019.-", max_size=6)))
def test_any_names_have_an_order(names: list[str]) -> None:
    assert len(sorted(names, key=natural)) == len(names)
    assert sorted(["0.10.0", "0.9.1", "0.9", "b1"], key=natural) == ["0.9", "0.9.1", "0.10.0", "b1"]


# Agreement


def observed(digests: dict[str, str], at: float = 0.0, grace: float = 10.0) -> Agreement:
    agreement = Agreement(grace)
    for node, digest in digests.items():
        agreement.observe(node, digest, at)
    return agreement


def test_equal_digests_agree() -> None:
    assert observed({}).camps(0) == ()
    assert observed({"a": "x", "b": "x"}).camps(0) == ()


def test_a_node_may_lag_for_the_grace() -> None:
    agreement = observed({"a": "old", "b": "old", "c": "old"})
    agreement.observe("a", "new", 100)
    agreement.observe("b", "new", 100)
    assert agreement.camps(105) == ()
    assert agreement.camps(111) == (Disagreement(("c",), "a"),)
    agreement.observe("c", "new", 111)
    assert agreement.camps(112) == ()


def test_a_node_ahead_of_the_others_agrees_for_the_grace() -> None:
    agreement = observed({"a": "x", "b": "x", "c": "x"})
    agreement.observe("a", "y", 100)
    assert agreement.camps(109) == ()
    assert agreement.camps(111) == (Disagreement(("a",), "b"),)
    agreement.forget("a")
    agreement.forget("a")
    assert agreement.camps(111) == ()


def test_groups_come_largest_first_and_are_few() -> None:
    majority = {f"m{n}": "x" for n in range(30)}
    others = {f"o{n}": f"y{n // 2}" for n in range(12)} | {"z1": "y0"}
    camps = observed(majority | others).camps(50)
    assert camps[0] == Disagreement(("o0", "o1", "z1"), "m0")
    assert len(camps) == 4


def test_without_a_majority_the_most_common_is_the_reference() -> None:
    camps = observed({"a": "x", "b": "y", "c": "y", "d": "z", "e": "w"}).camps(50)
    assert {camp.reference for camp in camps} == {"b"}
    assert [camp.nodes for camp in camps] == [("a",), ("d",), ("e",)]


def test_what_differs_twice_in_the_same_way_differs() -> None:
    agreement = observed({"a": "x", "b": "x", "c": "y"})
    (camp,) = agreement.camps(50)
    assert agreement.differing(camp, {"s/1": 1, "s/2": 1}, {"s/1": 2, "s/2": 1}) == ()
    # One changes on both nodes meanwhile: it merely lags.
    assert agreement.differing(camp, {"s/1": 3, "s/3": 1}, {"s/1": 4}) == ()
    assert agreement.differing(camp, {"s/1": 3, "s/3": 1}, {"s/1": 4}) == ("s/1", "s/3")
    assert agreement.camps(50) == (camp,)
    assert agreement.differing(camp, {"s/1": 3}, {"s/1": 4}) == ("s/1",)
    agreement.observe("c", "x", 51)
    assert agreement.camps(51) == ()
    assert agreement.differing(camp, {"s/1": 3}, {"s/1": 4}) == ()


@given(
    st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from("xyz"), st.floats(0, 100))),
    st.floats(0, 200),
)
def test_no_node_is_in_two_camps_or_compared_with_itself(
    seen: list[tuple[str, str, float]], now: float
) -> None:
    agreement = Agreement(10)
    for node, digest, at in sorted(seen, key=lambda each: each[2]):
        agreement.observe(node, digest, at)
    camps = agreement.camps(max([now, *(at for _, _, at in seen)]))
    listed = [node for camp in camps for node in camp.nodes]
    assert len(listed) == len(set(listed))
    assert all(camp.reference not in listed for camp in camps)
