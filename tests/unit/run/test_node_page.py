"""The page of a node: its state, once or as a stream that costs nothing while nobody reads it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
import yarl

from steersman import __version__
from steersman.model.drift import Drift
from steersman.model.errors import BusyError
from steersman.model.findings import Finding, Severity
from steersman.model.names import ObjectName
from steersman.model.node_state import NodeState
from steersman.run.pages import node_page
from steersman.run.pages.digest_page import DigestPage
from steersman.run.pages.node_page import MOST_LISTENERS, NodePage
from steersman.run.serve.http import application
from tests.support.builders.store import slice_
from tests.support.http import serving
from tests.support.modes.memory import World
from tests.support.node_states import states_of
from tests.support.waiting import until

SECONDS = 60.0


class Node:
    """A page on a world of four Services."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.world = World()
        self.cpu = 1.0
        self.asked = 0
        self.states = states_of(self.world, clock=clock, cpu=lambda: self.cpu)
        self.states.rates = self.rates
        self.page = NodePage(self.states, clock=clock)

    def rates(self) -> tuple[float | None, float | None]:
        self.asked += 1
        return 3.0, None

    @asynccontextmanager
    async def served(self) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
        async with (
            serving(application({"/node": self.page.serve})) as port,
            aiohttp.ClientSession() as session,
        ):
            yield session, f"http://127.0.0.1:{port}/node"


async def line(answer: aiohttp.ClientResponse) -> NodeState:
    async with asyncio.timeout(SECONDS):
        return msgspec.json.decode(await answer.content.readline(), type=NodeState)


async def test_the_state_is_that_of_the_last_sync() -> None:
    node = Node()
    await node.world.run()
    node.states.drift = lambda: (2, Drift(at=9.0, missing=1))
    node.states.lags.add(0.0, -0.5, (0.25,))
    async with node.served() as (session, url), session.get(url) as answer:
        found = msgspec.json.decode(await answer.read(), type=NodeState)
    assert (found.node, found.mode, found.version) == ("me", "memory", __version__)
    assert (found.pid, found.digest, found.healthy) == (os.getpid(), "", True)
    assert (found.services, found.service_ports, found.endpoint_slices) == (4, 4, 4)
    assert found.objects == node.world.sync.state.objects > 0
    assert (found.revision, found.sync_reason, found.refused) == (1, "start", 0)
    assert found.phases.keys() >= {"plan", "render", "apply"}
    assert (found.repairs, found.drift) == (2, Drift(at=9.0, missing=1))
    assert (found.connections, found.failed, found.lag) == (3.0, None, 0.5)
    assert found.memory > 1 << 20
    assert found.families == ("IPv4",)


async def test_the_state_without_findings_is_small() -> None:
    node = Node()
    await node.world.run()
    assert len(msgspec.json.encode(node.page.state())) < 4000


async def test_the_worst_findings_are_shown_and_all_are_counted() -> None:
    node = Node()
    await node.world.run()
    many = [Finding(f"Service shop/s{n:03}", "spec", "w" * 100) for n in range(90)]
    bad = Finding("Service shop/x", "spec", "e", Severity.ERROR)
    node.world.sync.state = msgspec.structs.replace(
        node.world.sync.state, findings=(*many, bad), unlisted={Severity.WARNING: 5}
    )
    state = node.page.state()
    assert state.findings == (bad, *many[:49])
    assert state.finding_counts == {Severity.WARNING: 95, Severity.ERROR: 1}
    # A few very long ones are too many, too.
    long = tuple(Finding(f"Service shop/s{n}", "spec", "w" * 5000) for n in range(9))
    node.world.sync.state = msgspec.structs.replace(node.world.sync.state, findings=long)
    assert node.page.state().findings == long[:3]


async def test_the_share_of_a_core_is_that_of_the_last_seconds() -> None:
    now = 100.0
    node = Node(lambda: now)
    assert node.page.state().cpu == 0.0
    now, node.cpu = 110.0, 3.5
    assert node.page.state().cpu == 0.25


