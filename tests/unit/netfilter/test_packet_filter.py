"""What other programs' rules do to a packet: as iptables-save and `nft -j` print them."""

from __future__ import annotations

from typing import Any

import pytest

from steersman.model.names import Family, Protocol
from steersman.netfilter.firewall import from_iptables, from_nft
from steersman.netfilter.firewall.packet_filter import (
    Chain,
    FilterTable,
    Hook,
    Met,
    Packet,
    Rule,
    met,
)

WEB = Packet(
    Family.IPV4,
    Protocol.TCP,
    "10.0.0.5",
    8080,
    source="192.0.2.9",
    came_in="eth0",
    goes_out="pod3",
    mark=0x4000,
    translated=True,
)
ANSWER = Packet(Family.IPV4, Protocol.TCP, "", 0, "10.0.0.5", translated=True, answer=True)
UNKNOWN = Packet(Family.IPV4, Protocol.TCP, "10.0.0.5", 8080)


def saved(*lines: str, policy: str = "ACCEPT", table: str = "filter") -> str:
    chains = f":INPUT ACCEPT [0:0]\n:FORWARD {policy} [7:300]\n:OTHER - [0:0]\n:MORE - [0:0]"
    return "\n".join(("# comment", f"*{table}", chains, *lines, "COMMIT", "# Completed", ""))


def drops(
    tables: list[FilterTable], hook: Hook, packet: Packet, before: Packet | None = None
) -> list[Met]:
    """Where a packet ends."""
    return [each for each in met(tables, hook, packet, before) if each.effect is None]


def changes(
    tables: list[FilterTable], hook: Hook, packet: Packet, before: Packet | None = None
) -> list[Met]:
    """The rules that change a packet."""
    return [each for each in met(tables, hook, packet, before) if each.effect is not None]


def end(text: str, packet: Packet = WEB, hook: Hook = "forward") -> str:
    """Where a packet ends in some iptables rules: `yes`, `maybe` and the rule, or nothing."""
    found = drops(from_iptables.parse_saved(text, Family.IPV4), hook, packet)
    return "; ".join(f"{'yes' if drop.certain else 'maybe'} {drop.place}" for drop in found)


@pytest.mark.parametrize(
    ("rule", "hit"),
    [
        ("", "yes"),
        ("-s 192.0.2.0/24", "yes"),
        ("! -s 192.0.2.0/24", ""),
        ("-d 10.0.0.5/32", "yes"),
        ("-d 10.0.0.6/32", ""),
        ("-d 2001:db8::/32", ""),
        ("-s example.org", "maybe"),
        ("-i eth0", "yes"),
        ("-i eth+", "yes"),
        ("! -i docker0", "yes"),
        ("-o eth0", ""),
        ("-p tcp", "yes"),
        ("-p udp", ""),
        ("-p 6", "yes"),
        ("-p all", "yes"),
        ("-p tcp -m tcp --dport 8080", "yes"),
        ("-p tcp -m tcp --dport 8000:9000", "yes"),
        ("-p tcp -m tcp --dport :80", ""),
        ("-p tcp -m tcp --dport 8000:", "yes"),
        ("-p tcp -m multiport --dports 80,8000:8080", "yes"),
        ("-p tcp -m multiport ! --dports 80,443", "yes"),
        ("-p tcp -m tcp --dport http", "maybe"),
        ("-m conntrack --ctstate NEW", "yes"),
        ("-m conntrack --ctstate RELATED,ESTABLISHED", ""),
        ("-m conntrack ! --ctstate DNAT", ""),
        ("-m state --state INVALID", ""),
        ("-m mark --mark 0x4000/0x4000", "yes"),
        ("-m mark --mark 0x1", ""),
        ('-m comment --comment "not -j ACCEPT"', "yes"),
        ("-m set --match-set blocked src", "maybe"),
        ("-m limit --limit 5/sec", "maybe"),
        ("-f", "maybe"),
    ],
)
def test_matches_of_iptables(rule: str, hit: str) -> None:
    for target in ("DROP", "REJECT --reject-with icmp-port-unreachable"):
        line = f"-A FORWARD {rule} -j {target}"
        assert end(saved(line)) == (f"{hit} {line}" if hit else "")


