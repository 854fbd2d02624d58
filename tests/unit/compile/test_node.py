from __future__ import annotations

from typing import Any

import msgspec
import pytest

from steersman.compile.node import (
    config_of_node,
    detectors,
    facts_of_node,
    is_this_machine,
    local_addresses,
    missing_cluster_cidr,
    node_ips,
    node_name_of,
    node_settings,
    zone_of,
)
from steersman.compile.planner import with_thresholds
from steersman.model.findings import Finding, Severity
from steersman.model.inputs import DetectLocalMode, HostFacts, NodeConfig, Snapshot
from steersman.model.kube import Node, ObjectMeta
from steersman.model.names import Family
from steersman.model.plan import FamilySettings, LocalDetector, NodeSettings, Traits
from tests.support.builders.objects import CONFIG, FACTS, IPTABLES, NFTABLES, NODE, node

V4, V6 = Family.IPV4, Family.IPV6
INTERNAL, EXTERNAL = "InternalIP", "ExternalIP"


def settings(
    facts: HostFacts = FACTS,
    traits: Traits = IPTABLES,
    snapshot: Snapshot | None = None,
    **config: Any,
) -> NodeSettings:
    return node_settings(snapshot or Snapshot(), NodeConfig(**config), facts, traits)[0]


def findings(facts: HostFacts = FACTS, **config: Any) -> tuple[Finding, ...]:
    return node_settings(Snapshot(), NodeConfig(**config), facts, IPTABLES)[1]


@pytest.mark.parametrize(
    ("addresses", "bind", "expected"),
    [
        ((), "0.0.0.0", []),
        (((INTERNAL, "10.0.0.1"),), "0.0.0.0", [(V4, "10.0.0.1")]),
        (
            ((EXTERNAL, "192.0.2.1"), (INTERNAL, "fd00::1"), (INTERNAL, "fd00::2")),
            "::",
            [(V6, "fd00::1"), (V4, "192.0.2.1")],
        ),
        (((INTERNAL, "10.0.0.1"),), "fd00::5", [(V6, "fd00::5"), (V4, "10.0.0.1")]),
        (((INTERNAL, "10.0.0.1"),), "10.0.0.9", [(V4, "10.0.0.9")]),
        ((("Hostname", "node-1"), (INTERNAL, "bad")), "bad", []),
    ],
)
def test_node_ips(
    addresses: tuple[tuple[str, str], ...], bind: str, expected: list[tuple[Family, str]]
) -> None:
    found = node_ips(node(addresses=addresses), NodeConfig(bind_address=bind))
    assert list(found.items()) == expected


def test_no_node_object_is_no_address() -> None:
    assert node_ips(None, NodeConfig()) == {}
    assert node_ips(Node(ObjectMeta("n")), NodeConfig()) == {}


def test_name_and_zone() -> None:
    assert node_name_of(NodeConfig(node_name=" Node-A "), HostFacts("host")) == "node-a"
    assert node_name_of(NodeConfig(), HostFacts("Host\n")) == "host"
    assert zone_of(None) == zone_of(Node(ObjectMeta("n"))) == zone_of(node()) == ""
    assert zone_of(node("z1")) == "z1"


@pytest.mark.parametrize(
    ("config", "spec", "ipv4", "ipv6"),
    [
        (
            {"cluster_cidrs": ("10.0.0.5/8", "10.9.0.0/16", "fd00::/8")},
            {},
            "10.0.0.0/8",
            "fd00::/8",
        ),
        ({"cluster_cidrs": ("",)}, {}, "", ""),
        (
            {"detect_local_mode": DetectLocalMode.NODE_CIDR, "cluster_cidrs": ("10.0.0.0/8",)},
            {"podCIDRs": ["10.1.0.0/24", "fd00::/64"]},
            "10.1.0.0/24",
            "fd00::/64",
        ),
        (
            {"detect_local_mode": DetectLocalMode.NODE_CIDR},
            {"podCIDR": "10.2.0.0/24"},
            "10.2.0.0/24",
            "",
        ),
        ({"detect_local_mode": DetectLocalMode.NODE_CIDR}, {}, "", ""),
    ],
)
def test_detectors_by_cidr(
    config: dict[str, Any], spec: dict[str, Any], ipv4: str, ipv6: str
) -> None:
    found, notes = detectors(NodeConfig(**config), node(**spec))
    assert (found[V4], found[V6]) == (LocalDetector(cidr=ipv4), LocalDetector(cidr=ipv6))
    assert notes == ()


