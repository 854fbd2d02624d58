"""The sync loop body against a kernel in memory that can refuse, lose and be busy."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import pytest

from steersman.compile.service_plan import plan_service
from steersman.model.errors import ApplyError, BusyError
from steersman.model.inputs import HostFacts, NodeConfig
from steersman.model.kube import KubeObject
from steersman.model.names import Family, ObjectName, PlanKey
from steersman.model.plan import NodeSettings, ServicePlan
from steersman.model.ruleset import Diff, Ruleset
from steersman.modes.base import ByOthers
from steersman.run.sync.state import SyncResult
from steersman.source.store import Store
from tests.support.builders.store import make, service, slice_
from tests.support.modes.inline import Held
from tests.support.modes.memory import MemoryMode, World


async def test_nothing_is_written_before_the_initial_lists_are_in() -> None:
    world = World()
    world.store = Store()
    world.start()
    assert await world.run() is None
    assert world.mode.kernel == {}
    assert await world.check() is None


async def test_the_first_sync_writes_everything_and_the_second_nothing() -> None:
    world = World()
    first = await world.run()
    assert first is not None
    assert (first.reason, first.dirty) == ("start", 4)
    assert world.mode.kernel == world.fresh()
    assert await world.run() is None
    assert len(world.mode.applied) == 1


async def test_a_restart_with_nothing_changed_writes_nothing() -> None:
    world = World()
    await world.run()
    world.start()
    await world.run()
    assert len(world.mode.applied) == 1


async def test_one_endpoint_costs_one_object_and_no_read() -> None:
    world = World()
    await world.run()
    reads = world.mode.reads
    world.store.upsert(slice_("s1-x", "s1", ("10.1.0.1", "10.1.0.99")))
    result = await world.run()
    assert result is not None
    assert (result.dirty, result.added, result.removed, result.changed) == (1, 1, 0, 0)
    assert world.mode.reads == reads
    assert world.mode.kernel == world.fresh()


async def test_leftovers_of_an_earlier_run_are_removed() -> None:
    world = World()
    world.mode.kernel = {"old chain": "x"}
    await world.run()
    assert world.mode.kernel == world.fresh()


async def test_the_culprit_stands_alone_and_the_others_go_in() -> None:
    world = World(9)
    poison = next(iter(world.store.snapshot.services))
    world.mode.poison = {f"{poison} (TCP, IPv4)"}
    result = await world.run()
    assert result is not None
    assert result.refused == 1
    fresh = world.fresh()
    assert world.mode.kernel == {k: v for k, v in fresh.items() if v not in world.mode.poison}
    (finding,) = world.sync.state.findings
    assert finding.object == f"Service {poison}"
    assert "refused: " in finding.reason
    world.mode.poison = set()
    await world.check()
    assert world.mode.kernel == fresh
    assert world.sync.state.findings == ()


async def test_a_refused_change_leaves_what_was_there_before() -> None:
    world = World()
    await world.run()
    before = dict(world.mode.kernel)
    world.mode.poison = {"shop/s1 (TCP, IPv4)"}
    world.store.upsert(slice_("s1-x", "s1", ("10.1.0.77",)))
    world.store.upsert(slice_("s2-x", "s2", ("10.1.0.88",)))
    await world.run()
    kept = {k for k in before if k.startswith("shop/s1 ")}
    assert {k for k in world.mode.kernel if k.startswith("shop/s1 ")} == kept
    assert "shop/s2 (TCP, IPv4) 10.1.0.88:8080" in world.mode.kernel
    await world.check()  # a check for drift does not take the old version away either
    assert {k for k in world.mode.kernel if k.startswith("shop/s1 ")} == kept
    world.mode.poison = set()
    world.store.upsert(slice_("s1-x", "s1", ("10.1.0.78",)))
    await world.run()
    assert world.mode.kernel == world.fresh()


async def test_only_what_was_written_is_said_to_be() -> None:
    class Clinging(MemoryMode):
        def apply(self, change: Diff) -> None:
            if "in use" in change.removed:
                raise ApplyError("a rule of somebody else's leads there")
            super().apply(change)

    world = World(9)
    world.mode = Clinging()
    world.mode.kernel = {"in use": "x"}
    world.mode.poison = {"shop/s3 (TCP, IPv4)"}
    world.start()
    result = await world.run()
    assert result is not None
    assert (result.added, result.removed, result.refused) == (2 + 8 * 2, 0, 1)
    world.mode.poison = set()
    result = await world.check()
    assert result is not None
    assert (result.added, result.removed, result.refused) == (2, 0, 0)
    result = await world.run()  # nobody can need the leftovers any more
    assert result is not None
    assert (result.added, result.removed, result.refused) == (0, 0, 1)
    assert {f.object for f in world.sync.state.findings} == {"leftovers"}


async def test_a_new_process_keeps_what_it_cannot_replace() -> None:
    """It has not written what the kernel has, but that stays in force all the same."""
    world = World()
    await world.run()
    before = dict(world.mode.kernel)
    service = next(key for key in before if " " in key and ":" in key)
    world.start()
    world.mode.poison = {"new", before[service] + "!"}
    render_node, render_service = world.mode.render_node, world.mode.render_service

    def of_service(plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        had = render_service(plan, settings)
        return {k: v + "!" if v == before[service] else v for k, v in had.items()}

    world.mode.render_node = lambda settings: {**render_node(settings), "node": "new", "more": 1}  # type: ignore[method-assign]
    world.mode.render_service = of_service  # type: ignore[method-assign]
    for _ in range(2):
        await world.run()
        assert world.sync.state.result
        assert world.sync.state.result.refused == 2
        assert world.mode.kernel == before
        assert len(dict(world.sync.objects())) == world.sync.state.objects == len(before)
        world.mode.kernel["stray"] = "x"
        await world.check()
        assert world.mode.kernel == before
    world.mode.poison = set()
    await world.check()
    assert world.mode.kernel["node"] == "new"
    assert world.sync.state.objects == len(world.mode.kernel) == len(before) + 1


async def test_a_refused_node_part_does_not_hide_the_reason() -> None:
    world = World()
    world.mode.poison = {"me"}
    await world.run()
    assert [finding.object for finding in world.sync.state.findings] == ["the node"]


async def test_a_busy_kernel_loses_nothing() -> None:
    world = World()
    world.mode.busy = True
    with pytest.raises(BusyError):
        await world.run()
    world.mode.busy = False
    await world.run()
    assert world.mode.kernel == world.fresh()
    world.mode.busy = True
    world.store.delete("Service", ObjectName("shop", "s1"))
    with pytest.raises(BusyError):
        await world.run()
    world.mode.busy = False
    await world.run()
    assert world.mode.kernel == world.fresh()


class HalfWay(MemoryMode):
    """A kernel where a batch that is interrupted is half in force, and adding again adds twice."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.twice: set[Any] = set()

    def apply(self, change: Diff) -> None:
        self.twice |= change.added.keys() & self.kernel.keys()
        if self.error is not None:
            self.kernel |= dict(list(change.added.items())[::2])
            raise self.error
        super().apply(change)


