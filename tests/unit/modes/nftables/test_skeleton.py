"""The fixed part of a table, as far as it depends on settings."""

from __future__ import annotations

import pytest

from steersman.model.names import Family
from steersman.model.plan import (
    FamilySettings,
    LocalDetector,
    NodeSettings,
)
from steersman.modes.nftables import skeleton
from tests.support.builders import nftables_plans as make


def rules_of(settings: NodeSettings, chain: str, family: Family = Family.IPV4) -> list[str]:
    start = f"add rule {skeleton.HEADER[family]} kube-proxy {chain} "
    text = skeleton.rules(settings, family).splitlines()
    return [line.removeprefix(start) for line in text if line.startswith(start)]


@pytest.mark.parametrize(
    ("detector", "match"),
    [
        (LocalDetector(cidr="10.244.0.0/16"), "ip saddr != 10.244.0.0/16 "),
        (LocalDetector(interface="br0"), 'iifname != "br0" '),
        (LocalDetector(interface_prefix="veth"), 'iifname != "veth*" '),
    ],
)
def test_detectors(detector: LocalDetector, match: str) -> None:
    settings = NodeSettings(ipv4=FamilySettings(detector=detector))
    (rule,) = rules_of(settings, "mark-cluster")
    assert rule == f"{match}meta mark set meta mark or 0x4000"
    assert rules_of(settings, "cluster-lb-4") == [rule, "goto lb-4"]
    assert "by-source-pod" in rules_of(settings, "by-source")[0]


def test_without_a_detector_there_are_no_pods() -> None:
    assert rules_of(NodeSettings(), "mark-cluster") == []
    assert rules_of(NodeSettings(), "np-cluster-local-lb-1") == ["goto np-local-lb-1"]
    assert rules_of(NodeSettings(), "by-source")[0] == "fib saddr type local goto by-source-node"


def test_node_ports_and_service_cidrs() -> None:
    given = rules_of(make.SETTINGS, "nat-output")[1]
    assert given == "ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports"
    everywhere = rules_of(make.SETTINGS, "nat-prerouting", Family.IPV6)[1]
    assert everywhere.startswith("ip6 daddr != ::1 fib daddr type local meta l4proto")
    assert rules_of(make.SETTINGS, "forward-check")[2] == "ip daddr 10.96.0.0/12 drop"
    two = NodeSettings(ipv4=FamilySettings(service_cidrs=("10.96.0.0/12", "10.128.0.0/16")))
    assert rules_of(two, "output-check")[4] == "ip daddr { 10.96.0.0/12, 10.128.0.0/16 } drop"
    assert len(rules_of(make.NO_DETECTOR, "forward-check")) == 2
