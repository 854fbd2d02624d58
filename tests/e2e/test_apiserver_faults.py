"""An API server that misbehaves: every fault is a counted retry, and the world stays."""

from __future__ import annotations

import json
import logging
import random
from typing import Any

import pytest

from steersman.source.kubeconfig import ClusterAccess
from tests.support.apiserver.reading import (
    IMPATIENT,
    WORLD,
    WatchedStore,
    reading,
    service,
    slice_,
    timing,
)
from tests.support.apiserver.server import ApiServer
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("each_http")

FAULTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("http_403", {"what": "status", "status": 403}),
    ("http_410", {"what": "status", "status": 410}),
    ("http_429", {"what": "status", "status": 429}),
    ("http_500", {"what": "status", "status": 500}),
    ("http_503", {"what": "status", "status": 503}),
    ("not_json", {"what": "html"}),
    ("redirect", {"what": "redirect"}),
    ("connection", {"what": "drop"}),
    ("http_500", {"what": "error_event", "status": 500}),
    ("http_410", {"what": "error_event", "status": 410}),
)
LIST_FAULTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("malformed", {"what": "empty"}),
    ("malformed", {"what": "wrong_kind"}),
    ("malformed", {"what": "truncate"}),
    ("malformed", {"what": "huge_line"}),
    ("malformed", {"what": "end"}),
    ("timeout", {"what": "stall"}),
)
WATCH_FAULTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("truncated", {"what": "empty"}),  # no newline ends it
    ("truncated", {"what": "truncate"}),
    ("relist", {"what": "huge_line"}),
    ("short_watch", {"what": "end"}),
    ("timeout", {"what": "stall"}),
)


def names(rows: tuple[tuple[str, dict[str, Any]], ...]) -> list[str]:
    return [f"{fault['what']}-{fault.get('status', '')}".rstrip("-") for _, fault in rows]


@pytest.mark.parametrize(("reason", "fault"), FAULTS[:8] + LIST_FAULTS,
                         ids=names(FAULTS[:8] + LIST_FAULTS))  # fmt: skip
async def test_initial_list(reason: str, fault: dict[str, Any]) -> None:
    async with ApiServer(WORLD) as server:
        server.fault(kind="Service", verb="list", times=3, **fault)
        async with reading(server, watch_list=False, timing=IMPATIENT) as r:
            await r.synced()
            assert r.store.services == {"cart", "till"}
            assert r.store.replaced.count(("Service", 2)) == 1
            assert r.source.stats.kind("Service").errors[reason] >= 1


@pytest.mark.parametrize("fault", [f for _, f in FAULTS + WATCH_FAULTS],
                         ids=names(FAULTS + WATCH_FAULTS))  # fmt: skip
async def test_initial_watch_list(fault: dict[str, Any]) -> None:
    async with ApiServer(WORLD) as server:
        server.fault(kind="Service", verb="watchlist", times=2, **fault)
        async with reading(server, watch_list=True, timing=IMPATIENT) as r:
            await r.synced()
            assert r.store.services == {"cart", "till"}
            assert {size for kind, size in r.store.replaced if kind == "Service"} == {2}


@pytest.mark.parametrize("protobuf", [True, False])
@pytest.mark.parametrize(("reason", "fault"), FAULTS + WATCH_FAULTS,
                         ids=names(FAULTS + WATCH_FAULTS))  # fmt: skip
async def test_watch(reason: str, fault: dict[str, Any], protobuf: bool) -> None:
    async with ApiServer(WORLD) as server:
        server.protobuf = protobuf
        server.fault(kind="Service", verb="watch", times=2, **fault)
        async with reading(server, timing=IMPATIENT) as r:
            await until(lambda: r.store.services == {"cart", "till"})
            server.add(service("new"))
            server.delete("Service", "till", "shop")
            await until(lambda: r.store.services == {"cart", "new"})
            # Bytes that are no frame in protobuf look like one of many gigabytes: a relist.
            errors = r.source.stats.kind("Service").errors
            await until(lambda: errors[reason] or (protobuf and errors["relist"]))
            assert min(size for kind, size in r.store.replaced if kind == "Service") == 2


