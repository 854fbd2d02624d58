"""What the userspace modes make of plans, and the text of their portal rules."""

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
from steersman.modes.userspace.iptables_portals import (
    ALL_CHAINS,
    ALL_JUMPS,
    FIREWALL,
    FoundRules,
    Rule,
    parse,
    portal_rules,
    write,
)
from steersman.modes.userspace.nft_portals import Chain, Element, change, objects, remove
from steersman.modes.userspace.nft_portals import parse as parse_nft
from steersman.modes.userspace.objects import BASE, BaseKey, Portal
from steersman.modes.userspace.render import (
    host_address,
    render_direct,
    render_node,
    render_redirect,
)
from steersman.proxy.listeners import LISTENER, PORTAL, Decision, FrontendKey, ListenerPlan

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


def plan(*frontends: Frontend, protocol: Protocol = Protocol.TCP) -> ServicePlan:
    return ServicePlan(key(protocol), frontends, ALL, (HERE,), ALL)


def at(what: str, address: str, port: int = 80, node_port: bool = False) -> FrontendKey:
    return FrontendKey(what, Family.IPV4, Protocol.TCP, address, port, node_port)


VIP, NODE_PORT = FrontendKind.LOAD_BALANCER_IP, FrontendKind.NODE_PORT


def test_a_service_address_has_a_listener_and_a_portal_to_it() -> None:
    ruleset = render_redirect(plan(frontend(VIP, CLUSTER)), NODE)
    choice = Decision(Verdict.FORWARD, ALL)
    assert ruleset == {
        at(LISTENER, "198.51.100.1"): ListenerPlan(key(), "192.168.0.2", 0, choice, choice, choice),
        at(PORTAL, "198.51.100.1"): Portal("shop/cart:http", Verdict.FORWARD, "192.168.0.2"),
    }


def test_node_ports_are_bound_at_every_address_that_serves_them() -> None:
    ruleset = render_redirect(plan(frontend(NODE_PORT, CLUSTER)), NODE)
    bound = {(v.bind, v.port) for v in ruleset.values() if isinstance(v, ListenerPlan)}
    assert bound == {(a, 30080) for a in ("127.0.0.1", "192.168.0.1", "192.168.0.2")}
    some = replace(FAMILY, node_port_addresses=("192.168.0.1",), localhost_node_ports=False)
    ruleset = render_redirect(
        plan(frontend(NODE_PORT, CLUSTER)), NodeSettings(families=(Family.IPV4,), ipv4=some)
    )
    assert set(ruleset) == {at(what, "192.168.0.1", 30080, True) for what in (LISTENER, PORTAL)}


def test_without_forwarding_there_is_a_portal_only() -> None:
    for action in (DROP, REJECT):
        for kind, address, port in ((VIP, "198.51.100.1", 80), (NODE_PORT, "192.168.0.1", 30080)):
            ruleset = render_redirect(plan(frontend(kind, action)), NODE)
            portal = ruleset[at(PORTAL, address, port, kind is NODE_PORT)]
            assert portal == Portal("shop/cart:http", action.verdict)
            assert not [k for k in ruleset if k[0] == LISTENER]


def test_only_insiders_pass_where_others_are_dropped() -> None:
    ruleset = render_redirect(plan(frontend(VIP, CLUSTER, CLUSTER, DROP)), NODE)
    portal = ruleset[at(PORTAL, "198.51.100.1")]
    assert portal.internal_only == FAMILY.detector
    listener = ruleset[at(LISTENER, "198.51.100.1")]
    assert listener.decide("10.244.9.9").endpoints == ALL
    assert listener.decide("192.168.0.1").endpoints == ALL
    assert listener.decide("203.0.113.9") == Decision(Verdict.DROP)


def test_a_listener_asks_the_plan_for_each_class_of_sources() -> None:
    local = frontend(VIP, CLUSTER, CLUSTER, LOCAL, ranges=("10.0.0.0/8", "203.0.113.0/24"))
    listener = render_redirect(plan(local), NODE)[at(LISTENER, "198.51.100.1")]
    assert listener.decide("10.244.9.9").endpoints == ALL
    assert listener.decide("203.0.113.9").endpoints == (HERE,)
    assert listener.decide("192.168.0.1") == Decision(Verdict.DROP)


