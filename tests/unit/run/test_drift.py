"""Drift: found by the sync, repaired, and told by log, metrics, Event and Finding."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from steersman.model.drift import Drift, DriftState, Writer
from steersman.model.errors import BusyError
from steersman.model.ruleset import Diff, Ruleset
from steersman.run.observe.drift import DriftLog
from steersman.run.observe.events import Recorder
from steersman.run.observe.metrics import Metrics
from steersman.run.pages.drift_page import DriftPage, compare
from steersman.run.sync.packer import Packer
from steersman.run.sync.state import SyncReport
from tests.support.builders.store import slice_
from tests.support.http import asking
from tests.support.modes.inline import Held, Inline
from tests.support.modes.memory import World
from tests.support.samples import value_of
from tests.support.waiting import PATIENCE

OTHER = Writer("iptables-restor", 77)


class Drifting:
    """A World with a sync that was done, and all observers of drift."""

    def __init__(self) -> None:
        self.world = World()
        self.metrics = Metrics("iptables")
        self.now = 1000.0
        self.posted: list[str] = []
        recorder = Recorder(self, "me", clock=lambda: int(self.now * 1e9))
        self.recorder = recorder
        self.log = DriftLog(self.world.store, recorder, self.metrics, wall=lambda: self.now)
        self.world.sync._wall = lambda: self.now

    async def post_event(self, namespace: str, event: dict[str, Any]) -> None: ...

    @property
    def events(self) -> list[str]:
        found = []
        while not self.recorder._queue.empty():
            found.append(self.recorder._queue.get_nowait()[1]["note"])
        return found

    @property
    def found(self) -> list[str]:
        return [each.reason for each in self.world.store.findings]

    async def check(self) -> Drift | None:
        self.world.sync.suspect()
        try:
            report = await self.world.sync.run()
        except BusyError:
            assert self.world.sync.drift
            self.log.unrepaired(self.world.sync.drift)
            return None
        assert report
        self.log.observe(report)
        return report.drift

    async def disturb(self) -> Drift:
        """Another program removes an object, and it is repaired."""
        self.world.mode.kernel.pop("node")
        drift = await self.check()
        assert drift
        return drift


@pytest.fixture
async def here(monkeypatch: pytest.MonkeyPatch) -> Drifting:
    drifting = Drifting()
    await drifting.world.sync.run()
    monkeypatch.setattr(drifting.world.mode, "writers", SimpleNamespace(take=lambda: (OTHER,)))
    return drifting


async def test_what_others_changed_is_told_apart_from_our_own_changes(here: Drifting) -> None:
    kernel = here.world.mode.kernel
    gone = next(key for key in kernel if "s1" in key)
    kernel.pop(gone)
    kernel["node"] = "theirs"
    kernel["their own"] = "x"
    here.world.store.upsert(slice_("s2-x", "s2", ("10.1.0.2", "10.1.0.99")))
    drift = await here.check()
    assert drift
    assert (drift.missing, drift.changed, drift.foreign) == (1, 1, 1)
    assert drift.writers == (OTHER,)
    assert any(gone in line for line in drift.examples)
    assert not any("10.1.0.99" in line for line in drift.examples)
    assert here.world.mode.kernel == here.world.fresh()
    assert await here.check() is None


async def test_neither_a_start_nor_a_retry_nor_a_change_of_ours_is_drift(here: Drifting) -> None:
    world = here.world
    world.store.upsert(slice_("s2-x", "s2", ("10.1.0.98",)))
    world.mode.busy = True
    with pytest.raises(BusyError):
        await world.sync.run()
    world.mode.busy = False
    report = await world.sync.run()
    assert report
    assert report.drift is None
    world.start()
    world.mode.kernel["left by an earlier process"] = "x"
    report = await world.sync.run()
    assert report
    assert report.written.removed
    assert report.drift is None


async def test_objects_of_the_process_itself_are_no_drift(
    here: Drifting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here.world.mode.words, "changed_by_others", lambda key: key != "node")
    here.world.mode.kernel.pop("node")
    assert await here.check() is None
    assert "node" in here.world.mode.kernel


def slow_read(here: Drifting) -> Held:
    """Hold each read of the kernel until `go`; then it returns what the kernel had before."""
    worker = here.world.mode.worker = Held("read", after=True)
    worker.go.clear()
    return worker


async def test_a_comparison_on_request_writes_nothing(here: Drifting) -> None:
    assert not await compare(here.world.sync, 5)
    here.world.mode.kernel.pop("node")
    here.world.store.upsert(slice_("s2-x", "s2", ("10.1.0.97",)))  # ours, not written yet
    drift = await compare(here.world.sync, 5)
    assert drift
    assert (drift.missing, drift.foreign, drift.changed) == (1, 0, 0)
    assert "node" not in here.world.mode.kernel


async def test_syncs_go_on_while_the_kernel_is_compared(
    here: Drifting, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, slow = here.world, slow_read(here)
    comparing = asyncio.create_task(compare(world.sync, 5))
    await slow.reached.wait()
    world.store.upsert(slice_("s2-x", "s2", ("10.1.0.97",)))
    async with asyncio.timeout(PATIENCE):
        assert await world.run()
    slow.go.set()
    assert await comparing is None  # what the sync wrote is no drift
    assert world.mode.reads == 2  # that of the start, and one


async def test_drift_is_found_while_a_sync_changes_other_objects(
    here: Drifting, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, slow = here.world, slow_read(here)
    world.mode.kernel["node"] = "theirs"
    comparing = asyncio.create_task(compare(world.sync, 5))
    await slow.reached.wait()
    world.store.upsert(slice_("s2-x", "s2", ("10.1.0.97",)))
    assert await world.run()
    slow.go.set()
    drift = await comparing
    assert drift
    assert (drift.missing, drift.foreign, drift.changed) == (0, 0, 1)


async def test_what_a_sync_writes_and_takes_back_meanwhile_is_no_drift(
    here: Drifting, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = here.world
    before = slice_("s2-x", "s2", ("10.1.0.2",))
    between = slice_("s2-x", "s2", ("10.1.0.97",))

    class Between(Inline):
        """Has syncs before and after the first read."""

        reads = 0

        async def do(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
            if call != world.mode.read or self.reads:
                self.reads += call == world.mode.read
                return await super().do(call, *args, **kwargs)
            self.reads = 1
            world.store.upsert(between)
            await world.run()
            found = await super().do(call, *args, **kwargs)
            world.store.upsert(before)
            await world.run()
            return found

    worker = world.mode.worker = Between()
    assert await compare(world.sync, 5) is None
    assert worker.reads == 2


async def test_objects_are_unpacked_in_a_thread(
    here: Drifting, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = here.world.sync
    await sync.pack()
    threads = set()

    class Watched(Packer):
        def unpack(self, part: Ruleset | bytes) -> Ruleset:
            threads.add(threading.current_thread())
            return super().unpack(part)

    monkeypatch.setattr(sync._ledger, "_packer", Watched())
    assert not await compare(sync, 5)
    assert threads
    assert threading.main_thread() not in threads


async def test_nothing_is_compared_before_the_kernel_is_known() -> None:
    assert await compare(World().sync, 5) is None


async def test_after_a_failed_sync_it_is_not_known_what_is_in_force(
    here: Drifting, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, slow = here.world, slow_read(here)
    world.mode.kernel["node"] = "theirs"
    comparing = asyncio.create_task(compare(world.sync, 5))
    await slow.reached.wait()
    world.mode.busy = True
    world.store.upsert(slice_("s2-x", "s2", ("10.1.0.97",)))
    with pytest.raises(BusyError):
        await world.run()
    slow.go.set()
    assert await comparing is None


async def test_who_asks_meanwhile_shares_a_comparison(here: Drifting) -> None:
    here.world.mode.kernel.pop("node")
    page = DriftPage(here.log, lambda: here.world.sync)
    before = here.world.mode.reads
    asked = (page.serve(asking("/drift?lines=3")) for _ in range(100))
    answers = await asyncio.gather(*asked)
    assert here.world.mode.reads == before + 2  # one beside syncs, and an exact one
    for answer in answers:
        assert isinstance(answer.pieces, Iterator)
        state = msgspec.json.decode(b"".join(answer.pieces), type=DriftState)
        assert state.differs
        assert state.differs.missing == 1


async def test_a_busy_kernel_and_a_wrong_number_are_answered(
    here: Drifting, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = DriftPage(here.log, lambda: here.world.sync)

    def busy() -> Ruleset:
        raise BusyError("somebody holds the lock")

    monkeypatch.setattr(here.world.mode, "read", busy)
    assert (await page.serve(asking("/drift"))).status == 503
    assert (await page.serve(asking("/drift?lines=many"))).status == 400


async def test_a_repair_is_logged_counted_and_an_event(
    here: Drifting, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "steersman"):
        await here.disturb()
    assert "1 kernel object (1 missing), such as + node" in caplog.text
    assert "iptables-restor (pid 77): repaired" in caplog.text
    assert here.events == ["rules of Services were changed by iptables-restor: repaired [SM4003]"]

    def value(name: str) -> float | None:
        return value_of(here.metrics.collect(), name, {})

    assert value("steersman_drift_pending_since_timestamp_seconds") == 0
    assert value("steersman_drift_repairs_total") == 1
    assert value("steersman_drift_objects_total") == 1
    assert value("steersman_drift_last_timestamp_seconds") == here.now
    assert here.found == []


async def test_a_fight_is_a_finding_until_it_is_over_and_floods_nothing(
    here: Drifting, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "steersman"):
        for _ in range(200):
            await here.disturb()
            here.now += 0.5
    assert len([line for line in caplog.messages if line.startswith("drift:")]) == 2
    assert "119 more such changes were not logged" in caplog.text
    assert len(here.events) == 1
    assert len(here.log.repairs) == 32
    (text,) = here.found
    assert "rewrites our rules more than once a second" in text
    assert "'iptables-restor'" in text
    here.now += 601
    await here.check()
    assert here.found == []


async def test_a_repair_takes_time_from_when_the_change_was_found(
    here: Drifting, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, began = here.world.mode.apply, here.now

    def slowly(change: Diff) -> None:
        here.now += 2
        apply(change)

    monkeypatch.setattr(here.world.mode, "apply", slowly)
    drift = await here.disturb()
    assert (drift.at, drift.repaired_at) == (began, began + 2)


async def test_a_comparison_takes_one_fingerprint(
    here: Drifting, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint, taken = here.world.mode.fingerprint, list[object]()

    def counted() -> object:
        taken.append(fingerprint())
        return taken[-1]

    monkeypatch.setattr(here.world.mode, "fingerprint", counted)
    await here.disturb()
    assert len(taken) == 1, "some modes list all rules for it"


async def test_what_cannot_be_repaired_is_a_finding_until_it_is(here: Drifting) -> None:
    here.world.mode.busy = True
    here.world.mode.kernel.pop("node")
    await here.check()
    (text,) = here.found
    assert "changed by iptables-restor (pid 77); they are not repaired yet" in text
    pending, found = "steersman_drift_pending_since_timestamp_seconds", here.now

    def value(name: str) -> float | None:
        return value_of(here.metrics.collect(), name, {})

    assert value(pending) == found
    here.now += 30
    await here.check()
    assert value(pending) == found
    here.world.mode.busy = False
    drift = await here.check()
    assert drift
    assert drift.repaired_at - drift.at == 30
    assert value(pending) == 0
    assert here.found == []


async def test_nothing_is_said_while_nothing_drifts(here: Drifting) -> None:
    report = await here.world.sync.run()
    assert isinstance(report, SyncReport)
    here.log.observe(report)
    assert here.events == []
    assert here.found == []
