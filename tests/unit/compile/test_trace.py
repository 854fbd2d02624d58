from __future__ import annotations

from typing import Any

import msgspec
import pytest

from steersman.compile.trace import Flow, TraceResult, classify, trace
from steersman.model.inputs import DetectLocalMode, NodeConfig
from steersman.model.names import Protocol
from steersman.model.plan import NodePlan, SourceClass, Traits
from tests.support.builders.objects import (
    CONFIG,
    IPTABLES,
    KEY,
    NFTABLES,
    NODE,
    endpoint,
    plan_of,
    port,
    service,
    settings_of,
    slice_,
)

POD, NODE_IP, OUTSIDE = "10.200.0.9", "192.168.0.2", "203.0.113.5"
HERE, THERE = endpoint("10.0.0.1", NODE), endpoint("10.0.0.2", "other")
NODE_PORT: dict[str, Any] = {"type": "NodePort", "ports": [port(nodePort=30000)]}
LOCAL: dict[str, Any] = {"externalTrafficPolicy": "Local"}
NO_DETECTOR = msgspec.structs.replace(CONFIG, cluster_cidrs=())


def decide(
    plan: NodePlan,
    source: str | SourceClass,
    destination: str = "10.96.0.10",
    number: int = 80,
    protocol: Protocol = Protocol.TCP,
) -> TraceResult:
    return trace(plan, Flow(source, destination, number, protocol))


def short(decision: TraceResult) -> str:
    """Verdict, last octets of the endpoints, and `m` where masqueraded."""
    octets = [e.ip.rpartition(".")[2] for e in decision.endpoints]
    return " ".join([decision.verdict, *octets, *["m"] * decision.masquerade])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (POD, "forward 1 2"),
        (NODE_IP, "forward 1 2 m"),
        (OUTSIDE, "forward 1 2 m"),
        (SourceClass.POD, "forward 1 2"),
        (SourceClass.NODE, "forward 1 2 m"),
        (SourceClass.EXTERNAL, "forward 1 2 m"),
        ("10.0.0.1", "forward 1 2"),
        ("nonsense", "forward 1 2 m"),
    ],
)
def test_cluster_ip(source: str | SourceClass, expected: str) -> None:
    decision = decide(plan_of(service(), slice_(HERE, THERE)), source)
    assert short(decision) == expected
    assert decision.plan == KEY
    assert decision.frontend is not None
    assert decision.reasons[0] == "10.96.0.10:80/TCP is the clusterIP of shop/cart:http"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (POD, "the client 10.200.0.9 is a pod of this cluster (pods: 10.0.0.0/8)"),
        (OUTSIDE, "the client 203.0.113.5 is no pod of this cluster (pods: 10.0.0.0/8)"),
        (NODE_IP, "the client 192.168.0.2 is this node itself"),
        (SourceClass.EXTERNAL, "the client is no pod of this cluster (pods: 10.0.0.0/8)"),
    ],
)
def test_reasons_say_who_the_client_is(source: str | SourceClass, says: str) -> None:
    assert says in decide(plan_of(service(), slice_(HERE)), source).reasons


def test_reasons_say_that_pods_cannot_be_told() -> None:
    decision = decide(plan_of(service(), slice_(HERE), config=NO_DETECTOR), POD)
    assert "without clusterCIDRs, pods cannot be recognised" in " ".join(decision.reasons)
    assert short(decision) == "forward 1"


def test_hairpin() -> None:
    alone = decide(plan_of(service(), slice_(HERE)), "10.0.0.1")
    assert short(alone) == "forward 1 m"
    assert any("hairpin" in reason for reason in alone.reasons)
    among = decide(plan_of(service(), slice_(HERE, THERE)), "10.0.0.1")
    assert not among.masquerade
    assert among.reasons[-2:] == (
        "not masqueraded: the endpoint sees the client's own address, except at 10.0.0.1:8080",
        "masqueraded there, because that endpoint is the client itself (hairpin)",
    )


