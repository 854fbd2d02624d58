"""Switches of the mode of a running daemon, on kernels in memory."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from steersman.config import parse_command_line
from steersman.model.errors import BusyError
from steersman.model.names import ObjectName
from steersman.model.ruleset import Diff, Ruleset
from steersman.model.switch import SwitchRequest, SwitchResult, SwitchStep
from steersman.modes.base import Mode, Support
from steersman.modes.capabilities import Carrier
from steersman.run.process import daemon, mode_transition, switching
from steersman.run.process.assemble import assemble
from steersman.run.process.canary import Target
from steersman.run.process.daemon import Daemon, Stop
from steersman.run.process.klog import ProcessLog
from steersman.run.process.machine import Machine
from steersman.run.sync.state import SyncReport
from steersman.run.sync.sync import Sync
from tests.support.builders.store import service, slice_
from tests.support.modes.inline import Held
from tests.support.modes.memory import MemoryMode
from tests.support.waiting import until

OBJECTS = """
{apiVersion: v1, kind: List, items: [
{apiVersion: v1, kind: Service, metadata: {namespace: shop, name: web},
 spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}},
{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, addressType: IPv4,
 metadata: {namespace: shop, name: web-1, labels: {kubernetes.io/service-name: web}},
 ports: [{port: 8080}], endpoints: [{addresses: [10.244.0.5]}]}]}
