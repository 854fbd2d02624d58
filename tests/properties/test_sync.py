"""Law of the loop: after any sequence of faults, the kernel has the plan of the Store."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Hashable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from steersman.compile.planner import Planner
from steersman.model.errors import ApplyError, BusyError
from steersman.model.inputs import HostFacts, NodeConfig
from steersman.model.names import Family, ObjectName, PlanKey
from steersman.model.plan import NodeSettings, ServicePlan
from steersman.model.ruleset import Diff, Ruleset, patch
from steersman.run.pages.drift_page import compare
from tests.support.builders.store import service, slice_
from tests.support.modes.memory import FACTS, MemoryMode, World

FAULTS = st.sampled_from(
    ["", "", "", "", "busy", "after", "half", "refused", "fork", "cancel", "meddle", "memory"]
)
EVENTS = st.one_of(
    st.tuples(st.just("slice"), st.integers(1, 4), st.integers(1, 9)),
    st.tuples(st.just("service"), st.integers(1, 5), st.integers(1, 9)),
    st.tuples(st.just("delete"), st.integers(1, 5), st.just(0)),
    st.tuples(st.just("reload"), st.integers(1, 3), st.just(0)),
    st.tuples(st.just("facts"), st.integers(1, 3), st.just(0)),
    st.tuples(st.just("node port"), st.integers(1, 4), st.integers(1, 2)),
)
STEPS = st.lists(
    st.tuples(
        st.lists(EVENTS, max_size=3),
        st.booleans(),  # a notification that somebody touched the kernel
        st.lists(FAULTS, max_size=6),  # of the calls to the mode, in order
    ),
    max_size=6,
)


class FaultyMode(MemoryMode):
    """A kernel that fails in every way, one fault a call; events can come while it works."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.meddled = False
        self.writes = 0

    def _fault(self) -> str:
        return self.faults.pop(0) if self.faults else ""

    def _fail(self, fault: str) -> None:
        match fault:
            case "busy":
                raise BusyError("somebody holds the lock")
            case "fork":
                raise BlockingIOError(11, "Resource temporarily unavailable")
            case "cancel":
                raise asyncio.CancelledError
            case "meddle" if self.kernel:
                self.kernel.pop(min(self.kernel, key=str))
                self.writes += 1
                self.meddled = True

    def _render(self) -> None:
        if self.faults and self.faults[0] == "memory":
            self.faults.pop(0)
            raise MemoryError

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        self._render()
        return super().render_service(plan, settings)

    def read(self) -> Ruleset:
        self._fail(self._fault())
        return super().read()

    def fingerprint(self) -> Hashable | None:
        self._fail(self._fault())
        return self.writes

    def apply(self, change: Diff) -> None:
        fault = self._fault()
        self._fail(fault)
        self.writes += 1
        if fault == "refused":
            raise ApplyError("refused: no reason")
        if fault == "half":
            half = Diff(dict(list(change.added.items())[::2]), {}, {})
            self.kernel = patch(self.kernel, half)
            raise TimeoutError("did not end within 60 s")
        super().apply(change)
        if fault == "after":
            raise BusyError("the answer was lost")


def happen(world: World, events: list[tuple[str, int, int]], facts: list[HostFacts]) -> None:
    for what, number, value in events:
        name = f"s{number}"
        match what:
            case "slice":
                world.store.upsert(slice_(f"{name}-x", name, (f"10.1.0.{value}",)))
            case "service":
                world.store.upsert(service(name, clusterIP=f"10.96.0.{value}"))
            case "node port":
                ports = [{"port": 80, "nodePort": 30080 + value}]
                spec: dict[str, Any] = {"type": "NodePort", "ports": ports}
                world.store.upsert(service(name, None, clusterIP=f"10.96.0.{number}", **spec))
            case "delete":
                world.store.delete("Service", ObjectName("shop", name))
            case "reload":
                config = NodeConfig(
                    node_name="me", families=(Family.IPV4,), masquerade_all=number > 1
                )
                world.use(config)
            case "facts":
                address = f"192.0.2.{number}/24"
                facts.append(HostFacts("me", {"eth0": (address,)}, ipv6=False))
                world.store.use_facts(facts[-1])


async def settle(world: World) -> None:
    """Run as the Runner would, without faults, until nothing is to be done."""
    for _ in range(6):
        if await world.run() is None:
            return
    raise AssertionError("there is always something to do")