@pytest.mark.parametrize("error", [BusyError("the lock"), TimeoutError("iptables-restore")])
async def test_what_was_interrupted_half_way_is_not_done_twice(error: Exception) -> None:
    world = World()
    mode = world.mode = HalfWay()
    world.start()
    await world.run()
    mode.error = error
    world.store.upsert(slice_("s1-x", "s1", ("10.1.0.7", "10.1.0.8", "10.1.0.9")))
    with pytest.raises(type(error)):
        await world.run()
    mode.error = None
    await world.run()
    assert mode.twice == set()
    assert mode.kernel == world.fresh()


class Counting(MemoryMode):
    """A mode that counts changes by others."""

    def __init__(self) -> None:
        super().__init__()
        self.strangers = 0

    def fingerprint(self) -> Hashable | None:
        return ByOthers(self.strangers)


async def test_what_is_in_force_without_an_answer_is_not_taken_back() -> None:
    class Silent(MemoryMode):
        silent = False

        def apply(self, change: Diff) -> None:
            super().apply(change)
            if self.silent:
                raise OSError("no answer")

    world = World()
    mode = world.mode = Silent()
    mode.poison = {"shop/s1 (TCP, IPv4)"}
    world.start()
    await world.run()
    mode.poison, mode.silent = set(), True
    with pytest.raises(OSError, match="no answer"):
        await world.check()  # the refused Service is tried again
    assert mode.kernel == world.fresh()
    mode.silent = False
    mode.applied.clear()
    await world.run()
    assert mode.applied == []
    assert mode.kernel == world.fresh()