@pytest.mark.parametrize(("reason", "fault"), FAULTS[:8] + LIST_FAULTS,
                         ids=names(FAULTS[:8] + LIST_FAULTS))  # fmt: skip
async def test_the_world_is_never_emptied(reason: str, fault: dict[str, Any]) -> None:
    async with (
        ApiServer(WORLD) as server,
        reading(server, watch_list=False, timing=IMPATIENT) as r,
    ):
        await r.synced()
        server.fault(kind="Service", verb="list", times=-1, **fault)
        server.expire()
        await until(lambda: r.source.stats.kind("Service").errors[reason] >= 2)
        assert r.store.services == {"cart", "till"}
        assert not r.source.stats.connected
        server.add(service("new"))
        server.clear_faults()
        await until(lambda: r.store.services == {"cart", "till", "new"})
        assert r.source.stats.kind("Service").lists >= 2


async def test_a_dropped_watch_resumes_where_it_was(
    caplog: pytest.LogCaptureFixture, each_http: str
) -> None:
    caplog.set_level(logging.INFO, "steersman.source")
    async with ApiServer(WORLD) as server, reading(server) as r:
        await r.synced()
        version = server.add(service("first"))
        await until(lambda: "first" in r.store.services)
        server.drop()
        server.delete("Service", "till", "shop")
        await until(lambda: "till" not in r.store.services)
        assert server.requests("Service", "watch")[-1].query["resourceVersion"] == version
        assert r.source.stats.kind("Service").lists == 1
    # All kinds lose their watch, and the first of them logs it.
    broke = {
        "HTTP/1.1": ": the connection broke in the middle of an answer; keeping previous state",
        "HTTP/2": ": the server broke off its answer: INTERNAL_ERROR; keeping previous state",
    }[each_http]
    assert [line for line in caplog.messages if broke in line]


async def test_a_stalled_watch_is_dropped() -> None:
    async with ApiServer(WORLD) as server, reading(server, timing=IMPATIENT) as r:
        await r.synced()
        server.stall(True)
        server.add(service("new"))
        await until(lambda: r.source.stats.kind("Service").errors["timeout"] >= 1)
        server.stall(False)
        await until(lambda: "new" in r.store.services)
        assert r.source.stats.kind("Service").lists == 1


async def test_expired_history_is_a_relist() -> None:
    async with ApiServer(WORLD) as server, reading(server) as r:
        await r.synced()
        server.stall(True)
        server.delete("Service", "till", "shop")
        server.compact()
        server.stall(False)
        server.drop()
        await until(lambda: r.store.services == {"cart"})
        assert r.source.stats.kind("Service").lists == 2
        assert r.source.stats.kind("Service").errors["http_410"] == 1


@pytest.mark.parametrize("version", [1, 50, 100_000])
async def test_another_life_of_the_server(version: int) -> None:
    async with ApiServer(WORLD) as server:
        server.world.version = 5000
        server.load(WORLD)
        async with reading(server) as r:
            await r.synced()
            server.restart(version)
            server.delete("Service", "till", "shop")
            server.add(service("new"))
            await until(lambda: r.store.services == {"cart", "new"})


async def test_a_watch_from_the_future_that_stays_silent() -> None:
    async with ApiServer(WORLD) as server, reading(server, timing=IMPATIENT) as r:
        await r.synced()
        server.world.version = 50  # nothing was dropped: only the silence tells
        server.add(service("new"))
        await until(lambda: "new" in r.store.services)
        assert r.source.stats.kind("Service").errors["relist"] >= 1


async def test_a_watch_whose_versions_go_back_is_a_relist() -> None:
    async with ApiServer(WORLD) as server, reading(server, protobuf=False) as r:
        await r.synced()
        server.stall()
        server.add(service("missed"))
        server.stall(False)
        bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "5"}}}
        server.send("Service", json.dumps(bookmark) + "\n")
        await until(lambda: r.source.stats.kind("Service").lists == 2)
        assert "missed" in r.store.services
        assert r.source.stats.kind("Service").errors["relist"] == 1


