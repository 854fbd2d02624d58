"""Explain all Services in trouble on a node, worst first. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from steersman.compile.conflicts import describe
from steersman.model.findings import Severity
from steersman.model.names import PlanKey
from steersman.model.plan import Frontend, ServicePlan, SourceClass, Verdict
from steersman.operate.answer import Answer, Block, Line
from steersman.operate.explain_flow import FlowExplainer
from steersman.operate.explain_service import STYLES

_REASONS = 10
"""Reasons printed of one object."""


class Problem(msgspec.Struct, frozen=True, rename="camel"):
    """A Service in trouble."""

    service: str
    """`namespace/name`; the object of the Finding if it is about something else."""
    severity: Severity
    reasons: tuple[str, ...]
    """Worst first."""


class ProblemsAnswer(Answer, frozen=True, kw_only=True):
    """All Services in trouble, worst first."""

    node: str
    services: int
    """Number of Services that were looked at."""
    problems: tuple[Problem, ...]
    not_yet: bool = False
    """Whether the process has just started: it serves no Service yet."""

    @property
    def exit_code(self) -> int:
        """1 if one of them has an error: a policy without an endpoint here is a warning only."""
        if self.not_yet:
            return 2
        return int(any(each.severity is Severity.ERROR for each in self.problems))

    def blocks(self, wide: bool) -> Iterator[Block]:
        """Yield the problems; only the first ones of an object with many ports if not `wide`."""
        counted = "1 Service" if self.services == 1 else f"{self.services} Services"
        errors = sum(each.severity is Severity.ERROR for each in self.problems)
        if not (total := len(self.problems)):
            yield Line(f"No problem on node {self.node} ({counted}).", "good")
            return
        words = f"{total} {'object' if total == 1 else 'objects'} in trouble on node {self.node}"
        yield Line(f"{words}, {errors} with errors ({counted}):", "title")
        for each in self.problems:
            yield Line(f"{each.severity.value:8}{each.service}", STYLES[each.severity])
            some = each.reasons if wide else each.reasons[:_REASONS]
            for reason in some:
                yield Line(reason, "", 8)
            if more := len(each.reasons) - len(some):
                yield Line(f"and {more} more: -o wide has them all", "dim", 8)


def explain_problems(explainer: FlowExplainer, namespace: str = "") -> ProblemsAnswer:
    """List all Services with Findings, without endpoints, or that drop traffic on this node.

    Only those in `namespace` are listed, unless it is "".
    """
    world, here = explainer.world, explainer.names.here
    found: dict[str, list[tuple[Severity, str]]] = {}
    owners = {
        f"EndpointSlice {owner.namespace}/{slice_}": owner
        for owner, slices in world.snapshot.slices.items()
        for slice_ in slices
    }
    for finding in world.findings:
        kind, _, text = finding.object.partition(" ")
        about = text if kind == "Service" else str(owners.get(finding.object, finding.object))
        if namespace and not about.startswith(f"{namespace}/"):
            continue
        words = f"{finding.field}: {finding.reason}" if finding.field else finding.reason
        if about not in (text, finding.object):  # an EndpointSlice: say which one
            words = str(finding)
        elif finding.code:
            words += f" [{finding.code}]"
        found.setdefault(about, []).append((finding.severity, words))
    for key, plan in world.plan.services.items():
        if namespace in ("", key.name.namespace):
            for severity, reason in port_problems(explainer, key, plan):
                found.setdefault(str(key.name.object_name), []).append((severity, reason))
    planned = {key.name.object_name for key in world.plan.services}
    if world.not_yet:  # said once, not of each Service
        found[f"node {here}"] = [(Severity.WARNING, f"its Services are {world.not_yet}")]
    else:
        for name, service in world.snapshot.services.items():
            if name not in planned and str(name) not in found and namespace in ("", name.namespace):
                found[str(name)] = [(Severity.WARNING, world.why_unserved(service))]
    problems = []
    for label, each in found.items():
        each.sort(key=lambda one: one[0] is not Severity.ERROR)
        problems.append(Problem(label, each[0][0], tuple(dict.fromkeys(why for _, why in each))))
    problems.sort(key=lambda each: (each.severity is not Severity.ERROR, each.service))
    count = sum(namespace in ("", name.namespace) for name in world.snapshot.services)
    return ProblemsAnswer(
        node=here, services=count, problems=tuple(problems), not_yet=bool(world.not_yet)
    )


def port_problems(
    explainer: FlowExplainer, key: PlanKey, plan: ServicePlan
) -> Iterator[tuple[Severity, str]]:
    """Yield the problems of one ServicePort that its plan shows."""
    what = f"port {key.name.port}" if key.name.port else "its port"
    what += f" ({key.name.protocol}, {key.family.kubernetes})"
    verdicts: dict[Verdict, list[Frontend]] = {}
    for frontend in plan.frontends:
        for source in SourceClass:
            verdicts.setdefault(frontend.action(source).verdict, []).append(frontend)
    if Verdict.REJECT in verdicts:
        report = explainer.report(key, explainer.names.here)
        why = "; ".join(report.notes) or f"none of {len(report.endpoints)} is ready"
        yield Severity.ERROR, f"{what}: no endpoint, connections are rejected: {why}"
        return
    if dropped := verdicts.get(Verdict.DROP):
        names = ", ".join(dict.fromkeys(describe(key, each) for each in dropped))
        yield (
            Severity.WARNING,
            f"{what}: the traffic policy is Local and no endpoint is on this node: connections to"
            f" {names} that arrive here are dropped",
        )
    slices = explainer.world.snapshot.slices.get(key.name.object_name, {}).values()
    if any(
        each.conditions is not None and each.conditions.terminating
        for slice_ in slices
        for each in slice_.endpoints or ()
    ):
        report = explainer.report(key, explainer.names.here)
        used = [each for each in report.endpoints if each.used]
        if used and all("terminating" in each.why for each in used):
            yield Severity.WARNING, f"{what}: only endpoints that terminate are left"
