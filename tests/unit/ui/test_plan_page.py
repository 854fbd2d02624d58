"""The page that plans a change: a form that works without scripts, and a process that computes."""

from __future__ import annotations

import asyncio
import io
import re
import struct
from typing import Any

import msgspec
import pytest
from aiohttp import FormData

from steersman.host.exec import Result
from steersman.model.node_state import NodeState
from steersman.operate.answer import QuestionError
from steersman.operate.plan_text import MOST_BYTES, PlanQuestion
from steersman.ui.pages import PAGES
from steersman.ui.plan_process import answer_of, plan_in_process
from steersman.ui.site import Site
from tests.support.builders.pasted import CART, SERVICE, SLICE, USER, encoded, world
from tests.support.modes.scripted import OnLoop
from tests.support.pages import ScriptedFleet, serving

JSON = {"Accept": "application/json"}
NEW = (SERVICE % ("new", "ClusterIP", "")) + SLICE % ("new-1", "new", 9)


WORLD = encoded(world(CART, USER))


def site_of(*names: str, **other: NodeState) -> tuple[Site, ScriptedFleet]:
    nodes = {name: NodeState(name, "iptables", version="1") for name in names} | other
    fleet = ScriptedFleet(nodes, pages={(name, "/world"): WORLD for name in nodes})
    return Site(fleet, PAGES), fleet


def stdin_of(question: PlanQuestion, data: bytes) -> bytes:
    asked = msgspec.msgpack.encode(question)
    return struct.pack(">I", len(asked)) + asked + data


class Scripted(OnLoop):
    """Ends as the test says, instead of running a program."""

    def __init__(self, result: Result | Exception) -> None:
        self.result = result
        self.stdin = b""

    async def run(self, argv: Any, stdin: bytes = b"", *, timeout: float = 60.0) -> Result:
        self.stdin = stdin
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


async def test_a_process_computes_the_plan() -> None:
    answer = await plan_in_process(WORLD, PlanQuestion(NEW))
    assert "shop/new" in {name for each in answer.treatments for name in each.services}
    assert answer.compared_with == "the rules as the process on worker-1 wrote them"
    with pytest.raises(QuestionError, match="the text cannot be read: line 2"):
        await plan_in_process(WORLD, PlanQuestion("a: ["))


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (TimeoutError("python"), "was not ready within 60 s"),
        (OSError("no processes"), "cannot be computed now: no processes"),
        (Result(1, b"", b"Traceback\nMemoryError"), "could not be computed: Traceback MemoryError"),
        (Result(-9, b"", b""), "could not be computed: status -9"),
    ],
)
async def test_a_process_that_fails(result: Result | Exception, error: str) -> None:
    with pytest.raises(QuestionError, match=error):
        await plan_in_process(b"", PlanQuestion("x"), Scripted(result))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (encoded(world(CART), "0.0.1"), "steersman 0.0.1"),
        (b"", "the answer of the node is not understood"),
        (WORLD[:40], "the answer of the node is not understood"),
        (b"\0\0\0\x01x", "the answer of the node is not understood"),
    ],
)
async def test_a_world_that_cannot_be_read(data: bytes, error: str) -> None:
    reply = await asyncio.to_thread(answer_of, stdin_of(PlanQuestion("x"), data))
    assert error in msgspec.json.decode(reply)["error"]


async def test_the_form_works_without_scripts() -> None:
    site, _ = site_of("a", "b", other=NodeState("other", "nftables", version="1"))
    async with serving(site) as client:
        text = await (await client.get("/plan")).text()
        assert '<form class="stack" method="post" action="/plan"' in text
        assert f'name="csrf" value="{site.access.token}"' in text
        assert '<option value="other">' in text
        form = {"text": NEW, "csrf": site.access.token}
        reply = await client.post("/plan", data=form)
        assert reply.status == 200
        text = await reply.text()
        # One node of each mode; both have the same World here.
        assert re.search(r"Nodes <bdi>a</bdi>,\s+<bdi>other</bdi>", text)
        assert "(and 1 more of the same mode and version)" in text
        assert "shop/new" in text
        assert "kind: Service" in text, "the text is still there to be changed"
        assert (await client.post("/plan", data={"text": NEW})).status == 403


async def test_chosen_nodes_and_a_file() -> None:
    site, fleet = site_of("a", "b")
    fleet.pages["b", "/world"] = encoded(world(CART))
    form = FormData({"csrf": site.access.token, "lines": "1", "whole": "1"})
    form.add_field("node", "a")
    form.add_field("node", "b")
    text = SERVICE % ("cart", "ClusterIP", "")
    form.add_field("file", text.encode(), filename="cart.yaml", content_type="text/yaml")
    async with serving(site) as client:
        twin = await (await client.post("/plan", data=form, headers=JSON)).json()
    first, second = twin["results"]
    assert (first["nodes"], second["nodes"]) == (["a"], ["b"])
    assert first["plan"]["treatments"][0]["services"] == ["shop/user"]
    assert first["plan"]["details"]
    assert second["plan"]["objects"] == []
    assert twin["chosen"] == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "status", "error"),
    [
        ({}, 422, "nothing to plan"),
        ({"text": "kind: Pod"}, 422, "the text has no Service"),
        ({"mode": "fast"}, 422, "there is no mode fast"),
        ({"text": "x", "node": "nowhere"}, 422, "there is no node nowhere"),
        ({"file": MOST_BYTES + 1}, 422, "more than 1,048,576"),
        ({"file": 3 << 20}, 413, "the form is too large"),
    ],
)
async def test_errors(fields: dict[str, Any], status: int, error: str) -> None:
    site, _ = site_of("a")
    form = FormData({"csrf": site.access.token})
    for name, value in fields.items():
        if name == "file":
            form.add_field("file", io.BytesIO(b"x" * value), filename="long.yaml")
        else:
            form.add_field(name, value)
    async with serving(site) as client:
        reply = await client.post("/plan", data=form)
        assert reply.status == status
        assert error in await reply.text()


async def test_more_nodes_than_are_planned() -> None:
    site, fleet = site_of(*(f"n{n}" for n in range(9)))
    form = FormData({"csrf": site.access.token, "text": NEW})
    for name in fleet.nodes:
        form.add_field("node", name)
    async with serving(site) as client:
        reply = await client.post("/plan", data=form)
        assert "choose at most 8 nodes" in await reply.text()
    empty, _ = site_of()
    async with serving(empty) as client:
        reply = await client.post("/plan", data={"csrf": empty.access.token, "text": NEW})
        assert "no node is known yet" in await reply.text()


async def test_a_node_that_cannot_be_asked() -> None:
    site, fleet = site_of("a", other=NodeState("other", "nftables"))
    del fleet.pages["other", "/world"]
    async with serving(site) as client:
        form = {"csrf": site.access.token, "text": NEW}
        twin = await (await client.post("/plan", data=form, headers=JSON)).json()
    assert [each["problem"] for each in twin["results"]] == ["", "other: no page /world"]