@pytest.mark.parametrize(
    "rule",
    [
        *("-s 192.0.2.0/24", "! -s 192.0.2.0/24", "-i eth0", "-o pod3"),
        *("-m mark --mark 0x4000/0x4000", "-m conntrack --ctstate DNAT"),
        *("! -i eth0", "-m conntrack ! --ctstate DNAT"),
    ],
)
def test_what_the_packet_does_not_say_is_unknown(rule: str) -> None:
    line = f"-A FORWARD {rule} -j DROP"
    assert end(saved(line), UNKNOWN) == f"maybe {line}"


def test_rules_of_iptables_are_walked_in_order() -> None:
    drop = "-A FORWARD -j DROP"
    assert end(saved("-A FORWARD -p tcp -j ACCEPT", drop)) == ""
    assert end(saved("-A FORWARD -p udp -j ACCEPT", drop)) == f"yes {drop}"
    assert end(saved("-A FORWARD -m set --match-set a src -j ACCEPT", drop)) == f"maybe {drop}"
    assert end(saved("-A FORWARD -j LOG", "-A FORWARD -j MARK --set-mark 1", drop)) == f"yes {drop}"
    assert end(saved("-A FORWARD -m set --match-set a src", drop)) == f"yes {drop}"
    inner = "-A OTHER -p tcp -j DROP"
    assert end(saved("-A FORWARD -j OTHER", inner)) == f"yes {inner}"
    assert end(saved("-A FORWARD -m limit --limit 5/sec -j OTHER", inner, drop)) == f"yes {drop}"
    assert end(saved("-A FORWARD -m limit --limit 5/sec -j OTHER", inner)) == f"maybe {inner}"
    assert end(saved("-A FORWARD -j OTHER", "-A OTHER -j RETURN", inner, drop)) == f"yes {drop}"
    maybe = "-A OTHER -m limit --limit 5/sec -j RETURN"
    assert end(saved("-A FORWARD -j OTHER", maybe, inner)) == f"maybe {inner}"
    assert end(saved("-A FORWARD -m set --match-set a src -j DROP", drop)) == f"yes {drop}"
    perhaps = "-A FORWARD -m set --match-set a src -j DROP"
    assert end(saved(perhaps, perhaps.replace("src", "dst"))) == f"maybe {perhaps}"
    # goto does not come back to the rest of the chain, only to the policy
    assert end(saved("-A FORWARD -g OTHER", drop)) == ""
    assert end(saved("-A FORWARD -g OTHER", drop, policy="DROP")) == "yes policy drop"
    assert end(saved("-A FORWARD -j GONE", "-A FORWARD -j")) == ""
    assert end(saved("-A FORWARD -j OTHER", "-A OTHER -j FORWARD", drop)) == f"yes {drop}"


def test_policies() -> None:
    assert end(saved(policy="DROP")) == "yes policy drop"
    assert end(saved("-A FORWARD -d 10.0.0.0/8 -j ACCEPT", policy="DROP")) == ""
    maybe = "-A FORWARD -m set --match-set a src -j ACCEPT"
    assert end(saved(maybe, policy="DROP")) == "maybe policy drop"
    assert end(saved(policy="DROP"), hook="input") == ""


def test_only_filtering_tables_of_the_family_count() -> None:
    drop = "-A FORWARD -j DROP"
    assert end(saved(drop, table="nat")) == ""
    assert end(saved(drop, table="mangle")) == f"yes {drop}"
    packet = WEB._replace(family=Family.IPV6, destination="fd00::5", source="")
    assert end(saved(drop), packet) == ""


def test_lines_that_no_iptables_prints_end_nothing() -> None:
    assert end(saved('-A FORWARD -m comment --comment "odd -j DROP')) == ""
    assert end(saved("-A FORWARD !")) == ""
    assert end(saved("-A FORWARD -s 10.0.0.0/8")) == ""