def test_hairpin_elsewhere() -> None:
    """Modes may masquerade only what an endpoint of this node sends itself."""
    traits = Traits(spares_hairpins_elsewhere=True)
    here = decide(plan_of(service(), slice_(HERE), traits=traits), "10.0.0.1")
    assert short(here) == "forward 1 m"
    there = slice_(endpoint("10.0.0.1", "node-b"))
    assert short(decide(plan_of(service(), there, traits=traits), "10.0.0.1")) == "forward 1"
    assert short(decide(plan_of(service(), there), "10.0.0.1")) == "forward 1 m"


def test_reject_and_drop_say_why() -> None:
    rejected = decide(plan_of(service()), POD)
    assert (short(rejected), rejected.reasons[-1][:11]) == ("reject", "no endpoint")
    dropped = decide(plan_of(service(internalTrafficPolicy="Local"), slice_(THERE)), POD)
    assert (short(dropped), dropped.reasons[-1][:22]) == ("drop", "the traffic policy is ")


def test_affinity_is_told() -> None:
    obj = service(sessionAffinity="ClientIP")
    decision = decide(plan_of(obj, slice_(HERE)), POD)
    assert any("until 10800 s after" in reason for reason in decision.reasons)


def test_ipv6_and_udp() -> None:
    obj = service(clusterIP="fd00::10", ports=[port(protocol="UDP")])
    six = slice_(endpoint("fd00:10::1"), family="IPv6", ports=[port(number=53, protocol="UDP")])
    plan = plan_of(obj, six)
    found = decide(plan, "fd00:10::9", "fd00:0::10", 80, Protocol.UDP)
    assert [str(e) for e in found.endpoints] == ["[fd00:10::1]:53"]
    assert found.reasons[0] == "[fd00::10]:80/UDP is the clusterIP of shop/cart:http"
    assert short(decide(plan, "fd00:10::9", "fd00::10")) == "accept"


def test_a_family_that_is_not_served() -> None:
    config = msgspec.structs.replace(CONFIG, families=CONFIG.families[:1])
    decision = decide(plan_of(service(), config=config), POD, "fd00::1")
    assert decision == TraceResult(
        "accept", reasons=("IPv6 is not served on this node: left as it is",)
    )


def test_a_destination_that_is_no_address() -> None:
    decision = decide(plan_of(service()), POD, "cart.shop")
    assert decision.verdict == "accept"
    assert "'cart.shop' is not an IP address" in decision.reasons[0]


# External destinations


@pytest.mark.parametrize(
    ("source", "endpoints", "expected"),
    [
        (POD, (HERE, THERE), "forward 1 2"),
        (NODE_IP, (HERE, THERE), "forward 1 2 m"),
        (OUTSIDE, (HERE, THERE), "forward 1"),
        (POD, (THERE,), "forward 2"),
        (OUTSIDE, (THERE,), "drop"),
        (OUTSIDE, (), "reject"),
    ],
)
@pytest.mark.parametrize("where", [("198.51.100.7", 80), (NODE_IP, 30000), ("192.0.2.1", 80)])
def test_external_policy_local(
    source: str, endpoints: tuple[dict[str, Any], ...], expected: str, where: tuple[str, int]
) -> None:
    obj = service(externalIPs=["198.51.100.7"], ingress=[{"ip": "192.0.2.1"}], **NODE_PORT, **LOCAL)
    assert short(decide(plan_of(obj, slice_(*endpoints)), source, *where)) == expected


@pytest.mark.parametrize(
    ("source", "ranges", "expected"),
    [
        (OUTSIDE, ["203.0.113.0/24"], "forward 1 m"),
        (OUTSIDE, ["198.51.100.0/24"], "drop"),
        (POD, ["203.0.113.0/24"], "drop"),
        (SourceClass.EXTERNAL, ["198.51.100.0/24"], "forward 1 m"),
        ("192.0.2.1", ["198.51.100.0/24"], "drop"),
        ("192.0.2.1", ["192.168.0.0/16"], "forward 1 m"),
    ],
)
def test_source_ranges(source: str | SourceClass, ranges: list[str], expected: str) -> None:
    obj = service(ingress=[{"ip": "192.0.2.1"}], loadBalancerSourceRanges=ranges)
    decision = decide(plan_of(obj, slice_(HERE)), source, "192.0.2.1")
    assert short(decision) == expected
    assert "may use it" in " ".join(decision.reasons)


