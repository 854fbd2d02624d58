"""Doctor's checks of the Service's objects: it exists, is well formed, and has usable endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from msgspec.structs import replace

from steersman.compile.conflicts import describe
from steersman.model.findings import Severity, printable
from steersman.model.kube import EndpointSlice, Service
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import ServicePlan
from steersman.model.world import World
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.result import Cause, CheckResult, Found, error, ok, skipped, warning
from steersman.operate.explain_service import findings_of


async def service_exists(context: Context) -> Found:
    """Find the Service, or names that may have been meant."""
    name, world = context.question.service, context.world
    assert name is not None
    if service := world.snapshot.services.get(name):
        plans = [p for key, p in world.plan.services.items() if key.name.object_name == name]
        if not any(plan.frontends for plan in plans):
            return why_not_planned(service, world)
        if not context.plans:
            ports = ", ".join(
                dict.fromkeys(
                    f"{plan.key.name.port or 'unnamed'} ({frontend.port}/{plan.key.name.protocol})"
                    for plan in plans
                    for frontend in plan.frontends[:1]
                )
            )
            return error(f"{name} has no port {context.question.port}; it has {ports}")
        frontends = dict.fromkeys(
            f"{frontend.kind}: {describe(plan.key, frontend)}"
            for plan in context.plans
            for frontend in plan.frontends
        )
        return ok(f"{name} is a Service of type {service.spec.type or 'ClusterIP'}", *frontends)
    if service := world.unserved.get(name):
        return why_unserved(name, service, world)
    # What the operator may have meant: the same name elsewhere, or a similar one here.
    known = sorted({*world.snapshot.services, *world.unserved})
    similar = [other for other in known if other.name == name.name]
    here = [other.name for other in known if other.namespace == name.namespace]
    similar += [ObjectName(name.namespace, n) for n in get_close_matches(name.name, here, n=3)]
    remedy = f"did you mean {' or '.join(map(str, similar))}?" if similar else ""
    if not similar:
        there = f"the namespace {name.namespace} has {', '.join(here[:5])}" if here else ""
        remedy = there or f"no Service of the namespace {name.namespace} is known: is it spelt so?"
    return error(f"there is no Service {name}, as {world.origin.text} knows it", remedy=remedy)


def why_not_planned(service: Service, world: World) -> CheckResult:
    """Say why a Service that this proxy should serve has no frontend here."""
    name, spec = service.metadata.object_name, service.spec
    if world.not_yet:
        remedy = "wait; if this lasts, `steersman status` and its log say why"
        return error(f"{name} is {world.not_yet}", remedy=remedy, cause=Cause.PROXY)
    text = f"{name} is not served here: {world.why_unserved(service)}"
    if not spec.ports:
        return error(text, remedy="add spec.ports")
    families = ", ".join(spec.ip_families or ()) or "its only family"
    return error(
        text,
        f"clusterIP {spec.cluster_ip}, families {families}",
        remedy="correct the fields that its Findings name",
        cause=Cause.OBJECT + 2,  # a Finding says it better
    )


def why_unserved(name: ObjectName, service: Service, world: World) -> CheckResult:
    """Say why no proxy, or another one, serves a Service."""
    labels = service.metadata.labels
    if labels is not None and labels.proxy_name is not None:
        remedy = "ask that proxy, or remove the label"
    elif service.spec.type == "ExternalName":
        remedy = "look the name up from a pod, and test its target itself"
    elif service.spec.cluster_ip == "None":
        remedy = "test the name in DNS, and the pods themselves"
    else:
        remedy = "ask the API server why it has assigned none"
    return warning(f"{name} is not served here: {world.why_unserved(service)}", remedy=remedy)


async def service_findings(context: Context) -> Found:
    """Repeat the Findings about the Service and its EndpointSlices."""
    name = context.question.service
    assert name is not None
    out = [
        (error if finding.severity is Severity.ERROR else warning)(
            printable(str(replace(finding, code=""))),
            remedy="correct the object",
            code=finding.code,
        )
        for finding in findings_of(context.world, name)
    ]
    return out or ok(f"no Finding is about {name} or its EndpointSlices")


# Endpoints


async def service_endpoints(context: Context) -> Found:
    """Say for each port how many endpoints it has, and why others are out."""
    out = [endpoints_of_port(context, plan) for plan in context.plans]
    return out or skipped("no port of the Service is served here")


def endpoints_of_port(context: Context, plan: ServicePlan) -> CheckResult:
    """Judge the endpoints of one port by their readiness."""
    report = context.report(plan)
    number, ready, why = len(report.endpoints), len(report.ready), report.lines
    what = f"{plan.key.name} ({plan.key.family.kubernetes})"
    if not number:
        slices = context.world.snapshot.slices.get(plan.key.name.object_name, ())
        return no_endpoints(plan.key, tuple(slices), what, why)
    if not ready:
        used = plan.reachable
        if used:
            return warning(
                f"no endpoint of {what} is ready; {len(used)} that terminate still serve",
                *why,
                remedy="see why no new pod becomes ready: `kubectl describe pod`",
            )
        return error(
            f"no endpoint of {what} is ready (0 of {number})",
            *why,
            remedy="the pods fail their readiness probe or do not start: `kubectl describe pod`",
        )
    if ready < number:
        verbs = "is not ready and gets" if number - ready == 1 else "are not ready and get"
        return warning(
            f"{number - ready} of {number} endpoints of {what} {verbs} no traffic",
            *why,
            remedy="normal during a rollout; otherwise see the pods' readiness probes",
            cause=Cause.ENDPOINTS + 5,
        )
    return ok(f"every endpoint of {what} is ready ({number})", *why)


def no_endpoints(
    key: PlanKey, slices: Sequence[EndpointSlice], what: str, why: Sequence[str]
) -> CheckResult:
    """Say why a port has no endpoint at all."""
    service = key.name.object_name
    entries = [entry for slice_ in slices for entry in slice_.endpoints or ()]
    show = f"kubectl -n {service.namespace}"
    labels = f"compare the selector with the pods' labels: `{show} get pods --show-labels`"
    if not slices:
        return error(
            f"no EndpointSlice belongs to {service}: its selector matches no pod, or it has no "
            "selector and nobody wrote one",
            remedy=f"{labels}; `{show} describe service {service.name}`",
        )
    if not entries:
        return error(
            f"the EndpointSlices of {service} are empty: its selector matches no pod",
            *(f"EndpointSlice {slice_.metadata.object_name}" for slice_ in slices),
            remedy=labels,
        )
    names = sorted({port.name or "" for slice_ in slices for port in slice_.ports or ()})
    if key.name.port not in names:
        have = ", ".join(map(repr, names)) or "none at all"
        return error(
            f"no endpoint of {what} has a port named {key.name.port!r}: the EndpointSlices have "
            f"{have}",
            *why,
            remedy="targetPort must be a number, or the name of a containerPort of the pods; in "
            "EndpointSlices that you write, ports carry the Service port's name",
        )
    return error(
        f"{what} has no endpoint of this family and protocol",
        *why,
        remedy="see addressType and ports of the EndpointSlices",
    )
