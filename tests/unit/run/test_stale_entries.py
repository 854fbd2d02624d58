"""The conntrack entries to delete after syncs, whatever fails (behaviour 12)."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.compile.conntrack import served_ports
from steersman.model.conntrack import Cleanup, Confirm, Stale, pack_socket
from steersman.model.errors import ApplyError, BusyError
from steersman.model.kube import KubeObject
from steersman.model.names import Family, ObjectName
from steersman.modes.base import Mode
from steersman.modes.capabilities import ConnectionTable
from steersman.run.observe.prometheus import Labelled, exposition
from steersman.run.observe.stale_entries import AGAIN, AT_ONCE, HOUR, Debts, Key
from tests.support.builders import kube
from tests.support.builders.store import make, replace_objects, service, slice_
from tests.support.modes.bare import BareMode
from tests.support.modes.conntrack_world import World, printed

# Entries to delete

_NAMES = st.sets(st.sampled_from("abc")).map(lambda names: [ObjectName("shop", n) for n in names])


@given(
    st.lists(
        st.tuples(st.sampled_from(["changed", "due"]), _NAMES)
        | st.tuples(st.just("begin"), st.integers(1, 3))
        | st.tuples(st.sampled_from(["pay", "fail"]), st.integers(0, 2)),
        max_size=20,
    )
)
def test_only_a_pass_that_began_after_the_change_pays_for_it(steps: list[Any]) -> None:
    """Passes may overlap and end in any order; none that failed counts."""
    owed, since = Debts(), dict[tuple[bool, ObjectName], int]()
    passes = list[tuple[int, bool, Any]]()
    for now, (step, what) in enumerate(steps):
        if step in ("changed", "due"):
            changed = step == "changed"
            owed.owe(what, changed=changed)
            since |= dict.fromkeys(((changed, name) for name in what), now)
        elif step == "begin":
            changed = any(each for each, _ in since)
            batch = owed.next(what)
            of_kind = [name for each, name in since if each == changed]
            assert len(batch.keys) == min(what, len(of_kind))
            passes.append((now, changed, batch))
        elif passes:
            began, changed, batch = passes.pop(what % len(passes))
            if step == "pay":
                owed.paid(batch, 0.0)
                for name in batch.keys:
                    if since.get((changed, name), now) < began:
                        del since[changed, name]
        assert len(owed) == len(since)
    left = set[tuple[bool, Key]]()
    while keys := (batch := owed.next(9)).keys:
        left |= {(any(each for each, _ in since.keys() - left), key) for key in keys}
        owed.paid(batch, 0.0)
    assert left == since.keys()


# The task


class Connections(ConnectionTable[Stale]):
    """A table of connections that are all stale."""

    def __init__(self) -> None:
        self.answers: list[int | Exception] = []
        """Of the next passes; then there are none."""
        self.looked: list[list[str]] = []

    def find_stale(self, stale: Stale) -> Generator[None, None, Stale]:
        yield
        self.looked.append(sorted(map(printed, stale.by_address)))
        return stale

    def delete_stale(self, found: Stale, stale: Stale) -> int:
        assert found
        answer = self.answers.pop(0) if self.answers else 0
        if isinstance(answer, Exception):
            raise answer
        return answer

    def take(self) -> list[list[str]]:
        looked, self.looked = self.looked, []
        return looked


class Forgetful(BareMode):
    """A mode that remembers connections itself."""

    name = "own"

    def __init__(self) -> None:
        self.connection_table = self.table = Connections()


def dns(name: str, number: int, protocol: str = "UDP", **spec: Any) -> KubeObject:
    address = f"10.96.{number >> 8}.{number & 255}"
    return service(
        name, **{"clusterIP": address, "ports": [{"port": 53, "protocol": protocol}], **spec}
    )


def ends(name: str, *ips: str, protocol: str = "UDP") -> KubeObject:
    return slice_(f"{name}-x", name, ips, protocol=protocol)


@asynccontextmanager
async def running(*objects: KubeObject, mode: Mode | None = None) -> AsyncIterator[World]:
    """A world after its first sync and clean-up."""
    world = World(mode)
    task = asyncio.create_task(world.stale_entries.run())
    replace_objects(world.store, "Service", [o for o in objects if "spec" in o.__struct_fields__])
    slices = [o for o in objects if "endpoints" in o.__struct_fields__]
    replace_objects(world.store, "EndpointSlice", slices)
    await world.report()
    yield world
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


A, B = [dns("a", 1), ends("a", "10.1.0.1")], [dns("b", 2), ends("b", "10.1.0.2")]


async def test_at_the_start_everything_is_looked_at_once() -> None:
    async with running(*A, *B) as world:
        assert world.table.take() == [["10.96.0.1", "10.96.0.2"]]
        assert world.stale_entries.owed == 0


async def test_a_change_concerns_its_service_only_and_tcp_costs_nothing() -> None:
    tcp = [dns("web", 3, "TCP"), ends("web", "10.1.0.3", protocol="TCP")]
    async with running(*A, *B, *tcp) as world:
        world.table.take()
        assert await world.change(ends("a", "10.1.0.9")) == [["10.96.0.1"]]
        assert await world.change(ends("web", "10.1.0.8", protocol="TCP")) == []
        assert world.stale_entries.owed == 0


async def test_a_service_that_asks_for_it_has_its_connections_closed() -> None:
    meta = {"namespace": "shop", "name": "web", "annotations": {}}
    meta["annotations"] = {"steersman/close-connections": "true"}
    spec = {"clusterIP": "10.96.0.3", "ports": [{"port": 53, "protocol": "TCP"}]}
    async with running(*A) as world:
        world.table.take()
        closing = make("Service", {"metadata": meta, "spec": spec})
        assert await world.change(closing) == [["10.96.0.3"]]


@pytest.mark.parametrize("more", [{"externalIPs": ["192.0.2.9"]}, {"type": "NodePort"}])
async def test_a_destination_that_comes_later_is_cleaned(more: dict[str, Any]) -> None:
    """Clients may have asked there before, and were not translated."""
    async with running(*A, *B) as world:
        world.table.take()
        (looked,) = await world.change(dns("a", 1, **more))
        assert looked == ["10.96.0.1", *more.get("externalIPs", ())]


async def test_a_service_that_comes_after_its_slice_is_cleaned() -> None:
    async with running(*B) as world:
        world.table.take()
        assert await world.change(ends("a", "10.1.0.1")) == []
        assert await world.change(dns("a", 1)) == [["10.96.0.1"]]


async def test_who_inherits_a_destination_is_cleaned() -> None:
    """The winner's clients are in conntrack; the loser did not change."""
    first = dns("a", 1, externalIPs=["192.0.2.9"])
    async with running(first, A[1], dns("b", 2, externalIPs=["192.0.2.9"]), B[1]) as world:
        assert world.table.take() == [["10.96.0.1", "10.96.0.2", "192.0.2.9"]]
        world.store.delete("Service", ObjectName("shop", "a"))
        assert await world.change() == [["10.96.0.1", "10.96.0.2", "192.0.2.9"]]