async def test_own_writes_cause_no_comparison_where_changes_by_others_are_counted() -> None:
    world = World()
    mode = world.mode = Counting()
    world.start()
    await world.run()  # everything is new, so the first comparison writes
    for last in range(2, 6):  # there is always a change when it is time to look for drift
        world.store.upsert(slice_("s1-x", "s1", ("10.1.0.1", f"10.1.0.{last}")))
        await world.check()
    assert mode.reads == 1
    assert mode.kernel == world.fresh()
    mode.strangers += 1
    mode.kernel.popitem()
    await world.check()
    assert mode.reads == 2
    assert mode.kernel == world.fresh()


async def test_drift_is_noticed_and_repaired_and_no_drift_costs_no_read() -> None:
    world = World()
    await world.run()
    await world.check()
    reads = world.mode.reads
    assert await world.check() is None
    assert world.mode.reads == reads
    world.mode.kernel.popitem()
    result = await world.check()
    assert result is not None
    assert (result.reason, result.added) == ("drift", 1)
    assert world.mode.kernel == world.fresh()


async def test_changes_beside_a_comparison_are_no_drift() -> None:
    """Otherwise the log and `status` of a busy node speak of drift all the time."""
    world = World()
    await world.run()
    result = await world.check()
    assert result is not None
    assert (result.reason, result.wrote) == ("comparison", False)
    reasons = []
    for last in (3, 4):
        world.store.upsert(slice_("s1-x", "s1", ("10.1.0.1", f"10.1.0.{last}")))
        result = await world.check()
        assert result is not None
        assert result.wrote
        reasons.append(result.reason)
        del world.mode.kernel["node"]
    assert reasons == ["changes", "drift"]


async def test_new_facts_of_the_machine_are_used_at_the_next_sync() -> None:
    world = World()
    await world.run()
    other = HostFacts("me", {"eth0": ("192.0.2.2/24",)}, ipv6=False)
    assert world.store.use_facts(other)
    assert not world.store.use_facts(other)
    result = await world.run()
    assert result is not None
    assert world.sync.state.plan.settings.ipv4.local_addresses == ("192.0.2.2",)


async def test_findings_of_sources_and_of_compile_are_in_the_state() -> None:
    world = World()
    bad = make(
        "Service",
        {
            "metadata": {"namespace": "shop", "name": "bad"},
            "spec": {"clusterIP": "10.96.0.300", "ports": [{"port": 80}]},
        },
    )
    world.store.upsert(bad)
    await world.run()
    assert any(finding.object == "Service shop/bad" for finding in world.sync.state.findings)


def test_a_result_says_what_happened_in_one_sentence() -> None:
    text = str(SyncResult(3, "changes", 2, 4, 1, 0, {"plan": 0.001, "apply": 0.002}, 1))
    assert text == (
        "sync 3 (changes): 2 ServicePorts planned, kernel objects 4 added, 0 changed, 1 removed "
        "in 3.0 ms (plan 1.0, apply 2.0); 1 refused by the kernel"
    )


