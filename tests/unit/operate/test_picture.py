"""The picture of a connection: which boxes, where they are, and the SVG of them."""

from __future__ import annotations

from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import pytest

from steersman.model.plan import Traits
from steersman.model.world import World
from steersman.operate.explain import Question, answer_question
from steersman.operate.explain_flow import FlowAnswer
from steersman.operate.names import Names
from steersman.operate.picture import MOST_ENDPOINTS, Box, Picture, picture_of, shorten, to_svg
from tests.support.builders import kube
from tests.support.builders.asked import DEMO, HTTP_TARGET, NODES, POD_A, PODS, WEB, asked
from tests.support.builders.asked import pod_endpoint as endpoint

WORLD = asked(*DEMO)
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "a<script>&\"'\u202e" + "x" * 253


def drawn(world: World = WORLD, **words: Any) -> Picture:
    answer = answer_question(Names(world), Question(**words))
    assert isinstance(answer, FlowAnswer)
    return picture_of(answer.flows[0])


def many(count: int) -> World:
    """A Service with that many endpoints."""
    ends = [f"10.244.3.{n}" for n in range(1, count + 1)]
    return asked(WEB, kube.endpoint_slice("web-1", "web", *ends, ports=[HTTP_TARGET]), *NODES)


def kinds(picture: Picture) -> list[str]:
    return [box.kind for box in picture.boxes]


def lines(picture: Picture, kind: str) -> list[tuple[str, ...]]:
    return [box.lines for box in picture.boxes if box.kind == kind]


def overlap(one: Box, other: Box) -> bool:
    return (
        one.x < other.x + other.width
        and other.x < one.x + one.width
        and one.y < other.y + other.height
        and other.y < one.y + one.height
    )


def surrounds(one: Box, other: Box) -> bool:
    return (
        one.x <= other.x
        and one.y <= other.y
        and one.x + one.width >= other.x + other.width
        and one.y + one.height >= other.y + other.height
    )


def test_a_connection_that_is_forwarded() -> None:
    picture = drawn(client="pod", to="shop/web")
    assert kinds(picture) == ["node", "client", "rule", "source", *["endpoint"] * 3]
    assert lines(picture, "node") == [("node node-a",)]
    assert lines(picture, "client") == [("a pod", "to 10.96.0.10:80/TCP")]
    assert lines(picture, "rule") == [("shop/web:http", "clusterIP", "10.96.0.10:80/TCP")]
    assert lines(picture, "source") == [
        ("not masqueraded", "the endpoint sees", "the client's address")
    ]
    assert lines(picture, "endpoint")[2] == ("shop/web-3", "10.244.2.13:8080", "on node-b")
    assert [arrow.label for arrow in picture.arrows] == ["", "", "33 %", "33 %", "33 %"]
    assert "forwarded to one of 3 endpoints" in picture.title
    assert picture.steps[0].node == "node-a"


def test_an_endpoint_that_is_the_client_is_masqueraded_alone() -> None:
    picture = drawn(client="shop/web-1", to="shop/web")
    assert lines(picture, "client") == [("shop/web-1", POD_A, "to 10.96.0.10:80/TCP")]
    assert lines(picture, "source")[0][0] == "not masqueraded"
    own, *others = lines(picture, "endpoint")
    assert own[-1] == "itself: masqueraded"
    assert all(len(other) == 3 for other in others)


def test_two_nodes_decide_about_a_node_port_of_the_other() -> None:
    picture = drawn(client="node-a", to="node-b:30080")
    assert lines(picture, "node") == [("node node-a",), ("node node-b",)]
    assert [each[0] for each in lines(picture, "rule")] == ["no Service here", "shop/web:http"]
    assert lines(picture, "rule")[1][1] == "node port"
    assert lines(picture, "source") == [
        ("masqueraded", "the endpoint sees", "an address of node-b")
    ]


@pytest.mark.parametrize(
    ("to", "kind", "says"),
    [
        ("shop/none", "reject", ("rejected", "an error at once")),
        ("shop/local", "drop", ("dropped", "the client times out")),
        ("10.96.0.99:80", "accept", ("goes on unchanged", "10.96.0.99:80/TCP")),
    ],
)
def test_connections_that_end_or_are_left_alone(to: str, kind: str, says: tuple[str, ...]) -> None:
    world = asked(
        *NODES,
        kube.service("none", "10.96.0.30"),
        kube.service("local", "10.96.0.31", internalTrafficPolicy="Local"),
        kube.endpoint_slice("local-1", "local", PODS[2]),
    )
    picture = drawn(world, client="pod", to=to)
    assert kinds(picture) == ["node", "client", "rule", kind]
    assert lines(picture, kind) == [says]
    assert picture.arrows[-1].refused == (kind != "accept")
    assert not picture.arrows[0].refused


