"""Addresses that a Service asks for and this node has already, in modes that hold them."""

from __future__ import annotations

from steersman.compile.actions import without_frontends
from steersman.compile.notes import Notes
from steersman.model.findings import Finding, Severity
from steersman.model.kube import Service
from steersman.model.names import PlanKey
from steersman.model.plan import Frontend, FrontendKind, NodeSettings, ServicePlan

_FIELDS = {
    FrontendKind.CLUSTER_IP: "spec.clusterIP",
    FrontendKind.EXTERNAL_IP: "spec.externalIPs",
    FrontendKind.LOAD_BALANCER_IP: "status.loadBalancer.ingress",
}


def without_own_addresses(
    service: Service, plans: dict[PlanKey, ServicePlan], settings: NodeSettings
) -> tuple[dict[PlanKey, ServicePlan], tuple[Finding, ...]]:
    """Return plans without Frontends at this node's own addresses, and Findings about them.

    A Service that took such an address would cut the node off from everything else that it does
    at that address (kubernetes issues 75290, 93175, 127410).
    """
    notes = Notes("Service", service.metadata)
    kept = {}
    for key, plan in plans.items():
        own = settings.family(key.family).local_addresses
        clashing = [f for f in plan.frontends if f.address in own]
        for frontend in clashing:
            _refuse(frontend, notes)
        rest = tuple(f for f in plan.frontends if f not in clashing)
        kept[key] = without_frontends(plan, rest) if clashing else plan
    return kept, notes.findings


def _refuse(frontend: Frontend, notes: Notes) -> None:
    reason = (
        f"{frontend.address} is an address of this node: not served there, as the node would be "
        "cut off; give the Service another address, or use a mode that "
        "assigns no Service addresses to the node"
    )
    notes.add(_FIELDS[frontend.kind], reason, Severity.ERROR)
