"""One Service alone: what it asks for, and with its EndpointSlices the plans of its ports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from steersman.compile.actions import one_health_check_port, plan_port
from steersman.compile.conntrack import closes_connections
from steersman.compile.endpoints import (
    MAX_ENDPOINTS,
    EndpointsByPort,
    EndpointState,
    categorize,
    check_address_types,
    local_ready_count,
    read_endpoints,
)
from steersman.compile.own_addresses import without_own_addresses
from steersman.compile.service import PortSpec, read_service
from steersman.compile.weights import with_weights
from steersman.compile.wishes import with_wishes, without_sctp
from steersman.model.findings import Finding, Severity
from steersman.model.kube import EndpointSlice, Service
from steersman.model.names import Family, PlanKey
from steersman.model.plan import Endpoint, NodeSettings, ServicePlan, Value

MAX_LISTED = 2 * MAX_ENDPOINTS
"""Endpoints in the EndpointSlices of one Service that are read (docs/limits.md)."""
Plans: TypeAlias = dict[PlanKey, ServicePlan]


class Asked(Value, frozen=True):
    """What a Service asks for: all of compiling it that has nothing to do with endpoints."""

    service: Service
    ports: tuple[tuple[PlanKey, PortSpec], ...]
    """Its ports, those of a family together."""
    findings: tuple[Finding, ...] = ()
    """What is wrong with it."""


def read_ports(service: Service, settings: NodeSettings, *, allow_external_ips: bool) -> Asked:
    """Return what a Service asks for, in the families and protocols that are served.

    Args:
        service: the Service.
        settings: the node; `families` and `traits` say what is served.
        allow_external_ips: feature gate AllowServiceExternalIPs.
    """
    by_family, findings = read_service(
        service, settings.families, allow_external_ips=allow_external_ips
    )
    if not settings.traits.forwards_sctp:
        by_family, refused = without_sctp(service, by_family)
        findings += refused
    ports = [
        (PlanKey(name, family), spec)
        for family, specs in by_family.items()
        for name, spec in specs.items()
    ]
    return Asked(service, tuple(ports), findings)


def plan_ports(
    asked: Asked, slices: Iterable[EndpointSlice], settings: NodeSettings, zone: str
) -> tuple[Plans, tuple[Finding, ...]]:
    """Return a Service's plans, as if it were alone, and what is wrong with it.

    Args:
        asked: what it asks for.
        slices: its EndpointSlices, of all families.
        settings: the node.
        zone: this node's zone, "" where it has none.
    """
    if not asked.ports:
        return {}, asked.findings
    slices, more = _within_limits(slices)
    node_name = settings.node_name
    findings = asked.findings + more + check_address_types(slices)
    cuts = settings.traits.terminates_connections and closes_connections(asked.service)
    wanted = {(key.name.port, key.name.protocol) for key, _ in asked.ports}
    plans: Plans = {}
    read: dict[Family, EndpointsByPort] = {}
    ready: dict[Family, int] = {}
    for key, spec in asked.ports:
        name, family = key
        if family not in read:
            read[family], more = read_endpoints(slices, family, node_name, wanted)
            findings += more
        states = read[family].get((name.port, name.protocol), ())
        plans[key] = plan_port(key, spec, categorize(states, spec, node_name, zone), settings)
        if cuts:
            plans[key] = _keeping(plans[key], states)
        if spec.health_check_node_port:
            if family not in ready:
                ready[family] = local_ready_count(read[family])
            plans[key] = msgspec.structs.replace(plans[key], ready_here=ready[family])
    if settings.traits.assigns_vips:
        plans, more = without_own_addresses(asked.service, plans, settings)
        findings += more
    if settings.traits.one_health_check_port:
        plans = one_health_check_port(plans)
    plans, more = with_weights(slices, plans, wanted)
    plans, wrong = with_wishes(asked.service, plans)
    return plans, findings + more + wrong


def _keeping(plan: ServicePlan, states: Iterable[EndpointState]) -> ServicePlan:
    """Return a plan that lets every endpoint that is listed keep its connections, no other one."""
    known: set[Endpoint] = {state.endpoint for state in states}
    return msgspec.structs.replace(plan, kept=tuple(sorted(known, key=str)))


def _within_limits(
    slices: Iterable[EndpointSlice],
) -> tuple[list[EndpointSlice], tuple[Finding, ...]]:
    """Return as many slices as are read of one Service; the others are not even looked at."""
    out: list[EndpointSlice] = []
    room = MAX_LISTED
    for slice_ in slices:
        room -= max(1, len(slice_.endpoints or ()))
        if room < 0:
            reason = f"the Service's slices list more than {MAX_LISTED} endpoints; this one and"
            reason += " those after it are ignored"
            name = f"EndpointSlice {slice_.metadata.object_name}"
            return out, (Finding(name, "endpoints", reason, Severity.ERROR),)
        out.append(slice_)
    return out, ()
