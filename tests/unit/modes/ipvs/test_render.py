"""The ipvs mode's pure half: what a plan becomes."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from steersman.model.names import Family, Protocol
from steersman.model.plan import FamilySettings, LocalDetector, NodeSettings, Scheduling
from steersman.model.ruleset import diff_of_owners
from steersman.modes.ipvs.objects import DEVICE, DeviceKey, MemberKey, Server, ServerKey, SetKey
from steersman.modes.ipvs.render import node_port_addresses, render_node, render_service
from steersman.netfilter.iptables.saved import canonical
from tests.support.builders.plans import (
    DROPPED,
    EXTERNAL_LOCAL,
    NONE_HERE,
    PLAIN,
    REJECTED,
    SETTINGS,
    cluster_ip,
    endpoints,
    key,
    load_balancer,
    node_port,
    plan,
    random_plan,
)

TWO = endpoints("10.244.0.2", "10.244.0.1")
TARGETS = (("10.244.0.1", 8080), ("10.244.0.2", 8080))
RR = "rr"


def members(ruleset: dict[Any, Any]) -> set[tuple[str, str]]:
    return {(k.set.removeprefix("KUBE-IPVS-"), k.entry) for k in ruleset if type(k) is MemberKey}


def servers(ruleset: dict[Any, Any]) -> dict[ServerKey, Server]:
    return {k: v for k, v in ruleset.items() if type(k) is ServerKey}


def test_a_cluster_ip() -> None:
    got = render_service(plan(key("ns/a:p"), cluster_ip("10.96.0.1"), cluster=TWO), SETTINGS, RR)
    assert servers(got) == {
        ServerKey(Protocol.TCP, "10.96.0.1", 80): Server("rr", 0, 0, True, TARGETS)
    }
    place = "10.96.0.1,6:80"
    assert members(got) == {("PORTS", place), ("NODE-MASQ", place), ("OUTSIDE-MASQ", place)}


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        (REJECTED, {"POD-REJECT", "NODE-REJECT", "OUTSIDE-REJECT"}),
        (DROPPED, {"POD-DROP", "NODE-DROP", "OUTSIDE-DROP"}),
        (NONE_HERE, {"NODE-MASQ", "OUTSIDE-DROP"}),
    ],
)
def test_each_class_of_sources_is_treated_as_planned(actions: Any, words: set[str]) -> None:
    got = render_service(plan(key("ns/a"), cluster_ip("10.96.0.1", actions)), SETTINGS, RR)
    assert {name for name, _ in members(got)} == words | {"PORTS"}


def test_those_outside_decide_about_the_list() -> None:
    local, every = endpoints("10.244.0.1"), TWO
    of = plan(key("ns/a"), cluster_ip("10.96.0.1", EXTERNAL_LOCAL), cluster=every, local=local)
    (server,) = servers(render_service(of, SETTINGS, RR)).values()
    assert server.targets == TARGETS[:1]
    dropped = plan(key("ns/a"), cluster_ip("10.96.0.1", NONE_HERE), cluster=every)
    (server,) = servers(render_service(dropped, SETTINGS, RR)).values()
    assert server.targets == TARGETS


def test_a_node_port_is_a_server_at_each_address_and_held_nowhere() -> None:
    got = render_service(plan(key("ns/a"), node_port(30080), cluster=TWO), SETTINGS, RR)
    (one,) = servers(got)
    assert one == ServerKey(Protocol.TCP, "10.250.1.2", 30080)
    assert not servers(got)[one].assigned
    assert ("PORTS", "10.250.1.2,6:30080") not in members(got)


def test_addresses_that_serve_node_ports() -> None:
    every = FamilySettings(local_addresses=("127.0.0.1", "192.0.2.1", "::1", "fe80::1", "fd00::1"))
    assert node_port_addresses(every) == ("192.0.2.1", "fd00::1")
    assert node_port_addresses(replace(every, node_port_addresses=("192.0.2.9",))) == ("192.0.2.9",)


def test_affinity_and_schedulers() -> None:
    of = plan(key("ns/a"), cluster_ip("10.96.0.1"), cluster=TWO, affinity=600)
    (server,) = servers(render_service(of, SETTINGS, "mh")).values()
    assert (server.scheduler, server.flags, server.timeout) == ("mh", 0x19, 600)


def test_a_service_may_have_its_own_scheduler() -> None:
    of = plan(key("ns/a"), cluster_ip("10.96.0.1"), cluster=TWO)
    for wishes, scheduler in (
        ({"least_connections": True}, "lc"),
        ({"scheduling": Scheduling("sed"), "least_connections": True}, "sed"),
    ):
        (server,) = servers(render_service(replace(of, **wishes), SETTINGS, RR)).values()
        assert server.scheduler == scheduler


def test_source_ranges_in_the_spelling_of_ipset() -> None:
    ranges = ("0.0.0.0/0", "192.0.2.1/32", "192.0.2.0/24")
    of = plan(key("ns/a"), load_balancer("192.0.2.7", PLAIN, ranges), cluster=TWO)
    place = "192.0.2.7,6:80"
    parts = ("0.0.0.0/1", "128.0.0.0/1", "192.0.2.1", "192.0.2.0/24")
    wanted = {("GUARDED", place)} | {("ALLOWED", f"{place},{part}") for part in parts}
    assert wanted <= members(render_service(of, SETTINGS, RR))
    name = key("ns/a", family=Family.IPV6)
    of = plan(name, load_balancer("fd00::7", PLAIN, ("::/0",)))
    entries = {k[1] for k in render_service(of, SETTINGS, RR) if k[0] == "KUBE-6-IPVS-ALLOWED"}
    assert entries == {"fd00::7,6:80,::/1", "fd00::7,6:80,8000::/1"}


def test_no_two_plans_claim_one_object() -> None:
    rng = Random(6)
    plans = [random_plan(rng, number, family) for number in range(200) for family in Family]
    rendered = [render_service(of, SETTINGS, RR) for of in plans]
    node = render_node(SETTINGS, random_fully=True)
    assert diff_of_owners(({}, ruleset) for ruleset in [*rendered, node])
    names = {k.set for k in node if type(k) is SetKey}
    assert {k.set for ruleset in rendered for k in ruleset if type(k) is MemberKey} <= names
    assert all(len(name) <= 31 for name in names)


def text(settings: NodeSettings) -> str:
    return "\n".join(
        v for k, v in render_node(settings, random_fully=True).items() if type(k) is tuple
    )


def test_rules_are_spelled_as_they_are_read_back() -> None:
    for k, value in render_node(SETTINGS, random_fully=False).items():
        if type(k) is tuple:
            for line in value.splitlines():
                assert canonical(line, int(k[0])) == line


@pytest.mark.parametrize(
    ("detector", "match"),
    [
        (LocalDetector(cidr="10.244.0.0/16"), "-s 10.244.0.0/16 "),
        (LocalDetector(interface="cbr0"), "-i cbr0 "),
        (LocalDetector(interface_prefix="veth"), "-i veth+ "),
    ],
)
def test_pods_are_told_first(detector: LocalDetector, match: str) -> None:
    rules = text(NodeSettings(ipv4=FamilySettings(detector=detector))).splitlines()
    chain = [rule for rule in rules if rule.startswith("-A KUBE-IPVS-SERVICES ")]
    assert chain[0].startswith(f"-A KUBE-IPVS-SERVICES {match}-m set")
    assert chain[1] == f"-A KUBE-IPVS-SERVICES {match}-j RETURN"
    assert "--src-type LOCAL" in chain[2]


def test_without_a_detector_nobody_is_a_pod() -> None:
    assert "POD-" not in text(NodeSettings())


def test_rules_match_sets_in_all_their_dimensions() -> None:
    node = render_node(SETTINGS, random_fully=True)
    kinds = {k.set: str(v).partition(" ")[0] for k, v in node.items() if type(k) is SetKey}
    matches = re.findall(r"--match-set (\S+) (\S+)", text(SETTINGS))
    assert matches
    for name, directions in matches:
        assert directions.split(",") == ["dst", "dst", "src"][: kinds[name].count(",") + 1]


def test_only_new_connections_are_dropped_or_rejected() -> None:
    """Those that pass already stay; all packets are marked, accepted and masqueraded."""
    rules = text(SETTINGS).splitlines()
    jumps = [rule for rule in rules if re.search("-j KUBE-IPVS-(?!MARK|SOURCES)", rule)]
    fresh = {rule.rpartition("-")[2] for rule in jumps if "--ctstate NEW" in rule}
    others = {rule.rpartition("-")[2] for rule in jumps if "--ctstate NEW" not in rule}
    assert fresh == {"DROPS", "REJECTS", "ACCESS"}
    assert others == {"HEALTH", "FORWARD", "SERVICES", "POSTROUTING"}


def test_the_interface_belongs_to_the_node() -> None:
    assert render_node(NodeSettings(families=()), random_fully=True) == {DeviceKey(DEVICE): "dummy"}


@pytest.mark.parametrize(
    ("scheduler", "configured", "asked", "flags"),
    [
        ("mh", (), (), 0x18),
        ("mh", ("none",), (), 0x8),
        ("mh", ("sh-port", "mh-fallback"), (), 0x8),
        ("sh", ("sh-port", "mh-fallback"), (), 0x18),
        ("sh", ("sh-port",), ("sh-fallback", "sh-port"), 0x18),
        ("mh", ("mh-fallback",), ("none",), 0x8),
        ("rr", ("mh-port",), (), 0),
    ],
)
def test_flags_of_schedulers(
    scheduler: str, configured: tuple[str, ...], asked: tuple[str, ...], flags: int
) -> None:
    of = plan(key("ns/a"), cluster_ip("10.96.0.1"), cluster=TWO)
    of = replace(of, scheduling=Scheduling(scheduler_flags=asked))
    (server,) = servers(render_service(of, SETTINGS, scheduler, configured)).values()
    assert server.flags == flags


def test_weights_stand_beside_their_endpoints() -> None:
    of = plan(key("ns/a"), cluster_ip("10.96.0.1"), cluster=TWO)
    heavy = replace(
        of, scheduling=Scheduling(weights=(("10.244.0.2", 8080, 7), ("10.244.9.9", 8080, 3)))
    )
    (server,) = servers(render_service(heavy, SETTINGS, RR)).values()
    assert (server.targets, server.weights) == (TARGETS, (1, 7))
    assert server.weight_of == {TARGETS[0]: 1, TARGETS[1]: 7}
    other = replace(of, scheduling=Scheduling(weights=(("10.244.9.9", 8080, 3),)))
    (server,) = servers(render_service(other, SETTINGS, RR)).values()
    assert server.weights == ()
    assert server.weight_of == dict.fromkeys(TARGETS, 1)


def test_health_checks_are_let_in() -> None:
    of = plan(key("ns/a"), cluster_ip("10.96.0.1"), cluster=TWO, health=32000)
    assert ("HEALTH", "32000") in members(render_service(of, SETTINGS, RR))
    node = render_node(SETTINGS, random_fully=True)
    assert node[SetKey("KUBE-IPVS-HEALTH")] == "bitmap:port range 0-65535"
    assert node[4, "filter", "INPUT", "jumps"].splitlines()[0].endswith("-j KUBE-IPVS-HEALTH")
