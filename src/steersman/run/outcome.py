"""What a sync means to the world outside: local endpoints, health checks, latency, conntrack.

Kept up to date by what changed, so that it costs what changed. Serves run/metrics.py and
run/health_server.py; decides nothing about traffic.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Set
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from steersman.compile.conntrack import ServedPort, destinations_at, ports_in, stale
from steersman.compile.endpoints import build_endpoints, local_ready_count
from steersman.model.conntrack import Stale
from steersman.model.names import Family, ObjectName, PlanKey
from steersman.model.plan import FrontendKind, ServicePlan, Verdict
from steersman.model.snapshot import Snapshot
from steersman.modes.base import ApplyError, BusyError, Remembering
from steersman.run.metrics import Metrics

if TYPE_CHECKING:
    from steersman.host.conntrack import Cleanup

log = logging.getLogger(__name__)

_CHUNK = 100  # Services, about 2 ms

TrafficPolicy = Literal["internal", "external"]


class Tally:
    """What is counted over all ServicePlans."""

    def __init__(self) -> None:
        self._without_local: dict[PlanKey, tuple[TrafficPolicy, ...]] = {}
        self._counts: Counter[tuple[TrafficPolicy, Family]] = Counter()
        self._health_ports: dict[PlanKey, int] = {}

    def update(self, changed: Mapping[PlanKey, ServicePlan], removed: Iterable[PlanKey]) -> None:
        """Take the plans that are new or differ, and the ones that are gone."""
        for key in removed:
            self._put(key, (), 0)
        for key, plan in changed.items():
            self._put(key, without_local(plan), plan.health_check_node_port)

    def _put(self, key: PlanKey, policies: tuple[TrafficPolicy, ...], health_port: int) -> None:
        self._counts.subtract((p, key.family) for p in self._without_local.pop(key, ()))
        self._counts.update((policy, key.family) for policy in policies)
        if policies:
            self._without_local[key] = policies
        self._health_ports.pop(key, None)
        if health_port:
            self._health_ports[key] = health_port

    def no_local_endpoints(self, policy: TrafficPolicy, family: Family) -> int:
        """Count the ServicePorts that have endpoints, none here, and a Local policy (SPEC 14)."""
        return self._counts[policy, family]

    def health_ports(self, family: Family) -> dict[ObjectName, int]:
        """Return the health check node ports by Service, in one family."""
        return {
            key.name.object_name: port
            for key, port in self._health_ports.items()
            if key.family is family
        }


def without_local(plan: ServicePlan) -> tuple[TrafficPolicy, ...]:
    """Return the policies under which a ServicePort has endpoints elsewhere but none here.

    That is what makes compile drop traffic from outside rather than refuse it.
    """
    dropped = {
        frontend.kind is FrontendKind.CLUSTER_IP
        for frontend in plan.frontends
        if frontend.external.verdict is Verdict.DROP
    }
    policies: tuple[tuple[bool, TrafficPolicy], ...] = ((True, "internal"), (False, "external"))
    return tuple(policy for internal, policy in policies if internal in dropped)


def health_counts(
    snapshot: Snapshot, names: Iterable[ObjectName], family: Family, node_name: str
) -> dict[ObjectName, int]:
    """Count the ready endpoints on this node of some Services (SPEC 4)."""
    return {
        name: local_ready_count(
            build_endpoints(snapshot.slices.get(name, {}).values(), family, node_name)
        )
        for name in names
    }


def programming_seconds(
    trigger_times: Mapping[ObjectName, Iterable[str]], now: float, started: float
) -> list[float]:
    """Return how long changes took from their cause until they are in force.

    Args:
        trigger_times: annotations of slices, RFC 3339; invalid ones are left out (SPEC 4).
        now: seconds since 1970; a cause that is later (a clock that is ahead) took no time.
        started: when the process started; older causes say nothing about it.
    """
    times = (_seconds(text) for texts in trigger_times.values() for text in texts)
    return [max(0.0, now - when) for when in times if when is not None and when > started]


def _seconds(text: str) -> float | None:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return None
    return when.timestamp() if when.tzinfo is not None else None


async def clean_conntrack(
    snapshot: Snapshot,
    families: Iterable[Family],
    metrics: Metrics,
    *,
    names: Iterable[ObjectName] | None = None,
    allow_external_ips: bool = True,
    delete: Callable[[Stale], Awaitable[Cleanup]] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Delete stale conntrack entries, once the rules are in (SPEC 12). Failures are only logged.

    Args:
        snapshot: the objects.
        families: those served.
        metrics: told of duration and deletions.
        names: the Services that changed; None for all.
        allow_external_ips: as configured.
        delete: deletes what is stale; None for the kernel's way.
        clock: monotonic seconds.
    """
    delete = delete or _delete_stale
    chosen = tuple(snapshot.services if names is None else names)
    for family in families:
        ports = await _ports(snapshot, family, chosen, allow_external_ips)
        own = await _destinations(snapshot, family, {port.node_port for port in ports} - {0})
        began = clock()
        try:
            result = await delete(await asyncio.to_thread(stale, family, ports, own))
        except OSError as error:
            log.error("stale %s conntrack entries stay: %s", family.kubernetes, error)
            continue
        label = family.kubernetes
        metrics.observe("conntrack_reconciler_sync_duration_seconds", clock() - began, label)
        metrics.add("conntrack_reconciler_deleted_entries_total", label, amount=result.deleted)
        if result.deleted or result.failed:
            log.info(
                "%s conntrack: %d stale entries deleted, %d refused by the kernel%s",
                label,
                result.deleted,
                result.failed,
                "" if result.complete else ", list incomplete",
            )


def deleting(mode: object) -> Callable[[Stale], Awaitable[Cleanup]]:
    """How stale connections are deleted: from conntrack, and from a mode's own tables."""

    async def delete(what: Stale) -> Cleanup:
        own = 0
        if isinstance(mode, Remembering):
            try:
                own = await mode.forget(what)
            except (ApplyError, BusyError) as error:
                log.error("stale connections of the mode stay: %s", error)
        done = await _delete_stale(what)
        return done._replace(deleted=done.deleted + own)

    return delete


async def _delete_stale(what: Stale) -> Cleanup:
    from steersman.host.conntrack import delete_stale  # noqa: PLC0415 - it calls what Windows lacks

    return await delete_stale(what)


async def _ports(
    snapshot: Snapshot, family: Family, names: tuple[ObjectName, ...], allow_external_ips: bool
) -> list[ServedPort]:
    """Collect what is served, with pauses for the rest of the process."""
    ports: list[ServedPort] = []
    async for chunk in _chunks(names, _CHUNK):
        ports += ports_in(snapshot, family, chunk, allow_external_ips=allow_external_ips)
    return ports


async def _destinations(snapshot: Snapshot, family: Family, node_ports: Set[int]) -> list[bytes]:
    """Collect the Services' destinations with the number of a node port, likewise."""
    own: list[bytes] = []
    names = tuple(snapshot.services) if node_ports else ()
    async for chunk in _chunks(names, 10 * _CHUNK):  # few of them are more than looked at
        own += destinations_at(snapshot, family, chunk, node_ports)
    return own


async def _chunks(
    names: tuple[ObjectName, ...], size: int
) -> AsyncIterator[tuple[ObjectName, ...]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]
        await asyncio.sleep(0)
