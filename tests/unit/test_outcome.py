from __future__ import annotations

import logging

import pytest

from steersman.host.conntrack import Cleanup
from steersman.model import kube
from steersman.model.conntrack import Stale
from steersman.model.names import Family, ObjectName, PlanKey, Protocol, ServicePortName
from steersman.model.plan import Action, Frontend, FrontendKind, ServicePlan, Verdict
from steersman.model.snapshot import Snapshot
from steersman.run.metrics import Metrics
from steersman.run.outcome import (
    Tally,
    clean_conntrack,
    health_counts,
    programming_seconds,
    without_local,
)

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


def test_only_ready_endpoints_of_this_node_are_counted() -> None:
    def endpoint(ip: str, node: str, ready: bool) -> kube.SliceEndpoint:
        return kube.SliceEndpoint([ip], kube.EndpointConditions(ready), node)

    slice_ = kube.EndpointSlice(
        kube.ObjectMeta(name="a", namespace="shop"),
        "IPv4",
        [
            endpoint("10.0.0.1", "here", True),
            endpoint("10.0.0.2", "here", False),
            endpoint("10.0.0.3", "there", True),
        ],
        [kube.SlicePort("http", "TCP", 80), kube.SlicePort("metrics", "TCP", 90)],
    )
    world = Snapshot(slices={CART: {"a": slice_}})
    other = ObjectName("shop", "other")
    assert health_counts(world, [CART, other], Family.IPV4, "here") == {CART: 1, other: 0}
    assert health_counts(world, [CART], Family.IPV6, "here") == {CART: 0}


def test_latency_is_counted_from_valid_causes_since_the_start() -> None:
    times = ["1970-01-01T00:01:40.250000001Z", "1970-01-01T00:00:09Z", "junk", "1970-01-01"]
    assert programming_seconds({CART: times}, now=101.0, started=10.0) == [pytest.approx(0.75)]


def test_a_cause_in_the_future_took_no_time() -> None:
    times = ["2999-01-01T00:00:00Z"]
    assert programming_seconds({CART: times}, now=101.0, started=10.0) == [0.0]


def _world() -> Snapshot:
    service = kube.Service(
        kube.ObjectMeta("cart", "shop"),
        kube.ServiceSpec(
            cluster_ip="10.96.0.1", ports=[kube.ServicePort(53, protocol="UDP", name="")]
        ),
    )
    slice_ = kube.EndpointSlice(
        kube.ObjectMeta("a", "shop"),
        "IPv4",
        [kube.SliceEndpoint(["10.0.0.1"])],
        [kube.SlicePort("", "UDP", 53)],
    )
    return Snapshot({CART: service}, {CART: {"a": slice_}})


async def test_conntrack_is_cleaned_in_every_family_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = list[Stale]()

    async def delete(stale: Stale) -> Cleanup:
        asked.append(stale)
        return Cleanup(3, 1, False) if stale else Cleanup(0, 0, True)

    metrics = Metrics("iptables")
    with caplog.at_level(logging.INFO):
        await clean_conntrack(_world(), Family, metrics, delete=delete)
        await clean_conntrack(_world(), [Family.IPV4], metrics, names=[], delete=delete)
    assert [(stale.family, bool(stale)) for stale in asked] == [
        (Family.IPV4, True),
        (Family.IPV6, False),
        (Family.IPV4, False),
    ]
    text = metrics.render()[0].decode()
    assert 'conntrack_reconciler_deleted_entries_total{ip_family="IPv4"} 3.0' in text
    assert 'conntrack_reconciler_sync_duration_seconds_count{ip_family="IPv4"} 2.0' in text
    assert "IPv4 conntrack: 3 stale entries deleted, 1 refused by the kernel" in caplog.text
    assert len(caplog.records) == 1


async def test_a_conntrack_that_does_not_answer_is_only_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def delete(_: Stale) -> Cleanup:
        raise OSError("no conntrack here")

    metrics = Metrics("iptables")
    await clean_conntrack(_world(), Family, metrics, delete=delete)
    assert [r.levelname for r in caplog.records] == ["ERROR", "ERROR"]
    assert "stale IPv4 conntrack entries stay: no conntrack here" in caplog.text