@pytest.mark.parametrize(
    ("source", "destination", "spares", "expected"),
    [
        (NODE_IP, "198.51.100.7", True, "accept"),
        (SourceClass.NODE, "192.0.2.1", True, "accept"),
        (NODE_IP, "198.51.100.7", False, "reject"),
        (OUTSIDE, "198.51.100.7", True, "reject"),
        (POD, "192.0.2.1", True, "reject"),
        (NODE_IP, "192.168.1.2", True, "reject"),
        (NODE_IP, "10.96.0.10", True, "reject"),
    ],
)
def test_own_traffic_to_far_addresses_without_endpoints(
    source: str | SourceClass, destination: str, spares: bool, expected: str
) -> None:
    obj = service(externalIPs=["198.51.100.7", "192.168.1.2"], ingress=[{"ip": "192.0.2.1"}])
    traits = msgspec.structs.replace(IPTABLES, spares_own_external_traffic=spares)
    assert short(decide(plan_of(obj, traits=traits), source, destination)) == expected


# Node ports


@pytest.mark.parametrize(
    ("destination", "config", "expected"),
    [
        (NODE_IP, {}, "forward 1 m"),
        ("192.168.1.2", {}, "forward 1 m"),
        ("127.0.0.1", {}, "forward 1 m"),
        ("127.0.0.1", {"localhost_node_ports": False}, "accept"),
        ("192.168.0.99", {}, "accept"),
        (NODE_IP, {"node_port_addresses": ("192.168.0.0/24",)}, "forward 1 m"),
        ("192.168.1.2", {"node_port_addresses": ("192.168.0.0/24",)}, "accept"),
        (NODE_IP, {"node_port_addresses": ("198.51.100.0/24",)}, "accept"),
        ("127.0.0.1", {"node_port_addresses": ("192.168.0.0/24",)}, "accept"),
    ],
)
def test_where_node_ports_answer(destination: str, config: dict[str, Any], expected: str) -> None:
    config = {"families": CONFIG.families[:1], **config}
    plan = plan_of(
        service(**NODE_PORT), slice_(HERE), config=msgspec.structs.replace(CONFIG, **config)
    )
    assert short(decide(plan, OUTSIDE, destination, 30000)) == expected


def test_ipv6_loopback_never_serves_node_ports() -> None:
    obj = service(clusterIP="fd00::10", **NODE_PORT)
    six = slice_(endpoint("fd00:10::1"), family="IPv6")
    assert short(decide(plan_of(obj, six), "::1", "::1", 30000)) == "accept"
    assert decide(plan_of(obj, six), "::1", "2001:db8::2", 30000).verdict == "forward"


@pytest.mark.parametrize(
    ("traits", "policy", "endpoints", "expected"),
    [
        (IPTABLES, "Cluster", (), "reject"),
        (IPTABLES, "Local", (THERE,), "drop"),
        (IPTABLES, "Local", (HERE,), "accept"),
        (NFTABLES, "Cluster", (), "accept"),
        (NFTABLES, "Local", (THERE,), "accept"),
    ],
)
def test_refusals_on_addresses_that_do_not_serve(
    traits: Traits, policy: str, endpoints: tuple[dict[str, Any], ...], expected: str
) -> None:
    config = msgspec.structs.replace(CONFIG, node_port_addresses=("192.168.0.0/24", "::/0"))
    obj = service(externalTrafficPolicy=policy, **NODE_PORT)
    plan = plan_of(obj, slice_(*endpoints), config=config, traits=traits)
    for address in ("192.168.1.2", "127.0.0.1"):
        assert short(decide(plan, POD, address, 30000)) == expected


# Not ours