async def test_a_server_that_was_down() -> None:
    async with ApiServer(WORLD) as server, reading(server) as r:
        await r.synced()
        await server.stop_listening()
        await until(lambda: r.source.stats.kind("Service").errors["connect"] >= 2)
        assert r.store.services == {"cart", "till"}
        await server.listen_again()
        server.add(service("new"))
        await until(lambda: "new" in r.store.services)


async def test_absent_and_forbidden_kinds_hold_nothing_up() -> None:
    async with ApiServer(WORLD) as server:
        server.absent, server.forbidden = frozenset({"ServiceCIDR"}), frozenset({"Node"})
        async with reading(server) as r:
            await r.synced()
            assert r.store.services == {"cart", "till"}
            assert r.store.snapshot.node is None
            server.absent = server.forbidden = frozenset()
            await until(lambda: r.store.snapshot.node is not None)
            await until(lambda: r.store.snapshot.service_cidrs)


async def test_what_a_starting_server_forbids_for_a_moment_is_soon_asked_for_again() -> None:
    async with ApiServer(WORLD) as server:
        server.forbidden = frozenset({"Node"})
        async with reading(server, timing=timing(optional_retry=3600.0, longest=10.0)) as r:
            await r.synced()
            await until(lambda: r.source.stats.kind("Node").errors["http_403"] >= 2)
            server.forbidden = frozenset()
            await until(lambda: r.store.snapshot.node is not None)


@pytest.mark.parametrize(
    ("status", "again"), [(403, True), (404, True), (400, False), (422, False)]
)
async def test_a_refused_watch_list_is_remembered_only_where_it_is_unknown(
    status: int, again: bool
) -> None:
    async with ApiServer(WORLD) as server:
        server.fault("status", status=status, kind="Service", verb="watchlist")
        async with reading(server, watch_list=True) as r:
            await r.synced()
            server.expire()
            await until(lambda: r.source.stats.kind("Service").lists == 2)
            assert len(server.requests("Service", "watchlist")) == 1 + again


async def test_a_line_that_is_too_long_is_listed_otherwise_once() -> None:
    async with ApiServer(WORLD) as server, reading(server, watch_list=True) as r:
        await r.synced()
        server.fault("huge_line", kind="Service", verb="watch")
        server.drop("Service")
        await until(lambda: r.source.stats.kind("Service").lists == 2)
        plain = [r for r in server.requests("Service", "list") if "limit" not in r.query]
        assert len(plain) == 1  # beside the probe before the watch is resumed
        await until(lambda: r.source.stats.kind("Service").connected)  # only watches expire
        server.expire()
        await until(lambda: r.source.stats.kind("Service").lists == 3)
        assert len(server.requests("Service", "list")) == 2
        assert len(server.requests("Service", "watchlist")) == 2


async def test_what_stays_forbidden_is_asked_for_seldom() -> None:
    async with ApiServer(WORLD) as server:
        server.forbidden = frozenset({"Node"})
        async with reading(server, timing=timing(optional_retry=3600.0)) as r:
            await r.synced()
            errors = r.source.stats.kind("Node").errors
            await until(lambda: errors["http_403"] >= 3)  # after 10, 20 ms; then at 40 ms: grown
            server.forbidden = frozenset()
            server.add(service("new"))
            await until(lambda: "new" in r.store.services)
            assert (errors["http_403"], r.store.snapshot.node) == (3, None)


@pytest.mark.parametrize("how", ["forbidden", "absent"])
async def test_a_kind_that_goes_away_keeps_what_is_known_and_is_asked_for_soon(how: str) -> None:
    """An error of RBAC is short, and the node may have another zone by then."""
    seldom = timing(optional_retry=3600.0)
    async with ApiServer(WORLD) as server, reading(server, timing=seldom) as r:
        await r.synced()
        setattr(server, how, frozenset({"Node"}))
        server.expire()
        stats = r.source.stats.kind("Node")
        await until(lambda: stats.errors["http_403"] + stats.errors["http_404"] >= 8)
        assert r.store.snapshot.node is not None
        assert not stats.connected
        setattr(server, how, frozenset())
        await until(lambda: stats.lists == 2)
        await until(lambda: stats.connected)