def nft(*statements: dict[str, Any], policy: str = "accept", **chain: Any) -> list[FilterTable]:
    """One rule of these statements in a chain at the forward hook."""
    place = {"family": "inet", "table": "fw"}
    hook = {"type": "filter", "hook": "forward", "prio": 0, "policy": policy} | chain
    return from_nft.parse_ruleset(
        [
            {"metainfo": {"version": "1.0.6"}},
            {"table": {"family": "inet", "name": "fw"}},
            {"chain": {**place, "name": "forward", **hook}},
            {"chain": {**place, "name": "other"}},
            {"rule": {**place, "chain": "other", "handle": 9, "expr": [{"drop": None}]}},
            {"rule": {**place, "chain": "forward", "handle": 4, "expr": list(statements)}},
        ]
    )


def match(left: Any, right: Any, op: str = "==") -> dict[str, Any]:
    return {"match": {"op": op, "left": left, "right": right}}


def payload(protocol: str, field: str) -> dict[str, Any]:
    return {"payload": {"protocol": protocol, "field": field}}


def meta(key: str) -> dict[str, Any]:
    return {"meta": {"key": key}}


def hits(tables: list[FilterTable], packet: Packet = WEB) -> str:
    found = drops(tables, "forward", packet)
    return "; ".join(f"{'yes' if drop.certain else 'maybe'} {drop}" for drop in found)


DROP: dict[str, Any] = {"drop": None}
STATE, STATUS = {"ct": {"key": "state"}}, {"ct": {"key": "status"}}


@pytest.mark.parametrize(
    ("statement", "hit"),
    [
        (match(payload("ip", "daddr"), "10.0.0.5"), True),
        (match(payload("ip", "daddr"), {"prefix": {"addr": "10.0.0.0", "len": 8}}), True),
        (match(payload("ip", "saddr"), "192.0.2.9", "!="), False),
        (match(payload("ip", "saddr"), {"set": ["192.0.2.8", "192.0.2.9"]}), True),
        (match(payload("ip", "saddr"), {"range": ["192.0.2.1", "192.0.2.9"]}), None),
        (match(payload("ip", "saddr"), "@blocked"), None),
        (match(payload("ip6", "daddr"), "fd00::5"), False),
        (match(payload("ip6", "daddr"), "fd00::5", "!="), False),
        (match(payload("ip", "protocol"), 6), True),
        (match(payload("ip", "protocol"), "tcp"), None),
        (match(payload("ip", "ttl"), 64), None),
        (match(payload("tcp", "dport"), 8080), True),
        (match(payload("tcp", "dport"), {"range": [8000, 9000]}), True),
        (match(payload("tcp", "dport"), {"set": [80, {"range": [90, 99]}]}), False),
        (match(payload("tcp", "dport"), 8080, "!="), False),
        (match(payload("udp", "dport"), 53, "!="), False),
        (match(payload("th", "dport"), 8080), True),
        (match(payload("tcp", "dport"), "@ports"), None),
        (match(payload("tcp", "sport"), 1), None),
        (match(payload("icmp", "type"), 8), None),
        (match(payload("udp", "sport"), 1), False),
        (match(meta("iifname"), "eth0"), True),
        (match(meta("iifname"), "pod*"), False),
        (match(meta("oifname"), {"set": ["eth0", "pod*"]}), True),
        (match(meta("iif"), 3), None),
        (match(meta("l4proto"), {"set": [6, 17]}), True),
        (match(meta("nfproto"), 2), True),
        (match(meta("nfproto"), 10), False),
        (match(meta("mark"), 0x4000), True),
        (match({"&": [meta("mark"), 0xFF]}, 0), True),
        (match(meta("mark"), {"range": [1, 2]}), None),
        (match(meta("cgroup"), 1), None),
        (match(STATE, [2, 4], "in"), False),
        (match(STATE, [8, 2], "in"), True),
        (match(STATE, "new"), None),
        (match(STATE, {"set": 8}), True),
        (match(STATUS, 32, "in"), True),
        (match(STATUS, 1, "in"), None),
        (match({"ct": {"key": "mark"}}, 1), None),
        (match(payload("tcp", "dport"), 9000, "<"), None),
        (match("@s", 1), None),
        (match({"concat": [payload("ip", "daddr"), payload("tcp", "dport")]}, "@s"), None),
        ({"limit": {"rate": 5, "per": "second"}}, None),
        ({"xt": {"type": "match", "name": "bpf"}}, None),
        ({"counter": {"packets": 0, "bytes": 0}}, True),
    ],
)
def test_matches_of_nft(statement: dict[str, Any], hit: bool | None) -> None:
    where = "table inet fw, chain forward: handle 4"
    expected = {True: f"yes {where}", False: "", None: f"maybe {where}"}[hit]
    assert hits(nft(statement, DROP)) == expected


