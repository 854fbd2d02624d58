"""The elements and listeners that plans become, as the nft commands that operators would see."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from steersman.compile.service_plan import TO_CLUSTER
from steersman.model.names import Family, PlanKey, Protocol, ServicePortName
from steersman.model.plan import (
    Action,
    Endpoint,
    FamilySettings,
    Frontend,
    FrontendKind,
    NodeSettings,
    ServicePlan,
    Traits,
    Verdict,
)
from steersman.model.ruleset import diff
from steersman.modes.nftables.layout import Kind, base_name, prefix
from steersman.modes.nftables.render import Slots, render_localhost, render_node, render_service
from steersman.modes.nftables.text import ruleset_text
from steersman.proxy.listeners import Decision, ListenerPlan
from tests.support.builders import nftables_plans as make
from tests.support.builders.nftables_plans import ON
from tests.support.builders.plans import (
    DROPPED,
    EXTERNAL_LOCAL,
    INTERNAL_LOCAL,
    MASQUERADED,
    NONE_HERE,
    PLAIN,
    REJECTED,
    Actions,
)


def lines(plan: ServicePlan, of: NodeSettings = make.SETTINGS) -> list[str]:
    return ruleset_text(render_service(plan, of, {})).splitlines()


def without(table: str, given: Sequence[str]) -> list[str]:
    return [line.removeprefix(f"add element {table} ") for line in given]


def test_a_cluster_ip() -> None:
    assert without("ip kube-proxy", lines(make.port([1, 3]))) == [
        'service-ips { 10.96.0.10 . tcp . 80 comment "shop/web:http cluster IP" : goto '
        "cluster-lb-4 }",
        "service-endpoints { 10.96.0.10 . tcp . 80 . 0 : 10.244.0.1 . 8080 }",
        "service-endpoints { 10.96.0.10 . tcp . 80 . 1 : 10.244.0.3 . 8080 }",
    ]


@pytest.mark.parametrize(
    ("actions", "chain"),
    [
        (PLAIN, "cluster-lb-4"),
        (make.UNMASQUERADED, "lb-4"),
        (MASQUERADED, "masquerade-lb-4"),
        (INTERNAL_LOCAL, "cluster-local-lb-4"),
        (EXTERNAL_LOCAL, "by-source"),
    ],
)
def test_the_chain_says_what_is_done(actions: Actions, chain: str) -> None:
    dispatch = lines(make.port([0, 2, 1], frontends=[make.cluster_ip(actions)]))[0]
    assert dispatch.endswith(f"goto {chain} }}")


def test_sources_with_different_verdicts_are_looked_up_by_class() -> None:
    node_port = Frontend(FrontendKind.NODE_PORT, "", 30080, *NONE_HERE)
    text = without("ip kube-proxy", lines(make.port([1], frontends=[node_port])))
    assert 'service-nodeports { tcp . 30080 comment "shop/web:http node port" : goto ' in text[0]
    assert text[2:5] == [
        "pod-nodeports { tcp . 30080 : goto np-lb-1 }",
        "node-nodeports { tcp . 30080 : goto np-masquerade-lb-1 }",
        'no-endpoint-nodeports { tcp . 30080 comment "shop/web:http node port" : drop }',
    ]


def test_without_a_detector_pods_are_external() -> None:
    front = make.cluster_ip(PLAIN)
    dispatch = lines(make.port([1], frontends=[front]), make.NO_DETECTOR)[0]
    assert dispatch.endswith("goto masquerade-lb-1 }")
    local = make.port([0], frontends=[make.cluster_ip(EXTERNAL_LOCAL)])
    assert not [line for line in lines(local, make.NO_DETECTOR) if "pod-service-ips" in line]


def test_refusals() -> None:
    rejected = make.port((), frontends=[make.cluster_ip(REJECTED)])
    comment = 'comment "shop/web:http cluster IP"'
    element = f"no-endpoint-services {{ 10.96.0.10 . tcp . 80 {comment}"
    start = "add element ip kube-proxy"
    assert lines(rejected) == [f"{start} {element} : continue }}"]
    dropped = make.port((), frontends=[make.cluster_ip(DROPPED)], affinity=60)
    assert lines(dropped) == [f"{start} {element} : drop }}"]


def test_source_ranges_are_made_disjoint() -> None:
    ranges = ("10.0.0.0/8", "10.1.0.0/16", "192.0.2.7/32")
    vip = Frontend(FrontendKind.LOAD_BALANCER_IP, "192.0.2.81", 80, *REJECTED, ranges)
    text = without("ip kube-proxy", lines(make.port((), frontends=[vip])))
    assert text[1:] == [
        'firewall-ips { 192.0.2.81 . tcp . 80 comment "shop/web:http load balancer IP" }',
        "firewall-allowed { 192.0.2.81 . tcp . 80 . 10.0.0.0-10.255.255.255 }",
        "firewall-allowed { 192.0.2.81 . tcp . 80 . 192.0.2.7-192.0.2.7 }",
    ]


def test_affinity_is_per_service_port_and_pool() -> None:
    plan = make.port([0, 1], frontends=[make.cluster_ip(EXTERNAL_LOCAL)], affinity=60)
    text = lines(plan)
    base = base_name(plan.key)
    chains = {line.split()[4]: line.partition("# ")[2] for line in text if "add chain" in line}
    assert chains == {
        f"affinity-learn-{base}": "learn 60 cluster local",
        f"affinity-{base}": "lookup tcp - cluster lb-4",
        f"masquerade-affinity-{base}": "lookup tcp mark-masquerade cluster lb-4",
        f"local-affinity-{base}": "lookup tcp - local local-lb-1",
    }
    assert f"add map ip kube-proxy affinity-local-{base}" in text
    assert f"add element ip kube-proxy members-local-{base} {{ 10.244.0.0 . 8080 }}" in text


def test_long_names_are_cut_in_comments() -> None:
    name = ServicePortName("n" * 120, "s" * 120, "p80", Protocol.TCP)
    plan = make.port(of=PlanKey(name, Family.IPV4), frontends=[make.cluster_ip()])
    assert "..." in lines(plan)[0]


def test_endpoints_keep_their_slots() -> None:
    slots: Slots = {}
    before = render_service(make.port(range(100)), make.SETTINGS, slots)
    after = render_service(make.port([*range(3), *range(4, 100)]), make.SETTINGS, slots)
    change = diff(before, after)
    kinds = sorted(key[0] for key in (*change.added, *change.removed, *change.changed))
    assert kinds == [Kind.SERVICE_ENDPOINTS] * 2


def test_the_node_part_is_texts_and_node_port_addresses() -> None:
    node = render_node(make.SETTINGS)
    address = prefix(Kind.NODEPORT_IPS, Family.IPV4) + bytes((192, 0, 2, 1))
    kinds = (Kind.SKELETON, Kind.RULES)
    assert set(node) == {address} | {prefix(k, f) for k in kinds for f in make.BOTH}


def node_port(actions: Actions = PLAIN, port: int = 30080) -> Frontend:
    return Frontend(FrontendKind.NODE_PORT, "", port, *actions)


def served(plan: ServicePlan, settings: NodeSettings = ON) -> list[ListenerPlan]:
    return list(render_localhost(plan, settings).values())


@pytest.mark.parametrize(("family", "address"), [(Family.IPV4, "127.0.0.1"), (Family.IPV6, "::1")])
@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP])
def test_a_node_port_is_served_on_loopback(
    family: Family, address: str, protocol: Protocol
) -> None:
    frontends = [make.cluster_ip(), node_port()]
    plan = make.port(of=make.key("web", family, protocol), frontends=frontends, affinity=60)
    [listener] = served(plan)
    assert (listener.bind, listener.port, listener.affinity_seconds) == (address, 30080, 60)
    assert listener.same_for_all
    assert listener.node == Decision(Verdict.FORWARD, plan.cluster)


def test_listeners_choose_from_the_pool_of_the_node() -> None:
    plan = make.port(range(4), frontends=[node_port(INTERNAL_LOCAL)])
    [listener] = served(plan)
    assert listener.node.endpoints == plan.local != plan.cluster


@pytest.mark.parametrize(
    ("plan", "settings"),
    [
        (make.port(), ON),
        (make.port(of=make.key(protocol=Protocol.SCTP), frontends=[node_port()]), ON),
        (make.port([], frontends=[node_port(REJECTED)]), ON),
        (make.port(frontends=[node_port()]), make.SETTINGS),
        (
            make.port(frontends=[node_port()]),
            msgspec.structs.replace(ON, ipv4=FamilySettings()),
        ),
        (make.port(frontends=[node_port()]), msgspec.structs.replace(ON, traits=Traits())),
    ],
    ids=["no-node-port", "sctp", "nobody-there", "other-traits", "not-wanted", "cannot"],
)
def test_no_listener_otherwise(plan: ServicePlan, settings: NodeSettings) -> None:
    assert served(plan, settings) == []


def test_an_action_that_drops_has_no_listener() -> None:
    drop = Action(Verdict.DROP)
    ends = (Endpoint("10.244.0.1", 8080),)
    frontend = Frontend(FrontendKind.NODE_PORT, "", 30080, TO_CLUSTER, drop, TO_CLUSTER)
    assert served(ServicePlan(make.key(), (frontend,), ends)) == []
