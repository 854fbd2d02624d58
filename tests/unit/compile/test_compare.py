"""Two plans compared: the differences, the Services they concern, and no others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from steersman.compile.compare import TRAIT_ROWS, Treatment, compare_plans
from steersman.model.names import Family, Protocol
from steersman.model.plan import (
    Endpoint,
    LocalDetector,
    NodePlan,
    NodeSettings,
    ProxyOptions,
    Scheduling,
    ServicePlan,
    Traits,
)
from tests.support.builders import plans as make

WEB = make.key("shop/web:http")
ENDS = make.endpoints("10.244.0.5", "10.244.0.6")
PLAN = make.plan(WEB, make.cluster_ip("10.96.0.1"), make.node_port(30080), cluster=ENDS)


def node_plan(*plans: ServicePlan, **settings: Any) -> NodePlan:
    return NodePlan(replace(make.SETTINGS, **settings), {plan.key: plan for plan in plans})


def said(before: NodePlan, after: NodePlan) -> dict[str, tuple[str, ...]]:
    return {each.reason: each.places for each in compare_plans(before, after)}


def between(old: ServicePlan, new: ServicePlan) -> dict[str, tuple[str, ...]]:
    return said(node_plan(old), node_plan(new))


def test_equal_plans_differ_in_nothing() -> None:
    assert compare_plans(node_plan(PLAN), node_plan(PLAN)) == ()


def test_services_that_come_and_go() -> None:
    other = make.plan(
        make.key("shop/db", Protocol.UDP, Family.IPV6),
        replace(make.cluster_ip("fd00::1"), port=53),
    )
    assert said(node_plan(PLAN), node_plan(other)) == {
        "cluster IP served no longer": ("shop/web:http 10.96.0.1:80/tcp",),
        "node port served no longer": ("shop/web:http node port 30080/tcp",),
        "cluster IP served from now on": ("shop/db [fd00::1]:53/udp",),
    }


def test_a_family_that_goes_is_one_reason() -> None:
    plans = [make.simple(n, family=Family.IPV6) for n in range(3)]
    before, after = node_plan(*plans), node_plan(families=(Family.IPV4,))
    (found,) = compare_plans(before, after)
    assert found.reason == "served no longer, as all of IPv6"
    assert found.services == ("ns-0/svc-0", "ns-1/svc-1", "ns-2/svc-2")


def test_frontends_and_endpoints_of_a_service() -> None:
    new = make.plan(
        WEB,
        make.cluster_ip("10.96.0.1"),
        make.external_ip("203.0.113.9"),
        cluster=make.endpoints("10.244.0.6", "10.244.0.7"),
    )
    assert between(PLAN, new) == {
        "external IP served from now on": ("shop/web:http 203.0.113.9:80/tcp",),
        "node port served no longer": ("shop/web:http node port 30080/tcp",),
        "endpoint gets connections from now on": ("shop/web:http 10.244.0.7:8080",),
        "endpoint gets no more connections": ("shop/web:http 10.244.0.5:8080",),
    }


def test_clients_are_named_if_only_some_are_treated_differently() -> None:
    def plan(actions: make.Actions) -> ServicePlan:
        return make.plan(WEB, make.node_port(30080, actions), cluster=ENDS, local=ENDS)

    place = ("shop/web:http node port 30080/tcp",)
    assert between(plan(make.MASQUERADED), plan(make.EXTERNAL_LOCAL)) == {
        "node port: pods of this node sent to endpoints on all nodes with their own source address "
        "instead of sent to endpoints on all nodes with the node's address as source": place,
        "node port: clients elsewhere sent to endpoints on this node with their own source address "
        "instead of sent to endpoints on all nodes with the node's address as source": place,
    }
    (reason,) = between(plan(make.DROPPED), plan(make.REJECTED))
    assert reason == "node port: all clients rejected instead of dropped"


def test_an_endpoint_that_other_clients_use() -> None:
    def plan(cluster: tuple[Endpoint, ...], local: tuple[Endpoint, ...]) -> ServicePlan:
        frontend = make.node_port(30080, make.EXTERNAL_LOCAL)
        return make.plan(WEB, frontend, cluster=cluster, local=local)

    one, other = ENDS
    assert between(plan(ENDS, (one,)), plan((other,), (one,))) == {
        "endpoint gets no more connections by policy Cluster": ("shop/web:http 10.244.0.5:8080",),
    }
    assert between(plan(ENDS, (one,)), plan(ENDS, ENDS)) == {
        "endpoint gets connections by policy Local from now on": ("shop/web:http 10.244.0.6:8080",),
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"affinity_seconds": 60}, "session affinity: 60 s instead of none"),
        ({"health_check_node_port": 1}, "health checks are admitted at another port, or no longer"),
        ({"maglev": True}, "endpoints are chosen in another way, or with other weights"),
        (
            {"scheduling": Scheduling(weights=(("10.244.0.5", 8080, 2),))},
            "endpoints are chosen in another way, or with other weights",
        ),
        (
            {"proxy": ProxyOptions(proxy_protocol=True)},
            "the PROXY protocol header is sent to endpoints",
        ),
    ],
)
def test_options_of_a_service(changes: dict[str, Any], reason: str) -> None:
    new = replace(PLAN, **changes)
    assert between(PLAN, new) == {reason: ("shop/web:http",)}


def test_the_end_of_the_proxy_protocol_is_said() -> None:
    old = replace(PLAN, proxy=ProxyOptions(proxy_protocol=True))
    assert "the PROXY protocol header is no longer sent to endpoints" in between(old, PLAN)


def test_source_ranges() -> None:
    old, new = (
        make.plan(WEB, make.load_balancer("203.0.113.9", ranges=ranges), cluster=ENDS)
        for ranges in ((), ("192.0.2.0/24",))
    )
    assert list(between(old, new)) == ["load balancer IP: other source ranges are let in"]


def family_settings(**fields: Any) -> NodeSettings:
    return replace(make.SETTINGS, ipv4=replace(make.SETTINGS.ipv4, **fields))


def test_settings_of_the_node_name_the_services_that_they_concern() -> None:
    no_port = make.plan(make.key("shop/db"), make.cluster_ip("10.96.0.2"))
    after = family_settings(node_port_addresses=("192.0.2.1",), localhost_node_ports=False)
    services = {plan.key: plan for plan in (PLAN, no_port)}
    before = NodePlan(make.SETTINGS, services)
    assert said(before, NodePlan(after, services)) == {
        "node port served at 192.0.2.1 instead of every address of the node": ("shop/web:http",),
        "node port no longer served on loopback addresses": ("shop/web:http",),
    }
    nowhere = NodePlan(family_settings(node_port_addresses=()), services)
    assert said(NodePlan(after, services), nowhere) == {
        "node port served at no address instead of 192.0.2.1": ("shop/web:http",),
        "node port served on loopback addresses": ("shop/web:http",),
    }


@pytest.mark.parametrize(
    ("detector", "words"),
    [
        (LocalDetector(), "nothing"),
        (LocalDetector(interface="cni0"), "cni0"),
        (LocalDetector(interface_prefix="veth"), "interfaces veth*"),
    ],
)
def test_how_pods_are_recognised(detector: LocalDetector, words: str) -> None:
    after = NodePlan(family_settings(detector=detector), {})
    reason = f"IPv4: local pods are recognised by {words} instead of 10.244.0.0/16"
    assert compare_plans(node_plan(), after) == (Treatment(reason),)


def test_the_mark_is_said() -> None:
    (found,) = compare_plans(node_plan(), node_plan(masquerade_bit=15))
    assert found.reason == "the packet mark for masquerading is 0x8000 instead of 0x4000"


REJECTED = make.plan(
    make.key("shop/none"),
    make.external_ip("203.0.113.1", make.REJECTED),
    make.load_balancer("203.0.113.2", make.REJECTED, ranges=("192.0.2.0/24",)),
    make.node_port(30081, make.REJECTED),
)


@pytest.mark.parametrize("name", TRAIT_ROWS)
def test_traits_that_come_and_go_concern_the_node_or_some_services(name: str) -> None:
    with_it = replace(Traits(), **{name: True})
    without = replace(Traits(), **{name: False})
    services = (PLAN, REJECTED)
    on = compare_plans(node_plan(*services, traits=without), node_plan(*services, traits=with_it))
    off = compare_plans(node_plan(*services, traits=with_it), node_plan(*services, traits=without))
    row = TRAIT_ROWS[name]
    assert [each.reason for each in (*on, *off)] == [row.comes, row.goes]
    if row.concerns is None:
        assert not on[0].services
    else:
        expected = ["shop/web"] if name == "terminates_connections" else ["shop/none"]
        assert list(on[0].services) == expected


IN_PLANS_OR_UNSEEN = {
    *("localhost_node_ports", "forwards_sctp", "one_health_check_port", "relays_localhost"),
    *("spares_hairpins_elsewhere", "reads_addresses"),
}


def test_every_trait_is_either_said_or_shows_in_the_plans() -> None:
    assert {*Traits.__struct_fields__} == {*TRAIT_ROWS} | IN_PLANS_OR_UNSEEN


def test_the_order_does_not_depend_on_that_of_the_services() -> None:
    plans: Iterable[ServicePlan] = [make.simple(n) for n in range(5)]
    one = compare_plans(node_plan(), node_plan(*plans))
    assert one == compare_plans(node_plan(), node_plan(*reversed([*plans])))
    assert one[0].places[0] == "ns-0/svc-0:http 10.96.0.0:80/tcp"