def started() -> World:
    world = World()
    world.mode = FaultyMode()
    world.start()
    return world


@given(STEPS)
def test_what_is_owed_is_written_whatever_failed_before(steps: Any) -> None:
    async def body() -> None:
        world, facts = started(), [FACTS]
        mode = world.mode
        assert isinstance(mode, FaultyMode)
        for events, suspected, faults in steps:
            happen(world, events, facts)
            mode.faults = list(faults)
            if suspected:
                world.sync.suspect()
            run = asyncio.ensure_future(world.sync.run())
            await asyncio.gather(run, return_exceptions=True)
        mode.faults = []
        # Whoever meddles is noticed by a comparison, and what was refused is tried again by one.
        world.sync.suspect()
        await settle(world)
        want = {**fresh(world, facts[-1])}
        assert mode.kernel == want
        assert dict(world.sync.objects()) == want
        assert set(world.sync.state.plan.services) == set(world.sync.planner.services)
        assert not any("cannot" in f.reason for f in world.sync.state.findings)

    asyncio.run(body())


@given(STEPS)
def test_without_meddling_and_refusals_no_comparison_has_to_be_asked_for(steps: Any) -> None:
    async def body() -> None:
        world, facts = started(), [FACTS]
        mode = world.mode
        assert isinstance(mode, FaultyMode)
        for events, _, faults in steps:
            happen(world, events, facts)
            mode.faults = [f for f in faults if f not in ("meddle", "refused", "memory")]
            await asyncio.gather(asyncio.ensure_future(world.sync.run()), return_exceptions=True)
        mode.faults = []
        await settle(world)
        assert mode.kernel == fresh(world, facts[-1])

    asyncio.run(body())


@given(
    st.lists(st.tuples(st.lists(EVENTS, max_size=3), st.integers(0, 40)), max_size=6),
)
@example([([("delete", 1, 0), ("reload", 2, 0)], 9), ([], 16)])  # between kernel and ledger
@example(
    [
        ([("delete", 1, 0), ("reload", 2, 0)], 0),
        ([("reload", 1, 0), ("service", 1, 1)], 1),
        ([("delete", 1, 0)], 16),
    ]
)
def test_a_run_can_be_cancelled_at_any_await_while_the_world_moves_on(steps: Any) -> None:
    async def body() -> None:
        world, facts = started(), [FACTS]
        with pytest.MonkeyPatch.context() as patch_:
            patch_.setattr("steersman.compile.planner._SLICE", 0)  # yields after each Service
            patch_.setattr("steersman.run.sync.renderer._SLICE", 0)
            patch_.setattr("steersman.host.worker._INLINE", 0)
            for events, when in steps:
                run = asyncio.ensure_future(world.sync.run())
                for _ in range(when):
                    await asyncio.sleep(0)
                happen(world, events, facts)
                if when % 3:
                    run.cancel()
                await asyncio.gather(run, return_exceptions=True)
            await settle(world)
        assert world.mode.kernel == fresh(world, facts[-1])
        assert set(world.sync.state.plan.services) == set(world.sync.planner.services)

    asyncio.run(body())


ENGINES = st.lists(
    st.tuples(
        st.lists(EVENTS, max_size=3),
        st.sampled_from(["run", "rehearse", "compare"]),
        st.integers(0, 1),  # which of the two Engines
        st.lists(FAULTS, max_size=4),
        st.integers(0, 30),  # turns of the loop until the next step; every third is cancelled then
    ),
    max_size=8,
)


@given(ENGINES)
def test_two_engines_side_by_side_lose_nothing(steps: Any) -> None:
    """As a switch of the mode and its way back have them, aborted anywhere."""

    async def body() -> None:
        one, facts = started(), [FACTS]
        other = started()
        other.store = one.store
        other.start()
        other.sync.in_force = one.sync.in_force
        worlds, tasks = (one, other), list[asyncio.Future[Any]]()
        for events, what, which, faults, turns in steps:
            happen(one, [event for event in events if event[0] != "reload"], facts)
            mode, sync = worlds[which].mode, worlds[which].sync
            assert isinstance(mode, FaultyMode)
            mode.faults = list(faults)
            work: Coroutine[Any, Any, object]
            match what:
                case "run":
                    work = sync.run()
                case "rehearse":
                    work = sync.rehearse()
                case _:
                    work = compare(sync, 5)
            task = asyncio.ensure_future(work)
            tasks.append(task)
            for _ in range(turns):
                await asyncio.sleep(0)
            if turns % 3 == 0:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for world in worlds:
            assert isinstance(world.mode, FaultyMode)
            world.mode.faults = []
            world.sync.suspect()
            await settle(world)
            assert world.mode.kernel == dict(world.sync.objects()) == fresh(world, facts[-1])
            assert world.sync.in_force.plans == world.sync.planner.services

    asyncio.run(body())


