from __future__ import annotations

from typing import Any

import pytest

from steersman.compile.service import (
    ParsedService,
    PortSpec,
    parse_service,
    port_names,
    service_ports,
)
from steersman.model.findings import Severity
from steersman.model.kube import Service
from steersman.model.names import Family, Protocol, ServicePortName
from tests.support.builders.objects import HTTP, port, service

BOTH = (Family.IPV4, Family.IPV6)
DUAL: dict[str, Any] = {"ipFamilies": ["IPv4", "IPv6"], "clusterIPs": ["10.96.0.10", "fd00::10"]}


def one(obj: Service, family: Family = Family.IPV4) -> PortSpec:
    (spec,) = service_ports(obj, family).values()
    return spec


def findings(obj: Service) -> dict[str, str]:
    """Reasons by field."""
    return {f.field: f.reason for f in parse_service(obj, BOTH).findings}


@pytest.mark.parametrize(
    "obj",
    [
        service(clusterIP=None),
        service(clusterIP=""),
        service(clusterIP="None"),
        service(type="ExternalName"),
        service(labels={"service.kubernetes.io/service-proxy-name": "other"}),
        service(labels={"service.kubernetes.io/service-proxy-name": ""}),
    ],
)
def test_what_is_not_ours_has_neither_ports_nor_findings(obj: Service) -> None:
    assert parse_service(obj, BOTH) == ParsedService(obj)


def test_a_port_of_a_plain_service() -> None:
    assert service_ports(service(labels={}), Family.IPV4) == {HTTP: PortSpec("10.96.0.10", 80)}
    assert service_ports(service(), Family.IPV6) == {}
    assert service_ports(service(ports=[]), Family.IPV4) == {}


def test_protocols_and_names_of_ports() -> None:
    obj = service(
        ports=[
            port(None, 53, protocol="UDP"),
            port("", 53),
            port("s", 53, protocol="SCTP", nodePort=30053),
        ]
    )
    names = {(n.port, n.protocol): s for n, s in service_ports(obj, Family.IPV4).items()}
    assert set(names) == {("", Protocol.UDP), ("", Protocol.TCP), ("s", Protocol.SCTP)}
    assert names["s", Protocol.SCTP].node_port == 30053


@pytest.mark.parametrize(
    ("spec", "ipv4", "ipv6"),
    [
        (DUAL, "10.96.0.10", "fd00::10"),
        (DUAL | {"ipFamilies": ["IPv4", "IPv6"], "clusterIPs": ["10.96.0.10"]}, "10.96.0.10", None),
        (DUAL | {"clusterIPs": None}, None, None),
        (DUAL | {"clusterIPs": ["10.96.0.10", "None"]}, "10.96.0.10", None),
        ({"ipFamilies": ["IPv6"], "clusterIPs": ["fd00::10"]}, None, "fd00::10"),
        ({"clusterIP": "fd00::00:10"}, None, "fd00::10"),
        ({"clusterIP": "172.30.0.041"}, "172.30.0.41", None),
        (
            {"ipFamilies": ["IPv4", "IPv4"], "clusterIPs": ["10.1.1.1", "10.1.1.2"]},
            "10.1.1.1",
            None,
        ),
    ],
)
def test_cluster_ip_of_each_family(
    spec: dict[str, Any], ipv4: str | None, ipv6: str | None
) -> None:
    parsed = parse_service(service(**spec), BOTH)
    addresses = {key.family: spec.cluster_ip for key, spec in parsed.ports}
    assert addresses == {f: a for f, a in ((Family.IPV4, ipv4), (Family.IPV6, ipv6)) if a}
    assert not parsed.findings


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"clusterIP": "10.96.0.300"}, "spec.clusterIP"),
        (DUAL | {"clusterIPs": ["10.96.0.10", "bad"]}, "spec.clusterIPs[1]"),
        (DUAL | {"clusterIPs": ["10.96.0.10", "10.96.0.11"]}, "spec.clusterIPs[1]"),
        ({"ipFamilies": ["IPv5"], "clusterIPs": ["10.96.0.10"]}, "spec.ipFamilies[0]"),
    ],
)
def test_a_bad_cluster_ip_is_a_finding(spec: dict[str, Any], field: str) -> None:
    parsed = parse_service(service(**spec), BOTH)
    found = parsed.findings
    assert [f.field for f in found] == [field]
    assert Family.IPV6 not in {key.family for key, _ in parsed.ports}
    assert found[0].object == "Service shop/cart"


