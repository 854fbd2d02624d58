"""Doctor's check of firewalls: which packets of which clients pass which hooks, in each mode."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steersman.compile.trace import Flow
from steersman.host.exec import Result
from steersman.model.errors import BusyError
from steersman.model.names import Family
from steersman.model.plan import SourceClass
from steersman.model.ruleset import Ruleset
from steersman.modes.base import Requirements
from steersman.netfilter.firewall.read import read_firewall
from steersman.operate.doctor.check import USUAL
from steersman.operate.doctor.context import Question
from steersman.operate.doctor.facts import SharedListings
from steersman.operate.doctor.result import CheckResult, Verdict
from steersman.operate.trace_loss import Hop
from tests.support.builders.doctor import CART, context_of, named, results
from tests.support.builders.firewall import (
    ACCEPTING,
    Delivering,
    Delivery,
    context,
    programs,
    saved,
)
from tests.support.builders.objects import service
from tests.support.modes.scripted import OnLoop, Scripted

(FIREWALL,) = named("firewall")


def check(*rules: str, chains: str = ACCEPTING, **more: Any) -> tuple[CheckResult, ...]:
    return results(FIREWALL, context(programs(saved(chains, *rules)), **more))


def test_nothing_is_dropped() -> None:
    (result,) = check("-A FORWARD -d 10.0.0.6/32 -j DROP", "-A INPUT -p udp -j DROP")
    assert result.verdict is Verdict.OK


def test_a_dropping_rule_is_named_with_its_chain() -> None:
    rule = "-A FORWARD -p tcp -m tcp --dport 8080 -j DROP"
    (result,) = check(rule)
    assert result.verdict is Verdict.ERROR
    assert result.text == (
        "a firewall drops packets of pods of this node and clients outside: "
        f"table filter (iptables-nft), chain FORWARD: {rule}"
    )
    assert "pods of this node: anyone to 10.0.0.5:8080/TCP" in result.evidence


def test_answers_may_be_dropped() -> None:
    (result,) = check("-A FORWARD ! -s 198.51.100.0/24 -m conntrack ! --ctstate NEW -j DROP")
    assert result.verdict is Verdict.ERROR
    assert "pods of this node: answers of 10.0.0.5 (TCP)" in result.evidence


def test_a_policy_is_named() -> None:
    (result,) = check(chains=":FORWARD DROP [0:0]")
    assert result.text.endswith("chain FORWARD: policy drop")
    accepts = (
        "-A FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT",
        "-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    )
    (masqueraded, *_) = check(*accepts, chains=":FORWARD DROP [0:0]")
    assert masqueraded.verdict is Verdict.ERROR
    assert "pods" in masqueraded.text
    assert "clients outside" not in masqueraded.text.partition(":")[0]


def test_rules_that_may_match_are_notices() -> None:
    (result,) = check("-A FORWARD -m set --match-set blocked src -j REJECT")
    assert result.verdict is Verdict.NOTICE
    assert result.suspect
    assert result.text.startswith("a firewall may reject packets")


def test_chains_of_the_mode_are_not_foreign() -> None:
    def dropping(chain: str) -> Verdict:
        rules = f"-A FORWARD -j {chain}", f"-A {chain} -j DROP"
        (result,) = check(*rules, chains=f"{ACCEPTING};:{chain} - [0:0]")
        return result.verdict

    assert dropping("KUBE-PROXY-FIREWALL") is Verdict.OK
    assert dropping("KUBE-POD-FW-7OQVIWTDKDB5TPZ4") is Verdict.ERROR  # of kube-router


_CALICO = (
    "-A FORWARD -j cali-FORWARD",
    "-A FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT",
    "-A cali-FORWARD -j MARK --set-xmark 0x0/0xe0000",
    "-A cali-FORWARD -o pod+ -j cali-to-wl-dispatch",
    "-A cali-to-wl-dispatch -o pod1 -g cali-tw-pod1",
    "-A cali-to-wl-dispatch -j DROP",
    "-A cali-tw-pod1 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    "-A cali-tw-pod1 -j MARK --set-xmark 0x0/0x10000",
    "-A cali-tw-pod1 -j cali-pri-kns.shop",
    "-A cali-tw-pod1 -m mark --mark 0x10000/0x10000 -j RETURN",
    "-A cali-tw-pod1 -j DROP",
)
_KUBE_ROUTER = (
    "-A FORWARD -j KUBE-ROUTER-FORWARD",
    "-A FORWARD -m mark --mark 0x20000/0x20000 -j ACCEPT",
    "-A KUBE-ROUTER-FORWARD -d 10.0.0.5/32 -j KUBE-POD-FW-A",
    "-A KUBE-POD-FW-A -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    "-A KUBE-POD-FW-A -j KUBE-NWPLCY-A",
    "-A KUBE-POD-FW-A -m mark ! --mark 0x10000/0x10000 -j REJECT",
    "-A KUBE-POD-FW-A -j MARK --set-xmark 0x20000/0x20000",
)


def other_chains(*rules: str) -> str:
    """Declare the chains of another program, on a node whose policy is to drop."""
    names = dict.fromkeys(rule.split()[1] for rule in rules)
    others = [f":{name} - [0:0]" for name in names if name != "FORWARD"]
    return ";".join([":FORWARD DROP [0:0]", *others])


def test_a_policy_that_marks_what_it_accepts_does_not_drop_it() -> None:
    accepts = "-A cali-pri-kns.shop -j MARK --set-xmark 0x10000/0x10000"
    rules = (*_CALICO, accepts)
    (result,) = check(*rules, chains=other_chains(*rules))
    assert result.verdict is Verdict.OK
    other = accepts.replace(".shop -j", ".shop -d 10.0.0.6/32 -j")
    (result,) = check(*_CALICO, other, chains=other_chains(*rules))
    assert result.verdict is Verdict.ERROR
    assert result.text.endswith("chain cali-tw-pod1: -A cali-tw-pod1 -j DROP")


def test_a_policy_whose_sets_are_not_read_may_drop() -> None:
    accepts = "-A KUBE-NWPLCY-A -m set --match-set A src -j MARK --set-xmark 0x10000/0x10000"
    rules = (*_KUBE_ROUTER, accepts)
    (result,) = check(*rules, chains=other_chains(*rules))
    assert result.verdict is Verdict.NOTICE
    assert result.suspect
    assert "-j REJECT" in result.text
    (result, *_) = check(*_KUBE_ROUTER, chains=other_chains(*rules))
    assert result.verdict is Verdict.ERROR


@pytest.mark.parametrize(
    ("hook", "destination", "delivery", "way", "hit"),
    [
        ("INPUT", "192.168.0.2", "local", Hop(device="pod1"), True),
        ("INPUT", "192.168.0.2", "forwarded", Hop(device="pod1"), False),
        ("INPUT", "10.0.0.5", "forwarded", Hop(device="lo", local=True), True),
        ("INPUT", "10.0.0.5", "forwarded", Hop(device="pod1"), False),
        ("FORWARD", "10.0.0.5", "local", Hop(device="pod1"), False),
        ("FORWARD", "10.0.0.5", "translated", Hop(device="pod1"), True),
        ("OUTPUT", "10.0.0.5", "local", Hop(device="pod1"), True),
        ("OUTPUT", "10.0.0.5", "forwarded", Hop(device="pod1"), True),
        ("OUTPUT", "10.96.0.10", "forwarded", Hop(device="pod1"), False),
    ],
)
def test_hooks_by_the_way_of_the_mode(
    hook: str, destination: str, delivery: Delivery, way: Hop, hit: bool
) -> None:
    found = check(f"-A {hook} -d {destination}/32 -j DROP", delivery=delivery, way=way)
    assert any(result.verdict is Verdict.ERROR for result in found) == hit


def test_a_question_about_a_connection_is_about_its_packets() -> None:
    rule = "-A FORWARD -s 198.51.100.0/24 -j DROP"

    def asked(source: str) -> Verdict:
        flow = Flow(source, "192.168.0.2", 30080)
        (result,) = check(rule, question=Question(CART, flow=flow))
        return result.verdict

    assert asked("198.51.100.7") is Verdict.ERROR
    assert asked("203.0.113.7") is Verdict.OK
    (result,) = check(rule, question=Question(CART, flow=Flow(SourceClass.NODE, "10.96.0.10", 80)))
    assert result.verdict is Verdict.OK
    (result,) = check(rule, question=Question(CART, flow=Flow(SourceClass.NODE, "10.96.0.99", 80)))
    assert result.verdict is Verdict.SKIPPED


def test_rules_of_nft_are_named_by_their_text() -> None:
    place = {"family": "inet", "table": "fw"}
    chain = {"name": "fwd", "type": "filter", "hook": "forward", "prio": 0, "policy": "accept"}
    dport = {"payload": {"protocol": "tcp", "field": "dport"}}
    match = {"match": {"op": "==", "left": dport, "right": 8080}}
    rule = {**place, "chain": "fwd", "handle": 7, "expr": [match, {"drop": None}]}
    tables = ("inet", "fw"), ("ip", "filter"), ("inet", "steersman-instance")
    runs = programs(
        saved(ACCEPTING),
        (
            "nft -t -j -a -nn list table inet fw",
            json.dumps({"nftables": [{"chain": {**place, **chain}}, {"rule": rule}]}),
        ),
        (
            "nft -t -a list chain inet fw fwd",
            "table inet fw {\n\t\ttcp dport 8080 drop # handle 7\n}",
        ),
    )
    (result,) = results(FIREWALL, context(runs, tables=tables))
    assert result.verdict is Verdict.ERROR
    assert result.evidence[0] == "table inet fw, chain fwd: tcp dport 8080 drop # handle 7"


def test_broken_output_of_nft_is_told() -> None:
    runs = programs(
        saved(ACCEPTING),
        ("nft * list table inet fw", '{"nftables": ['),
        ("nft * list table inet empty", ""),
    )
    found = results(FIREWALL, context(runs, tables=[("inet", "fw"), ("inet", "empty")]))
    assert [result.verdict for result in found] == [Verdict.UNKNOWN]
    assert found[0].evidence[0].startswith("table inet fw was not understood")


def test_tools_that_are_missing_or_fail(tmp_path: Path) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/ip_tables_names").write_text("filter\n")
    runs = Scripted(("iptables-nft-save", 4))
    found = results(FIREWALL, context(runs, root=tmp_path, tables=[("inet", "fw")]))
    assert [result.verdict for result in found] == [Verdict.UNKNOWN]
    notes = " ".join(found[0].evidence)
    assert "rules of iptables-legacy were not read: it is not installed" in notes
    assert "rules of nft were not read: it is not installed" in notes
    assert "rules of iptables-nft were not read" in notes


@pytest.mark.parametrize("hangs", ["nft * list table inet fw", "iptables-legacy-save"])
def test_a_tool_that_hangs_hides_no_rule_of_the_others(tmp_path: Path, hangs: str) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/ip_tables_names").write_text("filter\n")
    runs = programs(
        saved(ACCEPTING, "-A FORWARD -j DROP"),
        (hangs, TimeoutError("it did not end within 2 s")),
        ("nft * list table inet fw", ""),
        ("iptables-legacy-save", ""),
    )
    found = results(FIREWALL, context(runs, root=tmp_path, tables=[("inet", "fw")]))
    assert [result.verdict for result in found] == [Verdict.ERROR, Verdict.UNKNOWN]
    assert "a firewall drops packets" in found[0].text
    assert "it did not end within 2 s" in " ".join(found[1].evidence)


async def test_all_tools_together_take_less_time_than_the_check_has() -> None:
    class Hanging(OnLoop):
        async def run(
            self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
        ) -> Result:
            waits.append(timeout)
            raise TimeoutError(f"{argv[0]} did not end within {timeout:g} s")

    waits: list[float] = []
    found = await read_firewall(
        Hanging(), (Family.IPV4,), frozenset(), list_tables=lambda: [("inet", "fw")]
    )
    assert len(found.notes) == len(waits) == 2  # one after the other
    assert sum(waits) < USUAL


def test_legacy_rules_are_read_if_a_table_exists(tmp_path: Path) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/ip_tables_names").write_text("nat\nfilter\n")
    rules = saved(ACCEPTING, "-A FORWARD -j DROP")
    runs = programs(saved(ACCEPTING), ("iptables-legacy-save", rules))
    (result,) = results(FIREWALL, context(runs, root=tmp_path))
    assert "table filter (iptables-legacy), chain FORWARD" in result.text

    (tmp_path / "proc/net/ip_tables_names").write_text("")
    runs = programs(saved(ACCEPTING))
    (result,) = results(FIREWALL, context(runs, root=tmp_path))
    assert result.verdict is Verdict.OK


def test_what_the_mode_has_read_is_not_read_again() -> None:
    runs = Scripted(
        ("iptables-save", saved(ACCEPTING, "-A FORWARD -j DROP")), ("ip6tables-nft-save", "")
    )
    execute = SharedListings(runs)

    class Listing(Delivering):
        def requirements(self) -> Requirements:
            listed_by = {("nft", Family.IPV4): "iptables-save"}
            return msgspec.structs.replace(super().requirements(), listed_by=listed_by)

        def read(self) -> Ruleset:
            execute.run_tool(["iptables-save"])
            return super().read()

    (result,) = results(FIREWALL, replace(context(runs), mode=Listing(), execute=execute))
    assert "table filter (iptables-nft), chain FORWARD" in result.text
    assert runs.ran.count("iptables-save") == 1
    assert "iptables-nft-save" not in runs.ran


def test_a_mode_that_cannot_read_hides_no_firewall() -> None:
    class Failing(Delivering):
        def read(self) -> Ruleset:
            raise BusyError("the kernel is busy")

    runs = programs(saved(ACCEPTING, "-A FORWARD -j DROP"))
    (result,) = results(FIREWALL, replace(context(runs), mode=Failing()))
    assert "table filter (iptables-nft), chain FORWARD" in result.text


def test_a_service_without_endpoints_has_no_packets_to_drop() -> None:
    bare = context_of(service(), mode=Delivering(), programs=Scripted())
    (result,) = results(FIREWALL, bare)
    assert result.verdict is Verdict.SKIPPED
