"""Services that clients cannot use on this node, as their plans say. Pure.

That is no mistake of an object, and it comes and goes with pods. So it is shown to whoever asks,
but not logged, counted or sent as an Event as Findings are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from steersman.compile.conflicts import describe
from steersman.model import codes
from steersman.model.findings import Finding, Severity
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import Frontend, ServicePlan, SourceClass, Verdict

_NAMED = 3
"""Ports and destinations that a text names."""


class Trouble(NamedTuple):
    """Why clients cannot use a ServicePort, or soon cannot; the worst is the smallest."""

    rank: int
    code: str
    reason: str

    @property
    def severity(self) -> Severity:
        """An error if no client is served anywhere."""
        return Severity.ERROR if self.code == codes.NO_ENDPOINT else Severity.WARNING


_REJECTED = Trouble(0, codes.NO_ENDPOINT, "no endpoint: clients are rejected")
_DRAINING = Trouble(2, codes.ONLY_DRAINING, "only endpoints that terminate are left")


def trouble_of(plan: ServicePlan) -> Trouble | None:
    """Return why some clients cannot use a ServicePort on this node; None if all can."""
    dropped: dict[Frontend, None] = {}
    for frontend in plan.frontends:
        for source in SourceClass:
            match frontend.action(source).verdict:
                case Verdict.REJECT:
                    return _REJECTED
                case Verdict.DROP:
                    dropped[frontend] = None
    if dropped:
        what = _some([describe(plan.key, each) for each in dropped])
        reason = f"no endpoint on this node: clients of {what} are dropped"
        return Trouble(1, codes.NO_LOCAL_ENDPOINT, reason)
    return _DRAINING if plan.draining else None


def service_trouble(name: ObjectName, ports: Mapping[PlanKey, Trouble]) -> Finding:
    """Return the worst trouble of a Service in the form of a Finding, with the ports that have it.

    Args:
        name: the Service.
        ports: its ServicePorts in trouble, at least one.
    """
    first = min(ports.values())
    named = {
        f"{key.name.port}/{key.name.protocol} {key.family.kubernetes}".lstrip("/"): None
        for key in sorted(ports)
        if ports[key].code == first.code
    }
    field = f"port {_some(list(named))}"
    return Finding(f"Service {name}", field, first.reason, first.severity, first.code)


def services_in_trouble(plans: Iterable[ServicePlan]) -> dict[ObjectName, dict[PlanKey, Trouble]]:
    """Return the troubles of all plans, by Service."""
    found: dict[ObjectName, dict[PlanKey, Trouble]] = {}
    for plan in plans:
        if (trouble := trouble_of(plan)) is not None:
            found.setdefault(plan.key.name.object_name, {})[plan.key] = trouble
    return found


def _some(texts: list[str]) -> str:
    more = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return ", ".join(texts[:_NAMED]) + more