def test_detectors_by_interface_serve_both_families() -> None:
    bridge = NodeConfig(detect_local_mode=DetectLocalMode.BRIDGE_INTERFACE, bridge_interface="br0")
    assert detectors(bridge, None)[0] == dict.fromkeys(Family, LocalDetector(interface="br0"))
    prefix = NodeConfig(
        detect_local_mode=DetectLocalMode.INTERFACE_NAME_PREFIX, interface_name_prefix="veth"
    )
    assert detectors(prefix, None)[0] == dict.fromkeys(
        Family, LocalDetector(interface_prefix="veth")
    )


def test_a_node_that_is_not_known_has_no_pod_cidr() -> None:
    config = NodeConfig(detect_local_mode=DetectLocalMode.NODE_CIDR)
    assert not any(detectors(config, None)[0].values())


@pytest.mark.parametrize(
    ("config", "field", "severity"),
    [
        ({"cluster_cidrs": ("10.0.0.0/8", "bad")}, "clusterCIDRs[1]", Severity.WARNING),
        (
            {"cluster_cidrs": ("fd00::/8",), "families": (V4,)},
            "detectLocal",
            Severity.ERROR,
        ),
        ({"families": ()}, "families", Severity.ERROR),
        (
            {"node_port_addresses": ("192.168.0.0/24", "bad", "::/0")},
            "nodePortAddresses[1]",
            Severity.WARNING,
        ),
        ({"node_port_addresses": ("192.168.0.0/24",)}, "nodePortAddresses", Severity.WARNING),
    ],
)
def test_bad_configuration_is_a_finding(
    config: dict[str, Any], field: str, severity: Severity
) -> None:
    found = findings(**config)
    assert [(f.object, f.field, f.severity) for f in found] == [("configuration", field, severity)]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"cluster_cidrs": ("10.0.0.0/8",)},
        {"node_port_addresses": ("primary",)},
        {"node_port_addresses": ("192.168.0.0/24",), "families": (V4,)},
    ],
)
def test_good_configuration_is_none(config: dict[str, Any]) -> None:
    assert findings(**config) == ()


@pytest.mark.parametrize(
    ("cidrs", "ipv4", "localhost"),
    [
        ((), None, True),
        (("0.0.0.0/0",), None, True),
        (("192.168.0.0/24", "0.0.0.0/0"), None, True),
        (("fd00::/8",), None, True),
        (("192.168.0.0/24",), ("192.168.0.2",), False),
        (("192.168.000.0/16",), ("192.168.0.2", "192.168.1.2"), False),
        (("127.0.0.0/8", "192.168.1.0/24"), ("192.168.1.2",), True),
        (("127.0.0.5/32",), (), True),
        (("96.0.0.0/3",), (), True),
        (("primary",), ("192.168.1.2",), False),
    ],
)
def test_addresses_that_serve_node_ports(
    cidrs: tuple[str, ...], ipv4: tuple[str, ...] | None, localhost: bool
) -> None:
    found = settings(node_port_addresses=cidrs, bind_address="192.168.1.2")
    assert found.ipv4.node_port_addresses == ipv4
    assert found.ipv4.localhost_node_ports is localhost
    assert found.ipv6.localhost_node_ports is False


def test_primary_means_all_where_the_address_is_not_known() -> None:
    assert settings(node_port_addresses=("primary",)).ipv4.node_port_addresses is None


@pytest.mark.parametrize(("traits", "on"), [(IPTABLES, True), (NFTABLES, False), (IPTABLES, False)])
def test_localhost_node_ports_need_mode_and_configuration(traits: Traits, on: bool) -> None:
    configured = not (traits is IPTABLES and not on)
    found = settings(traits=traits, localhost_node_ports=configured)
    assert found.ipv4.localhost_node_ports is on


RELAYING = Traits(localhost_node_ports=True, relays_localhost=True)


@pytest.mark.parametrize(
    ("cidrs", "ipv4", "ipv6"),
    [
        ((), True, True),
        (("primary",), True, True),
        (("192.168.0.0/24", "::/0"), False, True),
        (("127.0.0.0/8", "2001:db8::/64"), True, False),
        (("192.168.0.0/24", "::1/128"), False, True),
    ],
)
def test_sockets_serve_loopback_of_both_families(
    cidrs: tuple[str, ...], ipv4: bool, ipv6: bool
) -> None:
    found = settings(traits=RELAYING, node_port_addresses=cidrs)
    assert found.ipv4.localhost_node_ports is ipv4
    assert found.ipv6.localhost_node_ports is ipv6
    off = settings(traits=RELAYING, node_port_addresses=cidrs, localhost_node_ports=False)
    assert not off.ipv4.localhost_node_ports
    assert not off.ipv6.localhost_node_ports


