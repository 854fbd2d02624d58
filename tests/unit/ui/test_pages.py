"""The pages of the cluster and of its Services, over simulated nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from aiohttp import ClientSession

from steersman.model.findings import Finding
from steersman.ui.fleet import Fleet, seen_once
from steersman.ui.nodes import FixedNodes
from steersman.ui.pages import PAGES
from steersman.ui.site import Site
from tests.support.builders import kube
from tests.support.fleet import SimulatedNodes, many_services, trouble
from tests.support.pages import events, serving

JSON = {"Accept": "application/json"}
HOSTILE = "<script>alert(1)</script>\u202e" + "x" * 253


@asynccontextmanager
async def pages(nodes: SimulatedNodes) -> AsyncIterator[tuple[ClientSession, Fleet]]:
    """A client of pages about simulated nodes, all of which have been reached or not."""
    fleet = Fleet(FixedNodes(nodes.urls))
    task = asyncio.create_task(fleet.run())
    try:
        async with asyncio.timeout(60):
            version = 0
            while not fleet.seen or any(not e.state and not e.problem for e in fleet.seen):
                version = await fleet.changed(version)
        async with serving(Site(fleet, PAGES)) as client:
            yield client, fleet
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_the_cluster_shows_the_worst_nodes_first() -> None:
    async with SimulatedNodes(24) as nodes:
        trouble(nodes)
        async with pages(nodes) as (client, _):
            view = await (await client.get("/", headers=JSON)).json()
            assert view["total"] == 24
            assert view["unreachable"] == 1
            assert view["notHealthy"] == 3
            assert [row["health"] for row in view["rows"][:3]] == [
                "unreachable",
                "failing",
                "waiting",
            ]
            text = await (await client.get("/")).text()
            assert "nft: Operation not supported" in text
            assert "24 of 24 nodes, worst first" in text
            found = await (await client.get("/?q=node-0006&sort=cpu")).text()
            assert "1 of 24 nodes, by cpu" in found
            assert 'value="node-0006"' in found
            assert "<option selected>cpu" in found
            none = await (await client.get("/?health=late&mode=none")).text()
            assert "No node is as the search asks." in none


async def test_hostile_names_are_only_text() -> None:
    async with SimulatedNodes(["a", HOSTILE.replace("/", "")]) as nodes:
        nodes.change("a", failure=HOSTILE)
        nodes.find("a", Finding(f"Service shop/{HOSTILE}", "", HOSTILE))
        fleet = await seen_once(FixedNodes({"a": nodes.urls["a"], HOSTILE: "http://127.0.0.1:9"}))
        async with serving(Site(fleet, PAGES)) as client:
            text = await (await client.get("/")).text()
            assert "&lt;script&gt;" in text
            assert "<script>alert" not in text
            reply = await client.get("/", params={"q": HOSTILE, "mode": '"><script>alert'})
            assert "<script>alert" not in await reply.text()


async def test_a_cluster_of_many_nodes_has_pages() -> None:
    async with SimulatedNodes(130) as nodes, pages(nodes) as (client, _):
        first = await (await client.get("/?sort=name")).text()
        assert "page 1 of 2" in first
        assert '<a href="?sort=name&amp;page=2" rel="next">' in first
        second = await (await client.get("/?sort=name&page=2", headers=JSON)).json()
        assert [row["name"] for row in second["rows"]] == [f"node-{n:04}" for n in range(101, 131)]


async def test_a_change_of_a_node_changes_the_open_page() -> None:
    async with SimulatedNodes(3) as nodes, pages(nodes) as (client, _):

        def enough(seen: list[tuple[str, str]]) -> bool:
            if len(seen) == 3:
                nodes.change("node-0002", failure="the kernel says no")
            return "the kernel says no" in seen[-1][1]

        found = await events(client, "/", enough)
        names = [name for name, _ in found]
        assert names[:3] == ["live_tiles", "live_disagreements", "live_nodes"]
        assert names[-1] == "live_nodes"


async def test_services_are_listed_a_page_at_a_time() -> None:
    objects = many_services(250)
    async with SimulatedNodes(2, objects=objects) as nodes, pages(nodes) as (client, _):
        view = await (await client.get("/services", headers=JSON)).json()
        assert (view["total"], view["pages"], len(view["rows"])) == (250, 3, 100)
        assert view["node"] == "node-0001"
        last = await (await client.get("/services?page=99&node=node-0002", headers=JSON)).json()
        assert (last["page"], len(last["rows"]), last["node"]) == (3, 50, "node-0002")
        found = await (await client.get("/services?q=shop-01/ 21", headers=JSON)).json()
        assert [row["service"] for row in found["rows"]] == [
            f"shop-01/web-{number:05}" for number in (21, 121, 221)
        ]
        bad = await (await client.get("/services?trouble=1", headers=JSON)).json()
        assert bad["matching"] == bad["total"] == len(bad["rows"]) > 0
        assert {row["problem"] for row in bad["rows"]} == {"no endpoint: clients are rejected"}
        few = await (await client.get("/services?trouble=1&q=web-00050")).text()
        assert "1 of" in few
        assert "Services in trouble, as node" in few
        text = await (await client.get("/services?q=web-00050")).text()
        assert "no endpoint: clients are rejected" in text
        assert '<a href="/services/shop-10/web-00050">' in text
        assert "No Service has this" in await (await client.get("/services?q=nothing")).text()
        # What nobody can have changed since is not asked for again.
        asked = len(nodes.asked)
        await client.get("/services?q=web-00050")
        assert len(nodes.asked) == asked
        nodes.change("node-0001", revision=99)
        async with asyncio.timeout(60):
            while len(nodes.asked) == asked:
                await client.get("/services?q=web-00050")


async def test_services_of_many_long_names_take_several_requests() -> None:
    objects = [
        obj
        for number in range(100)
        for name in [f"{'s' * 58}-{number:03}"]
        for obj in (
            kube.service(name, f"10.96.0.{number + 1}", namespace="n" * 63),
            kube.endpoint_slice(f"{name}-x", name, "10.244.0.1", namespace="n" * 63),
        )
    ]
    async with SimulatedNodes(1, objects=objects) as nodes, pages(nodes) as (client, _):
        view = await (await client.get("/services", headers=JSON)).json()
        assert len(view["rows"]) == 100
        worlds = [path for _, path in nodes.asked if path.startswith("/world")]
        assert len(worlds) > 1
        assert max(map(len, worlds)) < 8000


async def test_services_that_are_not_served_say_why() -> None:
    headless = kube.service("db", "None")
    async with SimulatedNodes(1, objects=[headless]) as nodes, pages(nodes) as (client, _):
        text = await (await client.get("/services")).text()
        assert "not served: <bdi>headless" in text


async def test_services_are_read_from_a_node_that_can_be_reached() -> None:
    objects = many_services(2)
    async with SimulatedNodes(2, objects=objects) as nodes, pages(nodes) as (client, fleet):
        nodes.stop("node-0001")
        async with asyncio.timeout(60):
            version = 0
            while not any(each.problem for each in fleet.seen):
                version = await fleet.changed(version)
        view = await (await client.get("/services", headers=JSON)).json()
        assert view["node"] == "node-0002"
        reply = await client.get("/services?node=node-0001", headers=JSON)
        assert (reply.status, await reply.json()) == (503, {"error": "the node is down"})


async def test_services_without_a_node() -> None:
    async with SimulatedNodes(1) as nodes, pages(nodes) as (client, _):
        reply = await client.get("/services?node=x")
        assert reply.status == 503
        assert "there is no node x" in await reply.text()
    fleet = Fleet(FixedNodes())
    async with serving(Site(fleet, PAGES)) as client:
        assert "no node has answered yet" in await (await client.get("/services")).text()
        assert "No node is known." in await (await client.get("/")).text()