@pytest.mark.parametrize(
    ("spec", "field", "says"),
    [
        ({"type": "Nodeport"}, "spec.type", "'Nodeport' is unknown"),
        ({"internalTrafficPolicy": "local"}, "spec.internalTrafficPolicy", "one of Cluster, Local"),
        ({"externalTrafficPolicy": "x"}, "spec.externalTrafficPolicy", "one of Cluster, Local"),
        ({"sessionAffinity": "Cookie"}, "spec.sessionAffinity", "one of None, ClientIP"),
        ({"externalIPs": ["", "1.2.3"]}, "spec.externalIPs[1]", "not an IP address"),
        (
            {"loadBalancerSourceRanges": ["10.0.0.0/8", " ", "10.0.0.0"]},
            "spec.loadBalancerSourceRanges[2]",
            "not a CIDR",
        ),
        ({"ports": [port(number=0)]}, "spec.ports[0].port", "0 must be 1 to 65535"),
        ({"ports": [port(number=65536)]}, "spec.ports[0].port", "not served"),
        ({"ports": [port(nodePort=-1)]}, "spec.ports[0].nodePort", "-1 must be"),
        ({"ports": [port(), port(protocol="QUIC")]}, "spec.ports[1].protocol", "'QUIC' is not TCP"),
        ({"ports": [port(), port(number=81)]}, "spec.ports[1].name", "only this one is served"),
        (
            {
                "type": "LoadBalancer",
                "externalTrafficPolicy": "Local",
                "healthCheckNodePort": 70000,
            },
            "spec.healthCheckNodePort",
            "70000 must be",
        ),
        (
            {
                "sessionAffinity": "ClientIP",
                "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": -5}},
            },
            "spec.sessionAffinityConfig.clientIP.timeoutSeconds",
            "10800 is used",
        ),
    ],
)
def test_a_malformed_field_is_a_finding_and_the_rest_is_served(
    spec: dict[str, Any], field: str, says: str
) -> None:
    obj = service(**spec)
    assert list(findings(obj)) == [field]
    assert says in findings(obj)[field]
    assert one(obj).cluster_ip == "10.96.0.10"


def test_source_ranges_none_of_which_is_valid_are_called_out() -> None:
    found = findings(service(loadBalancerSourceRanges=["bad"]))
    assert "everyone may use the load balancer" in found["spec.loadBalancerSourceRanges"]


def test_unserved_ports_are_errors() -> None:
    ports = [port(number=0), port("x", protocol="X")]
    found = parse_service(service(ports=ports), BOTH).findings
    assert {f.severity for f in found} == {Severity.ERROR}


def test_external_addresses_by_family() -> None:
    obj = service(
        **DUAL,
        type="LoadBalancer",
        externalIPs=["198.51.100.7", "", "2001:db8::7"],
        loadBalancerSourceRanges=[" 203.0.113.000/025 ", "2001:db8::/32"],
        ingress=[{"ip": "192.0.2.1"}, {"ip": "2001:db8::1", "ipMode": "VIP"}, {"hostname": "lb"}],
    )
    four, six = one(obj), one(obj, Family.IPV6)
    assert (four.external_ips, six.external_ips) == (("198.51.100.7",), ("2001:db8::7",))
    assert (four.load_balancer_vips, six.load_balancer_vips) == (("192.0.2.1",), ("2001:db8::1",))
    assert four.load_balancer_source_ranges == ("203.0.113.0/25",)
    assert six.load_balancer_source_ranges == ("2001:db8::/32",)
    assert not findings(obj)


def test_a_range_of_everything_allows_everyone_in_its_family() -> None:
    obj = service(**DUAL, loadBalancerSourceRanges=["10.0.0.0/8", "0.0.0.0/0", "fd00::/8"])
    assert one(obj).load_balancer_source_ranges == ()
    assert one(obj, Family.IPV6).load_balancer_source_ranges == ("fd00::/8",)


def test_external_ips_can_be_turned_off() -> None:
    obj = service(externalIPs=["198.51.100.7"])
    ((_, spec),) = parse_service(obj, BOTH, allow_external_ips=False).ports
    assert spec.external_ips == ()