def test_what_leaves_by_another_device_is_lost() -> None:
    assert hits(nft({"fwd": {"dev": "pod1"}})) == hits(nft(DROP))


def test_verdict_maps() -> None:
    def vmap(data: Any) -> dict[str, Any]:
        return {"vmap": {"key": payload("tcp", "dport"), "data": data}}

    jump = {"jump": {"target": "other"}}
    assert hits(nft(vmap({"set": [[80, DROP], [8080, {"accept": None}]]}))) == ""
    assert hits(nft(vmap({"set": [[8080, jump]]}))) == "yes table inet fw, chain other: handle 9"
    assert hits(nft(vmap({"set": [[8080, DROP]]}))) == "yes table inet fw, chain forward: handle 4"
    assert hits(nft(vmap("@m"))) == ""


def test_chains_of_nft() -> None:
    accept = match(payload("tcp", "dport"), 8080), {"accept": None}
    assert hits(nft(*accept, policy="drop")) == ""
    assert hits(nft(DROP, hook="input")) == ""
    assert hits(nft(DROP, type="nat")) == ""
    assert hits(nft(DROP, prio="filter")) != ""
    assert hits(nft(policy="drop")) == "yes table inet fw, chain forward: policy drop"
    assert hits(nft({"goto": {"target": "other"}})) == "yes table inet fw, chain other: handle 9"
    reject = {"reject": {"type": "tcp reset"}}
    assert drops(nft(reject), "forward", WEB)[0].fate == "reject"


def test_tables_of_nft_that_see_no_packets_of_ip_are_left_out() -> None:
    chain = {"name": "c", "type": "filter", "hook": "forward", "prio": 0, "policy": "drop"}
    objects = [
        {"chain": {"family": family, "table": table, **chain}}
        for family in ("ip", "ip6", "arp")
        for table in ("one", "two")
    ]
    names = [table.name for table in from_nft.parse_ruleset(objects)]
    assert names == ["table ip one", "table ip two", "table ip6 one", "table ip6 two"]


def test_certain_ends_come_first() -> None:
    def table(name: str, rule: Rule) -> FilterTable:
        return FilterTable(name, frozenset(Family), {"c": Chain([rule], "forward")})

    unsure = Rule((lambda _: None,), "drop", "one")
    sure = Rule((), "drop", "two")
    found = drops([table("a", unsure), table("b", sure)], "forward", WEB)
    assert [drop.place for drop in found] == ["two", "one"]


def test_chains_before_nat_see_the_address_of_the_service() -> None:
    before = WEB._replace(destination="10.96.0.1", port=80)
    rule = "-A FORWARD -d 10.96.0.1/32 -j DROP"
    for table, ends in (("raw", 1), ("mangle", 1), ("filter", 0)):
        tables = from_iptables.parse_saved(saved(rule, table=table), Family.IPV4)
        assert len(drops(tables, "forward", WEB, before)) == ends