def test_ipv6_is_drawn_with_brackets() -> None:
    six = kube.service("six", "fd00:10:96::6", clusterIPs=["fd00:10:96::6"], ipFamilies=["IPv6"])
    slice_ = kube.endpoint_slice("six-1", "six", "fd00:10:244::7", family="IPv6")
    picture = drawn(asked(six, slice_, *NODES), client="fd00:10:244::9", to="shop/six")
    assert lines(picture, "rule")[0][2] == "[fd00:10:96::6]:80/TCP"
    assert lines(picture, "endpoint") == [("[fd00:10:244::7]:8080",)]


@pytest.mark.parametrize("count", [1, MOST_ENDPOINTS, MOST_ENDPOINTS + 1, 200])
def test_many_endpoints_become_one_box(count: int) -> None:
    picture = drawn(many(count), client="pod", to="shop/web")
    shown = lines(picture, "endpoint")
    if count <= MOST_ENDPOINTS + 1:
        assert len(shown) == count
        assert "more" not in kinds(picture)
    else:
        assert len(shown) == MOST_ENDPOINTS
        assert lines(picture, "more") == [("and 192 more",)]
        assert picture.arrows[-1].label == "96 %"
        assert picture.arrows[-2].label == "< 1 %"
    assert picture.arrows[2].label == {1: "", 8: "12 %", 9: "11 %", 200: "< 1 %"}[count]


def test_shares_are_not_made_up_if_a_scheduler_chooses() -> None:
    annotations = {"steersman/load-balancing": "least-connections"}
    web = {**WEB, "metadata": {**WEB["metadata"], "annotations": annotations}}
    world = asked(web, *DEMO[1:], traits=Traits())
    picture = drawn(world, client="pod", to="shop/web")
    assert {arrow.label for arrow in picture.arrows} == {""}
    assert "a scheduler, weights or a hash" in picture.steps[-1].text


def test_an_arrival_that_is_only_assumed_is_said() -> None:
    picture = drawn(client="external", to="10.96.0.10:80")
    assert picture.steps[0].text == "the packets are assumed to arrive at this node"


@pytest.mark.parametrize(
    "words",
    [
        {"client": "pod", "to": "shop/web"},
        {"client": "shop/web-1", "to": "shop/web"},
        {"client": "node-a", "to": "node-b:30080"},
        {"client": "pod", "to": "10.96.0.99:80"},
    ],
)
def test_boxes_are_apart_and_inside_of_their_node(words: dict[str, Any]) -> None:
    picture = drawn(**words)
    frames = [box for box in picture.boxes if box.kind == "node"]
    others = [box for box in picture.boxes if box.kind != "node"]
    for one, other in combinations(others, 2):
        assert not overlap(one, other)
    for box in others:
        inside = [frame for frame in frames if surrounds(frame, box)]
        assert len(inside) == (box.kind in ("rule", "source"))
        assert not any(overlap(frame, box) for frame in frames if frame not in inside)
    for box in picture.boxes:
        assert 0 <= box.x <= box.x + box.width <= picture.width
        assert 0 <= box.y <= box.y + box.height <= picture.height


def test_the_svg_is_well_formed_and_has_no_style_of_its_own() -> None:
    picture = drawn(client="pod", to="shop/web")
    text = to_svg(picture, "first")
    root = ElementTree.fromstring(text)
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == "first-title first-text"
    assert root.findtext(f"{SVG}title") == picture.title
    assert all(step.text in (root.findtext(f"{SVG}desc") or "") for step in picture.steps)
    assert len(root.findall(f".//{SVG}rect")) == len(picture.boxes)
    assert "style" not in text
    styled = to_svg(picture, style=".way > g{color:red}")
    assert ElementTree.fromstring(styled).findtext(f"{SVG}style") == ".way > g{color:red}"
    assert picture.__html__() == to_svg(picture)


def test_hostile_names_are_escaped_and_cut() -> None:
    ends = endpoint(POD_A, HOSTILE, "node-a")
    slice_ = kube.endpoint_slice("web-1", "web", ends, ports=[HTTP_TARGET])
    picture = drawn(asked(WEB, slice_, *NODES), client="pod", to="shop/web")
    (box,) = (each for each in picture.boxes if each.kind == "endpoint")
    assert len(box.lines[0]) <= 26
    assert "x" * 253 in box.whole
    text = to_svg(picture)
    assert "<script>" not in text
    assert "\u202e" not in text
    assert ElementTree.fromstring(text) is not None


def test_texts_are_cut_in_the_middle() -> None:
    assert shorten("web-7f9c4", 9) == "web-7f9c4"
    assert shorten("checkout-5d8f7c9b4-x2x9k", 11) == "check…x2x9k"
    assert len(shorten("y" * 99, 12)) == 12
