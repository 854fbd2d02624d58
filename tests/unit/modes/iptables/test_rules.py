"""The evaluator of rules: what it knows it gets right, what it does not know it refuses."""

from __future__ import annotations

import pytest

from tests.support.modes.iptables_rules import End, Packet, Rules, parse, parse_rule

LOCAL = frozenset({"192.168.0.2"})
OUTSIDE = Packet("203.0.113.9", "10.96.0.1", 80, "tcp", "eth0")


def ends(text: str, packet: Packet = OUTSIDE) -> set[End]:
    return Rules(parse(text), LOCAL).ends(packet)


def nat(*rules: str, chains: str = ":A - [0:0]\n:B - [0:0]") -> str:
    body = "\n".join(f"-A {rule}" for rule in rules)
    return f"*nat\n:PREROUTING ACCEPT [0:0]\n{chains}\n{body}\nCOMMIT\n"


def matched(match: str, packet: Packet = OUTSIDE) -> bool:
    """Whether a packet is sent where a rule with this match sends it."""
    rule = f"{match} -j DNAT --to-destination 10.0.0.1:8080"
    return ends(nat(f"PREROUTING {rule}", f"OUTPUT {rule}"), packet) == {
        End("accept", "10.0.0.1:8080", False)
    }


def test_without_rules_a_packet_is_left_alone() -> None:
    assert ends("") == {End("accept", "", False)}


@pytest.mark.parametrize(
    ("match", "right"),
    [
        ("-d 10.96.0.1/32", True),
        ("-d 10.96.0.0/16", True),
        ("-d 10.97.0.0/16", False),
        ("! -d 10.97.0.0/16", True),
        ("-d 0.0.0.1/0.0.0.255", True),
        ("-d 0.0.0.2/0.0.0.255", False),
        ("-d fd00::1/128", False),
        ("-s 203.0.113.9", True),
        ("! -s 203.0.113.0/24", False),
        ("-i eth0", True),
        ("-i eth", False),
        ("-i eth+", True),
        ("! -i cali+", True),
        ("-p tcp -m tcp --dport 80", True),
        ("-p udp -m udp --dport 80", False),
        ("-p tcp -m tcp --dport 81", False),
        ('-m comment --comment "two words; and -j DROP"', True),
        ("-m addrtype --dst-type LOCAL", False),
        ("-m addrtype ! --src-type LOCAL", True),
        ("-m conntrack --ctstate NEW,RELATED", True),
        ("-m conntrack --ctstate INVALID", False),
        ("-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT", True),
        ("-m mark --mark 0x4000/0x4000", False),
        ("-m mark ! --mark 0x4000/0x4000", True),
        ("-m mark --mark 0x0", True),
    ],
)
def test_matches(match: str, right: bool) -> None:
    assert matched(match) is right


@pytest.mark.parametrize(
    "line",
    [
        "-A A -m physdev --physdev-is-in -j DROP",
        "-A A -m tcp --sport 80 -j DROP",
        "-A A -m addrtype --limit-iface-in -j DROP",
        "-A A -j REDIRECT --to-ports 80",
    ],
)
def test_what_it_does_not_know_it_refuses(line: str) -> None:
    with pytest.raises(ValueError, match="not known"):
        parse_rule(line)


def test_other_address_types_are_refused() -> None:
    with pytest.raises(ValueError, match="MULTICAST"):
        matched("-m addrtype --dst-type MULTICAST")


def test_a_line_that_is_none_of_iptables_save_is_refused() -> None:
    with pytest.raises(ValueError, match="not a line"):
        parse("*nat\nhello\n")


def test_a_jump_to_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="KUBE-GONE"):
        ends(nat("PREROUTING -j KUBE-GONE"))


def test_chance_goes_both_ways_and_affinity_too() -> None:
    rules = nat(
        "PREROUTING -m recent --rcheck --seconds 9 --reap --name X --mask 255.255.255.255"
        " --rsource -j A",
        "PREROUTING -m statistic --mode random --probability 0.50000000000 -j A",
        "PREROUTING -j B",
        "A -j DNAT --to-destination 10.0.0.1:1",
        "B -p tcp -m recent --set --name X --mask 255.255.255.255 --rsource -m tcp"
        " -j DNAT --to-destination 10.0.0.2:2",
    )
    assert ends(rules) == {End("accept", "10.0.0.1:1", False), End("accept", "10.0.0.2:2", False)}


def test_return_goes_back_to_the_caller_and_ends_a_built_in_chain() -> None:
    rules = nat(
        "PREROUTING -j A",
        "PREROUTING -j B",
        "A -j RETURN",
        "A -j DNAT --to-destination 10.0.0.1:1",
        "B -j DNAT --to-destination 10.0.0.2:2",
    )
    assert ends(rules) == {End("accept", "10.0.0.2:2", False)}
    assert ends(nat("PREROUTING -j RETURN", "PREROUTING -j DNAT --to-destination 1.1.1.1:1")) == {
        End("accept", "", False)
    }


MARKED = """*nat
:POSTROUTING ACCEPT [0:0]
-A PREROUTING -j MARK --set-xmark 0x4000/0x4000
-A POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A POSTROUTING -j MARK {clear}
-A POSTROUTING -j MASQUERADE --random-fully
COMMIT
"""


@pytest.mark.parametrize("clear", ["--set-xmark 0x4000/0x0", "--xor-mark 0x4000"])
def test_the_mark_masquerades(clear: str) -> None:
    assert ends(MARKED.format(clear=clear)) == {End("accept", "", True)}
    unmarked = MARKED.replace("-A PREROUTING -j MARK --set-xmark 0x4000/0x4000\n", "")
    assert ends(unmarked.format(clear=clear)) == {End("accept", "", False)}


FILTERS = """*filter
-A INPUT -s 203.0.113.9 -j DROP
-A FORWARD -d 10.96.0.1 -j REJECT --reject-with icmp-port-unreachable
-A OUTPUT -d 10.96.0.2 -j DROP
COMMIT
"""


@pytest.mark.parametrize(
    ("source", "destination", "verdict"),
    [
        ("203.0.113.9", "192.168.0.2", "drop"),
        ("203.0.113.9", "10.96.0.1", "reject"),
        ("203.0.113.9", "10.96.0.2", "accept"),
        ("192.168.0.2", "10.96.0.1", "accept"),
        ("192.168.0.2", "10.96.0.2", "drop"),
        ("127.0.0.1", "127.0.0.1", "accept"),
    ],
)
def test_each_packet_passes_the_hooks_of_its_way(
    source: str, destination: str, verdict: str
) -> None:
    assert {e.verdict for e in ends(FILTERS, Packet(source, destination, 80, "tcp"))} == {verdict}


def test_filters_see_where_dnat_sent_a_packet() -> None:
    rules = nat("PREROUTING -j DNAT --to-destination [fd00::1]:80") + (
        "*filter\n-A FORWARD -d fd00::1/128 -m conntrack --ctstate DNAT -j DROP\nCOMMIT\n"
    )
    packet = Packet("2001:db8::9", "fd00:10:96::1", 80, "tcp", "eth0")
    assert ends(rules, packet) == {End("drop", "", False)}