@pytest.mark.parametrize(
    ("rule", "hit"),
    [
        ("-m conntrack --ctstate NEW", ""),
        ("-m conntrack --ctstate RELATED,ESTABLISHED", "yes"),
        ("-m conntrack --ctstate NEW,DNAT", "yes"),
        ("-p tcp -m tcp --dport 8080", "maybe"),
        ("-d 10.0.0.0/8", "maybe"),
        ("! -s 192.0.2.0/24", "yes"),
    ],
)
def test_answers_of_the_endpoint(rule: str, hit: str) -> None:
    line = f"-A FORWARD {rule} -j DROP"
    assert end(saved(line), ANSWER) == (f"{hit} {line}" if hit else "")


def test_answers_are_established_for_nft() -> None:
    assert hits(nft(match(STATE, [2, 4], "in"), DROP), ANSWER).startswith("yes")
    assert hits(nft(match(STATE, 8, "in"), DROP), ANSWER) == ""


def test_a_packet_is_printed() -> None:
    assert str(WEB) == "192.0.2.9 to 10.0.0.5:8080/TCP"
    assert str(UNKNOWN) == "anyone to 10.0.0.5:8080/TCP"
    assert str(ANSWER) == "answers of 10.0.0.5 (TCP)"


def changed(found: list[Met]) -> list[str]:
    return [
        f"{'yes' if each.certain else 'maybe'} {each.effect.kind}"
        for each in found
        if each.effect is not None
    ]


@pytest.mark.parametrize(
    ("table", "target", "kind"),
    [
        ("nat", "DNAT --to-destination 10.9.9.9", "destination"),
        ("nat", "REDIRECT --to-ports 15001", "destination"),
        ("nat", "MASQUERADE", "source"),
        ("raw", "CT --notrack", "untracked"),
        ("raw", "NOTRACK", "untracked"),
        ("raw", "CT --zone-orig 5", "zone"),
        ("raw", "CT --helper ftp", ""),
        ("mangle", "TTL --ttl-set 1", "hops"),
        ("mangle", "NFQUEUE --queue-num 3", "program"),
        ("mangle", "MARK --set-xmark 0x0/0xffffffff", "mark"),
        ("mangle", "MARK", ""),
    ],
)
def test_what_extensions_of_iptables_change(table: str, target: str, kind: str) -> None:
    text = f"*{table}\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -p tcp -j {target}\nCOMMIT\n"
    tables = from_iptables.parse_saved(text, Family.IPV4)
    found = changes(tables, "prerouting", WEB)
    assert changed(found) == ([f"yes {kind}"] if kind else [])
    assert not changes(tables, "prerouting", WEB._replace(protocol=Protocol.UDP))
    assert not changes(tables, "prerouting", WEB._replace(family=Family.IPV6))
    assert not drops(tables, "prerouting", WEB)


def test_marks_that_are_changed() -> None:
    def marked(target: str, mark: int) -> int:
        effect = from_iptables.parse_rule(f"-A PREROUTING -j MARK --set-xmark {target}").effect
        assert effect is not None
        return effect.marked(mark)

    assert marked("0x0/0x4000", 0x4001) == 1
    assert marked("0x4000/0x4000", 1) == 0x4001
    assert marked("0x2", 0x4001) == 2
    assert marked("0x4000/0x0", 1) == 0x4001


def marked(*lines: str, packet: Packet = WEB) -> str:
    """Whether a packet with the mark 1, after these rules, is dropped."""
    marks = [f"-A FORWARD {line}" for line in lines]
    found = end(saved(*marks, "-A FORWARD -m mark --mark 0x1/0xf -j DROP"), packet)
    return found.partition(" ")[0]


