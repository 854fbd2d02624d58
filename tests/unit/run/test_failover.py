"""Failover at work, with probes and a clock of the test; the kernel's part is in tests/kernel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import structs

from steersman.config import ProxyConfig
from steersman.config.go import seconds
from steersman.config.types import FailoverSection
from steersman.failover.watch import Failure, FailureWatch
from steersman.model.errors import BusyError
from steersman.model.failover import Backend, Ejection, Observation, Probe
from steersman.model.inputs import NodeConfig
from steersman.model.kube import Annotations, EndpointSlice, Service
from steersman.model.names import Protocol
from steersman.run.observe.events import Recorder
from steersman.run.observe.failover import Failover
from steersman.run.observe.metrics import Metrics
from steersman.run.sync.engine import Engine
from tests.support.builders.store import service, slice_
from tests.support.modes.memory import MemoryMode, World
from tests.support.waiting import until

WEB = service().metadata.object_name

IPS = ("10.1.0.1", "10.1.0.2", "10.1.0.3")


class Log(FailureWatch):
    """The log of failures: the test writes it."""

    queue: asyncio.Queue[list[Failure]]
    opened = 0
    error: Exception | None = None
    cuts: list[Backend]

    def __init__(self) -> None:
        if Log.error is not None:
            raise Log.error
        Log.opened += 1

    async def receive(self) -> list[Failure]:
        return await Log.queue.get()

    async def cut(self, backends: Collection[Backend]) -> int:
        Log.cuts += backends
        return len(backends)

    async def aclose(self) -> None:
        Log.opened -= 1


class Seeing(MemoryMode):
    """A mode in which connections are seen to fail."""

    def watch_failures(self) -> FailureWatch:
        return Log()


def backend(ip: str) -> Backend:
    return Backend(ip, 8080, Protocol.TCP)


class Ejecting:
    """A process with three endpoints; those in `down` do not answer probes."""

    def __init__(self, **steersman: Any) -> None:
        self.world = World(services=0)
        self.metrics = Metrics("iptables")
        self.recorder = Recorder(self, "me")
        self.down: dict[Backend, Observation] = {}
        self.paths: list[str] = []
        """Of the checks that ran."""
        self.tried: set[Backend] = set()
        config = ProxyConfig()
        settings = structs.replace(config.steersman, **steersman)
        self.config = structs.replace(config, steersman=settings)
        self.failover = Failover(
            self.world.store,
            self.world.sync.in_force,
            self.recorder,
            self.metrics,
            lambda: self.config,
            try_backend=self._try,
        )

    async def post_event(self, namespace: str, event: dict[str, Any]) -> None: ...

    async def _try(self, probe: Probe) -> Observation:
        self.tried.add(probe.backend)
        if probe.check:
            self.paths.append(probe.path)
        return self.down.get(probe.backend, Observation.ANSWERED)

    async def sync(self) -> None:
        if (report := await self.world.sync.run()) is not None:
            self.report = report
            self.failover.observe(report)

    async def serve(self, annotation: str = "", **more: str) -> None:
        obj = service()
        assert isinstance(obj, Service)
        if annotation or more:
            given = Annotations(eject=annotation or None, **more)
            metadata = structs.replace(obj.metadata, annotations=given)
            obj = structs.replace(obj, metadata=metadata)
        self.world.store.upsert(obj)
        self.world.store.upsert(slice_(ips=IPS))
        await self.sync()

    @property
    def out(self) -> list[str]:
        return [each.backend.ip for each in self.world.store.snapshot.ejected.get(WEB, ())]

    async def refuse(self, ip: str) -> None:
        """Let an endpoint that has answered a probe refuse a client until it is ejected."""
        await until(lambda: Log.opened == 1 and backend(ip) in self.tried)
        self.down[backend(ip)] = Observation.REFUSED
        await Log.queue.put([Failure(backend(ip), Observation.REFUSED)])
        await until(lambda: ip in self.out)

    @asynccontextmanager
    async def running(self, mode: MemoryMode | None = None) -> AsyncIterator[None]:
        engine = Engine(mode or Seeing(), self.config, NodeConfig(), self.world.store)
        task = asyncio.create_task(self.failover.run(engine))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def events(self) -> list[str]:
        found = []
        while not self.recorder._queue.empty():
            found.append(self.recorder._queue.get_nowait()[1]["reason"])
        return found


@pytest.fixture(autouse=True)
def log_of_failures() -> None:
    Log.queue, Log.opened, Log.error, Log.cuts = asyncio.Queue(), 0, None, []


async def test_an_endpoint_that_refuses_is_ejected_and_its_connections_are_cut() -> None:
    ejecting = Ejecting(eject_failing_endpoints=True)
    await ejecting.serve()
    async with ejecting.running():
        await ejecting.refuse("10.1.0.2")
        assert Log.cuts == []
        await ejecting.sync()  # the rules are in force
        await until(lambda: Log.cuts == [backend("10.1.0.2")])
        [finding] = ejecting.world.store.findings
        assert finding.field == "endpoint 10.1.0.2:8080"
        assert "is ejected on this node: it has refused connections" in finding.reason
        assert ejecting.events == ["EndpointEjected"]
        assert ejecting.metrics.ejections("refused").value == 1
        assert ejecting.metrics.ejected().value == 1
    assert Log.opened == 0


async def test_kubernetes_ends_an_ejection() -> None:
    ejecting = Ejecting(eject_failing_endpoints=True)
    await ejecting.serve()
    async with ejecting.running():
        await ejecting.refuse("10.1.0.2")
        ejecting.world.store.upsert(slice_(ips=("10.1.0.1", "10.1.0.3")))
        await ejecting.sync()
        await until(lambda: ejecting.out == [])
        assert ejecting.world.store.findings == ()
        assert ejecting.events == ["EndpointEjected", "EndpointReturned"]


async def test_an_endpoint_that_kubernetes_changes_is_used_again() -> None:
    """Such as a pod that one of another node with its address replaces, in one update."""
    ejecting = Ejecting(eject_failing_endpoints=True)
    await ejecting.serve()
    async with ejecting.running():
        await ejecting.refuse("10.1.0.2")
        # News of others change nothing.
        ejecting.world.store.upsert(slice_(ips=(*IPS, "10.1.0.4")))
        await ejecting.sync()
        await until(lambda: Log.cuts == [backend("10.1.0.2")])
        assert ejecting.out == ["10.1.0.2"]
        changed = slice_(ips=(*IPS, "10.1.0.4"))
        assert isinstance(changed, EndpointSlice)
        ends = [structs.replace(end, node_name="other") for end in changed.endpoints or ()]
        ejecting.world.store.upsert(structs.replace(changed, endpoints=ends))
        await ejecting.sync()
        await until(lambda: ejecting.out == [])


async def test_a_flapping_endpoint_makes_one_event_of_each_kind() -> None:
    ejecting = Ejecting(eject_failing_endpoints=True)
    await ejecting.serve()
    async with ejecting.running():
        for _ in range(3):
            await ejecting.refuse("10.1.0.2")
            ejecting.world.store.upsert(slice_(ips=("10.1.0.1", "10.1.0.3")))
            await ejecting.sync()
            await until(lambda: ejecting.out == [])
            del ejecting.down[backend("10.1.0.2")]
            ejecting.tried.clear()
            ejecting.world.store.upsert(slice_(ips=IPS))
            await ejecting.sync()
        assert ejecting.metrics.ejections("refused").value == 3
        assert ejecting.events == ["EndpointEjected", "EndpointReturned"]


@pytest.mark.parametrize(
    ("default", "annotation", "watched"),
    [(False, "", False), (False, "true", True), (True, "false", False), (True, "", True)],
)
async def test_only_services_that_ask_for_it_are_watched(
    default: bool, annotation: str, watched: bool
) -> None:
    ejecting = Ejecting(eject_failing_endpoints=default)
    await ejecting.serve(annotation)
    async with ejecting.running():
        if watched:
            await ejecting.refuse("10.1.0.1")
        await asyncio.sleep(0)
        assert Log.opened == watched


async def test_the_ejections_of_a_service_without_endpoints_end() -> None:
    ejecting = Ejecting(eject_failing_endpoints=True)
    await ejecting.serve()
    async with ejecting.running():
        await ejecting.refuse("10.1.0.2")
        ejecting.world.store.upsert(slice_(ips=()))
        await ejecting.sync()
        await until(lambda: ejecting.out == [])
        assert ejecting.metrics.ejected().value == 0


async def test_a_service_that_no_longer_asks_gets_its_endpoints_back() -> None:
    ejecting = Ejecting()
    await ejecting.serve("true")
    async with ejecting.running():
        await ejecting.refuse("10.1.0.1")
        assert ejecting.metrics.ejected().value == 1
        await ejecting.serve("false")
        await until(lambda: ejecting.out == [] and Log.opened == 0)
        assert ejecting.metrics.ejected().value == 0
        assert ejecting.world.store.findings == ()


async def test_the_configuration_may_change() -> None:
    ejecting = Ejecting()
    await ejecting.serve()
    async with ejecting.running():
        on = structs.replace(ejecting.config.steersman, eject_failing_endpoints=True)
        ejecting.config = structs.replace(ejecting.config, steersman=on)
        await ejecting.serve("")
        ejecting.world.store.upsert(slice_(ips=IPS[:2]))
        await ejecting.sync()
        await ejecting.refuse("10.1.0.1")


async def test_parameters_of_the_configuration_take_effect_at_runtime() -> None:
    ejecting = Ejecting(eject_failing_endpoints=True)
    await ejecting.serve()
    async with ejecting.running():
        await ejecting.refuse("10.1.0.1")
        await ejecting.refuse("10.1.0.2")
        section = structs.replace(ejecting.config.steersman.failover, confirmed_share=0.4)
        block = structs.replace(ejecting.config.steersman, failover=section)
        ejecting.config = structs.replace(ejecting.config, steersman=block)
        await ejecting.serve("")
        ejecting.world.store.upsert(slice_(ips=(*IPS, "10.1.0.4")))
        await ejecting.sync()
        await until(lambda: ejecting.out == ["10.1.0.1"])


async def test_parameters_may_change_while_nobody_is_watched() -> None:
    one_of_three = FailoverSection(confirmed_share=0.4)
    ejecting = Ejecting(eject_failing_endpoints=True, failover=one_of_three)
    await ejecting.serve()
    async with ejecting.running():
        await until(lambda: Log.opened == 1)
        await ejecting.serve("false")
        await until(lambda: Log.opened == 0)
        ejecting.tried.clear()
        block = structs.replace(ejecting.config.steersman, failover=FailoverSection())
        ejecting.config = structs.replace(ejecting.config, steersman=block)
        await ejecting.serve("")
        await ejecting.refuse("10.1.0.1")
        await ejecting.refuse("10.1.0.2")


async def test_a_mode_that_sees_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    ejecting = Ejecting(eject_failing_endpoints=True)
    await ejecting.serve()
    with caplog.at_level(logging.WARNING):
        async with ejecting.running(MemoryMode()):
            await until(lambda: bool(ejecting.world.store.findings))
    [finding] = ejecting.world.store.findings
    assert "mode cannot see connections fail" in finding.reason
    assert "failing endpoints are not ejected" in caplog.text


@pytest.mark.parametrize("mode", [MemoryMode(), Seeing()], ids=["blind", "seeing"])
async def test_checks_eject_in_every_mode(mode: MemoryMode) -> None:
    section = FailoverSection(check_interval=seconds(0.05), hold=seconds(0.1))
    ejecting = Ejecting(failover=section)
    # Before one has failed three times, each of the others has been tried.
    await ejecting.serve(probe="http:/healthz", probe_failures="3")
    async with ejecting.running(mode):
        await until(lambda: "/healthz" in ejecting.paths)
        ejecting.down[backend("10.1.0.2")] = Observation.UNHEALTHY
        await until(lambda: ejecting.out == ["10.1.0.2"])
        await ejecting.sync()
        findings = [each for each in ejecting.world.store.findings if "endpoint" in each.field]
        assert "it has answered checks with an error" in findings[0].reason
        del ejecting.down[backend("10.1.0.2")]
        await until(lambda: ejecting.out == [])
        for ip in IPS:
            ejecting.down[backend(ip)] = Observation.SILENT
        tried = len(ejecting.paths)
        await until(lambda: len(ejecting.paths) > tried + 12)
        assert ejecting.out == [], "if all fail, none is ejected"
        await ejecting.serve("false", probe="http:/healthz")
        await until(lambda: not ejecting.failover._checks)


async def test_only_endpoints_that_this_node_uses_are_checked() -> None:
    section = FailoverSection(check_interval=seconds(0.01))
    ejecting = Ejecting(failover=section)
    await ejecting.serve(probe="tcp")
    key = next(iter(ejecting.world.sync.state.plan.services))
    assert {each.ip for each in ejecting.failover._used(key, ejecting.report.state)} == set(IPS)
    ejection = Ejection(backend("10.9.9.9"), Observation.SILENT, 0, 1, 1)
    ejecting.world.store.eject(WEB, (ejection,))
    assert "10.9.9.9" in {each.ip for each in ejecting.failover._used(key, ejecting.report.state)}


async def test_a_kernel_that_refuses_the_log_is_a_finding() -> None:
    ejecting = Ejecting(eject_failing_endpoints=True)
    await ejecting.serve()
    Log.error = BusyError("seeing connections fail needs nf_tables")
    async with ejecting.running():
        await until(lambda: bool(ejecting.world.store.findings))
    [finding] = ejecting.world.store.findings
    assert "needs nf_tables" in finding.reason
    assert "retrying in 60s" in finding.reason


async def test_that_failures_are_not_seen_is_a_finding_while_it_is_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("steersman.run.observe.failover._RETRY", 0.01)
    ejecting = Ejecting(eject_failing_endpoints=True)
    await ejecting.serve()
    Log.error = BusyError("seeing connections fail needs nf_tables")

    def said() -> list[str]:
        return [each.reason for each in ejecting.world.store.findings]

    async with ejecting.running():
        await until(lambda: "needs nf_tables" in "".join(said()))
        Log.error = None
        await until(lambda: said() == [])


async def test_a_probe_that_cannot_be_sent_says_nothing() -> None:
    ejecting = Ejecting(eject_failing_endpoints=True)
    await ejecting.serve()
    async with ejecting.running():
        await ejecting.refuse("10.1.0.1")
        asked: list[Backend] = []

        async def cannot(probe: Probe) -> Observation:
            asked.append(probe.backend)
            raise OSError(24, "no descriptor is left")

        ejecting.failover._try = cannot
        await Log.queue.put([Failure(backend("10.1.0.2"), Observation.REFUSED)])
        await until(lambda: len(asked) > 1)
        await asyncio.sleep(0.05)
        assert ejecting.out == ["10.1.0.1"], "neither an ejection nor a return"
        ejecting.failover._try = ejecting._try
        ejecting.down[backend("10.1.0.2")] = Observation.REFUSED
        await asyncio.sleep(0.6)  # between two suspicions
        await Log.queue.put([Failure(backend("10.1.0.2"), Observation.REFUSED)])
        await until(lambda: ejecting.out == ["10.1.0.1", "10.1.0.2"])


@pytest.mark.parametrize("cancel", ["the return", "the confirmation"])
async def test_a_switch_of_the_mode_loses_no_endpoint(cancel: str) -> None:
    """Finding 2: the probes that a switch cancelled left states that nothing ended."""
    section = FailoverSection(hold=seconds(0.1))
    ejecting = Ejecting(eject_failing_endpoints=True, failover=section)
    await ejecting.serve()
    mine, hangs = backend("10.1.0.2"), asyncio.Event()

    async def hang(probe: Probe) -> Observation:
        if probe.backend == mine:
            hangs.set()
            await asyncio.Event().wait()
        return Observation.ANSWERED

    async with ejecting.running():
        await until(lambda: len(ejecting.tried) == 3)
        if cancel == "the return":
            await ejecting.refuse(mine.ip)
        ejecting.failover._try = hang
        await Log.queue.put([Failure(mine, Observation.SILENT)])
        await hangs.wait()
    ejecting.failover._try = ejecting._try
    ejecting.down.clear()
    async with ejecting.running():
        if cancel == "the confirmation":
            await asyncio.sleep(0.6)  # between two suspicions
            ejecting.down[mine] = Observation.REFUSED
            await Log.queue.put([Failure(mine, Observation.REFUSED)])
            await until(lambda: ejecting.out == [mine.ip])
            ejecting.down.clear()
        await until(lambda: ejecting.out == [])


async def test_a_check_that_a_switch_cancels_starts_again() -> None:
    ejecting = Ejecting(failover=FailoverSection(check_interval=seconds(0.05)))
    await ejecting.serve(probe="tcp")
    hanging: set[Backend] = set()

    async def hang(probe: Probe) -> Observation:
        if probe.check:
            hanging.add(probe.backend)
            await asyncio.Event().wait()
        return Observation.ANSWERED

    ejecting.failover._try = hang
    async with ejecting.running():
        await until(lambda: len(hanging) == 3)
    ejecting.failover._try = ejecting._try
    async with ejecting.running():
        await until(lambda: len(ejecting.paths) >= 3)


async def test_a_check_that_ends_with_a_blind_phase_starts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("steersman.run.observe.failover._RETRY", 0.2)
    ejecting = Ejecting(failover=FailoverSection(check_interval=seconds(0.05)))
    await ejecting.serve(probe="tcp")
    hanging: set[Backend] = set()

    async def hang(probe: Probe) -> Observation:
        if probe.check and probe.backend not in hanging:
            hanging.add(probe.backend)
            await asyncio.Event().wait()
        return await ejecting._try(probe)

    ejecting.failover._try = hang
    async with ejecting.running(MemoryMode()):
        await until(lambda: len(hanging) == 3 and len(ejecting.paths) >= 3)


async def test_a_probe_that_breaks_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    ejecting = Ejecting(eject_failing_endpoints=True)
    await ejecting.serve()
    raised: list[BaseException] = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(
        loop, "call_exception_handler", lambda context: raised.append(context["exception"])
    )

    async def breaks(probe: Probe) -> Observation:
        raise ZeroDivisionError

    ejecting.failover._try = breaks
    async with ejecting.running():
        await until(lambda: len(raised) == 3)
        ejecting.failover._try = ejecting._try
        await until(lambda: len(ejecting.tried) == 3)
    assert {type(each) for each in raised} == {ZeroDivisionError}
