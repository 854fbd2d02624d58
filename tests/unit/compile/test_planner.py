from __future__ import annotations

from typing import Any

import msgspec
import pytest

from steersman.compile.planner import PlanChange, Planner, compile_all
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
from steersman.model.inputs import NodeConfig
from steersman.model.names import Family, ObjectName, PlanKey
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


# Clashes


def clash(
    first: dict[str, Any], second: dict[str, Any]
) -> tuple[list[str], list[str], dict[str, str]]:
    """Kinds of Frontends that Services `a` and `b` keep, and reasons by object and field."""
    a = service("a", **({"clusterIP": "10.96.0.1"} | first))
    b = service("b", **({"clusterIP": "10.96.0.2"} | second))
    plan = plan_of(a, b)
    kept = {
        name: [
            f.kind.value
            for key, p in plan.services.items()
            if key.name.service == name
            for f in p.frontends
        ]
        for name in "ab"
    }
    return kept["a"], kept["b"], {f"{f.object} {f.field}": f.reason for f in plan.findings}


OLD, NEW = "2026-01-01T00:00:00Z", "2026-02-02T00:00:00Z"
NODE_PORT: dict[str, Any] = {"type": "NodePort", "ports": [port(nodePort=30000)]}


@pytest.mark.parametrize(
    ("first", "second", "loser", "why"),
    [
        ({"created": OLD}, {"created": NEW}, "b", "belongs to the older"),
        ({"created": NEW}, {"created": OLD}, "a", "belongs to the older"),
        ({"created": OLD}, {"created": OLD}, "b", "is held by"),
        ({}, {}, "b", "is held by"),
        ({}, {"created": NEW}, "a", "is held by"),
    ],
)
def test_the_older_service_gets_a_node_port(
    first: dict[str, Any], second: dict[str, Any], loser: str, why: str
) -> None:
    a, b, reasons = clash(first | NODE_PORT, second | NODE_PORT)
    kept = {"a": a, "b": b}
    winner = "a" if loser == "b" else "b"
    assert kept[winner] == ["clusterIP", "nodePort"]
    assert kept[loser] == ["clusterIP"]
    (where,) = reasons
    assert where == f"Service shop/{loser} spec.ports[0].nodePort"
    assert f"node port 30000/TCP {why} Service shop/{winner}:http" in reasons[where]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"clusterIP": "10.96.0.9"}, "spec.clusterIP"),
        ({"externalIPs": ["192.0.2.1"]}, "spec.externalIPs"),
        ({"ingress": [{"ip": "192.0.2.1"}]}, "status.loadBalancer.ingress"),
    ],
)
def test_an_address_that_two_services_claim(more: dict[str, Any], field: str) -> None:
    a, b, reasons = clash(more, more)
    assert len(a) == len(b) + 1
    assert list(reasons) == [f"Service shop/b {field}"]


def test_one_port_number_and_two_protocols_do_not_clash() -> None:
    udp = {"type": "NodePort", "ports": [port(nodePort=30000, protocol="UDP")]}
    assert clash(NODE_PORT, udp)[2] == {}


def test_two_ports_of_one_service_on_one_number() -> None:
    plan = plan_of(service(ports=[port("b"), port("a")]), slice_(HERE))
    frontends = {key.name.port: p.frontends for key, p in plan.services.items()}
    assert len(frontends["a"]) == 1
    assert frontends["b"] == ()
    assert "10.96.0.10:80/TCP belongs to port 'a'" in plan.findings[0].reason


def test_a_lost_frontend_takes_its_endpoints_along() -> None:
    both = [service(name, clusterIP="10.96.0.9") for name in "ab"]
    plan = plan_of(*both, slice_(HERE, owner="b"))
    loser = plan.services[PlanKey(HTTP._replace(service="b"), Family.IPV4)]
    assert (loser.frontends, printed(loser)) == ((), ([], [], []))


def test_ipv6_clash_is_named_in_brackets() -> None:
    six = {"clusterIP": "fd00::9"}
    assert "[fd00::9]:80/TCP is held by" in clash(six, six)[2]["Service shop/b spec.clusterIP"]


HEALTH: dict[str, Any] = {
    "type": "LoadBalancer",
    "externalTrafficPolicy": "Local",
    "healthCheckNodePort": 30000,
}


def test_a_health_check_port_that_is_a_node_port_is_called_out() -> None:
    a, b, reasons = clash(NODE_PORT, HEALTH)
    assert (a, b) == (["clusterIP", "nodePort"], ["clusterIP"])
    assert "of shop/a:http" in reasons["Service shop/b spec.healthCheckNodePort"]


def test_a_health_check_port_of_two_services_is_called_out_on_both() -> None:
    assert len(clash(HEALTH, HEALTH)[2]) == 2


def test_a_health_check_port_that_is_its_own_node_port_is_called_out() -> None:
    own = HEALTH | {"ports": [port(nodePort=30000), port("other", 81)]}
    _, _, reasons = clash(own, {})
    assert list(reasons) == ["Service shop/a spec.healthCheckNodePort"]


# Planner


def test_a_planner_reports_what_changed() -> None:
    planner = Planner(CONFIG, IPTABLES)
    assert planner.plan.services == {}
    name = ObjectName("shop", "cart")
    world = snapshot(service(), slice_(HERE))
    first = planner.update(world, FACTS, {name})
    assert (first.settings_changed, list(first.changed), set(first.removed)) == (True, [KEY], set())
    again = planner.update(world, FACTS, {name}, everything=True)
    assert again == PlanChange()
    gone = planner.update(snapshot(), FACTS, {name})
    assert gone == PlanChange(removed=frozenset({KEY}))
    assert planner.plan.services == {}