@pytest.mark.parametrize(
    ("lines", "hit"),
    [
        (("-j MARK --set-xmark 0x1/0x1",), "yes"),
        (("-j MARK --set-xmark 0x2/0x2", "-j MARK --set-xmark 0x1/0x3"), "yes"),
        (("-j MARK --set-xmark 0x1/0x1", "-j MARK --set-xmark 0x0/0x1"), ""),
        (("-p udp -j MARK --set-xmark 0x1/0x1",), ""),
        (("-m set --match-set a src -j MARK --set-xmark 0x1/0x1",), "maybe"),
        (("-m set --match-set a src -j MARK --set-xmark 0x2/0x2",), ""),
        (
            ("-m set --match-set a src -j MARK --set-xmark 0x1", "-j MARK --set-xmark 0x1/0xf"),
            "yes",
        ),
    ],
)
def test_a_mark_counts_for_the_rules_that_follow(lines: tuple[str, ...], hit: str) -> None:
    assert marked(*lines) == hit


def test_an_unknown_mark_is_known_once_it_is_set_as_a_whole() -> None:
    assert marked("-j MARK --set-xmark 0x1/0x1", packet=UNKNOWN) == "maybe"
    assert marked("-j MARK --set-xmark 0x1", packet=UNKNOWN) == "yes"
    maybe = "-m set --match-set a src -j MARK --set-xmark 0x1"
    assert marked(maybe, packet=UNKNOWN) == "maybe"


def test_a_mark_counts_for_later_tables() -> None:
    text = "*mangle\n:FORWARD ACCEPT [0:0]\n-A FORWARD {} -j MARK --set-xmark 0x1/0x1\nCOMMIT\n"
    drop = "-A FORWARD -m mark --mark 0x1/0x1 -j DROP"
    assert end(saved(drop) + text.format("-p tcp")) == f"yes {drop}"
    assert end(saved(drop) + text.format("-m set --match-set a src")) == f"maybe {drop}"
    assert end(saved(drop) + text.format("-p udp")) == ""


def test_what_a_chain_marks_and_returns_counts_behind_it() -> None:
    accept = "-A FORWARD -m mark --mark 0x1/0x1 -j ACCEPT"
    drop = "-A FORWARD -j DROP"
    mark = "-A OTHER -j MARK --set-xmark 0x1/0x1"
    assert end(saved("-A FORWARD -j OTHER", accept, drop, mark)) == ""
    sometimes = "-A FORWARD -m set --match-set a src -j OTHER"
    assert end(saved(sometimes, accept, drop, mark)) == f"maybe {drop}"
    leaves = "-A OTHER -m set --match-set a src -j RETURN"
    assert end(saved("-A FORWARD -j OTHER", accept, drop, leaves, mark)) == f"maybe {drop}"
    # Whoever leaves a chain early is not accepted behind that place.
    accepts = "-A OTHER -j ACCEPT"
    assert end(saved("-A FORWARD -j OTHER", drop, leaves, accepts)) == f"maybe {drop}"


def nat(*lines: str, own_jumps: tuple[str, ...] = ("KUBE-",)) -> list[FilterTable]:
    chains = ":PREROUTING ACCEPT [0:0]\n:POSTROUTING ACCEPT [0:0]\n:KUBE-SERVICES - [0:0]\n"
    text = f"*nat\n{chains}{chr(10).join(lines)}\nCOMMIT\n"
    return from_iptables.parse_saved(text, Family.IPV4, own_jumps=own_jumps)


def test_only_what_comes_before_our_chains_of_nat_counts() -> None:
    ours = "-A PREROUTING -j KUBE-SERVICES", "-A KUBE-SERVICES -p tcp -j DNAT --to 10.0.0.5"
    other = "-A PREROUTING -p tcp -j DNAT --to 10.9.9.9"
    assert changed(changes(nat(*ours), "prerouting", WEB)) == []
    assert changed(changes(nat(*ours, own_jumps=()), "prerouting", WEB)) == ["yes destination"]
    assert changed(changes(nat(other, *ours), "prerouting", WEB)) == ["yes destination"]
    assert changed(changes(nat(ours[0], other, ours[1]), "prerouting", WEB)) == []
    # Who accepts a packet before them leaves it with the address of the Service.
    accept = "-A PREROUTING -p tcp -j ACCEPT"
    assert changed(changes(nat(accept, *ours), "prerouting", WEB)) == ["yes destination"]
    source = "-A POSTROUTING -j SNAT --to-source 192.0.2.2"
    found = changes(nat(*ours, source), "postrouting", WEB)
    assert changed(found) == ["yes source"]
    assert (found[0].priority, found[0].place) == (100, source)
    assert not changes(nat(source), "postrouting", ANSWER)