def test_local_addresses_by_family() -> None:
    assert local_addresses(FACTS, V4) == ("127.0.0.1", "192.168.0.2", "192.168.1.2")
    assert local_addresses(FACTS, V6) == ("2001:db8::2", "::1")


@pytest.mark.parametrize(
    ("ipv6", "configured", "addresses", "expected"),
    [
        (True, (V4, V6), (), (V4, V6)),
        (True, (V6, V4), (), (V6, V4)),
        (False, (V6, V4), (), (V4,)),
        (False, (V6,), (), ()),
        (True, (V4, V6), ((INTERNAL, "fd00::1"),), (V6, V4)),
        (True, (V4,), ((INTERNAL, "fd00::1"),), (V4,)),
    ],
)
def test_families_primary_first(
    ipv6: bool,
    configured: tuple[Family, ...],
    addresses: tuple[tuple[str, str], ...],
    expected: tuple[Family, ...],
) -> None:
    facts = msgspec.structs.replace(FACTS, ipv6=ipv6)
    found = settings(facts, snapshot=Snapshot(node=node(addresses=addresses)), families=configured)
    assert found.families == expected
    if V6 not in expected:
        assert found.ipv6 == FamilySettings()


def test_settings_carry_the_rest() -> None:
    cidrs = ("10.96.0.0/12", "fd00::/108")
    found = settings(
        snapshot=Snapshot(service_cidrs=cidrs),
        node_name="n",
        masquerade_all=True,
        masquerade_bit=5,
    )
    assert (found.ipv4.service_cidrs, found.ipv6.service_cidrs) == (cidrs[:1], cidrs[1:])
    assert (found.node_name, found.masquerade_all, found.masquerade_mark) == ("n", True, 32)
    assert found.traits == IPTABLES


@pytest.mark.parametrize(
    ("total", "before", "after"),
    [(500, False, False), (501, False, True), (251, True, True), (250, True, False)],
)
def test_many_services(total: int, before: bool, after: bool) -> None:
    earlier = NodeSettings(split_dispatch=before)
    found = with_thresholds(earlier, NodeConfig(), services=total, endpoints=0)
    assert found.split_dispatch is after


@pytest.mark.parametrize(
    ("total", "before", "after"),
    [(1000, False, False), (1001, False, True), (501, True, True), (500, True, False)],
)
def test_many_endpoints(total: int, before: bool, after: bool) -> None:
    earlier = NodeSettings(large_cluster=before)
    found = with_thresholds(earlier, NodeConfig(), services=0, endpoints=total)
    assert found.large_cluster is after


def test_a_threshold_of_zero_keeps_the_flag_off() -> None:
    earlier, config = NodeSettings(split_dispatch=True), NodeConfig(split_threshold=0)
    assert not with_thresholds(earlier, config, services=9999, endpoints=0).split_dispatch


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (NodeConfig(), "is empty: pods cannot be recognised"),
        (NodeConfig(cluster_cidrs=("10.0.0.0/8",)), ""),
        (NodeConfig(detect_local_mode=DetectLocalMode.NODE_CIDR), ""),
    ],
)
def test_an_empty_cluster_cidr_is_a_problem_where_it_counts(config: NodeConfig, says: str) -> None:
    assert missing_cluster_cidr(config).startswith(says)
    assert bool(missing_cluster_cidr(config)) is bool(says)


# Another node


def test_the_facts_of_another_node_are_those_of_its_object() -> None:
    known = node(addresses=(("InternalIP", "192.0.2.7"), ("Hostname", "x"), ("ExternalIP", "bad")))
    assert facts_of_node("other", known) == HostFacts(
        "other", {"lo": ("127.0.0.1/8", "::1/128"), "node": ("192.0.2.7/32",)}
    )
    assert facts_of_node("other", None).interfaces["node"] == ()
    own = msgspec.structs.replace(CONFIG, masquerade_all=True)
    there = config_of_node(own, "other")
    assert (there.node_name, there.bind_address, there.masquerade_all) == ("other", "0.0.0.0", True)


@pytest.mark.parametrize(
    ("name", "address", "same"),
    [
        ("elsewhere", "192.168.0.2", True),
        (NODE, "192.0.2.7", False),
        (NODE, None, True),
        ("elsewhere", None, False),
    ],
)
def test_the_addresses_of_a_node_tell_whether_it_is_this_machine(
    name: str, address: str | None, same: bool
) -> None:
    known = node(addresses=(("InternalIP", address),)) if address else None
    assert is_this_machine(name, known, FACTS) is same
