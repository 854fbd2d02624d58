# ruff: noqa: E501  (rules are one line each, as iptables has them)
from __future__ import annotations

import pytest

from steersman.modes.iptables.names import TAIL_COMMENT
from steersman.modes.iptables.parse import SavedRules, parse
from steersman.netfilter.iptables.names import RuleKey

SVC = "KUBE-SVC-XPGD46QRK7WJZT7O"
TAIL = f'-A KUBE-SERVICES -m comment --comment "{TAIL_COMMENT}" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS'


def rule(name: str, chain: str = "KUBE-SERVICES", protocol: str = "tcp") -> str:
    return (
        f'-A {chain} -d 10.96.0.1/32 -p {protocol} -m comment --comment "{name} cluster IP"'
        f" -m {protocol} --dport 80 -j {SVC}"
    )


def saved(table: str, *lines: str) -> SavedRules:
    chains = dict.fromkeys(line.split()[1] for line in lines if line.startswith("-A"))
    head = [f":{chain} - [0:0]" for chain in chains]
    return parse("\n".join(["# comment", f"*{table}", *head, *lines, "COMMIT", ""]), 4)


def parts(parsed: SavedRules) -> dict[str, str]:
    return {key[3]: value for key, value in parsed.ruleset.items()}


def test_rules_of_a_shared_chain_are_grouped_by_service_port() -> None:
    rules = [rule("ns/a:http"), rule("ns/a:http", protocol="udp"), rule("ns/b"), TAIL]
    assert parts(saved("nat", *rules)) == {
        "": "",
        "ns/a:http tcp": rules[0],
        "ns/a:http udp": rules[1],
        "ns/b tcp": rules[2],
        "node ports": TAIL,
    }


def test_the_tail_is_different_where_it_is_not_last() -> None:
    assert parts(saved("nat", TAIL, rule("ns/a")))["node ports"] != TAIL
    assert parts(saved("nat", rule("ns/a"), TAIL))["node ports"] == TAIL


def test_a_doubled_group_is_different() -> None:
    assert parts(saved("nat", rule("ns/a"), rule("ns/a")))["ns/a tcp"] != rule("ns/a")


@pytest.mark.parametrize(
    "strange",
    [
        "-A KUBE-SERVICES -j ACCEPT",
        '-A KUBE-SERVICES -m comment --comment "no name" -j ACCEPT',
        '-A KUBE-SERVICES -m comment --comment "ns/a" -j ACCEPT',
        "-A KUBE-SERVICES -m set --match-set a,b dst -j ACCEPT",
        '-A KUBE-SERVICES -m comment --comment "unfinished -j ACCEPT',
    ],
)
def test_what_is_not_ours_in_a_shared_chain_is_kept_for_removal(strange: str) -> None:
    assert parts(saved("nat", strange)) == {"": "", "unknown": strange}


def test_jumps_to_the_parts_of_a_split_list() -> None:
    jump = "-A KUBE-SERVICES -d 0.0.0.16/0.0.0.240 -j KUBE-SVC-BYADDR-1"
    assert parts(saved("nat", jump)) == {"": "", "split": jump}
    astray = "-A KUBE-NODEPORTS -j KUBE-SVC-BYADDR-1"
    assert parts(saved("nat", astray))["unknown"] == astray


def test_chains_are_read_whole() -> None:
    first, second = f"-A {SVC} -j KUBE-MARK-MASQ", f"-A {SVC} -j RETURN"
    assert saved("nat", first, second).ruleset == {(4, "nat", SVC, ""): f"{first}\n{second}"}
    empty = parse(f"*nat\n:{SVC} - [0:0]\nCOMMIT\n", 4).ruleset
    assert empty == {(4, "nat", SVC, ""): ""}


def test_counters_are_passed_over() -> None:
    text = f"*nat\n:{SVC} - [1:60]\n[3:180] -A {SVC} -j RETURN\n[0:0] -A {SVC} -j ACCEPT\nCOMMIT\n"
    assert parse(text, 4).ruleset == {
        (4, "nat", SVC, ""): f"-A {SVC} -j RETURN\n-A {SVC} -j ACCEPT"
    }


def test_foreign_chains_and_rules_are_passed_over() -> None:
    foreign = [
        "-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT",
        "-A FORWARD -j DOCKER",
        "-A DOCKER -j RETURN",
        "-A KUBE-MARK-DROP -j MARK --set-xmark 0x8000/0x8000",
    ]
    assert not saved("filter", *foreign).ruleset
    assert not parse("", 4).ruleset
    assert not parse("# nothing\n:odd\n-A\nCOMMIT", 4).ruleset


JUMP = '-A INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS'


def test_jumps_are_found_among_foreign_rules() -> None:
    foreign = "-A INPUT -j ACCEPT"
    assert saved("filter", foreign, JUMP, foreign).ruleset == {
        (4, "filter", "INPUT", "jumps"): JUMP
    }
    doubled = saved("filter", JUMP, foreign, JUMP).ruleset
    assert doubled == {(4, "filter", "INPUT", "jumps"): f"{JUMP}\n{JUMP}"}


def test_foreign_rules_that_lead_to_our_chains_are_remembered() -> None:
    parsed = saved("nat", "-A CNI-MARK -j KUBE-MARK-MASQ", "-A PREROUTING -j KUBE-NODEPORTS")
    assert parsed.referenced == {("nat", "KUBE-MARK-MASQ"), ("nat", "KUBE-NODEPORTS")}
    assert not parsed.ruleset


def test_what_is_shared_with_kubelet() -> None:
    localnet = (
        "-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment"
        ' "block incoming localnet connections" -m conntrack ! --ctstate'
        " RELATED,ESTABLISHED,DNAT -j DROP"
    )
    firewall: RuleKey = (4, "filter", "KUBE-FIREWALL", "")
    other = "-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP"
    assert saved("filter", other).ruleset == {firewall: ""}
    assert saved("filter", other, localnet, "-A INPUT -j KUBE-FIREWALL").ruleset == {
        firewall: "",
        (4, "filter", "KUBE-FIREWALL", "kubelet"): localnet,
        (4, "filter", "INPUT", "kubelet"): "-A INPUT -j KUBE-FIREWALL",
    }


C = '-m comment --comment "ns/a:http cluster IP"'


def test_how_this_machine_spells_a_rule_is_remembered_for_deleting_it() -> None:
    other = f"-A KUBE-SERVICES {C} -m tcp -p tcp -d 10.96.0.1/32 --dport 80 -j {SVC}"
    parsed = saved("nat", other)
    ours = parts(parsed)["ns/a:http tcp"]
    assert ours == rule("ns/a:http")
    assert parsed.spellings == {ours: other}
    mark = "-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000"
    parsed = saved("nat", mark)
    assert parsed.ruleset[4, "nat", "KUBE-MARK-MASQ", ""].endswith("--set-xmark 0x4000/0x4000")
    assert not parsed.spellings  # chains are rewritten whole, never rule by rule