async def test_a_stream_sends_a_line_now_and_for_every_change() -> None:
    node = Node()
    await node.world.run()
    async with (
        node.served() as (session, url),
        session.get(f"{url}?watch=1") as one,
        session.get(f"{url}?watch=1") as other,
    ):
        assert (await line(one)).revision == (await line(other)).revision == 1
        asked = node.asked
        node.world.mode.kernel.clear()
        node.world.sync.suspect()
        await node.world.run()
        for _ in range(50):  # a burst is one line
            node.page.changed()
        assert (await line(one)).revision == (await line(other)).revision == 2
        assert node.asked == asked + 1, "one line is made for all listeners"


async def test_without_listeners_nothing_is_made() -> None:
    node = Node()
    await node.world.run()
    async with node.served() as (session, url):
        async with session.get(f"{url}?watch=1") as answer:
            await line(answer)
        # The client has left: the next write notices it.

        def left() -> bool:
            node.page.changed()
            return not node.page._listeners

        await until(left)
        asked = node.asked
        node.page.changed()
        await asyncio.sleep(0)
        assert node.asked == asked


async def test_a_heartbeat_tells_that_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_page, "_HEARTBEAT", 0.05)
    node = Node()
    await node.world.run()
    async with node.served() as (session, url), session.get(f"{url}?watch=1") as answer:
        lines = [await line(answer) for _ in range(3)]
    assert [each.revision for each in lines] == [1, 1, 1]


async def test_listeners_are_bounded() -> None:
    node = Node()
    await node.world.run()
    async with node.served() as (_, url), aiohttp.ClientSession() as session:
        answers = [await session.get(f"{url}?watch=1") for _ in range(MOST_LISTENERS)]
        async with session.get(f"{url}?watch=1") as refused:
            assert refused.status == 503
            assert "watch this node already" in await refused.text()
        for answer in answers:
            answer.close()

        async def admitted() -> bool:
            async with session.get(f"{url}?watch=1") as again:
                return again.status == 200

        await until(admitted)


