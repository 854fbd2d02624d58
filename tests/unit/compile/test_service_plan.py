"""Services that ask for an address of the node, where modes hold the addresses of Services."""

from __future__ import annotations

import msgspec

from steersman.compile.planner import Planner
from steersman.model.findings import Severity
from steersman.model.plan import FrontendKind, NodePlan, Traits
from tests.support.builders.objects import (
    CONFIG,
    FACTS,
    KEY,
    endpoint,
    plan_of,
    service,
    slice_,
    snapshot,
)

HOLDS = Traits(assigns_vips=True)
MINE, FREE = "192.168.0.2", "203.0.113.7"
GREEDY = service(
    type="LoadBalancer",
    externalIPs=[MINE, FREE],
    ingress=[{"ip": "192.168.1.2"}, {"ip": "1.2.3.4"}],
)


def kept(plan: NodePlan) -> dict[FrontendKind, list[str]]:
    found: dict[FrontendKind, list[str]] = {}
    for frontend in plan.services[KEY].frontends:
        found.setdefault(frontend.kind, []).append(frontend.address)
    return found


def test_an_address_of_the_node_is_not_served_and_that_is_said() -> None:
    plan = plan_of(GREEDY, slice_(endpoint("10.0.0.1")), traits=HOLDS)
    assert kept(plan) == {
        FrontendKind.CLUSTER_IP: ["10.96.0.10"],
        FrontendKind.EXTERNAL_IP: [FREE],
        FrontendKind.LOAD_BALANCER_IP: ["1.2.3.4"],
    }
    fields = [(f.field, f.severity) for f in plan.findings]
    assert fields == [
        ("spec.externalIPs", Severity.ERROR),
        ("status.loadBalancer.ingress", Severity.ERROR),
    ]
    assert MINE in plan.findings[0].reason


def test_other_modes_serve_it() -> None:
    plan = plan_of(GREEDY, slice_(endpoint("10.0.0.1")))
    assert kept(plan)[FrontendKind.EXTERNAL_IP] == [MINE, FREE]
    assert plan.findings == ()


def test_a_node_that_gets_the_address_later_keeps_it() -> None:
    planner = Planner(CONFIG, HOLDS)
    world = snapshot(service(externalIPs=[FREE]), slice_(endpoint("10.0.0.1")))
    planner.update(world, FACTS, (), everything=True)
    assert kept(planner.plan)[FrontendKind.EXTERNAL_IP] == [FREE]
    facts = msgspec.structs.replace(FACTS, interfaces={"eth0": (f"{FREE}/24",)})
    change = planner.update(world, facts, ())
    assert list(change.changed) == [KEY]
    assert FrontendKind.EXTERNAL_IP not in kept(planner.plan)
