"""Counts over the plans in force: endpoints, and the answers of health check node ports."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Literal, TypeAlias

from steersman.model.names import Family, ObjectName, PlanKey
from steersman.model.plan import FrontendKind, ServicePlan, Verdict
from steersman.run.sync.in_force import InForce

_SLICE = 1000
"""Plans that are counted before other tasks may run; about 3 ms."""
TrafficPolicy: TypeAlias = Literal["internal", "external"]
POLICIES: tuple[TrafficPolicy, ...] = ("internal", "external")


class EndpointCounts:
    """Counts over all ServicePlans, kept up to date by the plans that changed."""

    def __init__(self, in_force: InForce) -> None:
        self._plans = in_force.plans
        self._cursor = in_force.log.cursor()
        self._without_local: dict[PlanKey, tuple[TrafficPolicy, ...]] = {}
        self._counts: Counter[tuple[TrafficPolicy, Family]] = Counter()
        self._without_any: set[PlanKey] = set()
        self._health_checks: dict[PlanKey, tuple[int, int]] = {}
        """Health check node port, and the number of ready endpoints here."""
        self.health_changes = 0
        """How often a health check node port or its answer changed."""

    async def observe(self, _: object = None) -> None:
        """Count the plans in force that changed; yields to the loop."""
        names, revision = self._cursor.changed()
        for number, key in enumerate(names, 1):
            if isinstance(key, PlanKey):
                self.count(key, self._plans.get(key))
            if number % _SLICE == 0:
                await asyncio.sleep(0)
        self._cursor.move(revision)

    def count(self, key: PlanKey, plan: ServicePlan | None) -> None:
        """Count a plan that is new or differs, or forget a removed one."""
        self._without_any.discard(key)
        if plan is None:
            self._put(key, (), 0, 0)
            return
        # One without an endpoint here may have others elsewhere; then it is dropped, not refused.
        refused = (frontend.external.verdict is Verdict.REJECT for frontend in plan.frontends)
        if not plan.reachable and any(refused):
            self._without_any.add(key)
        self._put(key, without_local(plan), plan.health_check_node_port, plan.ready_here)

    def _put(
        self, key: PlanKey, policies: tuple[TrafficPolicy, ...], health_port: int, ready: int
    ) -> None:
        self._counts.subtract((p, key.family) for p in self._without_local.pop(key, ()))
        self._counts.update((policy, key.family) for policy in policies)
        if policies:
            self._without_local[key] = policies
        # The answers of health checks change with the port or the number of ready endpoints here.
        check = (health_port, ready) if health_port else None
        self.health_changes += self._health_checks.pop(key, None) != check
        if check is not None:
            self._health_checks[key] = check

    def no_local_endpoints(self, policy: TrafficPolicy, family: Family) -> int:
        """Count the ServicePorts with endpoints, none here, and a Local policy (behaviour 14)."""
        return self._counts[policy, family]

    def without_endpoints(self, family: Family) -> int:
        """Count the ServicePorts that no endpoint serves, be it here or elsewhere."""
        keys = tuple(self._without_any)  # in one step: a scrape asks from its thread
        return sum(key.family is family for key in keys)

    def health_ports(self, family: Family) -> dict[ObjectName, int]:
        """Return the health check node ports by Service, in one family."""
        checks = self._health_checks.items()
        return {key.name.object_name: port for key, (port, _) in checks if key.family is family}

    def ready_here(self, family: Family) -> dict[ObjectName, int]:
        """Return the ready endpoints here of those Services, in one family (behaviour 4)."""
        checks = self._health_checks.items()
        return {key.name.object_name: ready for key, (_, ready) in checks if key.family is family}


def without_local(plan: ServicePlan) -> tuple[TrafficPolicy, ...]:
    """Return the policies under which a ServicePort has endpoints elsewhere but none here.

    In this case compile drops traffic from outside; otherwise it refuses it.
    """
    dropped = {
        frontend.kind is FrontendKind.CLUSTER_IP
        for frontend in plan.frontends
        if frontend.external.verdict is Verdict.DROP
    }
    return tuple(p for p in POLICIES if (p == "internal") in dropped)