async def test_where_everything_is_refused_halving_ends_early() -> None:
    """And all goes in at the first comparison after that, in one batch."""
    world = World(200)
    mode = world.mode
    mode.poison = {f"shop/s{i} (TCP, IPv4)" for i in range(1, 201)}
    result = await world.run()
    assert result is not None
    assert (result.refused, mode.kernel) == (200, {"node": "me", "masq": False})
    assert mode.reads < 60
    findings = [f.reason for f in world.sync.state.findings]
    assert len(findings) == 200
    assert any("others, not tried alone" in reason for reason in findings)
    mode.poison = set()
    mode.reads = 0
    await world.check()
    assert mode.kernel == world.fresh()
    assert (mode.reads, world.sync.state.result and world.sync.state.result.refused) == (2, 0)


async def test_the_innocent_go_in_though_most_are_refused() -> None:
    """A Service that the culprits delayed in one batch is earlier in the next."""
    world = World(200)
    world.mode.poison = {f"shop/s{i} (TCP, IPv4)" for i in range(2, 200)}
    await world.run()
    innocent = {"shop/s1 (TCP, IPv4)", "shop/s200 (TCP, IPv4)"}
    for _ in range(1000):
        if innocent <= set(map(str, world.mode.kernel.values())):
            break
        await world.check()
    assert innocent <= set(map(str, world.mode.kernel.values()))


async def test_an_object_that_changes_hands_is_not_lost() -> None:
    world = World()
    await world.run()

    def give_node_ports(**ports: int) -> None:
        for name, port in ports.items():
            spec: dict[str, Any] = {"type": "NodePort", "ports": [{"port": 80, "nodePort": port}]}
            world.store.upsert(service(name, None, clusterIP=f"10.96.0.{name[1]}", **spec))

    give_node_ports(s1=30080, s2=30081)
    await world.run()
    give_node_ports(s1=30081, s2=30080)  # the same keys, each with another owner
    await world.run()
    assert world.mode.kernel == world.fresh()
    assert world.mode.kernel["nodePort :30080"] == "shop/s2 (TCP, IPv4)"


async def test_objects_change_hands_though_the_kernel_refuses_another_one() -> None:
    world = World(9)

    def give_node_ports(turn: int) -> None:
        for i in range(1, 9):
            ports = [{"port": 80, "nodePort": 30080 + (i + turn) % 8}]
            spec: dict[str, Any] = {"type": "NodePort", "ports": ports}
            world.store.upsert(service(f"s{i}", None, clusterIP=f"10.96.0.{i}", **spec))

    give_node_ports(0)
    await world.run()
    give_node_ports(1)
    world.mode.poison = {"shop/s9 (TCP, IPv4)"}
    world.store.upsert(slice_("s9-x", "s9", ("10.1.0.77",)))
    await world.run()
    refused = {key for key in world.fresh() if key.startswith("shop/s9 ")}
    kernel = {k: v for k, v in world.mode.kernel.items() if not k.startswith("shop/s9 ")}
    assert kernel == {k: v for k, v in world.fresh().items() if k not in refused}


@pytest.mark.parametrize("at_once", [True, False])
async def test_an_object_of_a_refused_owner_goes_to_who_claims_it(at_once: bool) -> None:
    world = World()

    def node_port(name: str, number: int) -> None:
        spec: dict[str, Any] = {"type": "NodePort", "ports": [{"port": 80, "nodePort": number}]}
        world.store.upsert(service(name, None, clusterIP=f"10.96.0.{name[1]}", **spec))

    node_port("s1", 30080)
    await world.run()
    world.mode.poison = {"shop/s1 (TCP, IPv4)"}
    node_port("s1", 30081)
    if not at_once:
        await world.run()
    node_port("s2", 30080)
    await world.run()
    assert world.mode.kernel["nodePort :30080"] == "shop/s2 (TCP, IPv4)"
    await world.check()
    assert world.mode.kernel["nodePort :30080"] == "shop/s2 (TCP, IPv4)"
    world.mode.poison = set()
    node_port("s1", 30082)
    await world.run()
    assert world.mode.kernel == world.fresh()
    assert world.sync.state.objects == len(world.mode.kernel)