@given(STEPS)
def test_a_consumer_that_follows_what_is_in_force_sees_every_plan(steps: Any) -> None:
    """However often it fails itself."""

    async def body() -> None:
        world, facts = started(), [FACTS]
        mode, in_force = world.mode, world.sync.in_force
        assert isinstance(mode, FaultyMode)
        cursor, seen = in_force.log.cursor(), dict[PlanKey, ServicePlan]()

        def follow() -> None:
            names, revision = cursor.changed()
            if len(names) % 3 == 1:
                return  # it fails
            for key in names:
                if isinstance(key, PlanKey):
                    seen.pop(key, None)
                    if (plan := in_force.plans.get(key)) is not None:
                        seen[key] = plan
            cursor.move(revision)

        for events, _, faults in steps:
            happen(world, events, facts)
            mode.faults = list(faults)
            await asyncio.gather(asyncio.ensure_future(world.sync.run()), return_exceptions=True)
            follow()
        mode.faults = []
        await settle(world)
        names, _ = cursor.changed()
        unseen = {key for key in names if isinstance(key, PlanKey)}
        plans = in_force.plans
        assert {key for key in seen.keys() | plans.keys() if seen.get(key) != plans.get(key)} <= (
            unseen
        )

    asyncio.run(body())


def fresh(world: World, facts: HostFacts) -> dict[Any, Any]:
    """Return what a new process with the same configuration would write."""
    planner = Planner(world.sync.planner.config, world.mode.traits)
    planner.inherit_holders(world.sync.planner)
    planner.update(world.store.snapshot, facts)
    mode = MemoryMode()
    want = dict(mode.render_node(planner.settings))
    for plan in planner.services.values():
        want.update(mode.render_service(plan, planner.settings))
    return want


@pytest.mark.parametrize("fault", ["busy", "fork", "cancel", "half", "after"])
async def test_a_change_whose_write_failed_survives_every_comparison(fault: str) -> None:
    world = started()
    assert isinstance(world.mode, FaultyMode)
    await settle(world)
    await world.sync.check()
    world.mode.faults = [fault]
    world.store.upsert(service("new", clusterIP="10.96.0.99"))
    await asyncio.gather(asyncio.ensure_future(world.sync.run()), return_exceptions=True)
    await world.sync.check()  # the drift timer fires before the retry
    assert world.mode.kernel == fresh(world, FACTS)


async def test_a_suspicion_outlives_a_comparison_that_failed() -> None:
    world = started()
    assert isinstance(world.mode, FaultyMode)
    await settle(world)
    await world.sync.check()
    world.mode.faults = ["meddle", "busy"]
    world.sync.suspect()
    with pytest.raises(BusyError):
        await world.sync.run()  # the fingerprint differs, and the kernel cannot be read
    world.mode.faults = ["busy"]
    with pytest.raises(BusyError):
        await world.sync.run()
    await world.sync.run()
    assert world.mode.kernel == fresh(world, FACTS)
    world.mode.kernel.popitem()
    world.mode.writes += 1
    world.mode.faults = ["busy"]
    world.sync.suspect()
    with pytest.raises(BusyError):
        await world.sync.run()  # not even the fingerprint can be asked for
    await world.sync.run()
    assert world.mode.kernel == fresh(world, FACTS)


async def test_facts_that_come_while_a_run_plans_are_for_the_next_run() -> None:
    world = started()
    with pytest.MonkeyPatch.context() as patch_:
        patch_.setattr("steersman.compile.planner._SLICE", 0)
        run = asyncio.ensure_future(world.sync.run())
        await asyncio.sleep(0)  # it plans, and has read the facts of before
        other = HostFacts("me", {"eth0": ("192.0.2.9/24",)}, ipv6=False)
        assert world.store.use_facts(other)
        await run
    await settle(world)
    assert world.sync.state.plan.settings.ipv4.local_addresses == ("192.0.2.9",)
    assert not world.sync.owes
