"""A log line for each Service whose plan changed, at `-v 2`: what changed, and why.

    Service shop/web: port http +10.244.1.5:8080 -10.244.1.4:8080 (EndpointSlice)

Below that verbosity nothing is compared or kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

from steersman.compile.conflicts import describe
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import Frontend, ServicePlan
from steersman.run.process.klog import v
from steersman.run.sync.state import SyncReport
from steersman.source.store import Changes

log = logging.getLogger(__name__)

_LEVEL = v(2)
_MOST_SERVICES = 200
"""Services that get a line of their own after one sync; the rest are counted."""
_MOST_NAMED = 8
"""Endpoints that a line names; the rest are counted."""


class ServiceLog:
    """Logs the changed Services of each report."""

    def __init__(self, logger: logging.Logger = log) -> None:
        self._log = logger
        self._known: dict[PlanKey, ServicePlan] | None = None
        """The plans of the last report; None while the verbosity is too low."""

    def observe(self, report: SyncReport) -> None:
        """Log the changes of a report."""
        if not self._log.isEnabledFor(_LEVEL):
            self._known = None
            return
        changed, removed = report.plans.changed, report.plans.removed
        before = self._known
        if before is None:  # the first report at this verbosity: nothing to compare with
            self._known = dict(report.state.plan.services)
            return
        names = dict.fromkeys(key.name.object_name for key in (*changed, *removed))
        for number, name in enumerate(names):
            if number == _MOST_SERVICES:
                self._log.log(_LEVEL, "%d more Services changed", len(names) - number)
                break
            self._log_service(name, before, changed, removed, report.changes)
        before.update(changed)
        for key in removed:
            before.pop(key, None)

    def _log_service(
        self,
        name: ObjectName,
        before: Mapping[PlanKey, ServicePlan],
        changed: Mapping[PlanKey, ServicePlan],
        removed: frozenset[PlanKey],
        changes: Changes,
    ) -> None:
        parts, added, gone = [], 0, 0
        for key in sorted(key for key in (*changed, *removed) if key.name.object_name == name):
            old, new = before.get(key), changed.get(key)
            what = ", ".join(changes_of(old, new))
            port = key.name.port or key.name.protocol
            parts.append(f"port {port} {what or 'has other options'}")
            ends, later = (frozenset(plan.reachable if plan else ()) for plan in (old, new))
            added += len(later - ends)
            gone += len(ends - later)
        why = cause(name, changes)
        self._log.log(
            _LEVEL,
            "Service %s: %s (%s)",
            *(name, "; ".join(parts), why),
            extra={
                "service": str(name),
                "cause": why,
                "endpointsAdded": added,
                "endpointsRemoved": gone,
            },
        )


def cause(name: ObjectName, changes: Changes) -> str:
    """Say what made a Service change: its objects, or failover."""
    kinds = [
        kind
        for kind, names in (
            ("Service", changes.service_objects),
            ("EndpointSlice", changes.endpoints),
            ("failover", changes.ejections),
        )
        if name in names
    ]
    if kinds:
        return ", ".join(kinds)
    return "Node" if changes.node else "another Service, the node's addresses or the configuration"


def changes_of(old: ServicePlan | None, new: ServicePlan | None) -> Iterator[str]:
    """Yield the differences between two plans of a ServicePort, a few words each."""
    if old is None and new is not None:
        where = " ".join(describe(new.key, frontend) for frontend in new.frontends)
        count = len(new.reachable)
        endpoints = "1 endpoint" if count == 1 else f"{count} endpoints"
        yield f"added at {where or 'no address'} with {endpoints}"
        return
    if new is None or old is None:
        yield "removed"
        return
    ends, later = set(old.reachable), set(new.reachable)
    if ends != later:
        yield " ".join(
            [
                *_listed("+", [str(end) for end in sorted(later - ends)]),
                *_listed("-", [str(end) for end in sorted(ends - later)]),
            ]
        )
    was, will_be = _by_place(old.frontends), _by_place(new.frontends)
    for place in sorted(was.keys() | will_be.keys()):
        if place not in was or place not in will_be:
            frontend = was.get(place) or will_be[place]
            verb = "serves" if place in will_be else "no longer serves"
            yield f"{verb} {describe(new.key, frontend)}"
        elif was[place] != will_be[place]:
            yield f"other policy at {describe(new.key, will_be[place])}"
    if old.affinity_seconds != new.affinity_seconds:
        yield f"session affinity {new.affinity_seconds} s"
    if old.health_check_node_port != new.health_check_node_port:
        yield f"health check node port {new.health_check_node_port}"


def _by_place(frontends: Sequence[Frontend]) -> dict[tuple[str, str, int], Frontend]:
    return {(each.kind.value, each.address, each.port): each for each in frontends}


def _listed(sign: str, names: Sequence[str]) -> Iterator[str]:
    yield from (f"{sign}{name}" for name in names[:_MOST_NAMED])
    if (more := len(names) - _MOST_NAMED) > 0:
        yield f"{sign}{more} more"
