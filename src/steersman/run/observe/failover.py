"""Failover at work: watch connections fail, probe, take endpoints out and put them back.

    kernel --Failure--> Policy <--result, or none-- probes
                          |
             ejections -> Store -> an ordinary sync -> unanswered conntrack entries are deleted

The policy decides (failover/policy.py); this module gives it the clock and the network, and
ejections.py tells everybody. Only the Services that ask for it are watched, and while there are
none, nothing is opened.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import cached_property, partial
from math import inf
from typing import TYPE_CHECKING, Any

from steersman.compile.failover import ejects, read_check, watched_pools
from steersman.config import ProxyConfig, to_failover_settings
from steersman.failover.watch import FailureWatch
from steersman.host.probe import try_http, try_tcp, try_udp
from steersman.model.change_log import ChangeLog
from steersman.model.errors import BusyError
from steersman.model.failover import Backend, Check, Observation, Probe, Settings
from steersman.model.names import ObjectName, PlanKey, Protocol
from steersman.run.observe.ejections import Ejections
from steersman.run.observe.events import Recorder
from steersman.run.observe.metrics import Metrics
from steersman.run.sync.engine import Engine
from steersman.run.sync.in_force import InForce, services_of
from steersman.run.sync.state import State, SyncReport
from steersman.source.store import EJECTIONS, Change, Store

if TYPE_CHECKING:
    from steersman.failover.checks import Checks
    from steersman.failover.policy import Policy

log = logging.getLogger(__name__)

_RETRY = 60.0  # seconds until connections are watched again after that failed
_SECOND_CUT = 1.0  # seconds after the first
_SLICE = 50  # Services that are read before other tasks may run

TryBackend = Callable[[Probe], Coroutine[Any, Any, Observation]]


async def try_backend(probe: Probe) -> Observation:
    """Connect to an endpoint once."""
    backend = probe.backend
    if probe.path:
        outcome = await try_http(backend.ip, backend.port, probe.path, probe.timeout)
        return Observation(outcome)
    if backend.protocol is Protocol.UDP:
        return Observation(await try_udp(backend.ip, backend.port))
    return Observation(await try_tcp(backend.ip, backend.port, probe.timeout))


class Failover:
    """Keeps the ejections of this node up to date."""

    def __init__(
        self,
        store: Store,
        in_force: InForce,
        recorder: Recorder,
        metrics: Metrics,
        config: Callable[[], ProxyConfig],
        *,
        try_backend: TryBackend = try_backend,
    ) -> None:
        self._cursor = in_force.log.cursor()
        self._config = config
        self._try = try_backend
        self._ejections = Ejections(store, recorder, metrics)
        self._configured: ProxyConfig | None = None
        self._settings = Settings()
        """Those of the configuration."""
        self._was_default = False
        """Whether Services are watched that do not say whether they want it."""
        self._state: State | None = None
        """Of the last sync. Its report would keep everything that the sync planned and wrote."""
        self._services: ChangeLog[ObjectName] = ChangeLog()
        """Services to give to the policy: those that changed, or all."""
        self._read = self._services.cursor()
        self._pools: dict[ObjectName, tuple[PlanKey, ...]] = {}
        """The watched ServicePorts of each Service."""
        self._failures: FailureWatch | None = None
        self._uncut: dict[ObjectName, set[Backend]] = {}
        """Ejected endpoints whose connections are cut once the rules are in force."""
        self._due: set[Backend] = set()
        """Those whose rules are in force."""
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    # Loaded for the first Service that asks for failover: most nodes have none.

    @cached_property
    def _policy(self) -> Policy[PlanKey]:
        from steersman.failover.policy import Policy  # noqa: PLC0415 - see above

        return Policy(self._settings)

    @cached_property
    def _checks(self) -> Checks[PlanKey]:
        from steersman.failover.checks import Checks  # noqa: PLC0415 - see above

        return Checks(random.random, self._settings)

    def _configure(self) -> None:
        self._policy.configure(self._settings)
        self._checks.settings = self._settings

    # The endpoints

    def observe(self, report: SyncReport) -> None:
        """Take the Services that a sync changed; `run` reads them."""
        self._state = report.state
        config = self._config()
        if config is not self._configured:
            self._configured, self._settings = config, to_failover_settings(config)
            if self._pools:
                self._configure()
        default = config.steersman.eject_failing_endpoints
        if default != self._was_default or (report.result and report.result.reason == "start"):
            self._was_default = default
            self._touch(report.state.snapshot.services)
        names, revision = self._cursor.changed()
        self._touch(services_of(names))
        for change in names:
            if isinstance(change, Change) and change.kind == EJECTIONS:
                self._due |= self._uncut.pop(change.name, set())
        self._cursor.move(revision)
        if self._read.behind or self._due:
            self._wake.set()

    def _touch(self, names: Iterable[ObjectName]) -> None:
        """Have those of some Services read that ask for failover, or did so before."""
        assert self._state is not None
        services, default = self._state.snapshot.services, self._was_default
        for name in names:
            service = services.get(name)
            asks = service is not None and ejects(service, default)
            if asks or name in self._pools or self._ejections.of(name):
                self._services.touch(name)

    async def _read_services(self) -> None:
        while self._read.behind and self._state is not None:
            names, revision = self._read.changed()
            for number, name in enumerate(names, 1):
                self._read_service(name, self._state)
                if number % _SLICE == 0:
                    await asyncio.sleep(0)
            self._read.move(revision)

    def _read_service(self, name: ObjectName, state: State) -> None:
        snapshot, settings = state.snapshot, state.plan.settings
        service = snapshot.services.get(name)
        pools: dict[PlanKey, dict[Backend, str]] = {}
        check: Check | None = None
        if service is not None and ejects(service, self._was_default):
            slices = snapshot.slices.get(name, ())
            pools = watched_pools(service, slices, settings.families, settings.node_name)
            check, _ = read_check(service)
            self._configure()  # the settings may have changed while nobody was watched
        # What Kubernetes newly says about an endpoint counts for more than what was seen before.
        for backend in self._ejections.changed_by_kubernetes(name, snapshot):
            self._policy.renew(backend)
        for key in self._pools.pop(name, ()):
            if key not in pools:
                self._policy.serve(key, {})
            if key not in pools or check is None:
                self._checks.forget(key)
        for key, members in pools.items():
            self._policy.serve(key, members, name.namespace)
            if check is not None and key.name.protocol is Protocol.TCP:
                used = self._used(key, state)
                checked = [each for each in members if each in used]
                self._checks.serve(time.monotonic(), key, checked, check)
        if pools:
            self._pools[name] = tuple(pools)
        elif self._ejections.of(name):
            self._ejections.withdraw(name)
            self._report()

    def _used(self, key: PlanKey, state: State) -> set[Backend]:
        """Return the endpoints that this node uses, those included that are ejected."""
        used = {each.backend for each in self._ejections.of(key.name.object_name)}
        if plan := state.plan.services.get(key):
            used |= {Backend(each.ip, each.port, key.name.protocol) for each in plan.reachable}
        return used

    # At work

    async def run(self, engine: Engine) -> None:
        """Watch connections in a mode until cancelled."""
        told = ""
        while True:
            self._wake.clear()
            await self._read_services()
            if not self._pools:  # nobody asks for it: nothing that is said of it matters now
                self._ejections.problem = ""
                self._report()
                await self._wake.wait()
                continue
            try:
                mode = engine.mode
                if mode.watch_failures is None:
                    raise BusyError(f"the {mode.name} mode cannot see connections fail")
                failures = await mode.worker.do(mode.watch_failures)
                self._ejections.problem = ""
                await self._watch(failures)
                continue
            except (BusyError, OSError) as error:
                problem = f"{error}; retrying in {_RETRY:g}s"
            if problem != told:
                log.warning("failing endpoints are not ejected: %s", problem)
                told = problem
            if not (self._checks and self._ejections.problem):  # ejections by checks go on
                # Nothing would end the others.
                self._ejections.withdraw_all()
                del self._policy  # begin with a new one
                self._touch(self._pools)
            self._ejections.problem = problem
            self._report()
            if self._checks:
                await self._watch(FailureWatch(), time.monotonic() + _RETRY)
            else:
                await asyncio.sleep(_RETRY)

    async def _watch(self, failures: FailureWatch, ends: float = inf) -> None:
        """Follow the kernel and the policy while anything is watched; close `failures` at the end.

        Raises:
            OSError: failures cannot be seen any more.
        """
        self._failures = failures
        self._report()  # this also ends the Finding that failures cannot be seen
        self._policy.counts_answers = failures.counts_answers
        self._policy.of_this_node = failures.of_this_node
        receiving = asyncio.create_task(failures.receive())
        waking = asyncio.create_task(self._wake.wait())
        try:
            while (self._pools or self._read.behind) and time.monotonic() < ends:
                due = (self._policy.deadline, self._checks.deadline, ends)
                deadline = min(at for at in due if at is not None)
                wait = None if deadline == inf else max(0.0, deadline - time.monotonic())
                await asyncio.wait(
                    (receiving, waking), timeout=wait, return_when=asyncio.FIRST_COMPLETED
                )
                if receiving.done():
                    for failure in receiving.result():
                        self._policy.observe(
                            time.monotonic(), failure.backend, failure.observation, failure.client
                        )
                    receiving = asyncio.create_task(failures.receive())
                if waking.done():
                    self._wake.clear()
                    waking = asyncio.create_task(self._wake.wait())
                    await self._read_services()
                await self._advance()
        finally:
            # Probes that are cancelled here are reported as lost.
            for task in (receiving, waking, *self._tasks):
                task.cancel()
            await asyncio.gather(receiving, waking, *self._tasks, return_exceptions=True)
            self._failures = None
            await failures.aclose()

    async def _advance(self) -> None:
        now = time.monotonic()
        for probe in (*self._policy.advance(now), *self._checks.advance(now)):
            self._start(self._try(probe)).add_done_callback(partial(self._finish_probe, probe))
        self._publish()
        if self._due:
            due, self._due = self._due, set()
            await self._cut_connections(due)
            # A packet that met the old rules may have made an entry behind the first listing.
            self._start(self._cut_later(due))

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _finish_probe(self, probe: Probe, task: asyncio.Task[Observation]) -> None:
        """Report the result of a probe, or that it has none."""
        now, backend = time.monotonic(), probe.backend
        self._wake.set()
        try:
            outcome = task.result()
        except (Exception, asyncio.CancelledError) as error:
            (self._checks if probe.check else self._policy).lose(now, backend)
            if not isinstance(error, OSError | asyncio.CancelledError):
                raise  # the loop logs it
            return  # the mode is replaced, or no descriptor or port is left
        if not probe.check:
            self._policy.probed(now, backend, outcome)
        elif (well := self._checks.checked(now, backend, outcome)) is False:
            self._policy.fail_check(now, backend, outcome)
        elif well:
            self._policy.pass_check(now, backend)

    async def _cut_later(self, backends: set[Backend]) -> None:
        await asyncio.sleep(_SECOND_CUT)
        await self._cut_connections(backends)

    async def _cut_connections(self, backends: set[Backend]) -> None:
        """Let connections that wait for ejected endpoints begin again at their next packet."""
        try:
            if self._failures and (number := await self._failures.cut(backends)):
                log.info(
                    "%d unanswered connections to ejected endpoints are made to begin again", number
                )
        except OSError as error:
            log.warning("connections to ejected endpoints cannot be listed: %s", error)

    # Ejections

    def _publish(self) -> None:
        names = dict.fromkeys(key.name.object_name for key in self._policy.take_changed())
        for name in names:
            assert self._state is not None
            pools = self._pools.get(name, ())
            found = [each for key in pools for each in self._policy.ejected(key)]
            if new := self._ejections.publish(name, found, self._state.snapshot):
                self._uncut.setdefault(name, set()).update(new)
        if names:
            self._report()

    def _report(self) -> None:
        self._ejections.report(checks=bool(self._pools and self._checks))