@pytest.mark.parametrize("sent", ['{"type":\n', '{"type":"MOVED","object":{}}\n'])
async def test_a_malformed_event_is_a_relist(sent: str) -> None:
    """Resumed, the watch would begin with the same event until etcd compacts it."""
    async with ApiServer(WORLD) as server, reading(server, protobuf=False) as r:
        await r.synced()
        server.send("Service", sent)
        await until(lambda: r.source.stats.kind("Service").lists == 2)
        assert r.source.stats.kind("Service").errors == {"relist": 1}
        assert r.store.services == {"cart", "till"}


async def test_a_malformed_object_keeps_its_last_good_version() -> None:
    bad = slice_("cart-x", "cart", "10.244.0.1")
    bad["ports"] = "none"
    async with ApiServer(WORLD) as server, reading(server) as r:
        await r.synced()
        version = server.add(bad)
        await until(lambda: r.store.findings)
        (finding,) = r.store.findings
        assert finding.object == "EndpointSlice shop/cart-x"
        assert finding.reason.startswith("malformed at byte ")
        server.drop()
        await until(lambda: len(server.requests("EndpointSlice", "watch")) == 2)
        assert server.requests("EndpointSlice", "watch")[-1].query["resourceVersion"] == version
        server.expire()
        await until(lambda: r.source.stats.kind("EndpointSlice").lists == 2)
        assert r.store.addresses("cart") == {"10.244.0.1", "10.244.0.2"}
        assert len(r.store.findings) == 1
        server.add(slice_("cart-x", "cart", "10.244.0.5"))
        await until(lambda: r.store.addresses("cart") == {"10.244.0.5"})
        assert not r.store.findings


@pytest.mark.parametrize("protobuf", [True, False])
@pytest.mark.parametrize("watch_list", [True, False])
async def test_a_malformed_object_in_a_list_stops_no_other(
    watch_list: bool, protobuf: bool
) -> None:
    bad = service("bad")
    bad["spec"]["ports"] = [{"port": "http"}]
    async with ApiServer((*WORLD, bad)) as server, reading(server, watch_list=watch_list) as r:
        server.protobuf = protobuf
        await r.synced()
        assert r.store.services == {"cart", "till"}
        assert [f.object for f in r.store.findings] == ["Service shop/bad"]
        server.delete("Service", "bad", "shop")
        await until(lambda: r.store.findings == ())


@pytest.mark.parametrize(
    "text",
    [
        "{}\n",
        "[]\n",
        '{"type":"GREETING","object":{}}\n',
        '{"type":"ERROR","object":[]}\n',
        '{"type":"BOOKMARK","object":3}\n{"type":7}\n',
        "\x00\x01\n",
        '{"type":"DELETED","object":{"metadata":{"name":7}}}\n',
        '{"type":"ADDED","object":' + "[" * 5000 + "\n",
        "\n \n<html>\n",
    ],
)
async def test_rubbish_in_a_watch(text: str) -> None:
    async with ApiServer(WORLD) as server, reading(server, timing=IMPATIENT) as r:
        await r.synced()
        server.send("Service", text)
        server.add(service("new"))
        await until(lambda: "new" in r.store.services)
        assert r.source.stats.kind("Service").errors
        assert r.store.services == {"cart", "till", "new"}


async def test_a_malformed_object_can_be_deleted() -> None:
    async with ApiServer(WORLD) as server, reading(server, protobuf=False) as r:
        await r.synced()
        meta = {"namespace": "shop", "name": "till", "annotations": {"a": 1}, "labels": 2}
        event = {"type": "DELETED", "object": {"metadata": meta, "spec": []}}
        server.send("Service", json.dumps(event) + "\n")
        await until(lambda: r.store.services == {"cart"})
        assert not r.source.stats.errors()