def test_a_node_without_addresses_leads_nobody_anywhere() -> None:
    lonely = NodeSettings(families=(Family.IPV4,), ipv4=FamilySettings(local_addresses=("::1",)))
    both = plan(frontend(VIP, CLUSTER), frontend(VIP, REJECT))
    ruleset = render_redirect(both, lonely)
    assert ruleset == {at(PORTAL, "198.51.100.1"): Portal("shop/cart:http", Verdict.REJECT)}


def test_the_host_address_can_be_bound_without_an_interface() -> None:
    assert host_address(FAMILY) == "192.168.0.2"
    assert host_address(replace(FAMILY, node_ip="203.0.113.1")) == "192.168.0.1"
    assert host_address(FamilySettings(local_addresses=("::1", "fe80::1"))) == ""


def test_sctp_has_no_sockets() -> None:
    sctp = plan(frontend(VIP, CLUSTER), protocol=Protocol.SCTP)
    assert render_redirect(sctp, NODE) == render_direct(sctp, NODE) == {}


def test_the_node_has_chains_in_each_family() -> None:
    assert render_node(NODE) == {BaseKey(BASE, Family.IPV4): ""}


def test_direct_portals_bind_the_destination() -> None:
    ruleset = render_direct(plan(frontend(VIP, CLUSTER), frontend(NODE_PORT, CLUSTER)), NODE)
    assert {(k, v.bind, v.port) for k, v in ruleset.items()} == {
        (at(LISTENER, "198.51.100.1"), "198.51.100.1", 80),
        (at(LISTENER, "", 30080, True), "", 30080),
    }
    some = replace(NODE, ipv4=replace(FAMILY, node_port_addresses=("192.168.0.1",)))
    ruleset = render_direct(plan(frontend(NODE_PORT, CLUSTER)), some)
    assert {v.bind for v in ruleset.values()} == {"127.0.0.1", "192.168.0.1"}


def test_direct_portals_hold_what_they_refuse() -> None:
    ruleset = render_direct(plan(frontend(VIP, REJECT), frontend(NODE_PORT, REJECT)), NODE)
    assert ruleset == {at(PORTAL, "198.51.100.1"): Portal("shop/cart:http", Verdict.REJECT)}


def test_rootless_serves_what_this_machine_has() -> None:
    both = plan(frontend(VIP, CLUSTER), frontend(NODE_PORT, CLUSTER))
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
        plan(frontend(VIP, CLUSTER, CLUSTER, DROP, ranges=("10.0.0.0/8",))), NODE
    )
    lines = [f"{key}: {ruleset[key]}" for key in sorted(ruleset)]
    assert lines == [
        "listener 198.51.100.1 80/TCP: 192.168.0.2 port (any): pods to 10.244.1.5:8080, "
        "10.244.2.5:8080; this node to 10.244.1.5:8080, 10.244.2.5:8080; others to drop; "
        "only from 10.0.0.0/8",
        "portal 198.51.100.1 80/TCP: shop/cart:http: forward to 192.168.0.2; "
        "only from pods and this node; only from 10.0.0.0/8",
    ]


# -- rules ------------------------------------------------------------------------------------


def lines(portal: Portal, node_port: bool = False) -> list[str]:
    where = at(PORTAL, "192.168.0.2" if node_port else "198.51.100.1", 80, node_port)
    return [rule.line for rule in portal_rules(where, portal, 4711)]


NAME = '-m comment --comment "shop/cart:http" -m tcp'
TO = f"-d 192.168.0.2/32 -p tcp {NAME} --dport 4711"


def test_a_portal_leads_to_its_listener_and_nobody_else_gets_there() -> None:
    match = f"-d 198.51.100.1/32 -p tcp {NAME} --dport 80"
    assert lines(Portal("shop/cart:http", Verdict.FORWARD, "192.168.0.2")) == [
        f"-A KUBE-PORTALS-CONTAINER {match} -j DNAT --to-destination 192.168.0.2:4711",
        f"-A KUBE-PORTALS-HOST {match} -j DNAT --to-destination 192.168.0.2:4711",
        f"-A {FIREWALL} {TO} -m conntrack ! --ctstate DNAT -j DROP",
    ]


