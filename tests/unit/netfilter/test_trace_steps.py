"""Events of a packet and its answer, put together."""

from __future__ import annotations

from steersman.model.names import Protocol
from steersman.model.tracing import STEERSMAN, TraceStep, WatchedFlow
from steersman.netfilter.trace.events import Headers, TraceEvent
from steersman.netfilter.trace.rules import BaseChain, RuleBook
from steersman.netfilter.trace.steps import first_headers, to_steps

MINE = "steersman-trace-1"
FLOW = WatchedFlow(Protocol.TCP, "10.96.0.1", 80, "10.1.0.9", 40000)
SENT = Headers("10.1.0.9", 40000, "10.96.0.1", 80, 6, "SYN")
CARRIED = SENT._replace(destination="10.1.0.5", port=8080)
ANSWER = Headers("10.1.0.5", 8080, "192.0.2.1", 1024, 6, "SYN-ACK")
BOOK = RuleBook(
    {
        ("nft", "ip", "kube-proxy", "nat-prerouting", 1): "vmap @service-ips",
        ("nft", "ip", "kube-proxy", "lb", 2): "dnat to 10.1.0.5:8080",
        ("nft", "ip", "kube-proxy", "nat-postrouting", 3): "masquerade fully-random",
        ("nft", "inet", "fw", "forward", 5): "reject with icmp port-unreachable",
        ("legacy", "ip", "nat", "OUTPUT", 1): "-A OUTPUT -j KUBE-SERVICES",
        ("legacy", "ip", "nat", "OUTPUT", 2): "-A OUTPUT -g KUBE-GOTO",
        ("legacy", "ip", "nat", "OUTPUT", 3): "-A OUTPUT -j MARK --set-xmark 0x1",
        ("legacy", "ip", "nat", "OUTPUT", 4): "-A OUTPUT -p tcp",
        ("legacy", "ip", "nat", "KUBE-SERVICES", 1): "-A KUBE-SERVICES -j DNAT --to 10.1.0.5:8080",
        ("legacy", "ip", "filter", "FORWARD", 1): "-A FORWARD -j DROP",
        ("legacy", "ip", "filter", "FORWARD", 2): "-A FORWARD -j REJECT --reject-with tcp-reset",
        ("legacy", "ip", "filter", "FORWARD", 3): "-A FORWARD -j RETURN",
    },
    {
        ("ip", "kube-proxy", "nat-prerouting"): BaseChain("prerouting", -100),
        ("ip", "kube-proxy", "nat-postrouting"): BaseChain("postrouting", 100),
        ("ip", "kube-proxy", "nat-output"): BaseChain("output", -100),
        ("inet", "fw", "forward"): BaseChain("forward", 0),
        ("inet", MINE, "first-prerouting"): BaseChain("prerouting", -500),
        ("inet", MINE, "reply-prerouting"): BaseChain("prerouting", -199),
    },
    {
        ("ip", "nat", "KUBE-SERVICES"): "",
        ("ip", "nat", "KUBE-GOTO"): "",
        ("ip", "filter", "FORWARD"): "drop",
    },
)


def nft(
    table: str, chain: str, number: int, verdict: str, packet: int = 1,
    headers: Headers | None = None, kind: str = "rule",
) -> TraceEvent:  # fmt: skip
    family, _, name = table.rpartition(" ")
    return TraceEvent("nft", family or "ip", name, chain, kind, number, verdict, packet, headers)  # type: ignore[arg-type]


def legacy(
    table: str, chain: str, number: int, hook: str, headers: Headers = SENT, kind: str = "rule"
) -> TraceEvent:
    return TraceEvent("legacy", "ip", table, chain, kind, number, "", 0, headers, hook)  # type: ignore[arg-type]


def steps(*events: TraceEvent, to_endpoint: bool = True) -> tuple[TraceStep, ...]:
    return to_steps(
        events, BOOK, FLOW, table=MINE,
        owns=lambda table, chain: table == "ip kube-proxy" or chain.startswith("KUBE-"),
        to_endpoint=to_endpoint,
    )  # fmt: skip


FORWARDED = (
    nft(f"inet {MINE}", "first-prerouting", 4, "continue", headers=SENT),
    nft(f"inet {MINE}", "first-prerouting", 0, "continue"),
    nft("ip kube-proxy", "nat-prerouting", 1, "goto lb", headers=SENT),
    nft("ip kube-proxy", "lb", 2, "accept"),
    nft("inet fw", "forward", 0, "accept", headers=CARRIED, kind="policy"),
    nft("ip kube-proxy", "nat-postrouting", 3, "accept", headers=CARRIED),
)


def test_steps_have_hooks_rules_and_owners() -> None:
    found = steps(*FORWARDED)
    assert [(each.hook, each.chain, each.verdict, each.owner) for each in found] == [
        ("prerouting", "nat-prerouting", "goto lb", STEERSMAN),
        ("prerouting", "lb", "accept", STEERSMAN),
        ("forward", "forward", "accept", "another program"),
        ("postrouting", "nat-postrouting", "accept", STEERSMAN),
    ]
    assert [each.rule for each in found[:2]] == ["vmap @service-ips", "dnat to 10.1.0.5:8080"]


def test_the_rule_that_changes_the_destination_is_noted() -> None:
    _, translating, *others = steps(*FORWARDED)
    assert translating.note == "the destination is now 10.1.0.5:8080"
    assert translating.endpoint == "10.1.0.5:8080"
    assert {each.note for each in others} == {""}
    to_proxy = steps(*FORWARDED, to_endpoint=False)
    assert {each.endpoint for each in to_proxy} == {""}