async def test_retry_after_is_honoured_and_waits_grow() -> None:
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    slow = timing(sleep=note, first=1.0, longest=8.0, random=lambda: 0.0)
    async with ApiServer(WORLD) as server:
        server.fault("status", kind="Service", verb="list", status=500, times=5)
        server.fault("status", kind="Service", verb="list", status=429, retry_after=7)
        async with reading(server, watch_list=False, timing=slow) as r:
            await r.synced()
    assert waits[:5] == pytest.approx([0.1, 0.2, 0.4, 0.8, 0.8])
    assert waits[5] == pytest.approx(7.8)


async def test_no_more_requests_than_waits() -> None:
    async with ApiServer(WORLD) as server:
        server.fault("end", kind="Service", verb="watch", times=20)
        async with reading(server) as r:
            await until(lambda: r.source.stats.kind("Service").errors["short_watch"] == 20)
            stats = r.source.stats.kind("Service")
            asked = len(server.requests("Service"))
        assert asked <= 2 * stats.errors.total() + 3  # a resumed watch is preceded by a probe


async def test_the_same_failure_is_logged_once_per_wait(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "steersman.source")
    async with ApiServer(WORLD) as server:
        server.fault("status", kind="Service", verb="list", status=500, times=30)
        async with reading(server, watch_list=False) as r:
            await r.synced()
    lines = [record for record in caplog.messages if record.startswith("Service: 500")]
    assert 1 <= len(lines) <= 4
    assert "keeping previous state" in lines[0]


async def test_what_meets_every_kind_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "steersman.source")
    async with ApiServer(WORLD) as server, reading(server) as r:
        await r.synced()
        await server.stop_listening()
        kinds = r.source.stats.kinds.values()
        await until(lambda: all(stats.errors["connect"] >= 3 for stats in kinds))
        await server.listen_again()
        await until(lambda: r.source.stats.connected)
    assert len([text for text in caplog.messages if "cannot connect to" in text]) == 1
    assert any("connected again, watching" in text for text in caplog.messages)


async def test_failing_over_again_and_again_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    access = ClusterAccess(servers=("http://127.0.0.1:1", "http://127.0.0.1:2"))
    async with reading(access) as r:
        await until(lambda: r.source.stats.failovers >= 20)
    assert len([text for text in caplog.messages if "failed, trying" in text]) == 2


def misbehave(server: ApiServer, dice: random.Random) -> None:
    match dice.randrange(4):
        case 0:
            server.drop()
        case 1:
            server.expire()
        case 2:
            server.restore(dice)
        case _:
            server.fault(dice.choice(["html", "truncate", "drop", "end", "status"]))


def change(server: ApiServer, dice: random.Random, step: int) -> None:
    name = f"s{dice.randrange(12)}"
    match dice.randrange(6):
        case 0 | 1:
            server.delete("Service", name, "shop")
        case 2:
            server.add(slice_(f"{name}-x", name, f"10.244.0.{step}"))
        case _:
            server.add(service(name, f"10.96.1.{step}"))


def view(store: WatchedStore) -> object:
    """The known objects, without resourceVersions (which differ between servers)."""
    services = {name.name: s.spec for name, s in store.snapshot.services.items()}
    return services, {name.name: store.addresses(name.name) for name in store.snapshot.slices}


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_chaos_ends_like_a_fresh_start(seed: int) -> None:
    dice = random.Random(seed)
    async with ApiServer() as server:
        server.load(WORLD)
        async with reading(server, timing=IMPATIENT) as r:
            for step in range(150):
                if dice.random() < 0.3:
                    misbehave(server, dice)
                else:
                    change(server, dice, step)
                if dice.random() < 0.3:
                    requests = len(server.log)
                    await until(lambda before=requests: len(server.log) > before)  # type: ignore[misc]
            server.clear_faults()
            async with reading(server) as fresh:
                await fresh.synced()
                await until(lambda: view(fresh.store) == view(r.store))
            assert r.source.stats.kind("Service").lists >= 2
