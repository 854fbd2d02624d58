"""Everything that is wrong on the node of a World, as `problems` shows it. Pure."""

from __future__ import annotations

from collections import Counter

import msgspec

from steersman.compile.trouble import service_trouble, services_in_trouble
from steersman.model import codes
from steersman.model.findings import Finding
from steersman.model.node_state import NodeState
from steersman.operate.explain_flow import FlowExplainer
from steersman.operate.node_trouble import SeenNode
from steersman.operate.problems import Filter, Problems, find_problems

_PORTS = 12
"""Ports of a Service of which it is explained why they have no endpoint."""


def explain_problems(explainer: FlowExplainer, asked: Filter, now: float) -> Problems:
    """List everything that is wrong on this node, all Findings and Services in trouble.

    Args:
        explainer: of the World.
        asked: which problems to return.
        now: seconds since 1970.
    """
    world, here = explainer.world, explainer.names.here
    troubled: list[Finding] = []
    why: dict[str, list[str]] = {}
    for name, ports in services_in_trouble(world.plan.services.values()).items():
        found = service_trouble(name, ports)
        troubled.append(found)
        for key in sorted(ports)[:_PORTS]:
            if ports[key].code == codes.NO_ENDPOINT:
                report = explainer.report(key, here)
                reason = "; ".join(report.notes) or f"none of {len(report.endpoints)} is ready"
                port = f"port {key.name.port}" if key.name.port else "its port"
                line = f"{port} ({key.name.protocol}, {key.family.kubernetes}): {reason}"
                why.setdefault(found.object, []).append(line)
    told = {each.object for each in world.findings}
    planned = {key.name.object_name for key in world.plan.services}
    if not world.not_yet:  # a condition says so, once
        for name, service in world.snapshot.services.items():
            if name not in planned and f"Service {name}" not in told:
                reason = world.why_unserved(service)
                troubled.append(Finding(f"Service {name}", "", reason, code=codes.UNPLANNED))
    state = world.process
    if state is None:
        counts = Counter(each.severity for each in world.findings)
        counts.update(world.plan.unlisted)
        state = NodeState(here, world.mode, now=now, finding_counts=counts)
    state = msgspec.structs.replace(
        state, findings=world.findings, troubled=tuple(troubled), trouble_counts={}
    )
    nodes = (SeenNode(here, "", state, now, now),)
    found_ = find_problems(nodes, asked=asked, why=why, now=now, page_size=1_000_000)
    return msgspec.structs.replace(found_, source=world.origin.text)