async def test_a_slow_reader_gets_the_newest_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads nothing for a while: what it has missed is not sent any more."""
    monkeypatch.setattr(node_page, "_APART", 0.0)
    node = Node()
    await node.world.run()
    big = tuple(Finding(f"Service shop/s{n}", "spec", "w" * 900) for n in range(16))
    made = 2000  # lines of 16 kB: far more than sockets buffer
    async with node.served() as (session, url), session.get(f"{url}?watch=1") as answer:
        await line(answer)
        for number in range(made):
            node.world.sync.state = msgspec.structs.replace(
                node.world.sync.state, revision=number + 2, findings=big
            )
            node.page.changed()
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        seen: list[int] = []
        while not seen or seen[-1] != made + 1:
            seen.append((await line(answer)).revision)
            node.page.changed()
    assert seen == sorted(seen)
    assert len(seen) < made / 2


async def test_a_listener_that_reads_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_page, "_APART", 0.0)
    monkeypatch.setattr(node_page, "_STUCK", 0.1)
    node = Node()
    await node.world.run()
    big = tuple(Finding(f"Service shop/s{n}", "spec", "w" * 900) for n in range(16))
    node.world.sync.state = msgspec.structs.replace(node.world.sync.state, findings=big)
    async with node.served() as (session, url):
        at = yarl.URL(url)
        reader, writer = await asyncio.open_connection(at.host, at.port, limit=1024)
        writer.write(b"GET /node?watch=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: bool(node.page._listeners))
        async with asyncio.timeout(SECONDS):
            while node.page._listeners:
                node.page.changed()
                await asyncio.sleep(0)
        writer.close()
        del reader, session


async def test_conditions_are_followed() -> None:
    node = Node()
    task = asyncio.create_task(node.page.follow())
    await until(lambda: node.asked > 0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_digests_are_made_when_first_asked_for_and_kept_up_to_date() -> None:
    world, told = World(), asyncio.Event()
    await world.run()
    page = DigestPage(world.store, world.sync.in_force, told.set)
    report = await world.sync.check()
    assert report is not None
    await page.observe(report)
    assert page.total() == "", "it is being made"
    async with asyncio.timeout(SECONDS):
        await told.wait()
    first = page.total()
    assert first not in ("", "0" * 16)
    world.store.upsert(slice_("s1-x", "s1", ("10.1.0.77",)))
    world.store.delete("Service", ObjectName("shop", "s2"))
    assert page.total() == first, "not in force yet"
    report = await world.sync.run()
    assert report is not None
    await page.observe(report)
    async with (
        serving(application({"/digests": page.serve})) as port,
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/digests") as answer,
    ):
        found = await answer.json()
    assert found.keys() == {"shop/s1", "shop/s3", "shop/s4"}
    assert f"{sum(int(each, 16) for each in found.values()) % 2**64:016x}" == page.total() != first


class Digested:
    """A world whose digests are followed."""

    def __init__(self) -> None:
        self.world = World()
        self.page = DigestPage(self.world.store, self.world.sync.in_force)

    async def start(self) -> dict[str, str]:
        self.page.total()
        return await self.sync()

    async def sync(self) -> dict[str, str]:
        """Sync and report; return the digests."""
        report = await self.world.sync.check()
        assert report is not None
        await self.page.observe(report)
        return await self.digests()

    async def digests(self) -> dict[str, str]:
        async with (
            serving(application({"/digests": self.page.serve})) as port,
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/digests") as answer,
        ):
            found: dict[str, str] = await answer.json()
            return found


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    """Services with another digest."""
    return {name for name in {**one, **other} if one.get(name) != other.get(name)}


async def test_a_service_that_the_kernel_refuses_keeps_the_digest_of_its_old_version() -> None:
    digested = Digested()
    world = digested.world
    first = await digested.start()
    world.mode.poison = {"shop/s1 (TCP, IPv4)"}
    for name in ("s1", "s2"):
        world.store.upsert(slice_(f"{name}-x", name, ("10.1.0.77",)))
    during = await digested.sync()
    assert world.sync.in_force.refused == {ObjectName("shop", "s1")}
    assert differing(first, during) == {"shop/s2"}
    world.store.delete("Service", ObjectName("shop", "s2"))
    assert differing(during, await digested.sync()) == {"shop/s2"}
    world.mode.poison = set()
    after = await digested.sync()  # its reason is gone, and nothing changed in the Store
    assert world.sync.in_force.refused == frozenset()
    assert differing(during, after) == {"shop/s1", "shop/s2"}
    fresh = Digested()
    fresh.world = world
    fresh.page = DigestPage(world.store, world.sync.in_force)
    assert await fresh.start() == after


async def test_a_service_that_cannot_be_planned_keeps_the_digest_of_its_old_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digested = Digested()
    first = await digested.start()

    def failing(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    digested.world.store.upsert(slice_("s1-x", "s1", ("10.1.0.77",)))
    with monkeypatch.context() as patch:
        patch.setattr("steersman.compile.planner.plan_service", failing)
        assert differing(first, await digested.sync()) == set()
    assert differing(first, await digested.sync()) == {"shop/s1"}


async def test_a_change_that_is_not_in_force_yet_changes_no_digest() -> None:
    digested = Digested()
    world = digested.world
    first = await digested.start()
    world.store.upsert(slice_("s1-x", "s1", ("10.1.0.77",)))
    report = await world.sync.run()
    world.store.upsert(slice_("s1-x", "s1", ("10.1.0.78",)))  # before anybody heard of the sync
    world.store.upsert(slice_("s2-x", "s2", ("10.1.0.79",)))
    await digested.page.observe(report)
    assert differing(first, await digested.digests()) == set()
    world.mode.busy = True
    with pytest.raises(BusyError):
        await world.sync.run()
    await digested.page.observe()
    assert differing(first, await digested.digests()) == set()
    world.mode.busy = False
    assert differing(first, await digested.sync()) == {"shop/s1", "shop/s2"}
