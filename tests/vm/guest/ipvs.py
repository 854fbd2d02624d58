"""The ipvs mode in the namespace of a lab's node, and where its answers differ from the plan's."""

from __future__ import annotations

from dataclasses import replace

from steersman.host.exec import Exec, SubprocessExec
from steersman.model.addresses import join_host_port
from steersman.model.names import Protocol
from steersman.model.plan import NodePlan
from steersman.modes.base import Mode
from steersman.modes.diff import Ruleset
from steersman.modes.ipvs.mode import IpvsMode
from steersman.modes.ipvs.names import Server, ServerKey
from steersman.modes.ipvs.options import IpvsOptions
from tests.flows import FlowCase
from tests.lab_sockets import Netns
from tests.modes import ModeUnderTest, render


def mode_behind(execute: Exec, options: IpvsOptions | None = None) -> IpvsMode:
    """The mode, in the namespace that an Exec's prefix enters (`nsenter --net=PATH`)."""
    assert isinstance(execute, SubprocessExec)
    (path,) = (w.removeprefix("--net=") for w in execute.prefix if w.startswith("--net="))
    return IpvsMode(execute, options, Netns(path).call)


def _make(execute: Exec, _variant: str) -> Mode:
    offline = isinstance(execute, SubprocessExec) and not execute.prefix
    return IpvsMode(execute) if offline else mode_behind(execute)


IPVS = ModeUnderTest("ipvs", ("nft",), _make, None, lambda _plan: "")


def as_ipvs_serves(flows: tuple[FlowCase, ...], plan: NodePlan) -> tuple[FlowCase, ...]:
    """The flows as the mode's README says that they are served: one list for all classes.

    Pods and the node get the endpoints of those outside; everything else stays as it is.
    """
    ruleset = render(plan, IPVS.offline())
    return tuple(_served(flow, ruleset) for flow in flows)


def _served(flow: FlowCase, ruleset: Ruleset) -> FlowCase:
    server = ruleset.get(ServerKey(Protocol(flow.protocol), flow.address, flow.port))
    if flow.kind != "forward" or not isinstance(server, Server):
        return flow
    targets = {join_host_port(*target) for target in server.targets}
    return replace(flow, endpoints=flow.endpoints & targets)


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
"""Cases (and conformance cases) in which that differs from the plan."""
