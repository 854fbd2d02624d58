"""Plans of one Service: Actions, lists of endpoints, and addresses that the node has."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from steersman.compile.planner import Planner
from steersman.compile.service import parse_service
from steersman.compile.service_plan import (
    DROP,
    REJECT,
    TO_CLUSTER,
    TO_CLUSTER_MASQUERADED,
    TO_LOCAL,
    TO_LOCAL_MASQUERADED,
    plan_service,
)
from steersman.model.findings import Severity
from steersman.model.inputs import NodeConfig
from steersman.model.names import Family, PlanKey
from steersman.model.plan import Action, Frontend, FrontendKind, NodePlan, ServicePlan, Traits
from tests.support.builders.objects import (
    CONFIG,
    FACTS,
    HTTP,
    IPTABLES,
    KEY,
    NFTABLES,
    NODE,
    endpoint,
    node,
    plan_of,
    port,
    service,
    settings_of,
    slice_,
    snapshot,
)
from tests.support.following import update

HERE, THERE = endpoint("10.0.0.1", NODE), endpoint("10.0.0.2", "other")
NO_DETECTOR = msgspec.structs.replace(CONFIG, cluster_cidrs=())
FALLS_BACK = msgspec.structs.replace(CONFIG, local_falls_back=True)
FALLS_BACK_BLIND = msgspec.structs.replace(FALLS_BACK, cluster_cidrs=())
MASQUERADE_ALL = msgspec.structs.replace(CONFIG, masquerade_all=True)
ALL_MASQUERADED = (TO_CLUSTER_MASQUERADED,) * 3
EVERYWHERE: dict[str, Any] = {
    "type": "LoadBalancer",
    "externalIPs": ["198.51.100.7"],
    "ingress": [{"ip": "192.0.2.1"}],
    "ports": [port(nodePort=30000)],
}


def one(plan: NodePlan) -> ServicePlan:
    return plan.services[KEY]


def actions(frontend: Frontend) -> tuple[Action, Action, Action]:
    return frontend.pod, frontend.node, frontend.external


def kinds(plan: ServicePlan) -> list[str]:
    return [frontend.kind.value for frontend in plan.frontends]


def printed(plan: ServicePlan) -> tuple[list[str], list[str], list[str]]:
    return (
        [str(e) for e in plan.cluster],
        [str(e) for e in plan.local],
        [str(e) for e in plan.reachable],
    )


@pytest.mark.parametrize(
    ("config", "policy", "endpoints", "expected"),
    [
        (CONFIG, "Cluster", (), (REJECT, REJECT, REJECT)),
        (CONFIG, "Local", (), (REJECT, REJECT, REJECT)),
        (CONFIG, "Local", (THERE,), (DROP, DROP, DROP)),
        (CONFIG, "Cluster", (THERE,), (TO_CLUSTER, *ALL_MASQUERADED[:2])),
        (CONFIG, "Local", (HERE,), (TO_LOCAL, TO_LOCAL_MASQUERADED, TO_LOCAL_MASQUERADED)),
        (NO_DETECTOR, "Cluster", (THERE,), (TO_CLUSTER,) * 3),
        (NO_DETECTOR, "Local", (HERE,), (TO_LOCAL,) * 3),
        (MASQUERADE_ALL, "Cluster", (THERE,), ALL_MASQUERADED),
        (MASQUERADE_ALL, "Local", (HERE,), (TO_LOCAL_MASQUERADED,) * 3),
        (FALLS_BACK, "Local", (THERE,), (DROP, DROP, DROP)),  # nothing asked for others
    ],
)
def test_actions_at_the_cluster_ip(
    config: NodeConfig, policy: str, endpoints: tuple[dict[str, Any], ...], expected: object
) -> None:
    plan = one(plan_of(service(internalTrafficPolicy=policy), slice_(*endpoints), config=config))
    (frontend,) = plan.frontends
    assert (frontend.kind, frontend.address, frontend.port) == ("clusterIP", "10.96.0.10", 80)
    assert actions(frontend) == expected


@pytest.mark.parametrize(
    ("config", "policy", "endpoints", "expected"),
    [
        (CONFIG, "Cluster", (), (REJECT, REJECT, REJECT)),
        (CONFIG, "Cluster", (THERE,), ALL_MASQUERADED),
        (CONFIG, "Local", (), (REJECT, REJECT, REJECT)),
        (CONFIG, "Local", (THERE,), (TO_CLUSTER, TO_CLUSTER_MASQUERADED, DROP)),
        (CONFIG, "Local", (HERE,), (TO_CLUSTER, TO_CLUSTER_MASQUERADED, TO_LOCAL)),
        (NO_DETECTOR, "Local", (THERE,), (DROP, TO_CLUSTER_MASQUERADED, DROP)),
        (NO_DETECTOR, "Local", (HERE,), (TO_LOCAL, TO_CLUSTER_MASQUERADED, TO_LOCAL)),
        (MASQUERADE_ALL, "Local", (HERE,), (TO_CLUSTER, TO_CLUSTER_MASQUERADED, TO_LOCAL)),
        (FALLS_BACK, "Local", (), (REJECT, REJECT, REJECT)),
        (FALLS_BACK, "Local", (HERE,), (TO_CLUSTER, TO_CLUSTER_MASQUERADED, TO_LOCAL)),
        (FALLS_BACK, "Local", (THERE,), (TO_CLUSTER, *ALL_MASQUERADED[:2])),
        (FALLS_BACK_BLIND, "Local", (THERE,), ALL_MASQUERADED),
    ],
)
def test_actions_outside(
    config: NodeConfig, policy: str, endpoints: tuple[dict[str, Any], ...], expected: object
) -> None:
    obj = service(externalTrafficPolicy=policy, **EVERYWHERE)
    plan = one(plan_of(obj, slice_(*endpoints), config=config))
    assert kinds(plan) == ["clusterIP", "externalIP", "loadBalancerIP", "nodePort"]
    for frontend in plan.frontends[1:]:
        assert actions(frontend) == expected
    assert (plan.frontends[3].address, plan.frontends[3].port) == ("", 30000)


def test_the_cluster_ip_falls_back_where_others_are_asked_for() -> None:
    obj = service(internalTrafficPolicy="Local", **EVERYWHERE)
    plan = one(plan_of(obj, slice_(THERE), config=FALLS_BACK))
    assert actions(plan.frontends[0]) == (TO_CLUSTER, *ALL_MASQUERADED[:2])
    plan = one(plan_of(obj, slice_(THERE, HERE), config=FALLS_BACK))
    assert actions(plan.frontends[0])[0] == TO_LOCAL


def test_a_health_check_port_of_one_port_only() -> None:
    obj = service(
        ports=[port("a", 80), port("b", 81)],
        type="LoadBalancer",
        externalTrafficPolicy="Local",
        healthCheckNodePort=32000,
    )

    def ports(**traits: bool) -> list[int]:
        plans = plan_of(obj, traits=Traits(**traits)).services.values()
        return [plan.health_check_node_port for plan in plans]

    assert ports() == [32000, 32000]
    assert ports(one_health_check_port=True) == [32000, 0]


def test_most_services_have_no_health_check_port() -> None:
    obj = service(ports=[port("a", 80), port("b", 81)])
    plans = plan_of(obj, traits=Traits(one_health_check_port=True)).services.values()
    assert [plan.health_check_node_port for plan in plans] == [0, 0]


def test_lists_hold_what_is_used() -> None:
    both = slice_(HERE, THERE)
    assert printed(one(plan_of(service(), both))) == (
        ["10.0.0.1:8080", "10.0.0.2:8080"],
        [],
        ["10.0.0.1:8080", "10.0.0.2:8080"],
    )
    inside = service(internalTrafficPolicy="Local")
    assert printed(one(plan_of(inside, both))) == ([], ["10.0.0.1:8080"], ["10.0.0.1:8080"])
    outside = service(externalTrafficPolicy="Local", **EVERYWHERE)
    assert printed(one(plan_of(outside, both)))[1] == ["10.0.0.1:8080"]
    vip_is_cluster_ip = service(
        type="LoadBalancer", externalTrafficPolicy="Local", ingress=[{"ip": "10.96.0.10"}]
    )
    assert printed(one(plan_of(vip_is_cluster_ip, both)))[1] == []


def test_a_port_that_is_none_has_no_frontend_but_others_have() -> None:
    obj = service(ports=[port("bad", 0, nodePort=30000), port()])
    plan = plan_of(obj, slice_(HERE))
    bad = plan.services[PlanKey(HTTP._replace(port="bad"), Family.IPV4)]
    assert bad.frontends == ()
    assert printed(bad) == ([], [], [])
    assert kinds(one(plan)) == ["clusterIP"]
    assert [f.field for f in plan.findings] == ["spec.ports[0].port"]


def test_an_address_given_twice_is_one_frontend() -> None:
    obj = service(
        externalIPs=["198.51.100.7", "198.51.100.007", "10.96.0.10"],
        ingress=[{"ip": "198.51.100.7"}, {"ip": "192.0.2.1"}, {"ip": "192.0.2.1"}],
    )
    plan = plan_of(obj)
    assert [f.address for f in one(plan).frontends] == ["10.96.0.10", "198.51.100.7", "192.0.2.1"]
    assert plan.findings == ()


@pytest.mark.parametrize(
    ("ranges", "endpoints", "traits", "expected"),
    [
        (["203.0.113.0/24"], (HERE,), IPTABLES, ("203.0.113.0/24",)),
        (
            ["203.0.113.0/24", "192.168.0.0/16"],
            (HERE,),
            IPTABLES,
            ("203.0.113.0/24", "192.168.0.0/16", "192.0.2.1/32"),
        ),
        (["203.0.113.0/24"], (), IPTABLES, ()),
        (["203.0.113.0/24"], (), NFTABLES, ("203.0.113.0/24",)),
        (["0.0.0.0/0"], (HERE,), IPTABLES, ()),
    ],
)
def test_source_ranges_guard_the_vips_alone(
    ranges: list[str],
    endpoints: tuple[dict[str, Any], ...],
    traits: Traits,
    expected: tuple[str, ...],
) -> None:
    obj = service(loadBalancerSourceRanges=ranges, **EVERYWHERE)
    plan = one(plan_of(obj, slice_(*endpoints), traits=traits))
    assert [f.source_ranges for f in plan.frontends] == [(), (), expected, ()]


def test_affinity_and_health_check_port() -> None:
    obj = service(
        sessionAffinity="ClientIP",
        externalTrafficPolicy="Local",
        healthCheckNodePort=30100,
        **EVERYWHERE,
    )
    plan = one(plan_of(obj))
    assert (plan.affinity_seconds, plan.health_check_node_port) == (10800, 30100)


def test_both_families_of_a_dual_stack_service() -> None:
    obj = service(ipFamilies=["IPv4", "IPv6"], clusterIPs=["10.96.0.10", "fd00::10"])
    six = slice_(endpoint("fd00:10::1"), name="six", family="IPv6")
    plan = plan_of(obj, slice_(HERE), six)
    assert printed(one(plan))[0] == ["10.0.0.1:8080"]
    other = plan.services[PlanKey(HTTP, Family.IPV6)]
    assert printed(other)[0] == ["[fd00:10::1]:8080"]
    assert other.frontends[0].address == "fd00::10"


def test_slices_of_unknown_families_are_findings() -> None:
    plan = plan_of(service(), slice_(family="FQDN"))
    assert [f.field for f in plan.findings] == ["addressType"]


def test_zone_comes_from_the_node() -> None:
    near, far = endpoint("10.0.0.1", zones=["z1"]), endpoint("10.0.0.2", zones=["z2"])
    plan = plan_of(service(), slice_(near, far), node(zone="z2"))
    assert printed(one(plan))[0] == ["10.0.0.2:8080"]


def test_external_ips_gate() -> None:
    off = msgspec.structs.replace(CONFIG, allow_service_external_ips=False)
    assert kinds(one(plan_of(service(externalIPs=["198.51.100.7"]), config=off))) == ["clusterIP"]


def test_one_service_alone() -> None:
    settings = settings_of()
    parsed = parse_service(service(), settings.families)
    plans, findings = plan_service(parsed, [slice_(HERE)], settings, "")
    assert (list(plans), findings) == ([KEY], ())
    headless = parse_service(service(clusterIP="None"), settings.families)
    assert plan_service(headless, [], settings, "") == ({}, ())


# Addresses of the node, in modes that assign VIPs

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
    planner.update(world, FACTS)
    assert kept(planner.plan)[FrontendKind.EXTERNAL_IP] == [FREE]
    facts = msgspec.structs.replace(FACTS, interfaces={"eth0": (f"{FREE}/24",)})
    change = update(planner, world, facts)
    assert list(change.changed) == [KEY]
    assert FrontendKind.EXTERNAL_IP not in kept(planner.plan)