@pytest.mark.parametrize(
    ("traits", "destination", "number", "expected"),
    [
        (IPTABLES, "10.96.0.10", 81, "accept"),
        (IPTABLES, "10.96.0.99", 80, "accept"),
        (NFTABLES, "10.96.0.10", 81, "reject"),
        (NFTABLES, "10.96.0.99", 80, "drop"),
        (NFTABLES, "10.97.0.99", 80, "accept"),
    ],
)
def test_cluster_ips_where_nothing_is_served(
    traits: Traits, destination: str, number: int, expected: str
) -> None:
    plan = plan_of(
        service(), traits=traits, service_cidrs=("10.96.0.0/24", "10.96.0.0/16", "fd00::/108")
    )
    assert short(decide(plan, POD, destination, number)) == expected


def test_an_unassigned_address_outside_all_cidrs_is_left_alone() -> None:
    plan = plan_of(traits=NFTABLES, service_cidrs=("10.96.0.0/24",))
    assert decide(plan, POD, "198.51.100.1").reasons == (
        "no Service of this cluster is at 198.51.100.1:80/TCP",
        "no rule of the proxy matches: left as it is",
    )


@pytest.mark.parametrize(
    ("destination", "number", "protocol", "found"),
    [
        (NODE_IP, 30100, Protocol.TCP, True),
        (NODE_IP, 30101, Protocol.TCP, False),
        (NODE_IP, 30100, Protocol.UDP, False),
        ("198.51.100.1", 30100, Protocol.TCP, False),
        ("2001:db8::2", 30100, Protocol.TCP, False),
    ],
)
def test_health_check_port(destination: str, number: int, protocol: Protocol, found: bool) -> None:
    obj = service(type="LoadBalancer", healthCheckNodePort=30100, **LOCAL)
    decision = decide(plan_of(obj), OUTSIDE, destination, number, protocol)
    assert decision.verdict == "accept"
    assert any("health check node port of shop/cart" in r for r in decision.reasons) is found


# Who is a pod?


@pytest.mark.parametrize(
    ("config", "source", "interface", "expected"),
    [
        ({}, POD, "", SourceClass.POD),
        ({"cluster_cidrs": ("192.168.0.0/16",)}, NODE_IP, "", SourceClass.POD),
        ({}, "127.0.0.1", "", SourceClass.NODE),
        ({"cluster_cidrs": ()}, POD, "", SourceClass.EXTERNAL),
        (
            {
                "detect_local_mode": DetectLocalMode.BRIDGE_INTERFACE,
                "bridge_interface": "br0",
            },
            POD,
            "br0",
            SourceClass.POD,
        ),
        (
            {
                "detect_local_mode": DetectLocalMode.BRIDGE_INTERFACE,
                "bridge_interface": "br0",
            },
            POD,
            "br00",
            SourceClass.EXTERNAL,
        ),
        (
            {
                "detect_local_mode": DetectLocalMode.INTERFACE_NAME_PREFIX,
                "interface_name_prefix": "veth",
            },
            OUTSIDE,
            "veth12",
            SourceClass.POD,
        ),
        (
            {
                "detect_local_mode": DetectLocalMode.INTERFACE_NAME_PREFIX,
                "interface_name_prefix": "veth",
            },
            NODE_IP,
            "",
            SourceClass.NODE,
        ),
    ],
)
def test_classes(
    config: dict[str, Any], source: str, interface: str, expected: SourceClass
) -> None:
    settings = settings_of(msgspec.structs.replace(CONFIG, **config))
    flow = Flow(source, "10.96.0.10", 80, Protocol.TCP, interface)
    assert classify(settings, flow) is expected


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            NodeConfig(detect_local_mode=DetectLocalMode.BRIDGE_INTERFACE, bridge_interface="br0"),
            "br0",
        ),
        (
            NodeConfig(
                detect_local_mode=DetectLocalMode.INTERFACE_NAME_PREFIX,
                interface_name_prefix="veth",
            ),
            "veth*",
        ),
    ],
)
def test_reasons_name_the_interface(config: NodeConfig, says: str) -> None:
    decision = decide(plan_of(service(), config=config), OUTSIDE)
    assert any(f"(pods: interface {says})" in reason for reason in decision.reasons)


def test_a_flow_prints_itself() -> None:
    assert str(Flow(SourceClass.POD, "fd00::1", 53, Protocol.UDP)) == "pod to [fd00::1]:53/UDP"