FAILURES = [
    OSError(errno.ENOBUFS, "No buffer space available"),
    BusyError("somebody holds the lock"),
    ApplyError("refused"),
    TimeoutError("no answer"),
    KeyError("a defect"),
]
PARTIAL = [Cleanup(1, 0, complete=False), Cleanup(1, 2, complete=True)]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
async def test_what_failed_is_tried_again_with_growing_pauses(
    failure: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running(*A, *B) as world:
        world.table.take()
        world.table.answers = [failure] * 3
        assert await world.change(ends("a", "10.1.0.9")) == [["10.96.0.1"]]
        assert await world.change(ends("b", "10.1.0.9")) == [], "not before the pause is over"
        assert await world.advance(1.0) == [["10.96.0.1", "10.96.0.2"]]
        assert await world.advance(1.9) == []
        assert await world.advance(0.1) == [["10.96.0.1", "10.96.0.2"]]
        assert world.stale_entries.owed == 2
        assert await world.advance(4.0) == [["10.96.0.1", "10.96.0.2"]]
        assert world.stale_entries.owed == 0
        assert await world.advance(AGAIN) == [["10.96.0.1", "10.96.0.2"]]
        assert await world.advance(60.0) == []
        assert sum("retrying in" in line for line in caplog.messages) == 1
        assert sum("resolved" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("failure", PARTIAL, ids=["incomplete", "refused"])
async def test_entries_that_stay_are_tried_again_and_hold_up_nothing_new(failure: Cleanup) -> None:
    """The kernel keeps the entries of offloaded flows, say, for as long as they are in use."""
    async with running(*A, *B) as world:
        world.table.take()
        world.table.answers = [failure] * 3
        assert await world.change(ends("a", "10.1.0.9")) == [["10.96.0.1"]]
        assert await world.change(ends("b", "10.1.0.9")) == [["10.96.0.1", "10.96.0.2"]]
        assert await world.advance(1.9) == []
        assert await world.advance(0.1) == [["10.96.0.1", "10.96.0.2"]]
        assert await world.advance(4.0) == [["10.96.0.1", "10.96.0.2"]]
        assert world.stale_entries.owed == 0


def unlisted(*_: Any) -> Any:
    raise AssertionError("everything is looked at")


async def test_a_change_of_a_service_without_node_ports_looks_at_no_other() -> None:
    class Unlisted(dict[Any, Any]):
        __iter__ = keys = values = items = unlisted

    async with running(*A, *B) as world:
        world.table.take()
        world.store.upsert(ends("a", "10.1.0.9"))
        synced = await world.sync.run()
        assert synced is not None
        state = msgspec.structs.replace(
            synced.state,
            plan=msgspec.structs.replace(
                synced.state.plan, services=Unlisted(synced.state.plan.services)
            ),
            snapshot=msgspec.structs.replace(
                synced.state.snapshot, services=Unlisted(synced.state.snapshot.services)
            ),
        )
        world.stale_entries.note(msgspec.structs.replace(synced, state=state))
        await world.settle()
        assert world.table.take() == [["10.96.0.1"]]
        assert world.stale_entries.owed == 0


async def test_metrics_that_fail_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise KeyError("no such metric")

    async with running(*A) as world:
        world.table.take()
        monkeypatch.setattr(Labelled, "__call__", refuse)
        assert await world.change(ends("a", "10.1.0.9")) == [["10.96.0.1"]]
        monkeypatch.undo()
        assert await world.advance(1.0) == [["10.96.0.1"]]
        assert world.stale_entries.owed == 0


async def test_a_list_that_changed_is_usual_and_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with running(*A) as world:
        world.table.answers = [Cleanup(0, 0, complete=False)]
        await world.change(ends("a", "10.1.0.9"))
        await world.advance(1.0)
        assert world.stale_entries.owed == 0
        assert caplog.messages == []


async def test_pauses_are_a_minute_at_most() -> None:
    async with running(*A) as world:
        world.table.answers = [OSError(errno.EPERM, "no")] * 12
        await world.change(ends("a", "10.1.0.9"))
        for _ in range(11):
            await world.advance(60.0)
        assert len(world.table.answers) == 0
        assert world.stale_entries.owed == 1


async def test_each_table_is_owed_by_itself() -> None:
    mode = Forgetful()
    async with running(*A, mode=mode) as world:
        for table in (world.table, mode.table):
            assert table.take() == [["10.96.0.1"]]
        mode.table.answers = [BusyError("not now")]
        assert await world.change(ends("a", "10.1.0.9")) == [["10.96.0.1"]]
        mode.table.take()
        assert await world.advance(1.0) == [], "conntrack has been paid"
        assert mode.table.take() == [["10.96.0.1"]]


async def test_a_change_during_a_pass_is_looked_at_again() -> None:
    async with running(*A, *B) as world:
        world.table.take()

        async def change() -> None:
            world.table.during = None
            world.store.upsert(ends("a", "10.1.0.8"))
            report = await world.sync.run()
            assert report is not None
            world.stale_entries.note(report)

        world.table.during = change
        assert await world.change(ends("a", "10.1.0.9")) == [["10.96.0.1"]] * 2
        assert world.stale_entries.owed == 0


async def test_a_service_that_is_gone_owes_its_destinations() -> None:
    """A client that never pauses has an entry there that never ends."""
    async with running(*A, *B) as world:
        world.table.take()
        world.table.answers = [OSError(errno.ENOBUFS, "full")]
        world.store.delete("Service", ObjectName("shop", "a"))
        assert await world.change() == [["10.96.0.1"]]
        assert await world.advance(1.0) == [["10.96.0.1"]]
        assert await world.advance(AGAIN) == [["10.96.0.1"]]
        assert await world.advance(60.0) == []
        assert world.stale_entries.owed == 0


async def test_a_port_that_is_left_is_cleaned_until_somebody_has_it_again() -> None:
    node_port = [{"port": 53, "protocol": "UDP", "nodePort": 30053}]
    nodes = dns("a", 1, type="NodePort", ports=node_port)
    port = bytes((17,)) + (30053).to_bytes(2, "big")
    at_node, endpoint = bytes((17, 192, 0, 2, 1)) + port[1:], pack_socket("10.1.0.1", 8080)
    async with running(nodes, A[1], *B) as world:
        confirmed = list[bool]()

        async def back() -> None:
            """The Service has its node port again while the table is listed."""
            (listed,) = world.table.asked
            assert listed.contains(at_node, endpoint)
            world.store.upsert(nodes)
            report = await world.sync.run()
            assert report is not None
            world.stale_entries.note(report)
            world.table.during = None

        world.table.asked, world.table.during = [], back
        await world.change(dns("a", 1))
        assert world.table.confirmed is not None
        confirmed.append(world.table.confirmed.contains(at_node, endpoint))
        world.store.delete("Service", ObjectName("shop", "a"))
        await world.change()
        confirmed.append(world.table.asked[-1].contains(at_node, endpoint))
        assert confirmed == [False, True]


async def test_a_change_that_could_not_be_noted_is_noted_with_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise KeyError("a defect")

    async with running(*A, *B) as world:
        world.table.take()
        monkeypatch.setattr("steersman.run.observe.stale_entries.left_destinations", refuse)
        world.store.delete("Service", ObjectName("shop", "a"))
        with pytest.raises(KeyError):
            await world.report()
        monkeypatch.undo()
        assert await world.change(ends("b", "10.1.0.9")) == [["10.96.0.1", "10.96.0.2"]]


async def test_rules_that_were_missing_make_everything_owed() -> None:
    """Who asked meanwhile was not translated, and conntrack remembers that."""
    async with running(*A, *B) as world:
        world.table.take()
        world.kernel.kernel.clear()
        world.sync.suspect()
        await world.report()
        assert world.table.take() == [["10.96.0.1", "10.96.0.2"]]
        world.sync.suspect()
        await world.report()
        assert world.table.take() == [], "nothing was missing"


async def test_untranslated_connections_are_looked_at_after_rules_were_missing() -> None:
    """Those of all Services, in one pass; a change of rules that were there makes none."""
    web = [dns("web", 3, "TCP"), ends("web", "10.1.0.3", protocol="TCP")]
    async with running(*A, *web) as world:
        looked = world.table.untranslated_looked
        assert looked == [{"a", "web"}], "at the start"
        await world.change(ends("web", "10.1.0.8", protocol="TCP"))
        assert len(looked) == 1
        world.table.untranslated = [OSError(errno.ENOBUFS, "full"), Cleanup(0, 0, complete=False)]
        world.kernel.kernel.clear()
        world.sync.suspect()
        await world.report()
        assert len(looked) == 2
        await world.advance(1.0)
        await world.advance(2.0)
        assert looked == [{"a", "web"}] * 4, "twice without success"
        assert world.stale_entries.owed == 0


async def test_everything_is_looked_at_once_an_hour() -> None:
    async with running(*A, *B) as world:
        world.table.take()
        for _ in range(3):
            assert await world.advance(HOUR - 1) == []
            assert await world.advance(1) == [["10.96.0.1", "10.96.0.2"]]


async def test_the_hourly_look_at_many_services_is_spread_over_the_hour() -> None:
    count = 3 * AT_ONCE - 10
    objects = [o for n in range(count) for o in (dns(f"s{n}", n), ends(f"s{n}", "10.1.0.1"))]
    async with running(*objects) as world:
        while world.stale_entries.owed:
            await world.settle()
        assert [len(looked) for looked in world.table.take()] == [AT_ONCE, AT_ONCE, AT_ONCE - 10]
        await world.advance(HOUR - 1)
        seen = set[str]()
        for _ in range(3):
            looked = await world.advance(HOUR / 3)
            while world.stale_entries.owed:
                await world.settle()
            (part,) = looked or world.table.take()
            assert len(part) <= AT_ONCE
            seen |= set(part)
        assert len(seen) == count


async def test_the_loop_goes_on_while_many_endpoints_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counts slices, not time: each is some milliseconds on a slow machine."""
    slices, counted = [0], list[int]()

    def counting(*args: Any) -> Any:
        for port in served_ports(*args):
            slices[-1] += len(port.endpoints)
            yield port

    monkeypatch.setattr("steersman.run.observe.stale_entries.served_ports", counting)
    ips = tuple(f"10.1.{n // 250}.{n % 250}" for n in range(500))
    objects = [o for n in range(20) for o in (dns(f"s{n}", n), ends(f"s{n}", *ips))]
    world = World()
    replace_objects(world.store, "Service", objects[::2])
    replace_objects(world.store, "EndpointSlice", objects[1::2])
    report = await world.sync.run()
    assert report is not None
    task = asyncio.create_task(world.stale_entries.run())
    world.stale_entries.note(report)
    while world.stale_entries.owed:
        await asyncio.sleep(0)
        counted.append(slices[-1])
        slices.append(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert sum(counted) == 10_000
    assert max(counted) <= 1_000


async def test_changes_that_are_of_no_concern_are_not_owed() -> None:
    tcp = [dns("web", 3, "TCP"), ends("web", "10.1.0.3", protocol="TCP")]
    async with running(*tcp) as world:
        for number in range(10):
            assert await world.change(ends("web", f"10.1.0.{number}", protocol="TCP")) == []
        assert world.stale_entries.owed == 0


async def test_all_plans_are_searched_for_the_number_of_a_node_port() -> None:
    """A node port says nothing of an address that another Service holds at that number."""
    many = [dns(f"s{n}", 256 + n, "TCP") for n in range(1500)]
    ports = [{"port": 30053, "protocol": "UDP"}]
    other = service("other", clusterIP="10.96.0.7", ports=ports)
    node_port = [{"port": 53, "protocol": "UDP", "nodePort": 30053}]
    nodes = service("a", clusterIP="10.96.0.1", type="NodePort", ports=node_port)
    address, source = (10, 96, 0, 7), bytes(6)
    entries = [bytes((17, *at)) + (30053).to_bytes(2, "big") for at in (address, (192, 0, 2, 1))]
    async with running(*many, other, nodes, A[1]) as world:

        async def find() -> None:
            (stale,) = world.table.asked
            assert all(stale.contains(entry, source) for entry in entries)

        world.table.asked, world.table.during = [], find
        await world.change(ends("a", "10.1.0.9"))
        assert world.table.confirmed is not None
        assert [world.table.confirmed.contains(entry, source) for entry in entries] == [False, True]


async def test_plans_are_not_searched_if_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant who changes UDP node ports all the time would cost the node a walk each time."""
    node_port = [{"port": 53, "protocol": "UDP", "nodePort": 30053}]
    nodes = service("a", clusterIP="10.96.0.1", type="NodePort", ports=node_port)
    walks: list[Any] = []
    monkeypatch.setattr(
        "steersman.run.observe.stale_entries.destinations_at", lambda *a: walks.append(a)
    )
    async with running(nodes, A[1]) as world:
        world.table.take()
        assert await world.change(ends("a", "10.1.0.9")) == [["10.96.0.1"]]
    assert not walks


async def test_a_changed_service_is_looked_at_once_more() -> None:
    """A packet that was translated by the old rules may make its entry after the first pass."""
    async with running(*A, *B) as world:
        world.table.take()
        assert await world.change(ends("a", "10.1.0.9")) == [["10.96.0.1"]]
        assert await world.advance(AGAIN - 0.1) == []
        assert await world.change(ends("b", "10.1.0.9")) == [["10.96.0.2"]]
        assert await world.advance(0.1) == [["10.96.0.1"]]
        assert await world.advance(AGAIN - 0.1) == [["10.96.0.2"]]
        assert await world.advance(60.0) == []
        assert world.stale_entries.owed == 0


async def test_a_pass_that_takes_long_holds_up_no_change() -> None:
    """It rests for nine times the CPU time, and half a second if a Service changed meanwhile."""
    async with running(*A) as world:
        world.table.take()
        world.table.answers = [Cleanup(0, 0, True, seconds=10.0)]
        assert await world.change(ends("a", "10.1.0.9")) == [["10.96.0.1"]]
        assert await world.change(ends("a", "10.1.0.8")) == []
        assert await world.advance(0.4) == []
        world.table.answers = [Cleanup(0, 0, True, seconds=10.0)]
        assert await world.advance(0.1) == [["10.96.0.1"]]
        assert await world.advance(59.9) == [], "the second look waits for the rest"
        assert await world.advance(0.1) == [["10.96.0.1"]]


async def test_a_change_comes_before_the_hourly_clean_up() -> None:
    """Thousands of Services are owed, in passes with long rests between them."""
    count = 2 * AT_ONCE
    objects = [o for n in range(count) for o in (dns(f"s{n}", n), ends(f"s{n}", "10.1.0.1"))]
    world = World()
    world.table.answers = [Cleanup(0, 0, True, seconds=10.0)]
    task = asyncio.create_task(world.stale_entries.run())
    replace_objects(world.store, "Service", objects[::2])
    replace_objects(world.store, "EndpointSlice", objects[1::2])
    await world.report()
    while not world.table.looked:
        await world.settle()
    assert list(map(len, world.table.take())) == [AT_ONCE]
    world.store.upsert(ends(f"s{count - 1}", "10.1.0.9"))
    await world.report()
    assert await world.advance(0.5) == [["10.96.7.207"]]
    assert world.stale_entries.owed == AT_ONCE
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_no_family_waits_for_another() -> None:
    families, stopped = list[Family](), asyncio.Event()

    async def delete(stale: Stale, _confirm: Confirm) -> Cleanup:
        families.append(stale.family)
        if stale.family is Family.IPV4:
            await stopped.wait()
        return Cleanup(0, 0, complete=True)

    both: dict[str, Any] = {"clusterIPs": ["10.96.0.1", "fd00::1"], "ipFamilies": ["IPv4", "IPv6"]}
    world = World(families=tuple(Family), delete=delete)
    replace_objects(world.store, "Service", [dns("a", 1, **both)])
    ports = [{"name": "", "port": 8080, "protocol": "UDP"}]
    six = kube.endpoint_slice("a-6", "a", "fd01::1", family="IPv6", ports=ports)
    replace_objects(world.store, "EndpointSlice", [A[1], make("EndpointSlice", six)])
    task = asyncio.create_task(world.stale_entries.run())
    await world.report()
    while world.stale_entries.owed > 1:
        await world.settle()
    assert families == list(Family)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_deletions_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running(*A) as world:
        world.table.answers = [Cleanup(3, 0, True)]
        await world.change(ends("a", "10.1.0.9"))
        text = b"".join(exposition(world.metrics.collect())).decode()
        assert 'conntrack_reconciler_deleted_entries_total{ip_family="IPv4"} 3.0' in text
        assert 'conntrack_reconciler_sync_duration_seconds_count{ip_family="IPv4"} 3.0' in text
        assert "IPv4 conntrack: 3 stale entries deleted" in caplog.text
