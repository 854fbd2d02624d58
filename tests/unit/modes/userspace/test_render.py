"""Listeners and portals of plans, in both styles."""

from __future__ import annotations

from msgspec.structs import replace

from steersman.model.names import Family, PlanKey, Protocol, ServicePortName
from steersman.model.plan import (
    Action,
    Endpoint,
    FamilySettings,
    Frontend,
    FrontendKind,
    LocalDetector,
    NodeSettings,
    Pool,
    ServicePlan,
    SourceClass,
    SourceClassifier,
    Verdict,
)
from steersman.modes.userspace.render import (
    BASE,
    BaseKey,
    Portal,
    host_address,
    render_direct,
    render_node,
    render_redirect,
)
from steersman.proxy.listeners import LISTENER, PORTAL, Decision, FrontendKey, ListenerPlan
from tests.support.builders.plans import plan

HERE, THERE = Endpoint("10.244.1.5", 8080, local=True), Endpoint("10.244.2.5", 8080)
ALL = (HERE, THERE)
CLUSTER, LOCAL = Action(Verdict.FORWARD), Action(Verdict.FORWARD, Pool.LOCAL)
DROP, REJECT = Action(Verdict.DROP), Action(Verdict.REJECT)
FAMILY = FamilySettings(
    detector=LocalDetector(cidr="10.244.0.0/16"),
    node_ip="192.168.0.2",
    local_addresses=("127.0.0.1", "192.168.0.1", "192.168.0.2"),
    localhost_node_ports=True,
)
NODE = NodeSettings(families=(Family.IPV4,), ipv4=FAMILY)


def key(protocol: Protocol = Protocol.TCP) -> PlanKey:
    return PlanKey(ServicePortName("shop", "cart", "http", protocol), Family.IPV4)


def frontend(kind: FrontendKind, *actions: Action, ranges: tuple[str, ...] = ()) -> Frontend:
    address = "" if kind is FrontendKind.NODE_PORT else "198.51.100.1"
    port = 30080 if kind is FrontendKind.NODE_PORT else 80
    pod, node, external = actions if len(actions) == 3 else actions * 3
    return Frontend(kind, address, port, pod, node, external, ranges)


def cart(*frontends: Frontend, protocol: Protocol = Protocol.TCP) -> ServicePlan:
    return plan(key(protocol), *frontends, cluster=ALL, local=(HERE,))


def at(what: str, address: str, port: int = 80, node_port: bool = False) -> FrontendKey:
    return FrontendKey(what, Family.IPV4, Protocol.TCP, address, port, node_port)


VIP, NODE_PORT = FrontendKind.LOAD_BALANCER_IP, FrontendKind.NODE_PORT


def test_a_service_address_has_a_listener_and_a_portal_to_it() -> None:
    ruleset = render_redirect(cart(frontend(VIP, CLUSTER)), NODE)
    choice = Decision(Verdict.FORWARD, ALL)
    assert ruleset == {
        at(LISTENER, "198.51.100.1"): ListenerPlan(key(), "192.168.0.2", 0, choice, choice, choice),
        at(PORTAL, "198.51.100.1"): Portal("shop/cart:http", Verdict.FORWARD, "192.168.0.2"),
    }


def test_node_ports_are_bound_at_every_address_that_serves_them() -> None:
    ruleset = render_redirect(cart(frontend(NODE_PORT, CLUSTER)), NODE)
    bound = {(v.bind, v.port) for v in ruleset.values() if isinstance(v, ListenerPlan)}
    assert bound == {(a, 30080) for a in ("127.0.0.1", "192.168.0.1", "192.168.0.2")}
    some = replace(FAMILY, node_port_addresses=("192.168.0.1",), localhost_node_ports=False)
    ruleset = render_redirect(
        cart(frontend(NODE_PORT, CLUSTER)), NodeSettings(families=(Family.IPV4,), ipv4=some)
    )
    assert set(ruleset) == {at(what, "192.168.0.1", 30080, True) for what in (LISTENER, PORTAL)}


def test_without_forwarding_there_is_a_portal_only() -> None:
    for action in (DROP, REJECT):
        for kind, address, port in ((VIP, "198.51.100.1", 80), (NODE_PORT, "192.168.0.1", 30080)):
            ruleset = render_redirect(cart(frontend(kind, action)), NODE)
            portal = ruleset[at(PORTAL, address, port, kind is NODE_PORT)]
            assert portal == Portal("shop/cart:http", action.verdict)
            assert not [k for k in ruleset if k[0] == LISTENER]


def test_only_pods_and_this_node_pass_if_others_are_dropped() -> None:
    ruleset = render_redirect(cart(frontend(VIP, CLUSTER, CLUSTER, DROP)), NODE)
    portal = ruleset[at(PORTAL, "198.51.100.1")]
    assert portal.internal_only == FAMILY.detector
    listener = ruleset[at(LISTENER, "198.51.100.1")]
    assert listener.decide("10.244.9.9").endpoints == ALL
    assert listener.decide("192.168.0.1").endpoints == ALL
    assert listener.decide("203.0.113.9") == Decision(Verdict.DROP)