def test_ranges_come_after_everything_else_is_dropped() -> None:
    portal = Portal(
        "shop/cart:http",
        Verdict.FORWARD,
        "192.168.0.2",
        LocalDetector(cidr="10.244.0.0/16"),
        ("203.0.113.0/24",),
    )
    assert lines(portal)[3:] == [
        f"-A {FIREWALL} ! -s 10.244.0.0/16 {TO} -m addrtype ! --src-type LOCAL -j DROP",
        f"-A {FIREWALL} -s 203.0.113.0/24 {TO} -j RETURN",
        f"-A {FIREWALL} {TO} -j DROP",
    ]


def test_insiders_by_interface_and_none_at_all() -> None:
    node_port = Portal("shop/cart:http", Verdict.FORWARD)
    found = {
        lines(replace(node_port, internal_only=detector), True)[0].split(" -m comment")[0]
        for detector in (
            LocalDetector(interface="cni0"),
            LocalDetector(interface_prefix="veth"),
            LocalDetector(),
        )
    }
    start = f"-A {FIREWALL} -d 192.168.0.2/32"
    assert found == {f"{start} ! -i cni0 -p tcp", f"{start} ! -i veth+ -p tcp", f"{start} -p tcp"}
    assert lines(node_port, True) == []


def test_refusals() -> None:
    match = f"-A {FIREWALL} -d 198.51.100.1/32 -p tcp {NAME} --dport 80"
    assert lines(Portal("shop/cart:http", Verdict.DROP)) == [f"{match} -j DROP"]
    (rejected,) = lines(Portal("shop/cart:http", Verdict.REJECT))
    assert rejected == f"{match} -j REJECT --reject-with icmp-port-unreachable"


JUMP = (
    '-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals"'
    f" -j {FIREWALL}"
)
SAVED = f"""*filter
:INPUT ACCEPT [0:0]
:{FIREWALL} - [0:0]
{JUMP}
-A INPUT -p tcp -j ACCEPT
-A {FIREWALL} -d 10.0.0.1/32 -p tcp -m comment --comment shop/cart -m tcp --dport 80 -j DROP
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
COMMIT
"""


def test_only_what_is_ours_is_read_and_in_one_spelling() -> None:
    kernel = parse(SAVED)
    assert kernel.chains == {("filter", FIREWALL)}
    assert [rule.line[:8] for rule in kernel.jumps] == ["-A INPUT"]
    (rule,) = kernel.rules
    assert '--comment "shop/cart" -m' in rule.line
    assert not kernel.complete
    assert FoundRules(frozenset(), ALL_JUMPS, ALL_CHAINS).complete


def test_what_is_written_deletes_before_it_appends() -> None:
    old, new = Rule("filter", f"-A {FIREWALL} -j OLD"), Rule("filter", f"-A {FIREWALL} -j NEW")
    assert write([old], [new]) == (f"*filter\n-D {FIREWALL} -j OLD\n-A {FIREWALL} -j NEW\nCOMMIT\n")
    assert write((), ()) == ""
    whole = write((), [new], fresh=ALL_JUMPS)
    assert whole.index(f":{FIREWALL}") < whole.index("-D INPUT") < whole.index("-I INPUT")
    assert whole.count("COMMIT") == 2
    gone = write((), (), gone=parse(SAVED))
    assert gone.splitlines()[1:] == [
        f":{FIREWALL} - [0:0]",
        f'-D INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals"'
        f" -j {FIREWALL}",
        f"-X {FIREWALL}",
        "COMMIT",
    ]


# -- the same for nft -------------------------------------------------------------------------


def nft(portal: Portal, node_port: bool = False) -> tuple[list[str], list[str]]:
    """Its elements, and the rules of its own chain."""
    where = at(PORTAL, "192.168.0.2" if node_port else "198.51.100.1", 80, node_port)
    found = objects(where, portal, 0 if node_port else 4711)
    elements = [f"{each.map}: {each.text}" for each in found if isinstance(each, Element)]
    return sorted(elements), [r for each in found if isinstance(each, Chain) for r in each.rules]


