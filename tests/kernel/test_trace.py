"""`steersman trace`: real packets, in each mode, beside what the plan predicts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from steersman.model.names import Protocol
from steersman.model.plan import ServicePlan
from steersman.operate.answer import QuestionError
from tests.support.builders import nftables_plans as make
from tests.support.builders.plans import DROPPED, REJECTED
from tests.support.lab.cluster import Lab
from tests.support.lab.switches import CLIENT, ENDS, NODE, OUTSIDE, mode_of
from tests.support.lab.traced import (
    FRONTENDS,
    PATIENCE,
    SERVICE,
    VIP,
    Traced,
    first_difference,
    foreign,
    service_lab,
    serving,
    world_of,
)

pytestmark = pytest.mark.kernel
RULES = [("iptables", "nft"), ("iptables", "legacy"), ("nftables", "nft")]
every_mode = pytest.mark.parametrize(("name", "variant"), RULES)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with service_lab() as lab:
        yield lab


def mode_in(lab: Lab, name: str, variant: str, service: ServicePlan = SERVICE) -> Traced:
    return serving(lab, mode_of(lab, name, variant), service)


@every_mode
@pytest.mark.parametrize("source", ["", CLIENT, ENDS[0]])
@pytest.mark.parametrize("to", [(VIP, 80), (NODE, 30080)])
def test_a_packet_goes_as_predicted(
    lab: Lab, name: str, variant: str, source: str, to: tuple[str, int]
) -> None:
    node = mode_in(lab, name, variant)
    answer = node.trace(*to, source=source)
    assert answer.differences == ()
    assert answer.exit_code == 0
    assert answer.service == "shop/web:http"
    assert answer.reply is not None
    assert answer.reply.text == "SYN-ACK"
    assert answer.endpoint in ("10.244.0.0:8080", "10.244.0.2:8080")
    assert answer.connection is not None
    masqueraded = to[1] == 30080 or source == "" or answer.endpoint.startswith(f"{source}:")
    assert answer.connection.seen_source == (NODE if masqueraded else source)
    translating = [shown for shown in answer.steps if "the destination is now" in shown.step.note]
    assert [shown.step.note for shown in translating] == [
        f"the destination is now {answer.endpoint}"
    ]
    assert all(shown.predicted == "to one of 2 endpoints" for shown in translating)
    assert all(shown.matches for shown in answer.steps)
    assert {shown.step.owner for shown in translating} == {"steersman"}


@every_mode
@pytest.mark.parametrize("tool", ["nft", "iptables-nft", "iptables-legacy"])
@pytest.mark.parametrize("verdict", ["drop", "reject"])
def test_a_rule_of_another_program_is_named(
    lab: Lab, name: str, variant: str, tool: str, verdict: str
) -> None:
    node = mode_in(lab, name, variant)
    foreign(lab, tool, "forward", verdict)
    answer = node.trace(source=CLIENT, timeout=0.3 if verdict == "drop" else PATIENCE)
    assert answer.exit_code == 1
    last = [shown for shown in answer.steps if shown.step.direction == "original"][-1]
    assert (last.step.verdict, last.step.hook, last.matches) == (verdict, "forward", False)
    done = {"drop": "dropped", "reject": "rejected"}[verdict]
    who = "another program" if tool == "nft" else "Docker"
    where = "forward of table inet firewall" if tool == "nft" else "DOCKER-USER of table ip filter"
    where += " (legacy)" if tool == "iptables-legacy" else ""
    handle = f"(forward, handle {last.step.handle})"
    assert first_difference(answer).startswith(
        f"{done} by a rule of {who} in chain {where} {handle}"
    )
    assert last.step.handle > 0
    assert answer.reply is not None
    assert answer.reply.kind == {"drop": "none", "reject": "icmp"}[verdict]


@every_mode
def test_the_policy_of_a_chain_is_named(lab: Lab, name: str, variant: str) -> None:
    node = mode_in(lab, name, variant)
    tool = f"iptables-{variant}"
    lab.run(tool, "-P", "FORWARD", "DROP")
    if name == "iptables":  # our KUBE-FORWARD lets it pass, unless its rules come too late
        lab.run(tool, "-F", "FORWARD")
    answer = node.trace(source=CLIENT, timeout=0.3)
    assert first_difference(answer).startswith("dropped by the policy of chain FORWARD of table ip")


@every_mode
def test_a_dropped_answer_is_found(lab: Lab, name: str, variant: str) -> None:
    node = mode_in(lab, name, variant)
    rules = "table inet firewall { chain f { type filter hook forward priority -10; "
    lab.run("nft", "-f", "-", stdin=rules + "tcp sport 8080 drop; }; }")
    answer = node.trace(source=CLIENT, timeout=0.3)
    assert first_difference(answer).startswith("the answer was dropped by a rule of another")
    assert answer.endpoint


@every_mode
@pytest.mark.parametrize(
    ("actions", "verdict", "kind"),
    [(REJECTED, "reject", "icmp"), (DROPPED, "drop", "none")],
)
def test_refusals_of_the_plan_are_as_predicted(
    lab: Lab, name: str, variant: str, actions: Any, verdict: str, kind: str
) -> None:
    service = make.port([], frontends=(make.cluster_ip(actions),))
    node = mode_in(lab, name, variant, service)
    answer = node.trace(source=CLIENT, timeout=0.3 if kind == "none" else PATIENCE)
    assert answer.differences == ()
    assert answer.exit_code == 1  # the client gets no connection all the same
    last = [shown for shown in answer.steps if shown.step.direction == "original"][-1]
    assert (last.step.verdict, last.step.owner) == (verdict, "steersman")
    assert last.matches
    assert answer.reply is not None
    assert answer.reply.kind == kind


@every_mode
def test_rules_that_are_not_those_of_the_plan_are_a_difference(
    lab: Lab, name: str, variant: str
) -> None:
    node = mode_in(lab, name, variant)
    moved = make.port([4], frontends=FRONTENDS)
    node.world = world_of(node.mode, moved)
    assert "instead of to 10.244.0.4:8080; steersman drift says" in first_difference(node.trace())
    node.world = world_of(node.mode, make.port([], frontends=(make.cluster_ip(REJECTED),)))
    assert first_difference(node.trace()).startswith("no rule stopped the packet: it went to 10")
    node.world = world_of(node.mode)
    if name == "nftables":
        lab.run("nft", "delete", "table", "ip", "kube-proxy")
    else:
        lab.run(f"iptables-{variant}", "-t", "nat", "-F")
    unserved = node.trace(timeout=0.3)
    assert first_difference(unserved).startswith("the packet was not translated to")


@every_mode
def test_an_endpoint_that_does_not_listen_is_named(lab: Lab, name: str, variant: str) -> None:
    node = mode_in(lab, name, variant)
    lab.silence()
    answer = node.trace(source=CLIENT)
    assert first_difference(answer) == f"the endpoint {answer.endpoint} refuses the connection: RST"


@every_mode
@pytest.mark.parametrize("protocol", ["UDP", "SCTP"])
def test_other_protocols(lab: Lab, name: str, variant: str, protocol: str) -> None:
    kind = Protocol(protocol)
    service = make.port([0, 2], of=make.key(protocol=kind))
    for address in ENDS:
        lab.serve(address, 8080, protocol)
    answer = mode_in(lab, name, variant, service).trace(source=CLIENT, protocol=kind)
    assert answer.differences == ()
    assert answer.reply is not None
    assert answer.reply.answered
    assert answer.endpoint in ("10.244.0.0:8080", "10.244.0.2:8080")


@every_mode
def test_real_traffic_is_waited_for(lab: Lab, name: str, variant: str) -> None:
    node = mode_in(lab, name, variant)
    done = threading.Event()

    def clients() -> None:
        with ExitStack() as open_:  # a connection that ended would not be in conntrack
            while not done.wait(0.5):
                sock = open_.enter_context(lab.socket(OUTSIDE, "TCP"))
                sock.bind((OUTSIDE, 0))
                sock.connect((NODE, 30080))

    caller = threading.Thread(target=clients)
    caller.start()
    try:
        answer = node.trace(NODE, 30080, wait=True, timeout=30)
    finally:
        done.set()
        caller.join()
    assert answer.flow.startswith(f"{OUTSIDE}:")
    assert answer.reply is None
    assert answer.differences == ()
    assert answer.connection is not None
    assert answer.connection.seen_source == NODE


def test_a_packet_that_never_comes_is_an_error(lab: Lab) -> None:
    node = mode_in(lab, "nftables", "nft")
    with pytest.raises(QuestionError, match=r"any to 10\.96\.0\.10:80/TCP came within 0\.1 s"):
        node.trace(wait=True, timeout=0.1)
    with pytest.raises(QuestionError, match="no network namespace that this process sees has"):
        node.trace(source="10.244.99.99", netns=None)


through_a_proxy = pytest.mark.parametrize("variant", ["nft", "legacy", "nftables"])


@through_a_proxy
@pytest.mark.parametrize(
    ("source", "to"), [("", (VIP, 80)), (CLIENT, (VIP, 80)), (CLIENT, (NODE, 30080))]
)
def test_the_proxy_is_followed_to_the_endpoint(
    lab: Lab, variant: str, source: str, to: tuple[str, int]
) -> None:
    answer = mode_in(lab, "userspace", variant).trace(*to, source=source)
    assert answer.differences == ()
    (dialled,) = [shown for shown in answer.steps if shown.step.hook == "proxy"]
    assert dialled.step.verdict == "connected"
    assert dialled.step.rule == f"connects to {answer.endpoint}"
    assert dialled.predicted == "to one of 2 endpoints"
    assert f"(pid {os.getpid()})" in dialled.step.chain


def test_a_datagram_is_followed_through_the_proxy(lab: Lab) -> None:
    service = make.port([0, 2], of=make.key(protocol=Protocol.UDP))
    node = mode_in(lab, "userspace", "nftables", service)
    for _ in range(10):  # the proxy may have closed its socket before it is seen
        answer = node.trace(source=CLIENT, protocol=Protocol.UDP)
        assert answer.differences == ()
        if answer.endpoint:
            break
    assert answer.endpoint in ("10.244.0.0:8080", "10.244.0.2:8080")


@through_a_proxy
def test_a_rule_before_the_proxy_is_named(lab: Lab, variant: str) -> None:
    node = mode_in(lab, "userspace", variant)
    rules = "table inet firewall { chain i { type filter hook input priority -10; "
    lab.run("nft", "-f", "-", stdin=rules + f"ip saddr {CLIENT} drop; }}; }}")
    answer = node.trace(source=CLIENT, timeout=0.3)
    assert first_difference(answer).startswith("dropped by a rule of another program in chain i of")
    assert answer.endpoint == ""


def test_the_proxy_has_no_endpoint_that_accepts(lab: Lab) -> None:
    node = mode_in(lab, "userspace", "nft")
    lab.silence()
    assert first_difference(node.trace(source=CLIENT)).startswith(
        "the proxy accepted the connection"
    )