def test_ip_mode_decides_whether_a_vip_is_served() -> None:
    obj = service(
        ingress=[
            {"ip": "192.0.2.1", "ipMode": "Proxy"},
            {"ip": "192.0.2.2", "ipMode": "vip"},
            {"ip": "nonsense"},
        ]
    )
    assert one(obj).load_balancer_vips == ()
    assert set(findings(obj)) == {
        "status.loadBalancer.ingress[1].ipMode",
        "status.loadBalancer.ingress[2].ip",
    }
    assert one(service(ingress=[])).load_balancer_vips == ()


@pytest.mark.parametrize("same", [{"externalIPs": ["192.0.2.1"]}, {"clusterIP": "192.0.2.1"}])
def test_a_vip_that_escapes_its_source_ranges_is_called_out(same: dict[str, Any]) -> None:
    guarded: dict[str, Any] = {
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
        "ingress": [{"ip": "192.0.2.1"}],
    }
    assert "source ranges do not guard" in str(findings(service(**guarded, **same)))
    assert not findings(service(**guarded))


@pytest.mark.parametrize(
    ("spec", "local"),
    [
        ({"type": "LoadBalancer"}, True),
        ({"type": "NodePort"}, True),
        ({"type": "ClusterIP", "externalIPs": ["1.2.3.4"]}, True),
        ({"type": "ClusterIP"}, False),
        ({"type": None, "externalIPs": ["1.2.3.4"]}, False),
    ],
)
def test_external_policy_counts_where_the_service_is_accessible(
    spec: dict[str, Any], local: bool
) -> None:
    obj = service(externalTrafficPolicy="Local", **spec)
    assert one(obj).external_policy_local is local


@pytest.mark.parametrize(
    ("spec", "number"),
    [
        ({"type": "LoadBalancer", "externalTrafficPolicy": "Local"}, 30100),
        ({"type": "LoadBalancer", "externalTrafficPolicy": "Cluster"}, 0),
        ({"type": "NodePort", "externalTrafficPolicy": "Local"}, 0),
        (
            {
                "type": "LoadBalancer",
                "externalTrafficPolicy": "Local",
                "healthCheckNodePort": 0,
            },
            0,
        ),
    ],
)
def test_health_check_node_port(spec: dict[str, Any], number: int) -> None:
    assert one(service(**({"healthCheckNodePort": 30100} | spec))).health_check_node_port == number


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        ({"sessionAffinity": "None"}, 0),
        ({"sessionAffinity": "ClientIP"}, 10800),
        ({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {}}, 10800),
        (
            {
                "sessionAffinity": "ClientIP",
                "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}},
            },
            60,
        ),
        ({"sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}}}, 0),
    ],
)
def test_affinity(spec: dict[str, Any], seconds: int) -> None:
    obj = service(**spec)
    assert one(obj).affinity_seconds == seconds
    assert one(obj).session_affinity == spec.get("sessionAffinity", "")


def test_what_a_port_uses() -> None:
    inside = PortSpec("10.0.0.1", 80, internal_policy_local=True)
    assert (inside.uses_cluster, inside.uses_local, inside.externally_accessible) == (
        False,
        True,
        False,
    )
    outside = PortSpec("10.0.0.1", 80, node_port=30000, external_policy_local=True)
    assert (outside.uses_cluster, outside.uses_local, outside.externally_accessible) == (
        True,
        True,
        True,
    )
    plain = PortSpec("10.0.0.1", 80, external_policy_local=True)
    assert (plain.uses_cluster, plain.uses_local) == (True, False)


def test_keys_carry_the_names() -> None:
    assert list(service_ports(service("x", ports=[port("p")]), Family.IPV4)) == [
        ServicePortName("shop", "x", "p", Protocol.TCP)
    ]


def test_names_of_ports_by_family() -> None:
    both = service(ports=[port("a", 1), port("b", 2, protocol="UDP"), port("a", 3)], **DUAL)
    for families in ((Family.IPV4,), (Family.IPV6,), BOTH):
        parsed = parse_service(both, families).ports
        names = port_names(both, families)
        assert [key.name for key, _ in parsed] == [name for each in names.values() for name in each]
        assert tuple(names) == families
    assert port_names(service(type="ExternalName"), BOTH) == {}
