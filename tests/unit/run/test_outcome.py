from __future__ import annotations

import msgspec
import pytest

from steersman.model.names import Family, ObjectName, PlanKey, Protocol, ServicePortName
from steersman.model.plan import Action, Frontend, FrontendKind, ServicePlan, Verdict
from steersman.run.outcome import Tally, programming_seconds, without_local

CART = ObjectName("shop", "cart")
FORWARD, DROP, REJECT = (Action(Verdict(word)) for word in ("forward", "drop", "reject"))


def key(name: str, family: Family = Family.IPV4) -> PlanKey:
    return PlanKey(ServicePortName("shop", name, "", Protocol.TCP), family)


def plan(owner: PlanKey, health_port: int = 0, **external: Action) -> ServicePlan:
    frontends = tuple(
        Frontend(FrontendKind[kind], "", 80, FORWARD, FORWARD, action)
        for kind, action in external.items()
    )
    return ServicePlan(owner, frontends, health_check_node_port=health_port)


@pytest.mark.parametrize(
    ("external", "expected"),
    [
        ({"CLUSTER_IP": FORWARD, "NODE_PORT": FORWARD}, ()),
        ({"CLUSTER_IP": REJECT, "NODE_PORT": REJECT}, ()),
        ({"CLUSTER_IP": DROP, "NODE_PORT": FORWARD}, ("internal",)),
        ({"CLUSTER_IP": FORWARD, "EXTERNAL_IP": DROP}, ("external",)),
        ({"CLUSTER_IP": DROP, "NODE_PORT": DROP}, ("internal", "external")),
    ],
)
def test_dropping_means_that_no_endpoint_is_local(
    external: dict[str, Action], expected: tuple[str, ...]
) -> None:
    assert without_local(plan(key("cart"), 0, **external)) == expected


def test_counts_follow_the_changes() -> None:
    tally = Tally()
    one, two, six = key("one"), key("two"), key("one", Family.IPV6)
    tally.update({k: plan(k, NODE_PORT=DROP) for k in (one, two, six)}, ())
    assert tally.no_local_endpoints("external", Family.IPV4) == 2
    assert tally.no_local_endpoints("external", Family.IPV6) == 1
    assert tally.no_local_endpoints("internal", Family.IPV4) == 0
    tally.update({one: plan(one, NODE_PORT=FORWARD), two: plan(two, NODE_PORT=DROP)}, [six])
    assert tally.no_local_endpoints("external", Family.IPV4) == 1
    assert tally.no_local_endpoints("external", Family.IPV6) == 0


def test_health_ports_follow_the_changes() -> None:
    tally = Tally()
    four, six = key("cart"), key("cart", Family.IPV6)
    tally.update({four: plan(four, 30001), six: plan(six, 30001), key("b"): plan(key("b"))}, ())
    assert tally.health_ports(Family.IPV4) == {CART: 30001}
    tally.update({four: plan(four, 30002)}, [six, key("unknown")])
    assert tally.health_ports(Family.IPV4) == {CART: 30002}
    assert tally.health_ports(Family.IPV6) == {}


def test_ready_endpoints_are_told_with_the_plan() -> None:
    tally = Tally()
    four, six = key("cart"), key("cart", Family.IPV6)
    tally.update({four: plan(four, 30001), six: plan(six, 30001)}, ())
    assert tally.ready_here(Family.IPV4) == {CART: 0}
    tally.update({four: msgspec.structs.replace(plan(four, 30001), ready_here=2)}, ())
    assert (tally.ready_here(Family.IPV4), tally.ready_here(Family.IPV6)) == ({CART: 2}, {CART: 0})
    tally.update({}, [four])
    assert tally.ready_here(Family.IPV4) == {}


def test_latency_is_counted_from_valid_causes_since_the_start() -> None:
    times = ["1970-01-01T00:01:40.250000001Z", "1970-01-01T00:00:09Z", "junk", "1970-01-01"]
    assert programming_seconds({CART: times}, now=101.0, started=10.0) == [pytest.approx(0.75)]


def test_a_cause_in_the_future_took_no_time() -> None:
    times = ["2999-01-01T00:00:00Z"]
    assert programming_seconds({CART: times}, now=101.0, started=10.0) == [0.0]