def test_a_clash_dirties_just_the_other_claimant() -> None:
    planner = Planner(CONFIG, IPTABLES)
    a, b = service("a", clusterIP="10.96.0.9"), service("b", clusterIP="10.96.0.9")
    c = service("c", clusterIP="10.96.0.3")
    planner.update(snapshot(a, b, c), FACTS, (), everything=True)
    change = planner.update(snapshot(b, c), FACTS, {ObjectName("shop", "a")})
    assert {key.name.service for key in change.removed} == {"a"}
    assert {key.name.service for key in change.changed} == {"b"}
    assert planner.plan.findings == ()
    back = planner.update(snapshot(a, b, c), FACTS, {ObjectName("shop", "a")})
    assert {key.name.service for key in back.changed} == {"a"}  # b has it, and keeps it
    assert len(planner.plan.findings) == 1


@pytest.mark.parametrize("reads_addresses", [False, True])
def test_a_new_address_is_rendered_only_if_the_mode_reads_it(reads_addresses: bool) -> None:
    planner = Planner(CONFIG, msgspec.structs.replace(IPTABLES, reads_addresses=reads_addresses))
    world = snapshot(service(type="NodePort", ports=[port(nodePort=30000)]), slice_(HERE))
    planner.update(world, FACTS, (), everything=True)
    interfaces = {"eth1": ("192.0.2.9/24",), "lo": FACTS.interfaces["lo"]}
    facts = msgspec.structs.replace(FACTS, interfaces=interfaces)
    change = planner.update(world, facts, ())
    assert (change.settings_changed, change.changed) == (reads_addresses, {})
    assert planner.plan.settings.ipv4.local_addresses == ("127.0.0.1", "192.0.2.9")
    interfaces = {"lo": ("127.0.0.1/8", "127.0.0.9/8")}  # node ports may be served on loopback
    facts = msgspec.structs.replace(FACTS, interfaces=interfaces)
    assert planner.update(world, facts, ()).settings_changed


def test_a_service_that_cannot_be_planned_costs_no_other_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = Planner(CONFIG, IPTABLES)
    a, b, c = (service(name, clusterIP=f"10.96.0.{i}") for i, name in enumerate("abc", 1))
    planner.update(snapshot(a, b), FACTS, (), everything=True)
    (before,) = (plan for key, plan in planner.services.items() if key.name.service == "a")
    names = [each.metadata.object_name for each in (a, b, c)]

    def failing(parsed: Any, *rest: Any) -> Any:
        if parsed.service.metadata.name == "a":
            raise MemoryError("no room")
        return plan_service(parsed, *rest)

    monkeypatch.setattr("steersman.compile.planner.plan_service", failing)
    changed = service("a", clusterIP="10.96.0.7")
    change = planner.update(snapshot(changed, c), FACTS, names)
    assert change.failed == {names[0]}
    assert {key.name.service for key in change.changed} == {"c"}
    assert {key.name.service for key in change.removed} == {"b"}
    assert planner.services[before.key] == before
    (finding,) = planner.plan.findings
    assert finding.object == "Service shop/a"
    assert "MemoryError: no room" in finding.reason
    monkeypatch.undo()
    planner.update(snapshot(changed, c), FACTS, change.failed)
    assert planner.services[before.key].frontends[0].address == "10.96.0.7"
    assert planner.plan.findings == ()


def test_steps_yield_and_give_the_plan_of_a_single_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steersman.compile.planner._SLICE", 0)
    world = snapshot(*(service(f"s{i}", clusterIP=f"10.96.0.{i}") for i in range(1, 9)))
    planner = Planner(CONFIG, IPTABLES)
    assert sum(1 for _ in planner.steps(world, FACTS, (), everything=True)) >= 8
    assert planner.services == compile_all(world, CONFIG, FACTS, IPTABLES).services


def test_a_zone_change_dirties_everything() -> None:
    near, far = endpoint("10.0.0.1", zones=["z1"]), endpoint("10.0.0.2", zones=["z2"])
    planner = Planner(CONFIG, IPTABLES)
    planner.update(snapshot(service(), slice_(near, far), node("z1")), FACTS, (), everything=True)
    moved = snapshot(service(), slice_(near, far), node("z2"))
    assert list(planner.update(moved, FACTS, ()).changed) == [KEY]


def test_thresholds_have_hysteresis() -> None:
    config = msgspec.structs.replace(CONFIG, split_threshold=4, large_cluster_endpoints=2)
    planner = Planner(config, IPTABLES)

    def flags(ports: int, endpoints: int) -> tuple[bool, bool, bool]:
        obj = service(ports=[port(str(n), 80 + n) for n in range(ports)])
        entries = [endpoint(f"10.0.0.{n}") for n in range(endpoints)]
        world = snapshot(obj, slice_(*entries, ports=[port("0")]))
        change = planner.update(world, FACTS, {ObjectName("shop", "cart")})
        settings = planner.plan.settings
        return settings.split_dispatch, settings.large_cluster, change.settings_changed

    assert flags(4, 2) == (False, False, True)
    assert flags(5, 3) == (True, True, True)
    assert flags(3, 2) == (True, True, False)
    assert flags(2, 1) == (False, False, True)


def test_frontend_kinds_print_as_in_kubernetes() -> None:
    assert [kind.value for kind in FrontendKind] == [
        "clusterIP",
        "externalIP",
        "loadBalancerIP",
        "nodePort",
    ]
