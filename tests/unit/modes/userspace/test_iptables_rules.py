"""The text of portal rules for iptables: written, and read back."""

from __future__ import annotations

from msgspec.structs import replace

from steersman.model.names import Family, Protocol
from steersman.model.plan import LocalDetector, Verdict
from steersman.modes.userspace import ALL_CHAINS, FIREWALL
from steersman.modes.userspace.iptables_rules import (
    ALL_JUMPS,
    ALL_UNGUARDED,
    FoundRules,
    Rule,
    change,
    parse,
    portal_rules,
    removal,
    whole,
)
from steersman.modes.userspace.render import Portal
from steersman.netfilter.iptables.restore import UNCUT, Step, write_steps
from steersman.proxy.listeners import PORTAL, FrontendKey

SERVICE = FrontendKey(PORTAL, Family.IPV4, Protocol.TCP, "198.51.100.1", 80)
AT_NODE_PORT = FrontendKey(PORTAL, Family.IPV4, Protocol.TCP, "192.168.0.2", 80, True)


def text(steps: list[Step]) -> str:
    return "".join(run.text for run in write_steps({4: steps}, UNCUT, {}))


def lines(portal: Portal, node_port: bool = False) -> list[str]:
    where = AT_NODE_PORT if node_port else SERVICE
    return [rule.line for rule in portal_rules(where, portal, 4711)]


NAME = '-m comment --comment "shop/cart:http" -m tcp'
TO = f"-d 192.168.0.2/32 -p tcp {NAME} --dport 4711"


def test_a_portal_leads_to_its_listener_and_guards_it() -> None:
    match = f"-d 198.51.100.1/32 -p tcp {NAME} --dport 80"
    assert lines(Portal("shop/cart:http", Verdict.FORWARD, "192.168.0.2")) == [
        f"-A KUBE-PORTALS-CONTAINER {match} -j DNAT --to-destination 192.168.0.2:4711",
        f"-A KUBE-PORTALS-HOST {match} -j DNAT --to-destination 192.168.0.2:4711",
        f"-A {FIREWALL} {TO} -m conntrack ! --ctstate DNAT -j DROP",
    ]


def test_guards_are_last_and_met_only_by_clients_of_this_node_that_were_not_led_here() -> None:
    portal = Portal("shop/cart:http", Verdict.FORWARD, "192.168.0.2", LocalDetector())
    written = text(whole(portal_rules(SERVICE, portal, 4711), ALL_JUMPS))
    chain: list[str] = []
    for line in written.splitlines():
        if line.startswith(f"-A {FIREWALL}"):
            chain.append(line)
        elif line.startswith(f"-I {FIREWALL}"):
            chain.insert(0, line)
    match = f"{FIREWALL} {TO}"
    comment = '-m comment --comment "kubernetes service portals"'
    assert chain == [
        f"-I {match} -m addrtype ! --src-type LOCAL -j DROP",
        f"-A {FIREWALL} -m conntrack --ctstate DNAT {comment} -j RETURN",
        f"-A {FIREWALL} -m addrtype ! --dst-type LOCAL {comment} -j RETURN",
        f"-A {match} -m conntrack ! --ctstate DNAT -j DROP",
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
        f"-A {FIREWALL} -s 203.0.113.0/24 {TO} -m conntrack --ctstate DNAT -j RETURN",
        f"-A {FIREWALL} {TO} -j DROP",
    ]


def test_pods_by_interface_and_none_at_all() -> None:
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


def test_only_our_rules_are_read_in_one_spelling() -> None:
    kernel = parse(SAVED)
    assert kernel.chains == {("filter", FIREWALL)}
    assert [rule.line[:8] for rule in kernel.jumps] == ["-A INPUT"]
    (rule,) = kernel.rules
    assert '--comment "shop/cart" -m' in rule.line
    assert not kernel.complete
    assert not FoundRules(frozenset(), ALL_JUMPS, ALL_CHAINS).complete
    again = "*filter\n" + "\n".join(rule.line for rule in ALL_UNGUARDED)
    unguarded = parse(again)
    assert not unguarded.rules
    assert FoundRules(frozenset(), ALL_JUMPS, ALL_CHAINS, unguarded.unguarded).complete


def test_deletions_are_written_before_additions() -> None:
    old, new = Rule("filter", f"-A {FIREWALL} -j OLD"), Rule("filter", f"-A {FIREWALL} -j NEW")
    last = Rule("filter", f"-A {FIREWALL} -j LAST")
    assert text(change([old], [new, last])) == (
        f"*filter\n-D {FIREWALL} -j OLD\n-I {FIREWALL} -j LAST\n-I {FIREWALL} -j NEW\nCOMMIT\n"
    )
    assert not change((), ())
    written = text(whole([new], ALL_JUMPS))
    assert written.index(f":{FIREWALL}") < written.index("-D INPUT") < written.index("-I INPUT")
    assert written.count("COMMIT") == 2
    gone = text(removal(parse(SAVED)))
    assert gone.splitlines()[1:] == [
        f":{FIREWALL} - [0:0]",
        f'-D INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals"'
        f" -j {FIREWALL}",
        f"-X {FIREWALL}",
        "COMMIT",
    ]
