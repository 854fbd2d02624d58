"""What the nftables mode makes of plans, as the nft commands that operators would see."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from steersman.host.nlmsg import attr, message, nested, text
from steersman.model.names import Family, PlanKey, Protocol, ServicePortName
from steersman.model.plan import (
    FamilySettings,
    Frontend,
    FrontendKind,
    LocalDetector,
    NodeSettings,
    ServicePlan,
)
from steersman.model.ruleset import Diff, diff
from steersman.modes.nftables import skeleton, wire
from steersman.modes.nftables.affinity import base_name
from steersman.modes.nftables.elements import encode
from steersman.modes.nftables.layout import SETS, SIZES, Form, Kind, prefix, size_for
from steersman.modes.nftables.render import Slots, render_node, render_service
from steersman.modes.nftables.text import describe, diff_text, ruleset_text
from steersman.modes.nftables.transaction import transaction
from tests.support.builders import nftables_plans as make


def lines(plan: ServicePlan, of: NodeSettings = make.SETTINGS) -> list[str]:
    return ruleset_text(render_service(plan, of, {})).splitlines()


def without(table: str, given: Sequence[str]) -> list[str]:
    return [line.removeprefix(f"add element {table} ") for line in given]


def test_a_cluster_ip() -> None:
    assert without("ip kube-proxy", lines(make.plan([1, 3]))) == [
        'service-ips { 10.96.0.10 . tcp . 80 comment "shop/web:http cluster IP" : goto '
        "cluster-lb-4 }",
        "service-endpoints { 10.96.0.10 . tcp . 80 . 0 : 10.244.0.1 . 8080 }",
        "service-endpoints { 10.96.0.10 . tcp . 80 . 1 : 10.244.0.3 . 8080 }",
    ]


@pytest.mark.parametrize(
    ("actions", "chain"),
    [
        (make.PLAIN, "cluster-lb-4"),
        (make.UNMASQUERADED, "lb-4"),
        (make.MASQUERADED, "masquerade-lb-4"),
        (make.INTERNAL_LOCAL, "cluster-local-lb-4"),
        (make.EXTERNAL_LOCAL, "by-source"),
    ],
)
def test_the_chain_says_what_is_done(actions: make.Actions, chain: str) -> None:
    dispatch = lines(make.plan([0, 2, 1], frontends=[make.cluster_ip(actions)]))[0]
    assert dispatch.endswith(f"goto {chain} }}")


def test_sources_with_different_fates_are_looked_up_by_class() -> None:
    node_port = Frontend(FrontendKind.NODE_PORT, "", 30080, *make.NONE_HERE)
    text = without("ip kube-proxy", lines(make.plan([1], frontends=[node_port])))
    assert 'service-nodeports { tcp . 30080 comment "shop/web:http node port" : goto ' in text[0]
    assert text[2:5] == [
        "pod-nodeports { tcp . 30080 : goto np-lb-1 }",
        "node-nodeports { tcp . 30080 : goto np-masquerade-lb-1 }",
        'no-endpoint-nodeports { tcp . 30080 comment "shop/web:http node port" : drop }',
    ]


def test_pods_that_cannot_be_told_are_like_everyone_else() -> None:
    front = make.cluster_ip(make.PLAIN)
    dispatch = lines(make.plan([1], frontends=[front]), make.NO_DETECTOR)[0]
    assert dispatch.endswith("goto masquerade-lb-1 }")
    local = make.plan([0], frontends=[make.cluster_ip(make.EXTERNAL_LOCAL)])
    assert not [line for line in lines(local, make.NO_DETECTOR) if "pod-service-ips" in line]


def test_refusals() -> None:
    rejected = make.plan((), frontends=[make.cluster_ip(make.REJECTED)])
    comment = 'comment "shop/web:http cluster IP"'
    element = f"no-endpoint-services {{ 10.96.0.10 . tcp . 80 {comment}"
    start = "add element ip kube-proxy"
    assert lines(rejected) == [f"{start} {element} : continue }}"]
    dropped = make.plan((), frontends=[make.cluster_ip(make.DROPPED)], affinity=60)
    assert lines(dropped) == [f"{start} {element} : drop }}"]


def test_source_ranges_are_made_disjoint() -> None:
    ranges = ("10.0.0.0/8", "10.1.0.0/16", "192.0.2.7/32")
    vip = Frontend(FrontendKind.LOAD_BALANCER_IP, "192.0.2.81", 80, *make.REJECTED, ranges)
    text = without("ip kube-proxy", lines(make.plan((), frontends=[vip])))
    assert text[1:] == [
        'firewall-ips { 192.0.2.81 . tcp . 80 comment "shop/web:http load balancer IP" }',
        "firewall-allowed { 192.0.2.81 . tcp . 80 . 10.0.0.0-10.255.255.255 }",
        "firewall-allowed { 192.0.2.81 . tcp . 80 . 192.0.2.7-192.0.2.7 }",
    ]


def test_affinity_is_per_service_port_and_pool() -> None:
    plan = make.plan([0, 1], frontends=[make.cluster_ip(make.EXTERNAL_LOCAL)], affinity=60)
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


def test_names_are_upstreams_and_of_bounded_length() -> None:
    name = ServicePortName("ns1", "svc1", "p80", Protocol.TCP)
    assert base_name(PlanKey(name, Family.IPV4)) == "ULMVA6XW-ns1/svc1/tcp/p80"
    long = name._replace(namespace="n" * 120, service="s" * 120)
    assert len(base_name(PlanKey(long, Family.IPV4))) == 200
    frontend = [make.cluster_ip()]
    assert "..." in lines(make.plan(of=PlanKey(long, Family.IPV4), frontends=frontend))[0]


def test_the_slots_that_were_are_kept() -> None:
    slots: Slots = {}
    before = render_service(make.plan(range(100)), make.SETTINGS, slots)
    after = render_service(make.plan([*range(3), *range(4, 100)]), make.SETTINGS, slots)
    change = diff(before, after)
    kinds = sorted(key[0] for key in (*change.added, *change.removed, *change.changed))
    assert kinds == [Kind.SERVICE_ENDPOINTS] * 2


def test_more_endpoints_than_slots_are_left_out() -> None:
    assert [size_for(n) for n in (0, 1, 2, 4, 5, 65536)] == [1, 1, 4, 4, 16, 65536]
    assert SIZES[-1] == 65536


# -- the skeleton ---------------------------------------------------------------------------


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


def test_the_node_owns_texts_and_serving_addresses() -> None:
    node = render_node(make.SETTINGS)
    address = prefix(Kind.NODEPORT_IPS, Family.IPV4) + bytes((192, 0, 2, 1))
    kinds = (Kind.SKELETON, Kind.RULES)
    assert set(node) == {address} | {prefix(k, f) for k in kinds for f in make.BOTH}


# -- text and messages ----------------------------------------------------------------------


def test_a_diff_is_printed() -> None:
    plan, more = make.plan([1], affinity=60), make.plan([1, 3, 5, 7, 9], affinity=60)
    slots: Slots = {}
    before = render_service(plan, make.SETTINGS, slots) | render_node(make.SETTINGS)
    after = render_service(more, make.SETTINGS, slots)
    text = diff_text(diff(before, after))
    assert "delete table ip6 kube-proxy\n" in text
    assert "delete chain ip kube-proxy cluster-affinity-" in text
    assert "  # lookup tcp mark-cluster cluster lb-16\n" in text


def test_objects_are_named_in_errors() -> None:
    keys = sorted(render_service(make.plan([1], affinity=60), make.SETTINGS, {}))
    assert describe(keys[:2]) == (
        "element 10.96.0.10 . tcp . 80 of service-ips and 1 more in table ip kube-proxy"
    )
    said = {describe([key]).split(" ", 1)[0] for key in keys}
    assert said == {"element", "chain", "affinity", "members", "member"}
    table = describe([prefix(Kind.SKELETON, Family.IPV6)])
    assert table == "skeleton in table ip6 kube-proxy"


@pytest.mark.parametrize("keys_only", [False, True])
@pytest.mark.parametrize("form", list(Form))
def test_packed_elements_are_what_nested_attributes_make(form: Form, keys_only: bool) -> None:
    key, values = b"k" * 12, {Form.INTERVALS: b"e" * 4, Form.ENDPOINTS: b"d" * 8}
    value = values.get(form, b"lb-4\0words" if form is Form.VERDICTS else b"words")
    (packed,) = encode(form, [(key, value)], keys_only=keys_only)
    begin = nested(wire.ELEMENT_KEY, attr(1, key))
    rest = {
        Form.INTERVALS: nested(wire.ELEMENT_KEY_END, attr(1, key[:8] + value)),
        Form.ENDPOINTS: nested(wire.ELEMENT_DATA, attr(1, value)),
        Form.VERDICTS: wire.verdict(b"lb-4") + wire.userdata(b"words"),
        Form.SET: wire.userdata(b"words"),
    }[form]
    assert packed == nested(1, begin, b"" if keys_only and form is not Form.INTERVALS else rest)


def test_comments_come_back() -> None:
    assert wire.comment_of(wire.userdata(b"ns/name")[4:]) == b"ns/name"
    assert wire.comment_of(b"") == wire.comment_of(b"\1\2x\0") == b""


def test_many_elements_take_several_messages_and_one_transaction() -> None:
    plan = make.plan(range(3000))
    steps = transaction(Diff(render_service(plan, make.SETTINGS, {})), destroy=True)
    assert all(len(step.request.payload) < 65536 for step in steps)
    endpoints = [s for s in steps if s.keys[0][0] == Kind.SERVICE_ENDPOINTS]
    assert len(endpoints) > 1
    batch = wire.batch([step.request for step in steps])
    assert len(batch) == len(steps) + 2


def test_order_elements_go_before_their_chains_and_come_after() -> None:
    rules = render_service(make.plan([1], affinity=60), make.SETTINGS, {})
    kinds = [step.keys[0][0] for step in transaction(Diff(rules), destroy=True)]
    assert kinds.index(Kind.AFFINITY) < kinds.index(Kind.CHAIN) < kinds.index(Kind.SERVICE_IPS)
    gone = [step.keys[0][0] for step in transaction(Diff({}, rules), destroy=False)]
    assert gone.index(Kind.SERVICE_IPS) < gone.index(Kind.CHAIN) < gone.index(Kind.MEMBERS)
    assert Kind.MEMBER not in gone  # they go with their set


def test_a_chain_that_changes_lets_go_of_a_set_before_it_is_deleted() -> None:
    both = make.plan([0, 1], frontends=[make.cluster_ip(make.EXTERNAL_LOCAL)], affinity=60)
    one = make.plan([0, 1], affinity=60)
    rules = [render_service(each, make.SETTINGS, {}) for each in (both, one)]
    steps = transaction(diff(*rules), destroy=True)
    deleted = [n for n, s in enumerate(steps) if s.request.kind & 0xFF == wire.DELSET]
    learn = [n for n, s in enumerate(steps) if b"affinity-learn-" in s.keys[0]]
    assert deleted
    assert max(learn) < min(deleted)


def test_a_member_leaves_a_set_that_stays() -> None:
    slots: Slots = {}
    two = render_service(make.plan([1, 3], affinity=60), make.SETTINGS, slots)
    one = render_service(make.plan([1], affinity=60), make.SETTINGS, slots)
    kinds = {step.keys[0][0] for step in transaction(diff(two, one), destroy=False)}
    assert Kind.MEMBER in kinds
    assert Kind.MEMBERS not in kinds


def test_every_set_has_a_name_of_its_own() -> None:
    names = [spec.name for spec in SETS.values()]
    assert len(set(names)) == len(names)
    for family in Family:
        text = skeleton.foundation(family)
        assert all(f" {name} {{ type" in text for name in names)


def test_the_element_that_is_to_blame_is_found_by_its_place() -> None:
    pairs = [(bytes((10, 96, 0, n)), b"c" * n) for n in range(9)]
    items = encode(Form.SET, pairs, keys_only=False)
    request = wire.elements(wire.NEWSETELEM, Family.IPV4, "some", items)
    sent = message(request.kind, request.flags, 1, request.payload)
    places = [sent.index(item) for item in items]
    assert [wire.element_at(request, place) for place in places] == list(range(9))
    assert wire.element_at(request, places[3] + 4) == -1


def test_answers_are_taken_apart_as_far_as_they_make_sense() -> None:
    listed = nested(3, nested(1, b"ab"), nested(1, b"cdef"))
    assert list(wire.element_lists(bytes(4) + text(1, "table") + listed)) == [b"ab", b"cdef"]
    assert list(wire.element_lists(bytes(4) + attr(3, nested(1, b"ab") + bytes(4)))) == [b"ab"]
