"""From an operator's words to the question that the checks get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steersman.compile.trace import Flow
from steersman.config import parse_command_line
from steersman.model.names import ObjectName
from steersman.model.plan import SourceClass
from steersman.model.world import Origin, World
from steersman.operate.answer import QuestionError
from steersman.operate.client import NotRunningError
from steersman.operate.doctor import CHECKS, ask
from steersman.operate.doctor.ask import Asked, doctor, is_here, read_question
from steersman.operate.doctor.context import Question
from steersman.operate.doctor.result import Verdict
from tests.support.builders.doctor import CART, world_of
from tests.support.builders.objects import endpoint, node, port, service, slice_

THINGS = (
    service(type="NodePort", ports=[port(nodePort=30080), port("admin", 81)]),
    slice_(endpoint("10.0.0.5", node="node-1")),
)
WORLD = world_of(*THINGS)


async def question(**words: Any) -> Question:
    return await read_question(WORLD, Asked(**words))


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ({}, Question()),
        ({"service": "shop/cart"}, Question(CART)),
        ({"service": "cart", "namespace": "shop"}, Question(CART)),
        ({"service": "cart.shop.svc.cluster.local"}, Question(CART)),
        ({"service": "shop/cart:http"}, Question(CART, "http")),
        ({"service": "shop/cart:81"}, Question(CART, "81")),
        ({"service": "10.96.0.10:81"}, Question(CART, "admin")),
        # The checks name Services similar to one that does not exist.
        ({"service": "shop/carts"}, Question(ObjectName("shop", "carts"))),
        ({"service": "nothing"}, Question(ObjectName("default", "nothing"))),
        (
            {"destination": "shop/cart:http"},
            Question(CART, flow=Flow(SourceClass.EXTERNAL, "10.96.0.10", 80)),
        ),
        (
            {"destination": "10.96.0.10:81", "source": "198.51.100.7"},
            Question(CART, flow=Flow("198.51.100.7", "10.96.0.10", 81)),
        ),
        (
            {"destination": "192.168.0.2:30080", "source": "pod"},
            Question(CART, flow=Flow(SourceClass.POD, "192.168.0.2", 30080)),
        ),
        # A check says that nothing is there, and the node is examined.
        (
            {"destination": "10.96.0.99:80"},
            Question(flow=Flow(SourceClass.EXTERNAL, "10.96.0.99", 80)),
        ),
    ],
)
async def test_words_and_questions(words: dict[str, str], wanted: Question) -> None:
    assert await question(**words) == wanted


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"service": "shop/cart", "destination": "10.96.0.10:80"}, "not both"),
        ({"service": "shop/cart", "source": "10.0.0.9"}, "give --to with --from"),
        ({"source": "pod"}, "give --to"),
        ({"service": "10.96.0.10"}, "is not a Service"),
        ({"service": "10.96.0.99:80"}, "no Service is at 10.96.0.99:80"),
        ({"destination": "10.96.0.10"}, "an address with a port"),
        ({"service": "shop/cart", "pod": "external"}, "give a pod"),
        ({"service": "shop/cart", "pod": "10.0.0.5"}, "no network namespace of this machine"),
    ],
)
async def test_words_that_ask_nothing(words: dict[str, str], why: str) -> None:
    with pytest.raises(QuestionError, match=why):
        await question(**words)


async def test_a_pod_is_found_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "find_namespace", lambda ip: Path(f"/run/netns/{ip}"))
    found = await question(service="shop/cart", pod="10.0.0.5")
    assert (found.service, found.pod, found.netns) == (CART, "10.0.0.5", "/run/netns/10.0.0.5")


async def test_where_the_node_is() -> None:
    assert not await is_here(WORLD)
    assert await is_here(world_of(*THINGS, origin=Origin("process", "pid 1")))
    here = world_of(node(addresses=(("InternalIP", "127.0.0.1"),)))
    assert await is_here(here)


async def test_a_node_without_a_process_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    async def not_running(*_: object) -> World:
        raise NotRunningError("no steersman runs in this network namespace")

    monkeypatch.setattr(ask, "load_world", not_running)
    monkeypatch.setattr(ask, "CHECKS", [c for c in CHECKS if c.name in ("process", "node")])
    monkeypatch.setattr("steersman.operate.doctor.node_process.running", lambda: None)
    parsed = parse_command_line(["--hostname-override=node-9"])
    answer = await doctor(parsed, Asked())
    assert answer.exit_code == 1
    assert answer.cause == "no steersman runs on this node, so nobody updates its rules"
    assert answer.of(Verdict.UNKNOWN) == []
    with pytest.raises(NotRunningError):
        await doctor(parsed, Asked("shop/cart"))
