"""The ipvs_state suite: virtual servers with their real ones, against upstream's at the end.

Sets and rules are other ones here on purpose (modes/ipvs/README.md), so they are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from steersman.compile.planner import compile_all
from steersman.host.exec import SubprocessExec
from steersman.model.plan import NodePlan
from steersman.modes.ipvs.mode import IpvsMode
from steersman.modes.ipvs.objects import DEVICE, ServerKey
from tests.conformance.world import world

Case = Mapping[str, Any]
Shown = tuple[str, int, int, frozenset[tuple[str, int]]]

_PORT_0 = "a ServicePort without a port is no object that an API server lets in: not planned"
DIFFERENT: Mapping[str, str] = {
    "ipvs/TestHealthCheckNodePortE2E@sync2": _PORT_0,
    "ipvs/TestTestInternalTrafficPolicyE2E@sync1": _PORT_0,
    "ipvs/TestTestInternalTrafficPolicyE2E@sync6": _PORT_0,
    "ipvs/TestOnlyLocalExternalIPs@sync1": "an external IP on loopback is refused, as by the API",
    "ipvs/TestNoEndpointsMetric@sync4": "the policy Local drops, it does not fall back",
}
"""Cases, by id, in which ours differ from upstream's, and why."""


def ipvs_state(case: Case) -> None:
    """Compare virtual servers; where one differs by intention the case is in DIFFERENT."""
    ours, upstreams = _rendered(planned(case)), expected(case["expect"])
    same = ours == upstreams
    assert same != (case["id"] in DIFFERENT), f"ours {ours}\nupstream's {upstreams}"


def planned(case: Case) -> NodePlan:
    """The plan of a case."""
    snapshot, config, facts = world({**case})
    local = case["node"]["netlink"]["localAddresses"] or {}
    length = 128 if case["node"]["ipFamily"] == "IPv6" else 32
    interfaces = {
        name: tuple(f"{address}/{length}" for address in addresses or ())
        for name, addresses in local.items()
        if name != DEVICE
    }
    return compile_all(snapshot, config, replace(facts, interfaces=interfaces), IpvsMode.traits)


def _rendered(plan: NodePlan) -> dict[ServerKey, Shown]:
    mode = IpvsMode(SubprocessExec())
    found = {}
    for service in plan.services.values():
        for key, server in mode.render_service(service, plan.settings).items():
            if isinstance(key, ServerKey):
                targets = frozenset(server.targets)
                found[key] = (server.scheduler, server.flags, server.timeout, targets)
    return found


def expected(expect: Case) -> dict[ServerKey, Shown]:
    """Upstream's virtual servers at the end of a case."""
    return {
        ServerKey(row["protocol"], row["address"], row["port"]): (
            row["scheduler"],
            row["flags"],
            row["timeoutSeconds"],
            frozenset((real["address"], real["port"]) for real in row["realServers"] or ()),
        )
        for row in expect["virtualServers"] or ()
    }


SUITES: Mapping[str, Callable[[Case], None]] = {"ipvs_state": ipvs_state}