async def test_what_is_gone_while_the_configuration_changes_is_told_to_be_gone() -> None:
    world = World()
    await world.run()
    for bit in (7, 8):
        config = NodeConfig(node_name="me", families=(Family.IPV4,), masquerade_bit=bit)
        world.use(config)
    cursor = world.sync.in_force.log.cursor()
    cursor.move(world.sync.in_force.log.revision)
    world.store.delete("Service", ObjectName("shop", "s1"))
    await world.sync.run()
    names, _ = cursor.changed()
    keys = [each for each in names if isinstance(each, PlanKey)]
    assert [str(key) for key in keys if key.name.service == "s1"] == ["shop/s1 (TCP, IPv4)"]
    assert not any(key.name.service == "s1" for key in world.sync.in_force.plans)
    assert world.mode.kernel == world.fresh()


async def test_a_reload_leaves_a_node_port_with_who_has_it() -> None:
    world = World()

    def ask(name: str) -> None:
        spec: dict[str, Any] = {"type": "NodePort", "ports": [{"port": 80, "nodePort": 30080}]}
        world.store.upsert(service(name, None, clusterIP=f"10.96.1.{len(name)}", **spec))

    ask("web")
    await world.run()
    ask("aa")
    for bit in (7, 8):
        config = NodeConfig(node_name="me", families=(Family.IPV4,), masquerade_bit=bit)
        world.use(config)
    await world.run()
    assert world.mode.kernel["nodePort :30080"] == "shop/web (TCP, IPv4)"
    (finding,) = world.sync.state.findings
    assert finding.object == "Service shop/aa"


