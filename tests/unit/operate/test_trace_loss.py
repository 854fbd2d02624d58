"""Where a packet or its answer was lost, from the places where it was seen and look-ups."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from steersman.model.tracing import Sighting
from steersman.operate.trace_lookups import dropping_rules
from steersman.operate.trace_loss import (
    Hop,
    Surroundings,
    explain_drop,
    explain_silence,
    explain_unsent,
    first_drop,
    last_place,
    other_source,
    shared_address,
)

CLIENT, END = "10.1.0.9", "10.1.0.5"
SENT = Sighting("sent", 1, "eth0", CLIENT, 4000, "10.96.0.1", 80)
RECEIVED = Sighting("received", 2, "pod9", CLIENT, 4000, "10.96.0.1", 80)
FREED = Sighting(
    "dropped", 2, "pod9", CLIENT, 4000, END, 8080, reason="NETFILTER_DROP", function="f"
)
ANSWER = Sighting("sent", 3, "eth0", END, 8080, CLIENT, 4000, reply=True, what="SYN-ACK")
ERROR = Sighting("sent", 3, "eth0", CLIENT, 4000, END, 8080, reply=True, what="an ICMP error")


def around(**more: Any) -> Surroundings:
    values: dict[str, Any] = {"to": Hop(END, "pod5"), "back": Hop(CLIENT, "pod9")} | more
    return Surroundings("this node", "nsenter x ", **values)


def test_the_first_drop_with_a_reason_counts() -> None:
    unknown = replace(FREED, reason="NOT_SPECIFIED")
    assert first_drop([SENT, unknown, replace(FREED, reason="NO_SOCKET"), FREED]) == FREED
    assert first_drop([SENT, unknown]) is None
    assert first_drop([replace(FREED, what="an ICMP error")]) is None


def test_the_place_that_explains_a_loss() -> None:
    assert last_place([SENT, RECEIVED, ERROR]) == RECEIVED
    assert last_place([SENT, ANSWER, SENT]) == ANSWER
    assert last_place([SENT, FREED, ANSWER]) == FREED
    assert last_place([]) is None


@pytest.mark.parametrize(
    ("drop", "what", "code", "text", "shows"),
    [
        (
            FREED,
            around(full="9 of 9 entries"),
            "conntrack-full",
            "dropped at pod9 of this node: the connection table is full (9 of 9 entries)",
            "nf_conntrack_max",
        ),
        (
            FREED,
            around(drops=("a rule",)),
            "foreign-drop",
            "dropped at pod9 of this node by a rule",
            "nsenter x nft -a list ruleset",
        ),
        (
            replace(FREED, device="", reply=True),
            around(drops=("rule 1", "rule 2")),
            "foreign-drop",
            "the answer was dropped in this node by a rule of netfilter, likely rule 1",
            "nft",
        ),
        (
            FREED,
            around(to=Hop(END, trouble="unreachable")),
            "no-route",
            "dropped in this node: no route to 10.1.0.5: unreachable",
            "nsenter x ip route get 10.1.0.5",
        ),
        (
            FREED,
            around(),
            "foreign-drop",
            "dropped at pod9 of this node by a rule of netfilter that no trace reports",
            "nft list ruleset",
        ),
        (
            replace(FREED, reason="TC_EGRESS"),
            around(programs=("filter 1",)),
            "device-program",
            "dropped by a filter or program of tc at the egress of pod9 of this node",
            "tc filter show dev pod9 egress",
        ),
        (
            replace(FREED, reason="QDISC_DROP"),
            around(programs=("qdisc noqueue 0: root refcnt 2", " Sent 0 bytes")),
            "no-carrier",
            "dropped at pod9 of this node, which has no carrier: it or the device at its other end"
            " is down",
            "ip link show dev pod9",
        ),
        (
            replace(FREED, reason="QDISC_DROP"),
            around(programs=("qdisc blackhole",)),
            "device-queue",
            "dropped by the queueing discipline (qdisc) of pod9 of this node",
            "tc -s qdisc show dev pod9",
        ),
        (
            replace(FREED, reason="XDP"),
            around(),
            "device-program",
            "dropped by the XDP program of pod9 of this node",
            "ip link show dev pod9",
        ),
        (
            replace(FREED, reason="IP_RPFILTER"),
            around(back=Hop(CLIENT, "eth1", "192.0.2.9")),
            "rp-filter",
            "dropped at pod9 of this node by rp_filter (net.ipv4.conf.*.rp_filter): the way back to"
            " 10.1.0.9 is eth1 via 192.0.2.9, not pod9",
            "ip route get 10.1.0.9",
        ),
        (
            replace(FREED, reason="IP_INNOROUTES"),
            around(to=Hop(END, trouble="no route to host")),
            "no-route",
            "dropped in this node: no route to 10.1.0.5: no route to host",
            "ip route get 10.1.0.5",
        ),
        (
            replace(FREED, reason="IP_OUTNOROUTES"),
            around(),
            "kernel-drop",
            "dropped at pod9 of this node by the kernel (IP_OUTNOROUTES, in f): there is no route",
            "ip -s link",
        ),
        (
            replace(FREED, reason="NEIGH_FAILED"),
            around(to=Hop(END, "pod5", "10.1.0.1")),
            "neighbour",
            "dropped: the next hop 10.1.0.1 on pod5 of this node does not answer ARP or neighbour"
            " discovery (FAILED)",
            "ip neigh show 10.1.0.1",
        ),
        (
            replace(FREED, reason="IP_INHDR", function="ip_forward"),
            around(),
            "kernel-drop",
            "dropped at pod9 of this node by the kernel (IP_INHDR, in ip_forward): its TTL (hop",
            "ip -s link",
        ),
        (
            replace(FREED, reason="XFRM_POLICY"),
            around(),
            "ipsec",
            "dropped at pod9 of this node by the kernel (XFRM_POLICY, in f): an IPsec policy",
            "nsenter x ip xfrm policy",
        ),
        (
            replace(FREED, reason="PKT_TOO_BIG", device="", function=""),
            around(),
            "too-big",
            "dropped in this node by the kernel (PKT_TOO_BIG): it is larger than the MTU",
            "",
        ),
        (
            replace(FREED, reason="STRANGE"),
            around(),
            "kernel-drop",
            "dropped at pod9 of this node by the kernel (STRANGE, in f)",
            "ip -s link",
        ),
    ],
)
def test_drops(drop: Sighting, what: Surroundings, code: str, text: str, shows: str) -> None:
    found = explain_drop(drop, what)
    assert found.code == code
    assert found.text.startswith(text)
    assert shows in found.shows


HERE = Hop("10.1.0.5", local=True)


@pytest.mark.parametrize(
    ("last", "what", "code", "text"),
    [
        (
            replace(ANSWER, kind="received", netns=1),
            around(),
            "answer-untranslated",
            "the answer reached eth0 of this node from 10.1.0.5:8080 instead of 10.96.0.1:80",
        ),
        (
            replace(ANSWER, kind="received", netns=1, source="10.96.0.1", source_port=80),
            around(),
            "not-taken",
            "the answer reached eth0 of this node, but not the client's socket",
        ),
        (
            replace(RECEIVED, device=""),
            around(to=Hop(END, rule="9: x", trouble="no route")),
            "policy-rule",
            "this node has no route for the packet to 10.1.0.5: no route, by the policy rule",
        ),
        (
            RECEIVED,
            around(to=HERE, back=Hop(CLIENT, trouble="a blackhole route")),
            "no-route",
            "the packet arrived at pod9 of this node, which has no route back to 10.1.0.9: a bl",
        ),
        (
            RECEIVED,
            around(to=HERE, neighbour="INCOMPLETE"),
            "neighbour",
            "the packet arrived at pod9 of this node, and the answer is not sent: the next hop"
            " 10.1.0.9 on pod9 of this node does not answer ARP or neighbour",
        ),
        (
            RECEIVED,
            around(to=HERE),
            "not-answered",
            "the packet arrived at pod9 of this node, and nothing there answers",
        ),
        (
            RECEIVED,
            around(neighbour="FAILED"),
            "neighbour",
            "the packet is not sent: the next hop 10.1.0.5 on pod5 of this node does not answer",
        ),
        (
            RECEIVED,
            around(),
            "not-forwarded",
            "the packet was received by pod9 of this node and not sent on, to pod5",
        ),
        (
            replace(ANSWER, netns=2),
            around(),
            "left",
            "the answer left this node by eth0, and nothing came back",
        ),
        (
            SENT,
            around(to=Hop(END, "eth1", rule="9: from all lookup 7")),
            "policy-rule",
            "the packet left this node by eth0, and nothing came back; the policy rule '9: from all"
            " lookup 7' chose this way",
        ),
    ],
)
def test_silence(last: Sighting, what: Surroundings, code: str, text: str) -> None:
    found = explain_silence(last, what, ("10.96.0.1", 80), client=1)
    assert found.code == code
    assert found.text.startswith(text)


def test_a_packet_that_is_not_sent() -> None:
    assert explain_unsent(around()) is None
    found = explain_unsent(around(to=Hop(END, trouble="Network is unreachable")))
    assert found is not None
    assert found.text == "this node cannot send the packet: Network is unreachable"
    found = explain_unsent(around(neighbour="FAILED"))
    assert found is not None
    assert found.code == "neighbour"


def test_an_answer_from_another_address() -> None:
    assert other_source([SENT, ERROR], f"{END}:8080") is None
    assert other_source([SENT, ANSWER], "") is None
    assert other_source([SENT, ANSWER], f"{END}:8080") is None
    # Where it is received first, it may have been translated already.
    assert other_source([SENT, replace(ANSWER, kind="received")], "10.1.0.6:8080") is None
    found = other_source([SENT, ANSWER], "10.1.0.6:8080")
    assert found is not None
    assert found.text == "the endpoint 10.1.0.6:8080 answers from 10.1.0.5:8080, by eth0"


def test_an_address_of_two_pods() -> None:
    assert shared_address(f"{END}:8080", around(holders=("a",))) is None
    found = shared_address("[fd00::5]:8080", around(holders=("a", "b")))
    assert found is not None
    assert found.text == "fd00::5 is an address of 2 pods of this node: a and b"


LISTING = """\
table netdev guard { # handle 1
\tchain c { # handle 1
\t\ttype filter hook ingress device "pod2" priority filter; policy drop;
\t\tip daddr 10.96.0.10 drop # handle 2
\t\tip daddr 10.96.0.11 accept # handle 3
\t}
}
table inet cali-filter { # handle 2
\tchain cali-fw { # handle 1
\t\ttcp dport 80 reject with tcp reset # handle 5
\t}
}
"""


def test_rules_that_drop() -> None:
    assert list(dropping_rules(LISTING, ("netdev", "bridge"))) == [
        "the policy of chain c of table netdev guard",
        "a rule of another program in chain c of table netdev guard (handle 2):"
        " ip daddr 10.96.0.10 drop",
    ]
    assert list(dropping_rules(LISTING))[2:] == [
        "a rule of Calico in chain cali-fw of table inet cali-filter (handle 5):"
        " tcp dport 80 reject with tcp reset"
    ]