def test_nat_sees_packets_as_they_are_before_it() -> None:
    rule = "-A PREROUTING -d 10.96.0.1/32 -j DNAT --to-destination 10.9.9.9"
    before = WEB._replace(destination="10.96.0.1", port=80)
    assert changed(changes(nat(rule), "prerouting", WEB, before)) == ["yes destination"]
    assert not changes(nat(rule), "prerouting", WEB)


MARK = {"meta": {"key": "mark"}}


@pytest.mark.parametrize(
    ("statement", "kind", "mark"),
    [
        ({"dnat": {"addr": "10.9.9.9"}}, "destination", 0),
        ({"masquerade": None}, "source", 0),
        ({"notrack": None}, "untracked", 0),
        ({"queue": {"num": 3}}, "program", 0),
        ({"mangle": {"key": MARK, "value": 2}}, "mark", 2),
        ({"mangle": {"key": MARK, "value": {"&": [MARK, 0xFFFFBFFF]}}}, "mark", 1),
        ({"mangle": {"key": MARK, "value": {"|": [MARK, 6]}}}, "mark", 0x4007),
        ({"mangle": {"key": MARK, "value": {"^": [MARK, 3]}}}, "mark", 0x4002),
        ({"mangle": {"key": MARK, "value": {"ct": {"key": "mark"}}}}, "mark", 0),
        ({"mangle": {"key": {"ct": {"key": "zone"}}, "value": 5}}, "zone", 0),
        ({"mangle": {"key": payload("ip", "ttl"), "value": 1}}, "hops", 0),
        ({"mangle": {"key": payload("ip", "dscp"), "value": 1}}, "", 0),
    ],
)
def test_what_statements_of_nft_change(statement: dict[str, Any], kind: str, mark: int) -> None:
    dport = match(payload("tcp", "dport"), 8080)
    found = changes(nft(dport, statement), "forward", WEB)
    assert changed(found) == ([f"yes {kind}"] if kind else [])
    if kind == "mark":
        assert found[0].effect is not None
        assert found[0].effect.marked(0x4001) == mark
    assert changed(changes(nft({"limit": {}}, statement), "forward", WEB)) == (
        [f"maybe {kind}"] if kind else []
    )
    assert not changes(nft(dport, statement), "forward", WEB._replace(port=9))


def test_hooks_of_devices() -> None:
    def hooked(family: str, hook: str, **more: Any) -> list[FilterTable]:
        chain = {"name": "c", "type": "filter", "hook": hook, "prio": 0, **more}
        place = {"family": family, "table": "t"}
        rule = {**place, "chain": "c", "handle": 2, "expr": [DROP]}
        return from_nft.parse_ruleset([{"chain": {**place, **chain}}, {"rule": rule}])

    def ends(tables: list[FilterTable], hook: Hook, packet: Packet = WEB) -> list[bool]:
        return [drop.certain for drop in drops(tables, hook, packet)]

    assert ends(hooked("netdev", "ingress"), "ingress") == [False]
    assert ends(hooked("netdev", "ingress", dev="eth0"), "ingress") == [True]
    assert ends(hooked("netdev", "ingress", dev=["eth1", "eth2"]), "ingress") == []
    assert ends(hooked("netdev", "egress", dev="pod3"), "egress") == [True]
    assert ends(hooked("netdev", "egress", dev="eth0"), "egress") == []
    assert ends(hooked("bridge", "forward"), "ingress") == [True]
    assert ends(hooked("bridge", "postrouting"), "egress") == [True]
    assert ends(hooked("bridge", "prerouting"), "prerouting") == []
