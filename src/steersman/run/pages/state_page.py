"""The whole State as JSON (`/state`): the process, its Findings and the plans in force."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from steersman.model.node_state import NodeState
from steersman.model.plan import ServicePlan
from steersman.run.sync.state import State
from steersman.source.protobuf import NATIVE

_TOGETHER = 100
"""ServicePlans that are encoded at once, some 80 kB."""


def state_json(node: NodeState, state: State) -> Iterator[bytes]:
    """Return the State as of this call as JSON (`/state`), in pieces made on demand.

    The pieces may be made in another thread: everything that may change is read before.
    """
    result, plans, plain = state.result, tuple(state.plan.services.values()), msgspec.to_builtins
    source: dict[str, Any] = {"kind": "manifests"}
    if node.source.kind != "manifests":
        source = plain(node.source)
        del source["quietSeconds"]

    def pieces() -> Iterator[bytes]:
        document = {
            "version": node.version,
            "protobufDecoder": "C" if NATIVE else "none",
            "mode": state.mode,
            "uptimeSeconds": round(node.now - node.started, 3),
            "revision": state.revision,
            "synced": result is not None,
            "lastSync": None if result is None else {**plain(result), "at": state.at},
            "objects": {
                "services": len(state.snapshot.services),
                "endpointSlices": state.slices,
                "servicePorts": len(plans),
                "kernelObjects": state.objects,
            },
            "source": source,
            "findings": [plain(finding) for finding in state.findings],
            "node": plain(state.plan.settings),
            "servicePlans": [],
        }
        head = msgspec.json.encode(document).removesuffix(b"]}")
        for start in range(0, len(plans), _TOGETHER):
            part = [_plan_json(plan) for plan in plans[start : start + _TOGETHER]]
            yield head + msgspec.json.encode(part)[1:-1]
            head = b","
        yield b"]}" if plans else head + b"]}"

    return pieces()


def _plan_json(plan: ServicePlan) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(plan)
    fields |= fields.pop("scheduling") | fields.pop("proxy")  # the keys of earlier versions
    key = plan.key
    fields["key"] = {
        "namespace": key.name.namespace,
        "service": key.name.service,
        "port": key.name.port,
        "protocol": key.name.protocol.value,
        "family": key.family.kubernetes,
    }
    return fields
