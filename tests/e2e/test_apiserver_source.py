"""Following the objects of an API server that behaves."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
import yaml

from steersman.source import client, lister
from steersman.source.events import ApiEventPoster
from steersman.source.kubeconfig import ClusterAccess, load_cluster_access
from steersman.source.pace import Timing
from tests.support.apiserver.reading import (
    FAST,
    IMPATIENT,
    WORLD,
    node,
    reading,
    service,
    service_cidr,
    slice_,
    timing,
)
from tests.support.apiserver.remote import ServerThread, control
from tests.support.apiserver.server import ApiServer
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("each_http")

MODES = pytest.mark.parametrize(
    ("watch_list", "protobuf"), [("on", True), ("on", False), ("off", True), ("ignore", False)]
)


def patience(watch_list: str) -> Timing:
    """A server that ignores the wish for a WatchList is known by its silence alone."""
    return IMPATIENT if watch_list == "ignore" else FAST


@MODES
async def test_initial_lists(watch_list: str, protobuf: bool) -> None:
    async with ApiServer(WORLD) as server:
        server.watch_list, server.protobuf = watch_list, protobuf
        async with reading(server, watch_list=True, timing=patience(watch_list)) as r:
            await r.synced()
            assert r.store.services == {"cart", "till"}
            assert r.store.addresses("cart") == {"10.244.0.1", "10.244.0.2"}
            assert r.store.snapshot.node is not None
            assert r.store.snapshot.service_cidrs == ("10.96.0.0/12",)
            assert sorted(r.store.replaced) == [
                ("EndpointSlice", 1),
                ("Node", 1),
                ("Service", 2),
                ("ServiceCIDR", 1),
            ]
        assert bool(server.requests("Service", "list")) == (watch_list != "on")
        assert len(server.requests("Service", "watchlist")) == 1


async def test_requests_are_counted_and_watches_have_no_duration() -> None:
    async with ApiServer(WORLD) as server, reading(server) as r:
        await r.synced()
        host = r.source.stats.server.partition("://")[2]
        counts = r.source.stats.requests
        answered = counts.codes["200", "GET", host]
        assert answered >= 8  # four lists, four watches
        assert sum(counts.durations["GET", host].counts) <= answered - 4


async def test_an_empty_cluster_is_complete() -> None:
    async with ApiServer() as server, reading(server) as r:
        await r.synced()
        assert r.store.synced
        assert {size for _, size in r.store.replaced} == {0}


@MODES
async def test_selectors(watch_list: str, protobuf: bool) -> None:
    foreign = service("foreign", labels={"service.kubernetes.io/service-proxy-name": "other"})
    headless = slice_("headless-x", "none", "10.244.0.9", **{"service.kubernetes.io/headless": ""})
    async with ApiServer(WORLD) as server:
        server.watch_list = watch_list
        server.load([foreign, service("none", "None"), headless, node("node-b")])
        async with reading(server) as r:
            await r.synced()
            assert sorted(r.store.replaced)[1:3] == [("Node", 1), ("Service", 2)]
        for kind, name, value in (
            ("Service", "labelSelector", "!service.kubernetes.io/service-proxy-name"),
            ("Service", "fieldSelector", "spec.clusterIP!=None"),
            ("EndpointSlice", "labelSelector", "!service.kubernetes.io/headless"),
            ("Node", "fieldSelector", "metadata.name=node-a"),
        ):
            assert {request.query[name] for request in server.requests(kind)} == {value}


async def test_an_object_that_stops_matching_is_gone() -> None:
    async with ApiServer(WORLD) as server, reading(server) as r:
        await r.synced()
        server.add(service("cart", labels={"service.kubernetes.io/service-proxy-name": "other"}))
        await until(lambda: r.store.services == {"till"})


@MODES
async def test_events(watch_list: str, protobuf: bool) -> None:
    async with ApiServer(WORLD) as server:
        server.watch_list, server.protobuf = watch_list, protobuf
        async with reading(server, watch_list=True, timing=patience(watch_list)) as r:
            await r.synced()
            server.add(service("new", "10.96.0.7"))
            server.add(slice_("cart-x", "cart", "10.244.0.3"))
            server.delete("Service", "till", "shop")
            server.delete("ServiceCIDR", "kubernetes")
            await until(lambda: r.store.services == {"cart", "new"})
            await until(lambda: r.store.addresses("cart") == {"10.244.0.3"})
            await until(lambda: r.store.snapshot.service_cidrs == ())
            server.add(service_cidr("10.97.0.0/16"))
            await until(lambda: r.store.snapshot.service_cidrs == ("10.97.0.0/16",))
            stats = r.source.stats.kind("Service")
            assert (stats.events, stats.lists) == (2, 1)


async def test_a_list_is_read_at_once_from_the_cache() -> None:
    """As upstream: the first in any state, later ones not older than what was seen."""
    many = [service(f"s{i}", f"10.96.{i // 250}.{i % 250}") for i in range(1200)]
    async with ApiServer((*many, node())) as server, reading(server) as r:
        await r.synced()
        assert len(r.store.services) == 1200
        for request in server.requests(verb="list"):
            assert request.query["resourceVersion"] == "0"
            assert not request.query.keys() & {"limit", "continue", "resourceVersionMatch"}
            assert request.headers["Accept-Encoding"] == "gzip"
        assert len(server.requests(verb="list")) == 4
        seen = server.add(service("new"))
        await until(lambda: "new" in r.store.services)
        server.expire()
        await until(lambda: r.source.stats.kind("Service").lists == 2)
        query = server.requests("Service", "list")[-1].query
        assert query["resourceVersion"] == seen
        assert not query.keys() & {"limit", "continue", "resourceVersionMatch"}


@pytest.mark.parametrize("status", [410, 504])
async def test_the_newest_state_is_listed_if_what_was_seen_cannot_be(status: int) -> None:
    async with ApiServer(WORLD) as server, reading(server) as r:
        await r.synced()
        if status == 410:
            server.fault("status", status=410, kind="Service", verb="list")
            server.expire()
        else:  # another history, in which the last version does not exist yet
            server.world.version = 3
            server.expire()
        await until(lambda: r.source.stats.kind("Service").lists == 2)
        _, again, newest = server.requests("Service", "list")
        assert int(again.query["resourceVersion"]) > 1
        assert "resourceVersion" not in newest.query
        assert r.store.services == {"cart", "till"}


async def test_a_list_that_is_too_large_is_read_by_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [service(f"s{i}", f"10.96.{i // 250}.{i % 250}") for i in range(1200)]
    whole = len(json.dumps(many, separators=(",", ":")))
    monkeypatch.setattr(lister, "MAX_BODY", whole * 2 // 3)
    async with ApiServer(many) as server:
        server.fault("status", status=410, kind="Service", verb="list", skip=2)
        async with reading(server, protobuf=False) as r:
            await r.synced()
            assert len(r.store.services) == 1200
            server.expire()
            await until(lambda: r.source.stats.kind("Service").lists == 2)
        queries = [request.query for request in server.requests("Service", "list")]
        assert queries[0]["resourceVersion"] == "0"
        pages = ["25", "500", "500", "500"]
        # The second page expired, so that it begins again; later it begins with pages.
        limits = [query.get("limit") for query in queries]
        assert limits == [None, "25", "500", *pages, *pages]
        assert not any("resourceVersion" in query for query in queries[1:])


async def test_pages_of_large_objects_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no page takes long to decode."""
    endpoints = [f"10.244.{i // 250}.{i % 250}" for i in range(1000)]
    many = [slice_(f"s{i}", "cart", *endpoints) for i in range(100)]
    size = len(json.dumps(many[0], separators=(",", ":")))
    monkeypatch.setattr(lister, "MAX_BODY", 50 * size)
    async with ApiServer(many) as server:
        async with reading(server, protobuf=False) as r:  # protobuf is decoded as it arrives
            await r.synced()
            assert r.store.slices == 100
        requests = server.requests("EndpointSlice", "list")[1:]
        limits = [int(request.query["limit"]) for request in requests]
        assert limits[0] == 25
        assert all(10 <= limit <= (1 << 20) // size for limit in limits[1:])


async def test_a_watch_list_goes_on_as_a_watch() -> None:
    async with ApiServer(WORLD) as server, reading(server, watch_list=True) as r:
        await r.synced()
        server.add(service("new"))
        await until(lambda: "new" in r.store.services)
        assert len(server.requests("Service", "watchlist")) == 1
        assert not server.requests("Service", "watch") + server.requests("Service", "list")
        server.drop("Service")  # it is resumed as any watch
        server.add(service("later"))
        await until(lambda: "later" in r.store.services)
        assert r.source.stats.kind("Service").lists == 1


async def test_a_list_is_taken_in_slices() -> None:
    """Whatever its size, other tasks have their turn meanwhile."""
    turns = 0

    async def watch_turns() -> None:
        nonlocal turns
        while True:
            before = len(r.store.snapshot.services)
            await asyncio.sleep(0)
            turns += 0 < len(r.store.snapshot.services) - before <= 300

    many = [service(f"s{i}", f"10.96.{i // 250}.{i % 250}") for i in range(3000)]
    for watch_list in (True, False):
        async with ApiServer(many) as server, reading(server, watch_list=watch_list) as r:
            turns, task = 0, asyncio.create_task(watch_turns())
            await r.synced()
            task.cancel()
            assert len(r.store.services) == 3000
            assert turns >= 9


async def test_bookmarks_move_the_resource_version() -> None:
    async with ApiServer(WORLD) as server:
        server.bookmark_seconds = 0.05
        async with reading(server) as r:
            await r.synced()
            server.add(node("another"))  # moves the version, but is no event of a Service
            version = str(server.world.version)
            before = r.source.stats.kind("Service").bookmarks
            await until(lambda: r.source.stats.kind("Service").bookmarks >= before + 2)
            server.drop("Service")
            await until(lambda: len(server.requests("Service", "watch")) == 2)
            assert server.requests("Service", "watch")[-1].query["resourceVersion"] == version
            assert r.source.stats.kind("Service").lists == 1


async def test_watches_end_in_time_and_go_on() -> None:
    short = timing(watch_shortest=1.0, watch_longest=1.0, idle_timeout=5.0, steady=0.5)
    async with ApiServer(WORLD) as server, reading(server, timing=short) as r:
        await r.synced()
        await until(lambda: len(server.requests("Service", "watch")) >= 2)
        server.add(service("new"))
        await until(lambda: "new" in r.store.services)
        assert r.source.stats.kind("Service").lists == 1
        assert server.requests("Service", "watch")[0].query["timeoutSeconds"] == "1"


async def test_a_large_object_is_one_line() -> None:
    addresses = [f"10.{i // 62500}.{i // 250 % 250}.{i % 250}" for i in range(20_000)]
    async with ApiServer(WORLD) as server, reading(server) as r:
        await r.synced()
        server.add(slice_("cart-x", "cart", *addresses))
        await until(lambda: len(r.store.addresses("cart")) == 20_000)


async def test_a_server_in_a_thread_is_driven_over_http() -> None:
    with ServerThread(WORLD) as server:
        async with reading(load_cluster_access(masters=[server.url])) as r:
            await r.synced()
            server.control("add", object=service("new"))
            server.control("delete", kind="Service", name="till", namespace="shop")
            await until(lambda: r.store.services == {"cart", "new"})
            assert len(server.control("requests", kind="Node", verb="watch")) == 1


async def test_a_server_as_a_process(tmp_path: Path) -> None:
    """As tests in network namespaces use it."""
    (tmp_path / "objects.yaml").write_text(yaml.safe_dump_all(WORLD))
    command = ("-m", "tests.support.apiserver.server", "--objects", str(tmp_path / "objects.yaml"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    try:
        assert process.stdout is not None
        words = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()
        assert words[:2] == ["listening", "on"]
        url = words[2]
        async with reading(load_cluster_access(masters=[url])) as r:
            await r.synced()
            await asyncio.to_thread(control, url, "restart", version=7)
            await asyncio.to_thread(control, url, "add", object=service("new"))
            await until(lambda: r.store.services == {"cart", "till", "new"})
    finally:
        process.terminate()
        assert await process.wait() == 0


async def test_a_server_that_refuses_protobuf_is_asked_for_json() -> None:
    async with ApiServer(WORLD) as server:
        server.protobuf = False
        access = ClusterAccess(
            servers=(server.url,), accepted="application/vnd.kubernetes.protobuf"
        )
        async with reading(access) as r:
            await r.synced()
            server.add(service("new"))
            await until(lambda: "new" in r.store.services)
        assert [code for request, code in server.refused if request.kind == "Service"] == [406]


async def test_protobuf_is_what_the_server_sends() -> None:
    """Many endpoints, with gzip, and a change of one of them."""
    slices = [slice_(f"s{n}", "cart", f"10.245.{n // 200}.{n % 200}") for n in range(2000)]
    async with ApiServer((*WORLD, *slices)) as server, reading(server) as r:
        await r.synced()
        assert len(r.store.addresses("cart")) == 2002
        (request,) = server.requests("EndpointSlice", "list")
        assert request.headers["Accept"].startswith("application/vnd.kubernetes.protobuf,")
        server.add(slice_("s7", "cart", "10.246.0.1"))
        await until(lambda: "10.246.0.1" in r.store.addresses("cart"))
        assert "10.245.0.7" not in r.store.addresses("cart")
        assert r.source.stats.kind("EndpointSlice").events == 1


async def test_json_is_asked_for_where_protobuf_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "NATIVE", False)
    async with ApiServer(WORLD) as server:
        access = ClusterAccess(servers=(server.url,))
        async with reading(access) as r:
            await r.synced()
            server.add(service("new"))
            await until(lambda: "new" in r.store.services)
        event = dict.fromkeys(("action", "reason", "type", "reportingController"), "x")
        event |= {"reportingInstance": "x", "eventTime": "2026-01-01T00:00:00.000000Z"}
        await ApiEventPoster(r.source.connections).post_event(
            "shop", {"metadata": {"namespace": "shop"}, **event}
        )
        assert {request.headers["Accept"] for request in server.log} == {"application/json"}
        assert len(server.events) == 1


async def test_events_use_the_connection_of_the_watches(each_http: str) -> None:
    async with ApiServer(WORLD) as server:
        async with reading(server) as r:
            await r.synced()
            event = dict.fromkeys(("action", "reason", "type", "reportingController"), "x")
            event |= {"reportingInstance": "x", "eventTime": "2026-01-01T00:00:00.000000Z"}
            poster = ApiEventPoster(r.source.connections)
            for name in ("first", "second"):
                meta = {"name": name, "namespace": "shop"}
                await poster.post_event("shop", {"metadata": meta, **event})
        assert len(server.events) == 2
        if server.front is not None:
            assert server.front.visits == 1