def test_a_listener_asks_the_plan_for_each_class_of_sources() -> None:
    local = frontend(VIP, CLUSTER, CLUSTER, LOCAL, ranges=("10.0.0.0/8", "203.0.113.0/24"))
    listener = render_redirect(cart(local), NODE)[at(LISTENER, "198.51.100.1")]
    assert listener.decide("10.244.9.9").endpoints == ALL
    assert listener.decide("203.0.113.9").endpoints == (HERE,)
    assert listener.decide("192.168.0.1") == Decision(Verdict.DROP)


def test_a_node_without_addresses_has_no_portals() -> None:
    lonely = NodeSettings(families=(Family.IPV4,), ipv4=FamilySettings(local_addresses=("::1",)))
    both = cart(frontend(VIP, CLUSTER), frontend(VIP, REJECT))
    ruleset = render_redirect(both, lonely)
    assert ruleset == {at(PORTAL, "198.51.100.1"): Portal("shop/cart:http", Verdict.REJECT)}


def test_the_host_address_can_be_bound_without_an_interface() -> None:
    assert host_address(FAMILY) == "192.168.0.2"
    assert host_address(replace(FAMILY, node_ip="203.0.113.1")) == "192.168.0.1"
    assert host_address(FamilySettings(local_addresses=("::1", "fe80::1"))) == ""


def test_sctp_has_no_sockets() -> None:
    sctp = cart(frontend(VIP, CLUSTER), protocol=Protocol.SCTP)
    assert render_redirect(sctp, NODE) == render_direct(sctp, NODE) == {}


def test_the_node_has_chains_in_each_family() -> None:
    assert render_node(NODE) == {BaseKey(BASE, Family.IPV4): ""}


def test_direct_portals_bind_the_destination() -> None:
    ruleset = render_direct(cart(frontend(VIP, CLUSTER), frontend(NODE_PORT, CLUSTER)), NODE)
    assert {(k, v.bind, v.port) for k, v in ruleset.items()} == {
        (at(LISTENER, "198.51.100.1"), "198.51.100.1", 80),
        (at(LISTENER, "", 30080, True), "", 30080),
    }
    some = replace(NODE, ipv4=replace(FAMILY, node_port_addresses=("192.168.0.1",)))
    ruleset = render_direct(cart(frontend(NODE_PORT, CLUSTER)), some)
    assert {v.bind for v in ruleset.values()} == {"127.0.0.1", "192.168.0.1"}


def test_direct_portals_keep_the_addresses_that_they_refuse() -> None:
    ruleset = render_direct(cart(frontend(VIP, REJECT), frontend(NODE_PORT, REJECT)), NODE)
    assert ruleset == {at(PORTAL, "198.51.100.1"): Portal("shop/cart:http", Verdict.REJECT)}


def test_without_root_the_addresses_of_this_machine_are_served() -> None:
    both = cart(frontend(VIP, CLUSTER), frontend(NODE_PORT, CLUSTER))
    assert set(render_direct(both, NODE, frozenset())) == {at(LISTENER, "", 30080, True)}
    assert at(LISTENER, "198.51.100.1") in render_direct(both, NODE, frozenset({"198.51.100.1"}))


def test_sources_by_interface() -> None:
    one = SourceClassifier(LocalDetector(interface="cni0"))
    many = SourceClassifier(LocalDetector(interface_prefix="veth"), ("192.168.0.2",))
    assert one.classify("10.0.0.1", "cni0") is SourceClass.POD
    assert one.classify("10.0.0.1", "eth0") is SourceClass.EXTERNAL
    assert many.classify("10.0.0.1", "veth7") is SourceClass.POD
    assert many.classify("192.168.0.2") is SourceClass.NODE
    assert SourceClassifier().classify("127.0.0.1") is SourceClass.NODE


def test_objects_print_themselves() -> None:
    ruleset = render_redirect(
        cart(frontend(VIP, CLUSTER, CLUSTER, DROP, ranges=("10.0.0.0/8",))), NODE
    )
    lines = [f"{key}: {ruleset[key]}" for key in sorted(ruleset)]
    assert lines == [
        "listener 198.51.100.1 80/TCP: 192.168.0.2 port (any): pods to 10.244.1.5:8080, "
        "10.244.2.5:8080; this node to 10.244.1.5:8080, 10.244.2.5:8080; others to drop; "
        "only from 10.0.0.0/8",
        "portal 198.51.100.1 80/TCP: shop/cart:http: forward to 192.168.0.2; "
        "only from pods and this node; only from 10.0.0.0/8",
    ]