"""
VIP = "clusterIP 10.96.0.1:80"


class TestMode(MemoryMode):
    """A mode with a kernel of its own, connections, and a gate before each write."""

    __test__ = False
    variant = "none"  # the leftovers of other modes on this machine are left alone

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.usable = True
        self.open = 0
        self.carrier = TestCarrier(self)
        self.nat_hooks = TestHooks(self)
        self.worker = held = Held("apply")
        self.gate, self.at_gate = held.go, held.reached
        self.closed = 0
        self.held = 0
        self.ports_held_with: set[str] = set()

    def probe(self) -> Support:
        return Support(self.usable, () if self.usable else ("The kernel is too old.",))

    def close(self) -> None:
        self.closed += 1


class TestCarrier(Carrier):
    """The connections of a TestMode."""

    __test__ = False

    def __init__(self, mode: TestMode) -> None:
        self._mode = mode

    def connections(self) -> int:
        return self._mode.open

    def without_new_connections(self, have: Ruleset) -> Ruleset:
        return {key: value for key, value in have.items() if key == "node"}

    def hold_ports(self) -> None:
        self._mode.ports_held_with = set(self._mode.kernel)


class TestHooks:
    """Counts how often a TestMode keeps the hooks of NAT."""

    __test__ = False

    def __init__(self, mode: TestMode) -> None:
        self._mode = mode

    def create(self) -> None:
        self._mode.held += 1


class World:
    """A daemon in ebpf mode, and the modes that it may switch to."""

    def __init__(self) -> None:
        self.modes = {name: TestMode(name) for name in ("ebpf", "nftables", "userspace")}
        self.daemon: Daemon
        self.stop = Stop()
        self.steps: list[SwitchStep] = []
        self.answers: Callable[[Target], bool] = lambda _: True

    async def dial(self, target: Target) -> str:
        await asyncio.sleep(0)
        return "" if self.answers(target) else "refused"

    async def switch(self, to: str, **more: Any) -> SwitchResult:
        request = SwitchRequest(to, **{"watch_seconds": 0.0, **more})
        async with asyncio.timeout(60):
            return await self.daemon.switch(request, self.steps.append)

    def said(self, name: str) -> list[str]:
        return [step.text for step in self.steps if step.name == name]

    @property
    def serving(self) -> list[str]:
        """The modes whose kernel has the Service."""
        return [name for name, mode in self.modes.items() if VIP in mode.kernel]


@asynccontextmanager
async def running(folder: Path, *flags: str) -> AsyncIterator[World]:
    (folder / "objects.yaml").write_text(OBJECTS)
    world = World()
    parsed = parse_command_line(
        [
            f"--manifests={folder}",
            *(flags or ("--proxy-mode=ebpf",)),
            "--hostname-override=me",
            "--iptables-min-sync-period=0s",
            "--healthz-bind-address=",
            "--metrics-bind-address=",
        ]
    )
    machine = Machine(
        create_mode=lambda name, *_: world.modes[name],
        may_have_left=lambda *_: True,
        set_conntrack=lambda *_: None,
        set_oom_score=lambda _: "",
        allow_localhost_node_ports=lambda config, *_: config,
        memory_when_loaded=lambda: None,
    )
    logs = ProcessLog(stream=io.StringIO(), root=logging.Logger("unused"))
    world.daemon = await assemble(parsed, logs, machine, world.stop)
    world.daemon.switcher.dial = world.dial
    task = asyncio.create_task(world.daemon.run())
    async with asyncio.timeout(60):
        await world.daemon.serving.wait()
    try:
        yield world
    finally:
        world.stop.request()
        async with asyncio.timeout(60):
            await task
    assert not world.stop.failure


async def test_another_mode_serves_and_the_first_one_is_removed(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        before = world.daemon.sync.state.revision
        result = await world.switch("nftables")
        assert (result.outcome, result.mode, result.before) == ("switched", "nftables", "ebpf")
        assert world.serving == ["nftables"]
        assert world.modes["ebpf"].kernel == {}
        assert [s.name for s in world.steps if s.name != "check"] == [
            *("serve", "leave", "compare", "watch"),
        ]
        state = world.daemon.sync.state
        assert (state.mode, state.revision > before) == ("nftables", True)
        assert world.modes["nftables"].held == 1
        await until(lambda: world.modes["ebpf"].closed == 1)


async def test_changes_go_to_the_mode_that_serves(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.switch("nftables")
        store = world.daemon.sync.store
        store.upsert(service("more", clusterIP="10.96.0.2"))
        await until(lambda: "clusterIP 10.96.0.2:80" in world.modes["nftables"].kernel)
        assert world.modes["ebpf"].kernel == {}


async def test_a_change_during_the_check_is_served_by_the_new_mode(tmp_path: Path) -> None:
    """The mode that still serves takes it in; the one that is checked has rehearsed already."""
    async with running(tmp_path) as world:
        store, dialled = world.daemon.sync.store, list[Target]()

        async def dial(target: Target) -> str:
            if not dialled:
                dialled.append(target)
                store.upsert(service("more", clusterIP="10.96.0.2"))
                store.upsert(slice_("more-1", "more", ("10.244.0.6",)))
                store.delete("EndpointSlice", ObjectName("shop", "web-1"))
                await until(lambda: "clusterIP 10.96.0.2:80" in world.modes["ebpf"].kernel)
            return ""

        world.daemon.switcher.dial = dial
        assert (await world.switch("nftables")).outcome == "switched"
        new = world.modes["nftables"]
        assert "clusterIP 10.96.0.2:80" in new.kernel
        assert not any("10.244.0.5" in str(key) for key in new.kernel), "a dead endpoint"
        assert dict(world.daemon.sync.objects()) == new.kernel
        assert not world.daemon.sync.owes
        plans = world.daemon.sync.state.plan.services
        assert {key.name.service for key in plans} == {"web", "more"}


async def test_a_restart_that_brings_the_old_mode_back_is_announced(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        result = await world.switch("nftables")
        assert "configuration still says ebpf" in result.text
        (finding,) = world.daemon.sync.store.findings
        assert "a restart brings ebpf back" in finding.reason
        assert "configuration" not in (await world.switch("ebpf")).text
        assert world.daemon.sync.store.findings == ()


async def test_the_configuration_file_may_follow_the_switch(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"

    def write(mode: str) -> None:
        file.write_text(
            "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
            f"mode: {mode}\nhostnameOverride: me\nsteersman:\n  manifests: [{tmp_path}/objects]\n"
        )

    (tmp_path / "objects").mkdir()
    write("ebpf")
    objects = tmp_path / "objects"
    async with running(objects, f"--config={file}") as world:
        await world.switch("nftables")
        assert world.daemon.sync.store.findings
        # Defaults are those of the mode that serves.
        assert world.daemon.engine.node.node_port_addresses == ("primary",)
        write("nftables")
        await until(lambda: not world.daemon.sync.store.findings)
        assert world.daemon.engine.mode.name == "nftables"


async def test_a_dry_run_and_a_refusal_change_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        kernel = dict(world.modes["ebpf"].kernel)
        assert (await world.switch("nftables", dry_run=True)).outcome == "checked"
        world.modes["nftables"].usable = False
        result = await world.switch("nftables")
        assert (result.outcome, world.steps[-1].state) == ("refused", "failed")
        assert "The kernel is too old." in world.steps[-1].text
        assert (await world.switch("no-such-mode")).outcome == "refused"
        assert "there is no mode no-such-mode here" in world.steps[-1].text
        assert (await world.switch("winuserspace")).outcome == "refused"
        assert (await world.switch("ebpf")).outcome == "unchanged"
        assert world.modes["nftables"].applied == []
        assert world.modes["ebpf"].kernel == kernel


async def test_a_mode_whose_objects_are_refused_is_left_again(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        world.modes["nftables"].poison = {world.modes["ebpf"].kernel[VIP]}
        result = await world.switch("nftables")
        assert result.outcome == "back"
        assert world.serving == ["ebpf"]
        assert world.modes["nftables"].kernel == {}
        assert "the kernel refuses 1 ServicePorts" in world.said("back")[0]
        assert world.daemon.sync.state.mode == "ebpf"


async def test_a_busy_kernel_leads_back_and_no_change_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switching, "_PAUSE", 0.0)
    async with running(tmp_path) as world:
        new = world.modes["nftables"]
        new.gate.clear()
        new.busy = True
        switch = asyncio.create_task(world.switch("nftables"))
        await new.at_gate.wait()  # the first sync of the new mode has taken what changed so far
        store = world.daemon.sync.store
        store.upsert(service("more", clusterIP="10.96.0.2"))
        store.upsert(slice_("more-1", "more", ("10.244.0.6",)))
        new.gate.set()
        assert (await switch).outcome == "back"
        await until(lambda: "clusterIP 10.96.0.2:80" in world.modes["ebpf"].kernel)
        assert world.serving == ["ebpf"]


async def test_what_a_mode_wrote_is_removed_though_no_way_leads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as world:
        new, old = world.modes["nftables"], world.modes["ebpf"]
        # Another switch has made the engine that serves, which leaves nftables to it.
        await world.switch("nftables")
        await world.switch("ebpf")
        await until(lambda: not new.kernel)

        def too_late() -> Ruleset:
            raise TimeoutError("bpftool did not answer in time")

        with monkeypatch.context() as patch:

            def written_but_late(change: Diff) -> None:
                MemoryMode.apply(new, change)
                patch.setattr(old, "read", too_late)
                raise TimeoutError("nft did not answer in time")

            patch.setattr(new, "apply", written_but_late)
            result = await world.switch("nftables")
            assert result.outcome == "stuck"
            assert "bpftool did not answer in time" in result.text
            assert new.kernel
            await asyncio.sleep(0.05)
            assert new.kernel  # ebpf mode is not known to be in force
        world.daemon._suspect()
        await until(lambda: not new.kernel)
        assert old.kernel


async def test_new_connections_that_fail_lead_back(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        world.answers = lambda _: world.serving == ["ebpf"]
        result = await world.switch("nftables", watch_seconds=20.0)
        assert (result.outcome, world.serving) == ("back", ["ebpf"])
        assert "new connections fail to shop/web" in world.said("back")[0]
        assert result.failed_dials >= 3


async def test_what_did_not_answer_before_is_not_held_against_the_new_mode(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        world.answers = lambda _: False
        result = await world.switch("nftables")
        assert (result.outcome, result.dials) == ("switched", 0)
        assert any("no connection is watched" in text for text in world.said("check"))


async def test_one_switch_at_a_time(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        new = world.modes["nftables"]
        new.gate.clear()
        first = asyncio.create_task(world.switch("nftables"))
        await new.at_gate.wait()
        with pytest.raises(BusyError, match="another switch is under way"):
            await world.switch("userspace")
        new.gate.set()
        assert (await first).outcome == "switched"
        assert (await world.switch("userspace")).outcome == "switched"
        assert world.serving == ["userspace"]


async def test_a_defect_in_a_switch_is_logged_and_another_one_may_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def crash(_: object) -> None:
        raise KeyError("defect")

    async with running(tmp_path) as world:
        with monkeypatch.context() as broken:
            broken.setattr(switching.Switch, "run", crash)
            with pytest.raises(KeyError, match="defect"):
                await world.switch("nftables")
        assert "a switch failed; the mode that serves continues" in caplog.text
        assert (await world.switch("nftables")).outcome == "switched"


async def test_a_client_that_goes_does_not_stop_the_switch(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        new = world.modes["nftables"]
        new.gate.clear()
        first = asyncio.create_task(world.switch("nftables"))
        await new.at_gate.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        new.gate.set()
        await until(lambda: world.serving == ["nftables"])


async def test_the_process_may_end_in_the_middle(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        new = world.modes["nftables"]
        new.gate.clear()
        switch = asyncio.create_task(world.switch("nftables"))
        await new.at_gate.wait()
        world.stop.request()
        with pytest.raises(BusyError, match="the process ends"):
            await switch
    assert world.serving == ["ebpf"], "nothing is removed that serves"


async def test_connections_of_the_old_mode_drain(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        old = world.modes["ebpf"]
        old.open = 2
        assert (await world.switch("nftables")).outcome == "switched"
        assert "2 go on through it" in world.said("leave")[0]
        assert list(old.kernel) == ["node"], "what carries its connections"
        assert old.ports_held_with == {"node"}, "no connection comes that is not held"
        old.open = 0
        await until(lambda: old.kernel == {} and old.closed == 1)


async def test_a_change_of_the_configuration_during_the_switch_is_used(tmp_path: Path) -> None:
    file, objects = tmp_path / "config.yaml", tmp_path / "objects"
    objects.mkdir()

    def write(masquerade_all: bool) -> None:
        file.write_text(
            "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
            f"mode: ebpf\nhostnameOverride: me\nsteersman:\n  manifests: [{objects}]\n"
            f"nftables:\n  masqueradeAll: {str(masquerade_all).lower()}\n"
        )

    write(False)
    async with running(objects, f"--config={file}") as world:
        new = world.modes["nftables"]
        new.gate.clear()
        switch = asyncio.create_task(world.switch("nftables"))
        await new.at_gate.wait()
        write(True)
        new.gate.set()
        assert (await switch).outcome == "switched"
        await until(lambda: new.kernel.get("masq") is True)


async def test_modes_drain_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leftovers(current: str, *_: object, **__: object) -> list[tuple[str, Mode]]:
        return [(name, mode) for name, mode in world.modes.items() if name != current]

    monkeypatch.setattr(daemon, "other_modes", leftovers)
    async with running(tmp_path) as world:
        world.modes["ebpf"].open = world.modes["nftables"].open = 2
        await world.switch("nftables")
        await world.switch("userspace")
        for _ in range(100):  # other tasks would remove what they may
            await asyncio.sleep(0)
        assert list(world.modes["ebpf"].kernel) == ["node"]
        assert list(world.modes["nftables"].kernel) == ["node"]
        world.modes["ebpf"].open = world.modes["nftables"].open = 0
        await until(lambda: not world.modes["ebpf"].kernel and not world.modes["nftables"].kernel)
        assert world.serving == ["userspace"]


async def test_a_mode_that_only_removed_leftovers_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, unusable = TestMode("nftables"), TestMode("userspace")
    left.kernel["node"] = "left"
    unusable.usable = False
    monkeypatch.setattr(mode_transition, "_RETRY_SECONDS", 0.0)
    left_modes = [("one", left), ("other", unusable)]
    monkeypatch.setattr(daemon, "other_modes", lambda *_, **__: left_modes)
    async with running(tmp_path) as world:
        await until(lambda: bool(left.closed and unusable.closed))
        assert (left.kernel, left.closed, unusable.closed) == ({}, 1, 1)
        assert world.modes["ebpf"].closed == 0, "it serves"


async def test_a_mode_that_drains_may_serve_again(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        old = world.modes["ebpf"]
        old.open = 2
        await world.switch("nftables")
        assert (await world.switch("ebpf")).outcome == "switched"
        assert world.serving == ["ebpf"]
        old.open = 0
        store = world.daemon.sync.store
        store.upsert(service("more", clusterIP="10.96.0.2"))
        await until(lambda: "clusterIP 10.96.0.2:80" in old.kernel)
        assert VIP in old.kernel, "nobody removes it any more"


async def test_what_others_take_away_during_the_switch_is_written_again(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        old, new = world.modes["ebpf"], world.modes["nftables"]
        remove = old.apply

        def apply(change: Diff) -> None:
            remove(change)
            if change.removed:  # an object that both modes have
                new.kernel.pop("node", None)

        old.apply = apply  # type: ignore[method-assign]
        assert (await world.switch("nftables")).outcome == "switched"
        assert "node" in new.kernel


@pytest.mark.parametrize("found_by", ["the switch", "a sync before it", "nobody"])
async def test_only_what_others_write_again_undoes_a_switch(
    tmp_path: Path, found_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services change all the time on a busy node, also between the two comparisons."""
    async with running(tmp_path) as world:
        new, compare, distrust = world.modes["nftables"], world.daemon.compare, Sync.distrust

        def lose_and_distrust(sync: Sync) -> None:
            new.kernel.pop("node", None)  # no sync of the daemon can find it before the switch
            distrust(sync)

        async def compare_beside_changes(*, whole: bool) -> SyncReport | None:
            if not whole:
                store = world.daemon.sync.store
                store.upsert(service("more", clusterIP="10.96.0.2"))
                if found_by != "nobody":
                    new.kernel.pop("node", None)
                if found_by == "a sync before it":
                    await compare(whole=False)
            return await compare(whole=whole)

        monkeypatch.setattr(Sync, "distrust", lose_and_distrust)
        monkeypatch.setattr(world.daemon, "compare", compare_beside_changes)
        result = await world.switch("nftables")
        if found_by != "nobody":
            assert result.outcome == "back"
            words = "1 kernel object (1 missing) differed again: another program writes them"
            assert words in world.said("back")[0]
        else:
            assert result.outcome == "switched"
            assert "clusterIP 10.96.0.2:80" in new.kernel
            assert world.said("compare")[0].startswith("1 objects were missing")
