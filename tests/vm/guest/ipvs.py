"""The ipvs mode in the namespace of a lab's node, and where its answers differ from the plan's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from steersman.model.names import Family, Protocol
from steersman.model.plan import (
    Frontend,
    FrontendKind,
    NodePlan,
    ServicePlan,
    SourceClass,
    Verdict,
)
from steersman.modes.ipvs.render import node_port_addresses
from tests.support.modes.flows import FlowCase
from tests.vm.machine import EVERYTHING

ALL = bool(os.environ.get(EVERYTHING))
only_with_all = pytest.mark.skipif(not ALL, reason=f"{EVERYTHING}=1 asks for it")
"""For tests that need the kernel less than others: each takes seconds here."""


def as_ipvs_serves(flows: tuple[FlowCase, ...], plan: NodePlan) -> tuple[FlowCase, ...]:
    """The flows as the mode's README says that they are served, told from the plan alone."""
    return tuple(_served(flow, plan) for flow in flows)


def _served(flow: FlowCase, plan: NodePlan) -> FlowCase:
    """See LOCAL_FIRST, OWN_ADDRESS and HELD_SOURCE."""
    found = list(_frontends(flow, plan))
    family = Family.IPV6 if ":" in flow.address else Family.IPV4
    if not found and flow.address in plan.settings.family(family).local_addresses:
        return replace(flow, kind="untouched", endpoints=frozenset(), masquerade=False)
    if flow.source in {f.address for service in plan.services.values() for f in service.frontends}:
        return replace(flow, kind="drop", endpoints=frozenset(), masquerade=False)
    for service, frontend in found if flow.kind == "forward" else ():
        outside = frontend.action(SourceClass.EXTERNAL)
        if outside.verdict is Verdict.FORWARD:
            ends = frozenset(str(endpoint) for endpoint in service.pool(outside.pool))
            return replace(flow, endpoints=ends)
    return flow


def _frontends(flow: FlowCase, plan: NodePlan) -> Iterator[tuple[ServicePlan, Frontend]]:
    for key, service in plan.services.items():
        family = plan.settings.family(key.family)
        for frontend in service.frontends:
            held = frontend.kind is not FrontendKind.NODE_PORT
            addresses = (frontend.address,) if held else node_port_addresses(family)
            place = key.name.protocol, frontend.port
            if place == (Protocol(flow.protocol), flow.port) and flow.address in addresses:
                yield service, frontend


LOCAL_FIRST = frozenset(
    {
        "both-policies-local",
        "detector-bridge",
        "detector-prefix",
        "external-ip-local",
        "hairpin-load-balancer",
        "hints-zone-local",
        "load-balancer-local",
        "load-balancer-udp",
        "masquerade-all-local",
        "no-detector-local",
        "node-port-local",
        "node-port-local-ipv6",
        "session-affinity-node-port",
        "source-ranges-local",
        "terminating-here-only",
        "common/TestExternalTrafficPolicyLocal#1",
        "common/TestInternalExternalMasquerade/base#1",
        "common/TestInternalExternalMasquerade/no_LocalTrafficDetector#1",
        "common/TestInternalExternalMasquerade/masqueradeAll#1",
        "common/TestInternalExternalMasquerade/masqueradeAll,_no_LocalTrafficDetector#1",
    }
)
"""Cases (and conformance cases) in which pods and the node get the endpoints of those outside:
a virtual server has one list."""
OWN_ADDRESS = frozenset(
    {"common/TestNoEndpointsReject#1", "common/TestExternalTrafficPolicyLocal#1"}
)
"""Those with an external IP that is an address of the node: it is refused, with a Finding."""
HELD_SOURCE = frozenset({"source-ranges-with-this-node"})
"""Those in which a packet from outside has an address of a Service as its source, which is one of
the node's here: the kernel drops it as a martian (RFC 1812, 5.3.7)."""
DIFFERENT = LOCAL_FIRST | OWN_ADDRESS | HELD_SOURCE
