"""Failover at work: watch connections fail, probe, take endpoints out and put them back.

    kernel --Failure--> Policy <--result-- probes
                          |
             ejections -> Store -> an ordinary sync -> unanswered conntrack entries are deleted

The policy decides (failover/policy.py); this module gives it the clock and the network. Only the
Services that ask for it are watched, and while there are none, nothing is opened.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from math import inf
from typing import Any

import msgspec

from steersman.compile.failover import ejects, entries_of, read_check, watched_pools
from steersman.config import ProxyConfig, to_failover_settings
from steersman.failover.checks import Checks
from steersman.failover.policy import Policy
from steersman.failover.watch import Failure, FailureWatch
from steersman.host.connect import try_http, try_tcp, try_udp
from steersman.model.addresses import join_host_port
from steersman.model.errors import BusyError
from steersman.model.failover import Backend, Check, Ejection, Observation, Probe
from steersman.model.findings import Finding
from steersman.model.kube import SliceEndpoint
from steersman.model.names import ObjectName, PlanKey, Protocol
from steersman.run.observe.events import Recorder, Regarding
from steersman.run.observe.metrics import Metrics
from steersman.run.sync.engine import Engine
from steersman.run.sync.in_force import InForce, services_of
from steersman.run.sync.state import State, SyncReport
from steersman.source.store import EJECTIONS, Change, Store

log = logging.getLogger(__name__)

_RETRY = 60.0  # seconds until connections are watched again after that failed
_SECOND_CUT = 1.0  # seconds after the first
_SLICE = 50  # Services that are read before other tasks may run
_MOST_FINDINGS = 50

TryBackend = Callable[[Probe], Awaitable[Observation]]


async def try_backend(probe: Probe) -> Observation:
    """Connect to an endpoint once."""
    backend = probe.backend
    if probe.path:
        outcome = await try_http(backend.ip, backend.port, probe.path, probe.timeout)
        return Observation(outcome)
    if backend.protocol is Protocol.UDP:
        return Observation(await try_udp(backend.ip, backend.port))
    return Observation(await try_tcp(backend.ip, backend.port, probe.timeout))


class _Blind(FailureWatch):
    """Sees nothing: for checks alone."""

    async def receive(self) -> list[Failure]:
        await asyncio.Event().wait()
        return []

    def close(self) -> None:
        pass


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
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Watch nothing yet.

        Args:
            store: takes the ejections, and the Findings about them.
            in_force: says which Services changed.
            recorder: takes the Events.
            metrics: count ejections.
            config: returns the configuration in force.
            try_backend: connects to an endpoint.
            clock: monotonic seconds.
            wall: seconds since 1970.
        """
        self._store = store
        self._cursor = in_force.log.cursor()
        self._recorder = recorder
        self._metrics = metrics
        self._config = config
        self._try = try_backend
        self._clock = clock
        self._wall = wall
        self._policy: Policy[PlanKey] = Policy()
        self._checks: Checks[PlanKey] = Checks(random.random)
        self._problem = ""
        """Why connections are not seen to fail; "" if they are."""
        self._pools: dict[ObjectName, tuple[PlanKey, ...]] = {}
        """The watched ServicePorts of each Service."""
        self._unread: dict[ObjectName, None] = {}
        """Services that changed, in order."""
        self._failures: FailureWatch | None = None
        self._state: State | None = None
        """Of the last sync. Its report would keep everything that the sync planned and wrote."""
        self._was_default = False
        self._configured: ProxyConfig | None = None
        """The configuration that the policy has."""
        self._entries: dict[ObjectName, dict[Backend, tuple[SliceEndpoint, ...]]] = {}
        """Of ejected endpoints: their entries in EndpointSlices when they were ejected."""
        self._cut: dict[ObjectName, set[Backend]] = {}
        """Ejected endpoints whose connections are cut once the rules are in force."""
        self._due: set[Backend] = set()
        """Those whose rules are in force."""
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # The endpoints

    def observe(self, report: SyncReport) -> None:
        """Take the Services that a sync changed."""
        self._state = report.state
        config = self._config()
        if config is not self._configured:
            self._configured = config
            self._checks.settings = to_failover_settings(config)
            self._policy.configure(self._checks.settings)
        default = config.steersman.eject_failing_endpoints
        if default != self._was_default or (report.result and report.result.reason == "start"):
            self._unread.update(dict.fromkeys(report.state.snapshot.services))
            self._was_default = default
        names, revision = self._cursor.changed()
        self._unread.update(dict.fromkeys(services_of(names)))
        for change in names:
            if isinstance(change, Change) and change.kind == EJECTIONS:
                self._due |= self._cut.pop(change.name, set())
        self._cursor.move(revision)
        if self._unread or self._due:
            self._wake.set()

    async def _read_services(self) -> None:
        """Give the policy the endpoints of Services that changed."""
        number = 0
        while self._unread and self._state is not None:
            # A dictionary that is emptied from its front finds its next first key ever later.
            for name in tuple(self._unread):
                del self._unread[name]
                self._read_service(name, self._state)
                number += 1
                if number % _SLICE == 0:
                    await asyncio.sleep(0)
            if not self._unread:  # and keeps room for all that it once held
                self._unread = {}

    def _read_service(self, name: ObjectName, state: State) -> None:
        snapshot, settings = state.snapshot, state.plan.settings
        service = snapshot.services.get(name)
        pools: dict[PlanKey, dict[Backend, str]] = {}
        check: Check | None = None
        if service is not None and ejects(service, self._was_default):
            slices = snapshot.slices.get(name, {}).values()
            pools = watched_pools(service, slices, settings.families, settings.node_name)
            check, _ = read_check(service)
        # What Kubernetes newly says about an endpoint counts for more than what was seen before.
        for backend, entries in self._entries.get(name, {}).items():
            if entries != self._entries_of(name, backend):
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
                self._checks.serve(
                    self._clock(), key, [each for each in members if each in used], check
                )
        if pools:
            self._pools[name] = tuple(pools)
        elif name in self._store.snapshot.ejected:
            self._store.eject(name, ())
            self._count()

    def _entries_of(self, name: ObjectName, backend: Backend) -> tuple[SliceEndpoint, ...]:
        assert self._state is not None
        slices = self._state.snapshot.slices.get(name, {})
        return entries_of(slices.values(), backend.ip)

    def _used(self, key: PlanKey, state: State) -> set[Backend]:
        """Return the endpoints that this node uses, those included that are ejected."""
        plan = state.plan.services.get(key)
        used = (
            {Backend(each.ip, each.port, key.name.protocol) for each in plan.reachable}
            if plan
            else set()
        )
        return used | {
            each.backend for each in self._store.snapshot.ejected.get(key.name.object_name, ())
        }

    # At work

    async def run(self, engine: Engine) -> None:
        """Watch connections in a mode until cancelled."""
        told = ""
        while True:
            self._wake.clear()
            await self._read_services()
            if not self._pools:  # nobody asks for it: nothing that is said of it matters now
                self._problem = ""
                self._store.report("failover", self._findings())
                await self._wake.wait()
                continue
            try:
                failures = engine.mode.watch_failures()
                self._problem = ""
                await self._watch(failures)
                continue
            except (BusyError, OSError) as error:
                problem = f"{error}; retrying in {_RETRY:g}s"
            if problem != told:
                log.warning("failing endpoints are not ejected: %s", problem)
                told = problem
            if not (self._checks and self._problem):  # ejections by checks go on
                self._give_up()
            self._problem = problem
            self._count()
            if self._checks:
                await self._watch(_Blind(), self._clock() + _RETRY)
            else:
                await asyncio.sleep(_RETRY)

    async def _watch(self, failures: FailureWatch, ends: float = inf) -> None:
        """Follow the kernel and the policy while anything is watched; close `failures` at the end.

        Raises:
            OSError: failures cannot be seen any more.
        """
        self._failures = failures
        # It also ends the Finding that failures cannot be seen.
        self._store.report("failover", self._findings())
        self._policy.counts_answers = failures.counts_answers
        self._policy.of_this_node = failures.of_this_node
        receiving = asyncio.create_task(failures.receive())
        waking = asyncio.create_task(self._wake.wait())
        try:
            while (self._pools or self._unread) and self._clock() < ends:
                due = (self._policy.deadline, self._checks.deadline, ends)
                deadline = min(at for at in due if at is not None)
                wait = None if deadline == inf else max(0.0, deadline - self._clock())
                await asyncio.wait(
                    (receiving, waking), timeout=wait, return_when=asyncio.FIRST_COMPLETED
                )
                if receiving.done():
                    for failure in receiving.result():
                        self._policy.observe(
                            self._clock(), failure.backend, failure.observation, failure.client
                        )
                    receiving = asyncio.create_task(failures.receive())
                if waking.done():
                    self._wake.clear()
                    waking = asyncio.create_task(self._wake.wait())
                    await self._read_services()
                await self._advance()
        finally:
            for task in (receiving, waking, *self._tasks):
                task.cancel()
            await asyncio.gather(receiving, waking, *self._tasks, return_exceptions=True)
            self._failures = None
            self._checks.interrupt(self._clock())
            failures.close()

    async def _advance(self) -> None:
        now = self._clock()
        for probe in (*self._policy.advance(now), *self._checks.advance(now)):
            self._start(self._probe(probe))
        self._publish()
        if self._due:
            due, self._due = self._due, set()
            await self._cut_connections(due)
            # A packet that met the old rules may have made an entry behind the first listing.
            self._start(self._cut_later(due))

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

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _probe(self, probe: Probe) -> None:
        try:
            outcome = await self._try(probe)
        except OSError as error:  # no descriptor or port is left: that says nothing about it
            log.debug("cannot probe %s: %s", probe.backend, error)
            outcome = Observation.ANSWERED
        now = self._clock()
        if not probe.check:
            self._policy.probed(now, probe.backend, outcome)
        elif (well := self._checks.checked(now, probe.backend, outcome)) is False:
            self._policy.fail_check(now, probe.backend, outcome)
        elif well:
            self._policy.pass_check(now, probe.backend)
        self._wake.set()

    # Ejections

    def _publish(self) -> None:
        """Put the ejections that changed into the Store, and tell everybody."""
        names = dict.fromkeys(key.name.object_name for key in self._policy.take_changed())
        for name in names:
            before = self._store.snapshot.ejected.get(name, ())
            found = {
                ejection.backend: self._on_the_wall(ejection)
                for key in self._pools.get(name, ())
                for ejection in self._policy.ejected(key)
            }
            known = {each.backend for each in before}
            entries = self._entries.pop(name, {})
            if found:
                self._entries[name] = {
                    backend: entries.get(backend) or self._entries_of(name, backend)
                    for backend in found
                }
            self._store.eject(name, tuple(found.values()))
            for ejection in (each for each in found.values() if each.backend not in known):
                self._cut.setdefault(name, set()).add(ejection.backend)
                self._metrics.ejections(ejection.reason.value).inc()
                self._tell_of_ejection(name, ejection)
            for backend in known - found.keys():
                is_same = entries.get(backend) == self._entries_of(name, backend)
                self._tell_of_return(
                    name, backend, "answers again" if is_same else "was changed by Kubernetes"
                )
        if names:
            self._count()

    def _count(self) -> None:
        """Say in metrics and Findings how many endpoints are ejected."""
        ejected = self._store.snapshot.ejected
        self._metrics.ejected().set(sum(map(len, ejected.values())))
        self._store.report("failover", self._findings())

    def _on_the_wall(self, ejection: Ejection) -> Ejection:
        """Return an ejection with times of the wall clock."""
        offset = self._wall() - self._clock()
        return msgspec.structs.replace(
            ejection, since=ejection.since + offset, until=ejection.until + offset
        )

    # Texts of Events have no times, so that the recorder drops repetitions.

    def _tell_of_ejection(self, name: ObjectName, ejection: Ejection) -> None:
        where = join_host_port(ejection.backend.ip, ejection.backend.port)
        log.warning("endpoint %s of Service %s is ejected: %s", where, name, ejection.why)
        about = Regarding("Service", name.name, name.namespace)
        note = f"endpoint {where} does not answer and gets no new connections"
        self._recorder.record(about, "Warning", "EndpointEjected", "Eject", note)

    def _tell_of_return(self, name: ObjectName, backend: Backend, why: str) -> None:
        where = join_host_port(backend.ip, backend.port)
        log.warning("endpoint %s of Service %s %s; it is not ejected any more", where, name, why)
        about = Regarding("Service", name.name, name.namespace)
        self._recorder.record(
            about, "Normal", "EndpointReturned", "Return", f"endpoint {where} {why}"
        )

    def _findings(self) -> tuple[Finding, ...]:
        ejected = self._store.snapshot.ejected
        findings = [
            Finding(
                f"Service {name}",
                f"endpoint {join_host_port(each.backend.ip, each.backend.port)}",
                f"is ejected on this node: {each.why}",
            )
            for name in sorted(ejected)
            for each in ejected[name]
        ]
        if len(findings) > _MOST_FINDINGS:
            more = len(findings) - _MOST_FINDINGS
            text = f"{more} more endpoints are ejected; see steersman services"
            findings[_MOST_FINDINGS:] = [Finding("the node", "failover", text)]
        if self._failures and self._failures.limits:
            findings.append(Finding("the node", "failover", self._failures.limits))
        if self._problem:
            text = f"failing endpoints are not ejected: {self._problem}"
            if self._checks:
                text += "; only checks (steersman/probe) show them"
            findings.insert(0, Finding("the node", "failover", text))
        return tuple(findings)

    def _give_up(self) -> None:
        """Withdraw all ejections, as nothing would end them."""
        for name in list(self._store.snapshot.ejected):
            self._store.eject(name, ())
        self._entries.clear()
        self._policy = Policy(self._policy.settings)
        self._unread.update(dict.fromkeys(self._pools))
