"""The ipvs mode in the namespace of a lab's node, and where its answers differ from the plan's."""

from __future__ import annotations

import os

import pytest

from tests.vm.machine import EVERYTHING

ALL = bool(os.environ.get(EVERYTHING))
only_with_all = pytest.mark.skipif(not ALL, reason=f"{EVERYTHING}=1 asks for it")
"""For tests that need the kernel less than others: each takes seconds here."""


LOCAL_FIRST = frozenset(
    {
        "both-policies-local",
        "detector-bridge",
        "detector-prefix",
        "external-ip-local",
        "hairpin-load-balancer",
        "hints-node-local",
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
