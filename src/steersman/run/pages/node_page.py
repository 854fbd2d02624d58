"""The page of this node for pages of a cluster: its NodeState, once or as a stream of lines.

    report, failure, condition --changed--> timer (at most 4 a second) --> one line --> listeners

A line is made and encoded once for all listeners. Each listener is a coroutine that waits for the
newest line: one that reads slowly misses lines, and nothing queues up for it. Without listeners
`changed` does nothing, and there is no timer.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Collection

import msgspec

from steersman.compile.digest import Digests, digest_of
from steersman.host.process import cpu_seconds, resident_bytes
from steersman.model.drift import Drift
from steersman.model.findings import Finding, Severity, worst
from steersman.model.names import ObjectName
from steersman.model.node_state import NodeState
from steersman.model.world import Condition, ProcessStatus
from steersman.run.pages.history import Lags
from steersman.run.serve.http import Answer, Request
from steersman.run.sync.in_force import InForce, services_of
from steersman.run.sync.state import SyncResult
from steersman.run.sync.sync import Sync
from steersman.source.store import Store

MOST_LISTENERS = 16
"""Streams at a time; the local socket keeps room for commands."""
_APART = 0.25
"""Least seconds between two lines."""
_HEARTBEAT = 5.0
"""Most seconds between two lines."""
_STUCK = 30.0
"""Seconds after which a listener that reads nothing is dropped."""
_MOST_FINDINGS, _FINDING_CHARACTERS = 50, 16_000
_LONGEST_FAILURE = 1000
"""Characters of the last failure."""
_LOOK = 5.0
"""Seconds between two looks at the conditions and the CPU time."""
_DIGESTS_AT_ONCE = 50
"""Digests that are made before other tasks may run, a few milliseconds."""
_CPU_SAMPLES = 3
"""Samples of the CPU time that are kept."""
_OF_PROCESS = (
    *("version", "pid", "started", "now", "owes"),
    *("waiting", "healthy", "source", "conditions"),
)
"""Fields of a NodeState that are those of ProcessStatus."""


class DigestPage:
    """Keeps the digests of all Services once somebody has asked, and serves `/digests`."""

    def __init__(
        self, store: Store, in_force: InForce, ready: Callable[[], None] = lambda: None
    ) -> None:
        """Create the page.

        Args:
            store: the cluster's objects.
            in_force: says which of them the kernel has.
            ready: called when all digests are known for the first time.
        """
        self._store = store
        self._in_force = in_force
        self._cursor = in_force.log.cursor()
        self.ready = ready
        self._digests = Digests()
        self._made: asyncio.Task[None] | None = None

    def total(self) -> str:
        """Return the digest of all Services; "" for the first moments, while it is made."""
        if self._made is None:
            self._made = asyncio.create_task(self._make())
        return self._digests.total if self._made.done() else ""

    async def observe(self, _: object = None) -> None:
        """Take the Services that a sync has brought into force; yields to the loop."""
        names, revision = self._cursor.changed()
        if self._made is not None:
            await self._put(services_of(names))
        self._cursor.move(revision)

    async def serve(self, _: Request) -> Answer:
        """Answer `/digests`: the digest of each Service by its name."""
        self.total()
        assert self._made is not None
        await asyncio.shield(self._made)
        found = self._digests.by_name()
        body = await asyncio.to_thread(msgspec.json.encode, found)
        return Answer(body, content_type="application/json")

    async def _make(self) -> None:
        await self._put(tuple(self._store.snapshot.services))
        asyncio.get_running_loop().call_soon(self.ready)

    async def _put(self, names: Collection[ObjectName]) -> None:
        snapshot, in_force = self._store.snapshot, self._in_force
        for number, name in enumerate(names, 1):
            # Another version than the Store's is in force: its digest stays, if there is one.
            if in_force.has_newest(name, self._store.log):
                service, slices = snapshot.services.get(name), snapshot.slices.get(name, {})
                digest = digest_of(name, service, slices.values()) if service is not None else 0
                self._digests.put(name, digest)
            if number % _DIGESTS_AT_ONCE == 0:
                await asyncio.sleep(0)


class NodePage:
    """Serves `/node`."""

    def __init__(
        self,
        status: Callable[[], ProcessStatus],
        sync: Callable[[], Sync],
        *,
        drift: Callable[[], tuple[int, Drift | None]],
        rates: Callable[[], tuple[float | None, float | None]],
        lags: Lags,
        digest: Callable[[], str] = str,
        periods: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = cpu_seconds,
    ) -> None:
        """Create the page; nothing is made before it is asked for.

        Args:
            status: describes the process.
            sync: returns the body of the sync loop of the mode that serves.
            drift: returns how often drift was repaired, and the last one.
            rates: returns new and failed connections per second, as far as counted already.
            lags: of the last syncs.
            digest: returns the digest of all Services; "" until it is known.
            periods: returns the longest and the least seconds between two syncs.
            clock: monotonic seconds.
            cpu: returns the CPU seconds of this process so far.
        """
        self._status = status
        self._sync = sync
        self._drift = drift
        self._rates = rates
        self._lags = lags
        self._periods = periods
        self._clock = clock
        self._cpu = cpu
        self._cpu_samples = deque([(clock(), cpu())], _CPU_SAMPLES)
        self._worst: tuple[tuple[Finding, ...], tuple[Finding, ...]] = (), ()
        """The Findings of the last state, and the worst of them."""
        self._digest = digest
        self._listeners: dict[object, Request] = {}
        self._line = b""
        self._made_at = float("-inf")
        self._news = asyncio.Event()
        """Set when there is another line, and replaced by a fresh one."""
        self._timer: asyncio.TimerHandle | None = None
        self._due = float("inf")
        """When the timer fires, by the loop's clock."""

    @property
    def listening(self) -> int:
        """Number of streams."""
        return len(self._listeners)

    @property
    def waiting(self) -> bool:
        """Whether another line will be made."""
        return self._timer is not None

    def changed(self, _: object = None) -> None:
        """Send the state soon: a sync has ended or failed, or something else is different."""
        if self._listeners:
            self._make_at(self._made_at + _APART)

    async def follow(self) -> None:
        """Look at the conditions and the CPU time every few seconds, until cancelled.

        So each condition knows since when it has its status, whether somebody asks or not.
        """
        known: tuple[Condition, ...] = ()
        while True:
            self._cpu_samples.append((self._clock(), self._cpu()))
            if (conditions := self._status().conditions) != known:
                known = conditions
                self.changed()
            await asyncio.sleep(_LOOK)

    def serve(self, request: Request) -> Answer:
        """Answer `/node`, or `/node?watch=1` with a line now and for every change."""
        if request.query.get("watch", "0") in ("", "0"):
            return Answer(msgspec.json.encode(self.state()), content_type="application/json")
        for key, listener in tuple(self._listeners.items()):
            if listener.gone():
                del self._listeners[key]
        if len(self._listeners) >= MOST_LISTENERS:
            text = f"{MOST_LISTENERS} clients watch this node already; close one of them\n"
            return Answer(text, 503)
        return Answer(
            pieces=self._lines(request),
            content_type="application/x-ndjson",
            more_headers={"Cache-Control": "no-store"},
            patience=_STUCK,
        )

    async def _lines(self, request: Request) -> AsyncGenerator[bytes]:
        """Listen until the client leaves, or takes no line for too long."""
        key = object()
        self._listeners[key] = request
        try:
            if self._clock() - self._made_at >= _APART or not self._line:
                self._make()
            while True:
                news = self._news
                yield self._line
                await news.wait()
        finally:
            self._listeners.pop(key, None)
            if not self._listeners and self._timer is not None:
                self._timer.cancel()
                self._timer, self._due, self._line = None, float("inf"), b""

    def _make_at(self, when: float) -> None:
        """Make the next line at a time, or earlier if it is due earlier."""
        if when >= self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = when
        delay = max(0.0, when - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay, self._make)

    def _make(self) -> None:
        """Make a line, and wake all listeners."""
        self._made_at, self._due = self._clock(), float("inf")
        self._make_at(self._made_at + _HEARTBEAT)
        self._line = msgspec.json.encode(self.state()) + b"\n"
        news, self._news = self._news, asyncio.Event()
        news.set()

    def state(self) -> NodeState:
        """Return the state of this process now."""
        sync = self._sync()
        state, status = sync.state, self._status()
        result = state.result or SyncResult()
        # Findings: sorted only if they are others than in the last state.
        findings = state.findings if state.result else sync.store.findings
        if findings != self._worst[0]:
            self._worst = findings, worst(findings, _MOST_FINDINGS, _FINDING_CHARACTERS)
        counts: Counter[Severity] = Counter(finding.severity for finding in findings)
        counts.update(state.unlisted)
        repairs, drift = self._drift()
        connections, failed = self._rates()
        settings, node = state.plan.settings, sync.store.snapshot.node
        labels = node.metadata.labels if node else None
        period, least = self._periods()
        now, (at, before) = self._clock(), self._cpu_samples[0]
        return NodeState(
            node=sync.planner.config.node_name,
            mode=state.mode,
            variant=sync.mode.variant,
            **{name: getattr(status, name) for name in _OF_PROCESS},
            revision=state.revision,
            synced_at=state.at,
            sync_reason=result.reason,
            sync_seconds=round(result.seconds, 6),
            phases={phase: round(seconds, 6) for phase, seconds in result.phases.items()},
            lag=self._lags.last,
            lag_p99=self._lags.p99(now),
            failure=status.failure[:_LONGEST_FAILURE],
            services=len(sync.store.snapshot.services),
            service_ports=len(state.plan.services),
            endpoint_slices=sync.store.slices,
            objects=state.objects,
            refused=result.refused,
            findings=self._worst[1],
            finding_counts=counts,
            drift=drift,
            repairs=repairs,
            cpu=round((self._cpu() - before) / (now - at), 4) if now > at else 0.0,
            memory=resident_bytes(),
            cores=os.cpu_count() or 1,
            connections=connections,
            failed=failed,
            digest=self._digest(),
            families=tuple(family.kubernetes for family in settings.families),
            zone=(labels.zone or "") if labels else "",
            sync_period=period,
            min_sync_period=least,
        )
