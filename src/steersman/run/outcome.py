"""What a sync means to the world outside: local endpoints, health checks, latency.

Kept up to date by what changed, so that it costs what changed. Serves run/metrics.py and
run/health_server.py; decides nothing about traffic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Literal

from steersman.model.names import Family, ObjectName, PlanKey
from steersman.model.plan import FrontendKind, ServicePlan, Verdict

TrafficPolicy = Literal["internal", "external"]


class Tally:
    """What is counted over all ServicePlans."""

    def __init__(self) -> None:
        self._without_local: dict[PlanKey, tuple[TrafficPolicy, ...]] = {}
        self._counts: Counter[tuple[TrafficPolicy, Family]] = Counter()
        self._health_ports: dict[PlanKey, int] = {}
        self._ready_here: dict[PlanKey, int] = {}
        self.health_changes = 0
        """How often a health check node port or the answer on it changed."""

    def update(self, changed: Mapping[PlanKey, ServicePlan], removed: Iterable[PlanKey]) -> None:
        """Take the plans that are new or differ, and the ones that are gone."""
        for key in removed:
            self._put(key, (), 0, 0)
        for key, plan in changed.items():
            self._put(key, without_local(plan), plan.health_check_node_port, plan.ready_here)

    def _put(
        self, key: PlanKey, policies: tuple[TrafficPolicy, ...], health_port: int, ready: int
    ) -> None:
        self._counts.subtract((p, key.family) for p in self._without_local.pop(key, ()))
        self._counts.update((policy, key.family) for policy in policies)
        if policies:
            self._without_local[key] = policies
        before = self._health_ports.pop(key, 0), self._ready_here.pop(key, 0)
        self.health_changes += before != (health_port, ready)
        if health_port:
            self._health_ports[key] = health_port
            self._ready_here[key] = ready

    def no_local_endpoints(self, policy: TrafficPolicy, family: Family) -> int:
        """Count the ServicePorts with endpoints, none here, and a Local policy (behaviour 14)."""
        return self._counts[policy, family]

    def health_ports(self, family: Family) -> dict[ObjectName, int]:
        """Return the health check node ports by Service, in one family."""
        return _by_service(self._health_ports, family)

    def ready_here(self, family: Family) -> dict[ObjectName, int]:
        """Return the ready endpoints here of those Services, in one family (behaviour 4)."""
        return _by_service(self._ready_here, family)


def _by_service(numbers: Mapping[PlanKey, int], family: Family) -> dict[ObjectName, int]:
    return {key.name.object_name: n for key, n in numbers.items() if key.family is family}


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


def programming_seconds(
    trigger_times: Mapping[ObjectName, Iterable[str]], now: float, started: float
) -> list[float]:
    """Return how long changes took from their cause until they are in force.

    Args:
        trigger_times: annotations of slices, RFC 3339; invalid ones are left out (behaviour 4).
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
