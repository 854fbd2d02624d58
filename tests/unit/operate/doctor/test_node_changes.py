"""Doctor's check of rules that change packets: which of them matter for a Service, in each mode."""

from __future__ import annotations

import pytest

from steersman.operate.doctor.result import CheckResult, Verdict
from tests.support.builders.doctor import named, results
from tests.support.builders.firewall import Delivery, context, programs

(CHANGES,) = named("rule-changes")


def check(
    table: str, *rules: str, delivery: Delivery = "forwarded", chains: str = ""
) -> tuple[CheckResult, ...]:
    names = [*dict.fromkeys(rule.split()[1] for rule in rules)]
    declared = "\n".join([*(f":{name} ACCEPT [0:0]" for name in names), *chains.split()])
    text = f"*{table}\n{declared}\n{chr(10).join(rules)}\nCOMMIT\n"
    return results(CHANGES, context(programs(text), delivery=delivery))


@pytest.mark.parametrize(
    ("table", "rule", "words"),
    [
        ("nat", "PREROUTING -d 10.96.0.10/32 -j DNAT --to 10.9.9.9", "decides where packets"),
        ("nat", "PREROUTING -p tcp -m tcp --dport 30080 -j REDIRECT", "and clients outside go"),
        ("nat", "PREROUTING -d 10.96.0.11/32 -j DNAT --to 10.9.9.9", ""),
        ("nat", "PREROUTING -d 10.0.0.5/32 -j DNAT --to 10.9.9.9", ""),
        ("nat", "OUTPUT -d 10.96.0.10/32 -j DNAT --to 10.9.9.9", "of this node itself"),
        ("nat", "POSTROUTING -d 10.0.0.5/32 -j MASQUERADE", "of pods of this node another source"),
        ("nat", "POSTROUTING ! -d 10.0.0.0/8 -j MASQUERADE", ""),
        ("raw", "PREROUTING -d 10.96.0.10/32 -j CT --notrack", "from being tracked"),
        ("raw", "PREROUTING -s 10.0.0.5/32 -j CT --notrack", "from being tracked"),
        ("raw", "PREROUTING -d 192.0.2.1/32 -j CT --notrack", ""),
        ("mangle", "POSTROUTING -j MARK --set-xmark 0x0/0xffffffff", "clears the mark"),
        ("mangle", "POSTROUTING -j MARK --set-xmark 0x0/0xff", ""),
        ("mangle", "FORWARD -j MARK --set-xmark 0x4000/0x4000", "sets the mark"),
        ("mangle", "PREROUTING -j TTL --ttl-set 1", "how far packets"),
    ],
)
def test_rules_that_matter(table: str, rule: str, words: str) -> None:
    (result,) = check(table, f"-A {rule}")
    assert result.verdict is (Verdict.NOTICE if words else Verdict.OK)
    assert words in result.text
    assert result.suspect == bool(words)


def test_rules_that_may_match_come_last() -> None:
    sure = "-A PREROUTING -d 10.96.0.10/32 -j CT --notrack"
    unsure = "-A PREROUTING -m set --match-set x src -j CT --notrack"
    first, second = check("raw", unsure, sure)
    assert first.text.endswith(sure)
    assert second.text.endswith(unsure)
    assert "if it matches" in second.text
    assert first.cause < second.cause


def test_a_rule_of_both_hooks_is_named_once() -> None:
    rules = "-A PREROUTING -j HOSTPORT", "-A HOSTPORT -d 10.96.0.10/32 -j DNAT --to 10.9.9.9"
    (result,) = check("nat", *rules)
    assert "pods of this node" in result.text
    assert "chain HOSTPORT" in result.text


def test_marks_do_not_matter_without_masquerading_by_mark() -> None:
    (result,) = check("mangle", "-A FORWARD -j MARK --set-xmark 0x0", delivery="translated")
    assert result.verdict is Verdict.OK