def test_a_change_without_a_known_rule_is_noted_at_the_step_before() -> None:
    events = (
        nft("inet fw", "forward", 9, "accept", headers=SENT),
        nft("inet fw", "forward", 8, "accept", headers=CARRIED._replace(source="192.0.2.1")),
    )
    first, second = steps(*events)
    assert first.note == (
        "the text of this rule cannot be read, the destination is now 10.1.0.5:8080,"
        " the source is now 192.0.2.1:40000"
    )
    assert second.note == "the text of this rule cannot be read"


def test_headers_at_the_end_of_a_chain_count_for_the_next_step() -> None:
    events = (
        nft("ip kube-proxy", "nat-prerouting", 1, "goto lb", headers=SENT),
        nft("ip kube-proxy", "lb", 2, "accept"),
        nft("inet fw", "forward", 0, "continue", headers=CARRIED),
        nft("inet fw", "forward", 0, "accept", kind="policy"),
    )
    assert [each.endpoint for each in steps(*events)] == ["", "10.1.0.5:8080", ""]


def test_the_answer_is_a_way_of_its_own() -> None:
    events = (
        *FORWARDED,
        nft(f"inet {MINE}", "reply-prerouting", 6, "continue", packet=2, headers=ANSWER),
        nft("inet fw", "forward", 5, "drop", packet=2, headers=ANSWER),
        nft("inet fw", "forward", 5, "drop", packet=3, headers=SENT._replace(protocol=1)),
        nft("inet fw", "forward", 5, "drop", packet=4),
    )
    ends = [(each.direction, each.verdict) for each in steps(*events) if each.ends]
    assert ends == [("original", "reject"), ("reply", "reject"), ("reply", "reject")]
    assert not any(each.note for each in steps(*events) if each.direction == "reply")


def test_verdicts_of_legacy_follow_from_the_rules() -> None:
    events = (
        legacy("nat", "OUTPUT", 1, "output"),
        legacy("nat", "KUBE-SERVICES", 1, "output"),
        legacy("nat", "KUBE-SERVICES", 0, "output", kind="return"),
        legacy("nat", "OUTPUT", 2, "output"),
        legacy("nat", "OUTPUT", 3, "output"),
        legacy("nat", "OUTPUT", 4, "output"),
        legacy("filter", "FORWARD", 3, "forward"),
        legacy("filter", "FORWARD", 2, "forward"),
        legacy("filter", "FORWARD", 1, "forward"),
        legacy("filter", "FORWARD", 0, "forward", kind="policy"),
        legacy("raw", "OUTPUT", 0, "output", kind="policy"),
    )
    found = steps(*events)
    assert [each.verdict for each in found] == [
        "jump KUBE-SERVICES", "accept", "return", "goto KUBE-GOTO", "continue", "continue",
        "return", "reject", "drop", "drop", "accept",
    ]  # fmt: skip
    assert {each.table for each in found} == {
        "ip nat (legacy)", "ip filter (legacy)", "ip raw (legacy)",
    }  # fmt: skip
    assert [each.owner for each in found[:2]] == [STEERSMAN, STEERSMAN]
    assert found[8].owner == "another program"


def test_a_chain_of_legacy_that_comes_first_has_the_hook_of_its_packet() -> None:
    (found,) = steps(legacy("nat", "KUBE-SERVICES", 1, "output"))
    assert found.hook == "output"


def test_answers_of_legacy_go_to_the_client() -> None:
    back = Headers("10.96.0.1", 80, "10.1.0.9", 40000, 6, "SYN-ACK")
    found = steps(
        legacy("nat", "OUTPUT", 1, "output"), legacy("filter", "FORWARD", 1, "forward", back)
    )
    assert [each.direction for each in found] == ["original", "reply"]


def test_both_backends_are_merged_by_hook_and_priority() -> None:
    events = (
        *FORWARDED,
        legacy("mangle", "PREROUTING", 0, "prerouting", kind="policy"),
        legacy("filter", "FORWARD", 3, "forward", CARRIED),
        legacy("nat", "POSTROUTING", 0, "postrouting", CARRIED, kind="policy"),
    )
    assert [each.chain for each in steps(*events)] == [
        "PREROUTING", "nat-prerouting", "lb", "forward", "FORWARD", "POSTROUTING",
        "nat-postrouting",
    ]  # fmt: skip


def test_packets_of_the_node_itself_begin_at_output() -> None:
    events = (
        nft("ip kube-proxy", "nat-output", 1, "accept", headers=SENT),
        nft("ip kube-proxy", "nat-postrouting", 3, "accept"),
        legacy("mangle", "PREROUTING", 0, "prerouting", kind="policy"),
        legacy("mangle", "OUTPUT", 0, "output", kind="policy"),
    )
    hooks = [each.hook for each in steps(*events)]
    assert hooks == ["output", "output", "postrouting", "prerouting"]


def test_an_event_before_any_base_chain_has_no_hook() -> None:
    (found,) = steps(nft("ip kube-proxy", "lb", 2, "accept", headers=SENT))
    assert found.hook == ""


def test_the_first_packet_is_that_of_our_rule() -> None:
    assert first_headers(FORWARDED, MINE) == SENT
    assert first_headers(FORWARDED[1:], MINE) is None
    answer = nft(f"inet {MINE}", "reply-prerouting", 6, "continue", packet=2, headers=ANSWER)
    assert first_headers([answer], MINE) is None
