"""The names of objects, for shell completion by commands on this node, and for pages."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from steersman.compile.trouble import services_in_trouble
from steersman.model.findings import Finding
from steersman.model.kube import EndpointSlice, Node
from steersman.model.names import ObjectName
from steersman.model.plan import ServicePlan

KINDS = ("service", "endpoint", "pod", "node", "namespace")


def names(
    kind: str,
    services: Iterable[ObjectName],
    slices: Iterable[EndpointSlice],
    nodes: Iterable[Node],
    plans: Collection[ServicePlan],
    *,
    findings: Iterable[Finding] = (),
) -> list[str]:
    """Return the names of a kind, sorted.

    Args:
        kind: one of KINDS, or `trouble` for Services in trouble; any other has no names.
        slices: all EndpointSlices, with the targets of their endpoints.
    """
    found: set[str] = set()
    match kind:
        case "service":
            found = {str(name) for name in services}
        case "trouble":
            objects = (each.object.partition(" ") for each in findings)
            found = {name for kind, _, name in objects if kind == "Service"}
            found.update(map(str, services_in_trouble(plans)))
            found &= set(map(str, services))
        case "namespace":
            found = {name.namespace for name in services}
        case "endpoint":
            found = {str(endpoint) for plan in plans for endpoint in plan.reachable}
        case "node":
            found = {node.metadata.name for node in nodes}
            found.update(
                each.node_name or "" for slice_ in slices for each in slice_.endpoints or ()
            )
        case "pod":
            targets = (each.target_ref for slice_ in slices for each in slice_.endpoints or ())
            found = {f"{ref.namespace}/{ref.name}" for ref in targets if ref and ref.kind == "Pod"}
    return sorted(found - {""})