def test_nft_leads_and_guards() -> None:
    portal = Portal("shop/cart:http", Verdict.FORWARD, "192.168.0.2")
    leads = "portals: 198.51.100.1 . 6 . 80 : 192.168.0.2 . 4711"
    guard = "guards: 192.168.0.2 . 6 . 4711 : goto "
    assert nft(portal) == ([f"{guard}proxied", leads], [])
    ranges = ("203.0.113.0/24", "203.0.113.0/25", "10.0.0.1/32")
    pods = LocalDetector(cidr="10.244.0.0/16")
    fenced = replace(portal, internal_only=pods, source_ranges=ranges)
    assert nft(fenced) == (
        [f"{guard}to-tcp-192.168.0.2-4711", leads],
        [
            "ct status & dnat != dnat drop",
            "ip saddr != 10.244.0.0/16 fib saddr type != local drop",
            "ip saddr != { 10.0.0.1/32, 203.0.113.0/24 } drop",
        ],
    )


def test_nft_insiders_by_interface_and_none_at_all() -> None:
    node_port = Portal("shop/cart:http", Verdict.FORWARD)
    found = [
        nft(replace(node_port, internal_only=LocalDetector(**how)), True)[1]
        for how in ({"interface": "cni0"}, {"interface_prefix": "veth"}, {})
    ]
    rest = "fib saddr type != local drop"
    assert found == [[f'iifname != "cni0" {rest}'], [f'iifname != "veth*" {rest}'], [rest]]
    assert nft(node_port, True) == ([], [])


def test_nft_refusals_and_removal() -> None:
    for verdict, word in ((Verdict.DROP, "drop"), (Verdict.REJECT, "goto refuse")):
        portal = Portal("shop/cart:http", verdict)
        assert nft(portal) == ([f"guards: 198.51.100.1 . 6 . 80 : {word}"], [])
    assert remove(Family.IPV6) == "table ip6 kube-portals\ndelete table ip6 kube-portals\n"


def test_nft_writes_only_what_differs() -> None:
    where = at(PORTAL, "198.51.100.1")
    portal = Portal("shop/cart:http", Verdict.FORWARD, "192.168.0.2")
    old, new = objects(where, portal, 4711), objects(where, portal, 4712)
    assert change(Family.IPV4, old, old) == ""
    assert change(Family.IPV4, old, new).splitlines() == [
        "delete element ip kube-portals guards { 192.168.0.2 . 6 . 4711 }",
        "delete element ip kube-portals portals { 198.51.100.1 . 6 . 80 }",
        "add element ip kube-portals guards { 192.168.0.2 . 6 . 4712 : goto proxied }",
        "add element ip kube-portals portals { 198.51.100.1 . 6 . 80 : 192.168.0.2 . 4712 }",
    ]
    one, two = (
        objects(where, replace(portal, source_ranges=(cidr,)), 4711)
        for cidr in ("10.0.0.1/32", "10.0.0.2/32")
    )
    chain = "chain ip kube-portals to-tcp-192.168.0.2-4711"
    assert [
        line.partition(" comment")[0] for line in change(Family.IPV4, one, two).splitlines()
    ] == [
        f"add {chain}",
        f"flush {chain}",
        f"add rule{chain.removeprefix('chain')} ct status & dnat != dnat drop",
        f"add rule{chain.removeprefix('chain')} ip saddr != {{ 10.0.0.2/32 }} drop",
    ]
    assert change(Family.IPV4, two, old).splitlines()[-2:] == [f"flush {chain}", f"delete {chain}"]


def test_nft_reads_what_it_lists() -> None:
    listed = """table ip kube-portals {
\tmap portals {
\t\ttype ipv4_addr . inet_proto . inet_service : ipv4_addr . inet_service
\t}

\tmap guards {
\t\ttype ipv4_addr . inet_proto . inet_service : verdict
\t\telements = { 1.1.1.1 . 17 . 3 : drop,
\t\t\t     192.168.0.2 . 6 . 30009 : goto refuse }
\t}

\tchain input {
\t\ttype filter hook input priority 0; policy accept;
\t\tct state 0x8 jump firewall comment "w"
\t\ttcp dport 1 drop
\t}
}
"""
    assert parse_nft(listed) == {
        Element("guards", "1.1.1.1 . 17 . 3 : drop"),
        Element("guards", "192.168.0.2 . 6 . 30009 : goto refuse"),
        Chain("input", ("w", "")),
    }
