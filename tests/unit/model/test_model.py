from __future__ import annotations

import msgspec
import pytest

from steersman.model.addresses import (
    canonical_cidr,
    canonical_ip,
    family_of,
    in_cidr,
    is_loopback,
    join_host_port,
    split_host_port,
    without_password,
)
from steersman.model.findings import Finding
from steersman.model.kube import ObjectMeta
from steersman.model.names import Family, ObjectName, PlanKey, Protocol, ServicePortName
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
    Verdict,
)
from steersman.model.stats import increase


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("010.000.0.001", "10.0.0.1"),
        ("172.30.0.041", "172.30.0.41"),
        ("10.0.0.256", None),
        ("10.0.0", None),
        ("10.0.0.x", None),
        ("10.0.0.1 ", None),
        ("10.0.0.\N{ARABIC-INDIC DIGIT ONE}", None),
        ("", None),
        ("a\0b", None),
        ("\udc80", None),
        ("FD00:0:0::1", "fd00::1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::1.2.3.4", "::102:304"),
        ("fe80::1%eth0", None),
        ("::\udc80", None),
        ("fd00::g", None),
    ],
)
def test_canonical_ip(text: str, canonical: str | None) -> None:
    assert canonical_ip(text) == canonical


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("10.1.2.3/8", "10.0.0.0/8"),
        ("203.0.113.000/025", "203.0.113.0/25"),
        ("10.0.0.0", None),
        ("10.0.0.0/", None),
        ("10.0.0.0/33", None),
        ("10.0.0.0/x", None),
        ("10.0.0.0/-1", None),
        ("10.0.0.0/" + "9" * 5000, None),
        ("nonsense/8", None),
        ("FD00::5/64", "fd00::/64"),
        ("fd00::/129", None),
        ("::ffff:10.1.0.0/104", "10.0.0.0/8"),
        ("::ffff:10.1.0.0/95", None),
    ],
)
def test_canonical_cidr(text: str, canonical: str | None) -> None:
    assert canonical_cidr(text) == canonical


def test_in_cidr_never_across_families() -> None:
    assert in_cidr("10.1.2.3", "10.0.0.0/8")
    assert not in_cidr("11.1.2.3", "10.0.0.0/8")
    assert not in_cidr("fd00::1", "0.0.0.0/0")
    assert not in_cidr("10.0.0.1", "::/0")


def test_loopback_and_family() -> None:
    assert [is_loopback(a) for a in ("127.0.0.1", "127.9.9.9", "::1", "10.0.0.1", "::2")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert family_of("10.0.0.0/8") is Family.IPV4
    assert family_of("::/0") is Family.IPV6
    assert (Family.IPV4.bits, Family.IPV6.bits) == (32, 128)
    assert (Family.IPV4.kubernetes, Family.IPV6.kubernetes) == ("IPv4", "IPv6")


@pytest.mark.parametrize("text", ["10.0.0.1:80", "[fd00::1]:65535"])
def test_host_port_there_and_back(text: str) -> None:
    assert join_host_port(*split_host_port(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fd00::1:80", "brackets"),
        ("10.0.0.1", "ADDRESS:PORT"),
        ("localhost:80", "ADDRESS:PORT"),
        ("10.0.0.1:http", "ADDRESS:PORT"),
        ("[10.0.0.1:80", "ADDRESS:PORT"),
        ("[fd00::1:80", "brackets"),
        ("fd00::1]:80", "brackets"),
        ("10.0.0.1:0", "between 1 and 65535"),
        ("10.0.0.1:65536", "between 1 and 65535"),
    ],
)
def test_split_host_port_says_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        split_host_port(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://u:p@x:1/a, http://y@z", "https://***@x:1/a, http://***@z"),
        ("https://x:1/a@b", "https://x:1/a@b"),
        ("https://u:p@q@x", "https://***@x"),
        ("a\0--master=https://u:p@x\0-v=2\0b@c", "a\0--master=https://***@x\0-v=2\0b@c"),
        ('["https://x","a@b"]', '["https://x","a@b"]'),
        ("a b", "a b"),
    ],
)
def test_passwords_in_urls_are_hidden(text: str, shown: str) -> None:
    assert without_password(text) == shown


def test_names_print_as_kubernetes_does() -> None:
    name = ServicePortName("ns", "svc", "p", Protocol.UDP)
    assert str(name) == "ns/svc:p"
    assert str(name._replace(port="")) == "ns/svc"
    assert str(PlanKey(name, Family.IPV6)) == "ns/svc:p (UDP, IPv6)"
    assert name.object_name == ObjectName("ns", "svc")
    assert str(ObjectName("", "node-1")) == "node-1"
    assert str(ObjectMeta(name="svc", namespace="ns").object_name) == "ns/svc"


def test_findings_and_endpoints_print_for_people() -> None:
    assert str(Finding("Service a/b", "spec.x", "bad")) == "Service a/b spec.x: bad"
    assert str(Finding("Service a/b", "", "bad")) == "Service a/b: bad"
    assert str(Endpoint("fd00::1", 80)) == "[fd00::1]:80"


def test_a_plan_knows_which_lists_it_uses() -> None:
    key = PlanKey(ServicePortName("a", "b", "", Protocol.TCP), Family.IPV4)
    drop, there = Action(Verdict.DROP, Pool.LOCAL), Action(Verdict.FORWARD, Pool.CLUSTER)
    here = Action(Verdict.FORWARD, Pool.LOCAL)
    frontend = Frontend(FrontendKind.NODE_PORT, "", 30000, drop, there, here)
    one, two = Endpoint("10.0.0.1", 1), Endpoint("10.0.0.2", 2)
    plan = ServicePlan(key, (frontend,), (one,), (two,), (one, two))
    assert plan.pool(Pool.CLUSTER) == (one,)
    assert plan.pool(Pool.LOCAL) == (two,)
    assert [frontend.action(source) for source in SourceClass] == [drop, there, here]


def test_settings_by_family() -> None:
    four, six = FamilySettings(node_ip="10.0.0.1"), FamilySettings(node_ip="fd00::1")
    settings = NodeSettings(ipv4=four, ipv6=six, masquerade_bit=3)
    assert settings.family(Family.IPV4) is four
    assert settings.family(Family.IPV6) is six
    assert settings.masquerade_mark == 8


def test_a_detector_is_truthy_where_it_tells() -> None:
    assert not LocalDetector()
    assert LocalDetector(cidr="10.0.0.0/8")
    assert LocalDetector(interface="br0")
    assert LocalDetector(interface_prefix="veth")


def test_state_keeps_the_keys_of_renamed_fields() -> None:
    shown = msgspec.to_builtins(NodeSettings())
    assert {"many_services", "many_endpoints"} <= shown.keys()
    assert {"holds_addresses", "hides_clients"} <= shown["traits"].keys()


def test_frontend_kinds_print_as_in_kubernetes() -> None:
    assert [kind.value for kind in FrontendKind] == [
        "clusterIP",
        "externalIP",
        "loadBalancerIP",
        "nodePort",
    ]


@pytest.mark.parametrize(
    ("before", "now", "more"),
    [((2, 5), (3, 5), (1, 0)), ((2, 5), (3, 4), (3, 4)), ((), (3, 4), (3, 4))],
)
def test_counters_that_fall_have_restarted_at_zero(
    before: tuple[int, ...], now: tuple[int, ...], more: tuple[int, ...]
) -> None:
    assert increase(before, now) == more