async def test_planning_and_rendering_let_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many Services there are: at most so many between two turns of the event loop."""
    world, most, since = World(250), Counter[str](), Counter[str]()

    def counted(what: str, work: Any) -> Any:
        def count(*args: Any, **more: Any) -> Any:
            since[what] += 1
            most[what] = max(most[what], since[what])
            return work(*args, **more)

        return count

    async def others() -> None:
        while True:
            since.clear()
            await asyncio.sleep(0)

    monkeypatch.setattr("steersman.compile.planner.plan_service", counted("plan", plan_service))
    world.mode.render_service = counted("render", world.mode.render_service)  # type: ignore[method-assign]
    task = asyncio.create_task(others())
    await world.run()
    assert 10 < most["plan"] < 60
    assert 10 < most["render"] < 60
    config = NodeConfig(node_name="me", families=(Family.IPV4,), masquerade_all=True)
    world.use(config)
    await world.run()
    assert max(most.values()) < 60
    task.cancel()
    assert world.mode.kernel["masq"] is True


async def test_a_reload_while_a_sync_writes_leaves_what_is_published() -> None:
    world = World()
    worker = world.mode.worker = Held("apply")
    await world.run()
    worker.go.clear()
    worker.reached.clear()
    world.store.upsert(slice_("s1-x", "s1", ("10.1.0.99",)))
    run = asyncio.create_task(world.run())
    await worker.reached.wait()
    config = NodeConfig(node_name="me", families=(Family.IPV4,), masquerade_all=True)
    world.use(config)
    worker.go.set()
    await run
    assert len(world.sync.state.plan.services) == 4
    assert world.sync.state.plan.settings.families == (Family.IPV4,)
    assert not world.sync.state.plan.settings.masquerade_all
    assert world.sync.owes
    await world.run()
    assert world.sync.state.plan.settings.masquerade_all


def cannot_render(mode: MemoryMode, names: set[str]) -> set[str]:
    """Have the rendering of some Services fail, for as long as they are in the set returned."""

    def failing(render: Callable[..., Any]) -> Callable[..., Any]:
        def rendered(plan: ServicePlan, *more: Any) -> Any:
            if plan.key.name.service in names:
                raise MemoryError("no room")
            return render(plan, *more)

        return rendered

    mode.render_service = failing(mode.render_service)  # type: ignore[method-assign]
    return names


async def test_a_run_that_is_cancelled_while_it_renders_renders_everything_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("steersman.run.sync.renderer._SLICE", 0)  # others run after each plan
    world = World()
    await world.run()
    render = world.mode.render_service

    def cancelled(plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return render(plan, settings)

    for last, rendered in ((77, cancelled), (78, render)):
        world.mode.render_service = rendered  # type: ignore[method-assign]
        for name in ("s1", "s2", "s3"):
            world.store.upsert(slice_(f"{name}-x", name, (f"10.1.0.{last}",)))
        await asyncio.gather(asyncio.create_task(world.run()), return_exceptions=True)
    assert world.mode.kernel == world.fresh()
    assert not world.sync.broken


async def test_what_cannot_be_rendered_costs_no_other_service() -> None:
    world = World()
    await world.run()
    broken = cannot_render(world.mode, {"s1"})
    before = {k for k in world.mode.kernel if k.startswith("shop/s1 ")}
    world.store.upsert(slice_("s1-x", "s1", ("10.1.0.77",)))
    world.store.upsert(slice_("s2-x", "s2", ("10.1.0.88",)))
    result = await world.run()
    assert result is not None
    assert result.refused == 1
    assert {k for k in world.mode.kernel if k.startswith("shop/s1 ")} == before
    assert "shop/s2 (TCP, IPv4) 10.1.0.88:8080" in world.mode.kernel
    (finding,) = world.sync.state.findings
    assert finding.object == "Service shop/s1"
    assert "MemoryError: no room" in finding.reason
    broken.clear()
    await world.check()
    assert world.mode.kernel == world.fresh()
    assert world.sync.state.findings == ()


async def test_a_restart_keeps_the_last_versions_of_several_that_are_refused() -> None:
    world = World()
    for name in ("s1", "s2"):
        world.store.upsert(slice_(f"{name}-x", name, ("10.1.0.1", "10.1.0.2", "10.1.0.3")))
    await world.run()
    before = dict(world.mode.kernel)
    world.start()
    for name in ("s1", "s2"):
        world.store.upsert(slice_(f"{name}-x", name, ("10.1.0.1", "10.1.0.9")))
    world.mode.poison = {"shop/s1 (TCP, IPv4)", "shop/s2 (TCP, IPv4)"}
    for _ in range(3):
        await world.check()
        assert world.mode.kernel == before


async def test_a_restart_keeps_the_last_version_of_what_the_kernel_refuses() -> None:
    """Also what the new version does not want: the old one may need it."""
    world = World()
    world.store.upsert(slice_("s1-x", "s1", ("10.1.0.1", "10.1.0.2", "10.1.0.3")))
    await world.run()
    before = dict(world.mode.kernel)
    world.start()
    world.store.upsert(slice_("s1-x", "s1", ("10.1.0.1", "10.1.0.9")))
    world.store.delete("Service", ObjectName("shop", "s4"))
    world.mode.poison = {"shop/s1 (TCP, IPv4)"}
    world.mode.kernel["node"] = "other"  # something has to be written
    for _ in range(3):
        await world.check()
        assert world.mode.kernel == before
    objects = {finding.object for finding in world.sync.state.findings}
    assert objects == {"Service shop/s1", "objects of an earlier process"}
    assert world.sync.state.objects == len(before)
    world.mode.poison = set()
    await world.check()
    assert world.sync.owes
    await world.run()
    assert not world.sync.owes
    assert world.mode.kernel == world.fresh()
    assert world.sync.state.findings == ()
    assert world.sync.state.objects == len(world.mode.kernel)


async def test_what_a_refused_service_may_have_had_goes_with_it() -> None:
    world = World()
    world.store.upsert(slice_("s1-x", "s1", ("10.1.0.1", "10.1.0.2", "10.1.0.3")))
    await world.run()
    world.start()
    world.store.upsert(slice_("s1-x", "s1", ("10.1.0.1", "10.1.0.9")))
    world.mode.poison = {"shop/s1 (TCP, IPv4)"}
    await world.run()
    assert world.mode.kernel != world.fresh()
    world.store.delete("Service", ObjectName("shop", "s1"))
    await world.run()
    assert world.sync.owes
    await world.run()
    assert not world.sync.owes
    assert world.mode.kernel == world.fresh()
    assert world.sync.state.objects == len(world.mode.kernel)


def spread(namespace: str, name: str, ip: str) -> KubeObject:
    meta = {"namespace": namespace, "name": name}
    return make("Service", {"metadata": meta, "spec": {"clusterIP": ip, "ports": [{"port": 80}]}})


def in_force(world: World, namespace: str) -> int:
    return sum(value.startswith(f"{namespace}/") for value in map(str, world.mode.kernel.values()))


async def test_a_tenant_whose_objects_are_refused_takes_nobody_along() -> None:
    world = World(0)
    for number in range(20):
        world.store.upsert(spread(f"good{number % 3}", f"s{number}", f"10.96.2.{number}"))
    for number in range(400):
        name = f"s{number}"
        world.store.upsert(spread("evil", name, f"10.97.{number // 250}.{number % 250}"))
        world.mode.poison.add(f"evil/{name} (TCP, IPv4)")
    await world.run()
    assert sum(in_force(world, f"good{number}") for number in range(3)) == 20
    assert world.mode.reads < 150
    world.store.upsert(spread("good0", "more", "10.96.3.1"))
    await world.run()
    assert world.mode.kernel["clusterIP 10.96.3.1:80"] == "good0/more (TCP, IPv4)"


async def test_a_kernel_that_refuses_everything_is_not_asked_for_ever() -> None:
    world = World(0)
    for number in range(1000):  # each is a Finding
        ip = f"10.97.{number // 250}.{number % 250}"
        world.store.upsert(spread(f"ns{number % 50}", f"s{number}", ip))
        world.mode.poison.add(f"ns{number % 50}/s{number} (TCP, IPv4)")
    await world.run()
    assert world.sync.state.result is not None
    assert world.sync.state.result.refused == 1000
    state = world.sync.state
    assert len(state.findings) + sum(state.unlisted.values()) == 1000
    assert world.mode.reads < 500
    before, world.mode.poison = world.mode.reads, set()
    await world.check()
    assert len(world.mode.kernel) == 1002
    assert world.mode.reads < before + 10


async def test_a_service_that_was_never_written_is_gone_after_a_reload_without_it() -> None:
    world = World()
    broken = cannot_render(world.mode, {"s1"})
    world.mode.busy = True
    with pytest.raises(BusyError):
        await world.run()
    world.mode.busy = False
    world.store.delete("Service", ObjectName("shop", "s1"))
    config = NodeConfig(node_name="me", families=(Family.IPV4,), masquerade_all=True)
    world.use(config)
    await world.run()
    assert {key.name.service for key in world.sync.state.plan.services} == {"s2", "s3", "s4"}
    assert world.sync.state.findings == ()
    assert broken  # it would fail still


async def test_what_cannot_be_rendered_gives_way_to_who_claims_its_objects() -> None:
    world = World()
    await world.run()
    broken = cannot_render(world.mode, {"s1"})
    world.store.upsert(service("s1", clusterIP="10.96.0.77"))
    world.store.upsert(service("s9", clusterIP="10.96.0.1"))
    for _ in range(2):
        await world.run()
        assert world.mode.kernel["clusterIP 10.96.0.1:80"] == "shop/s9 (TCP, IPv4)"
        assert "shop/s1 (TCP, IPv4) 10.1.0.1:8080" in world.mode.kernel
        world.sync.suspect()
    broken.clear()
    await world.check()
    assert world.mode.kernel == world.fresh()


async def test_objects_of_a_refused_service_that_others_removed_are_not_counted() -> None:
    world = World()
    await world.run()
    world.mode.poison = {"shop/s1 (TCP, IPv4)"}
    world.store.upsert(slice_("s1-x", "s1", ("10.1.0.77",)))
    await world.run()
    assert world.sync.state.objects == len(world.mode.kernel)
    world.mode.kernel.pop(next(key for key in world.mode.kernel if key.startswith("shop/s1 ")))
    await world.check()  # what it had cannot be put back either
    assert world.sync.state.objects == len(world.mode.kernel)
    world.mode.poison = set()
    await world.check()
    assert world.mode.kernel == world.fresh()
    assert world.sync.state.objects == len(world.mode.kernel)
