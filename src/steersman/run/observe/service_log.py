"""A log line for each Service whose plan changed, at `-v 2`: what changed, and why.

    Service shop/web: port http +10.244.1.5:8080 -10.244.1.4:8080 (EndpointSlice)

Below that verbosity nothing is compared or kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from steersman.compile.conflicts import describe
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import Frontend, ServicePlan
from steersman.run.process.klog import v
from steersman.run.sync.in_force import InForce, Name
from steersman.source.store import EJECTIONS, Change

log = logging.getLogger(__name__)

_LEVEL = v(2)
_MOST_SERVICES = 200
"""Services that get a line of their own after one sync; the rest are counted."""
_KINDS = ("Service", "EndpointSlice", EJECTIONS)
_NODE_KINDS = ("Node", "ServiceCIDR")
_MOST_NAMED = 8
"""Endpoints that a line names; the rest are counted."""


class ServiceLog:
    """Logs the changed Services of each sync."""

    def __init__(self, in_force: InForce) -> None:
        self._in_force = in_force
        self._cursor = in_force.log.cursor()
        self._known: dict[PlanKey, ServicePlan] | None = None
        """The plans of the last sync; None while the verbosity is too low."""

    def observe(self, _: object = None) -> None:
        """Log what changed in force."""
        names, revision = self._cursor.changed()
        before, plans = self._known, self._in_force.plans
        if not log.isEnabledFor(_LEVEL):
            self._known = None
        elif before is None:  # the first sync at this verbosity: nothing to compare with
            self._known = dict(plans)
        else:
            keys: dict[ObjectName, list[PlanKey]] = {}
            for key in names:
                if isinstance(key, PlanKey):
                    keys.setdefault(key.name.object_name, []).append(key)
            for number, (name, ports) in enumerate(keys.items()):
                if number == _MOST_SERVICES:
                    log.log(_LEVEL, "%d more Services changed", len(keys) - number)
                    break
                self._log_service(name, sorted(ports), before, cause(name, names))
            for key in chain.from_iterable(keys.values()):
                before.pop(key, None)
                if (plan := plans.get(key)) is not None:
                    before[key] = plan
        self._cursor.move(revision)

    def _log_service(
        self,
        name: ObjectName,
        keys: Iterable[PlanKey],
        before: Mapping[PlanKey, ServicePlan],
        why: str,
    ) -> None:
        parts, added, gone = [], 0, 0
        for key in keys:
            old, new = before.get(key), self._in_force.plans.get(key)
            what = ", ".join(changes_of(old, new))
            port = key.name.port or key.name.protocol
            parts.append(f"port {port} {what or 'has other options'}")
            ends, later = (frozenset(plan.reachable if plan else ()) for plan in (old, new))
            added += len(later - ends)
            gone += len(ends - later)
        log.log(
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


def cause(name: ObjectName, names: Iterable[Name]) -> str:
    """Say what made a Service change: its objects, or failover.

    Args:
        names: everything that changed in the same syncs.
    """
    changes = [each for each in names if isinstance(each, Change)]
    kinds = {change.kind for change in changes if change.of_service and change.name == name}
    if kinds:
        return ", ".join(kind for kind in _KINDS if kind in kinds)
    if any(change.kind in _NODE_KINDS for change in changes):
        return "Node"
    return "another Service, the node's addresses or the configuration"


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
    if old.draining != new.draining:
        yield "only endpoints that terminate are left" if new.draining else "ready endpoints"
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
