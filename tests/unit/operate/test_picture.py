"""The picture of a connection: its stages, and the boxes of each."""

from __future__ import annotations

from typing import Any

import pytest

from steersman.model.plan import Traits
from steersman.model.world import World
from steersman.operate.explain import Question, answer_question
from steersman.operate.explain_flow import FlowAnswer
from steersman.operate.names import Names
from steersman.operate.picture import MOST_ENDPOINTS, Box, Picture, picture_of
from tests.support.builders import kube
from tests.support.builders.asked import DEMO, HTTP_TARGET, NODES, POD_A, PODS, WEB, asked

WORLD = asked(*DEMO)


def drawn(world: World = WORLD, **words: Any) -> Picture:
    answer = answer_question(Names(world), Question(**words))
    assert isinstance(answer, FlowAnswer)
    return picture_of(answer.flows[0])


def many(count: int) -> World:
    """A Service with that many endpoints."""
    ends = [f"10.244.3.{n}" for n in range(1, count + 1)]
    return asked(WEB, kube.endpoint_slice("web-1", "web", *ends, ports=[HTTP_TARGET]), *NODES)


def boxes(picture: Picture) -> list[Box]:
    return [box for stage in picture.stages for box in stage.boxes]


def kinds(picture: Picture) -> list[str]:
    return [box.kind for box in boxes(picture)]


def nodes(picture: Picture) -> list[str]:
    return [stage.node for stage in picture.stages]


def lines(picture: Picture, kind: str) -> list[tuple[str, ...]]:
    return [box.lines for box in boxes(picture) if box.kind == kind]


def test_a_connection_that_is_forwarded() -> None:
    picture = drawn(client="pod", to="shop/web")
    assert kinds(picture) == ["client", "rule", "source", *["endpoint"] * 3]
    assert nodes(picture) == ["", "node-a", ""]
    assert lines(picture, "client") == [("a pod", "to 10.96.0.10:80/TCP")]
    assert lines(picture, "rule") == [("shop/web:http", "clusterIP", "10.96.0.10:80/TCP")]
    assert lines(picture, "source") == [
        ("not masqueraded", "the endpoint sees", "the client's address")
    ]
    assert lines(picture, "endpoint")[2] == ("shop/web-3", "10.244.2.13:8080", "on node-b")
    assert [box.share for box in boxes(picture)] == ["", "", "", "33 %", "33 %", "33 %"]
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
    assert nodes(picture) == ["", "node-a", "node-b", ""]
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
    assert kinds(picture) == ["client", "rule", kind]
    assert lines(picture, kind) == [says]


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
        assert [box.share for box in boxes(picture)[-2:]] == ["< 1 %", "96 %"]
    assert boxes(picture)[3].share == {1: "", 8: "12 %", 9: "11 %", 200: "< 1 %"}[count]


def test_shares_are_not_made_up_if_a_scheduler_chooses() -> None:
    annotations = {"steersman/load-balancing": "least-connections"}
    web = {**WEB, "metadata": {**WEB["metadata"], "annotations": annotations}}
    world = asked(web, *DEMO[1:], traits=Traits())
    picture = drawn(world, client="pod", to="shop/web")
    assert {box.share for box in boxes(picture)} == {""}
    assert "a scheduler, weights or a hash" in picture.steps[-1].text


def test_an_arrival_that_is_only_assumed_is_said() -> None:
    picture = drawn(client="external", to="10.96.0.10:80")
    assert picture.steps[0].text == "the packets are assumed to arrive at this node"
