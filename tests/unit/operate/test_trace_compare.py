"""What the kernel did beside what was predicted: the first difference is the one that counts."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from steersman.compile.trace import TraceResult
from steersman.model.drift import Drift, DriftState
from steersman.model.names import Family, ObjectName, PlanKey, Protocol, ServicePortName
from steersman.model.plan import Endpoint
from steersman.model.tracing import Sighting, TraceStep, TrackedConnection, WatchedFlow
from steersman.model.world import Origin, World
from steersman.modes.tracer import Tracer
from steersman.operate.answer import QuestionError
from steersman.operate.drift import DriftAnswer
from steersman.operate.trace import TraceAnswer, trace_packet
from steersman.operate.trace_compare import (
    Observation,
    command_for,
    compare,
    describe_end,
    expectation,
    mark_of,
    prediction,
    short_rule,
)
from steersman.operate.trace_loss import Hop, Surroundings
from steersman.operate.trace_question import TraceQuestion
from tests.support.builders.doctor import CART, world_of
from tests.support.builders.objects import endpoint, service, slice_

A, B = Endpoint("10.1.0.5", 8080), Endpoint("10.1.1.7", 8080)
FORWARD = TraceResult("forward", (A, B))
MASQUERADED = TraceResult("forward", (A, B), masquerade=True)
JUMP = TraceStep("prerouting", "nat-prerouting", "jump lb", "jump lb", "ip kube-proxy", 1)
DNAT = TraceStep("prerouting", "lb", "dnat to x", "accept", "ip kube-proxy", 2, endpoint=str(A))
SNAT = TraceStep("postrouting", "nat-postrouting", "masquerade", "accept", "ip kube-proxy", 3)
FIREWALL = TraceStep(
    "forward", "DOCKER-USER", "-A DOCKER-USER -j DROP", "drop", "ip filter", 7, "Docker"
)
OWN_DROP = TraceStep("prerouting", "check", "drop", "drop", "ip kube-proxy", 9)
OWN_REJECT = TraceStep("prerouting", "check", "reject", "reject", "ip kube-proxy", 9)


def connection(endpoint: Endpoint = A, seen: str = "10.1.0.9", **more: Any) -> TrackedConnection:
    values: dict[str, Any] = {"source": "10.1.0.9", "destination": "10.96.0.1", "port": 80} | more
    return TrackedConnection(
        source_port=4000, endpoint=endpoint.ip, endpoint_port=endpoint.port,
        seen_source=seen, seen_port=4000, **values,
    )  # fmt: skip


def seen(*steps: TraceStep, **more: Any) -> Observation:
    values: dict[str, Any] = {"connection": connection(), "answer": "answer"} | more
    return Observation(steps, **values)


def texts(predicted: TraceResult, what: Observation) -> list[tuple[int, str]]:
    return [(each.step, each.text) for each in compare(predicted, what)]


@pytest.mark.parametrize(
    ("predicted", "what"),
    [
        (FORWARD, seen(JUMP, DNAT)),
        (FORWARD, seen(JUMP)),  # conntrack has the endpoint
        (FORWARD, seen(JUMP, DNAT, connection=None)),
        (FORWARD, seen(JUMP, DNAT, answer="unknown")),
        (MASQUERADED, seen(JUMP, DNAT, SNAT, connection=connection(seen="192.0.2.1"))),
        (TraceResult("drop"), seen(OWN_DROP, connection=None, answer="none")),
        (TraceResult("drop"), seen(JUMP, connection=None, answer="none")),
        (TraceResult("reject"), seen(OWN_REJECT, connection=None, answer="icmp")),
        (TraceResult("accept"), seen(JUMP, connection=connection(destination=A.ip, port=8080))),
    ],
)
def test_nothing_differs(predicted: TraceResult, what: Observation) -> None:
    assert compare(predicted, what) == ()


def test_another_programs_rule_is_named_with_chain_and_handle() -> None:
    what = seen(JUMP, DNAT, FIREWALL, connection=None, answer="none")
    assert texts(FORWARD, what) == [
        (
            3,
            "dropped by a rule of Docker in chain DOCKER-USER of table ip filter"
            " (forward, handle 7): -j DROP",
        )
    ]
    assert texts(TraceResult("drop"), what)[0][0] == 3


def test_our_own_rule_against_the_plan() -> None:
    what = seen(OWN_DROP, connection=None, answer="none")
    for drifted, (code, end) in {
        True: (
            "rules-differ",
            "the rules in the kernel are not those of the plan: see steersman drift",
        ),
        False: (
            "rules-agree",
            "the rules in the kernel are those of the plan: something else decided",
        ),
        None: (
            "rules",
            "steersman drift says whether the rules in the kernel are those of the plan",
        ),
    }.items():
        (found,) = compare(FORWARD, what._replace(drifted=drifted))
        assert (found.step, found.code) == (1, code)
        assert found.text.endswith(f"drop; {end}")
        assert found.shows == "nft -a list chain ip kube-proxy check"
    assert len(texts(TraceResult("reject"), seen(OWN_DROP, connection=None))) == 1


def test_a_policy_has_no_rule() -> None:
    policy = TraceStep("input", "INPUT", "", "drop", "ip filter", owner="another program")
    assert describe_end(policy) == "dropped by the policy of chain INPUT of table ip filter (input)"
    program = TraceStep("connect", "cgroup/connect4", "no endpoint", "reject")
    assert describe_end(program) == (
        "rejected by a rule of steersman in chain cgroup/connect4 (connect): no endpoint"
    )


def test_another_endpoint() -> None:
    other = Endpoint("10.1.9.9", 1)
    ((step, text),) = texts(FORWARD, seen(JUMP, connection=connection(other)))
    assert (step, text.partition(";")[0]) == (
        0,
        "the packet went to 10.1.9.9:1 instead of to 10.1.0.5:8080 or 10.1.1.7:8080",
    )


@pytest.mark.parametrize(
    ("predicted", "steps", "text"),
    [
        (FORWARD, (JUMP,), "the packet was not translated to 10.1.0.5:8080 or"),
        (TraceResult("accept"), (DNAT,), "the packet went to 10.1.0.5:8080, but no rule should"),
        (TraceResult("drop"), (DNAT,), "no rule stopped the packet: it went to 10.1.0.5:8080"),
        (TraceResult("reject"), (JUMP,), "no rule stopped the packet: it passed"),
        (FORWARD, (), "no hook of this node's kernel saw the packet"),
    ],
)
def test_what_became_of_it(predicted: TraceResult, steps: tuple[TraceStep, ...], text: str) -> None:
    assert texts(predicted, seen(*steps, connection=None))[0][1].startswith(text)


@pytest.fixture(autouse=True)
def no_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers to the packets of these tests never come."""
    monkeypatch.setattr("steersman.operate.trace._SETTLED_WITHIN", 0.1)


class _Waited(Tracer):
    """A packet of real traffic to 10.96.0.10:80 that was sent to 10.1.0.6."""

    async def start(self, flow: WatchedFlow) -> None:
        self.flow = msgspec.structs.replace(flow, source="192.0.2.9", source_port=4000)

    async def first_packet(self) -> WatchedFlow:
        return self.flow

    async def steps(self) -> tuple[TraceStep, ...]:
        return (msgspec.structs.replace(DNAT, endpoint="10.1.0.6:8080"),)

    async def connection(self, flow: WatchedFlow) -> TrackedConnection | None:
        return None

    async def aclose(self) -> None:
        pass


def test_a_packet_is_compared_with_the_plan_of_its_time() -> None:
    """`trace --wait` may wait for minutes, in which a Service gets other endpoints."""
    before, later = (world_of(service(), slice_(endpoint(f"10.1.0.{n}"))) for n in (5, 6))

    def traced(now: World) -> TraceAnswer:
        async def renew(_: World, services: Collection[ObjectName]) -> World:
            assert [*services] == [CART]
            return now

        question = TraceQuestion("10.96.0.10", 80, wait=True, timeout=60.0)
        return asyncio.run(trace_packet(before, question, _Waited, renew))

    assert not traced(later).differences
    assert traced(later).predicted.startswith("forwarded to 10.1.0.6:8080")
    assert traced(before).differences[0].text.startswith("the packet went to 10.1.0.6:8080 instead")


def test_masquerading() -> None:
    cni = TraceStep(
        "postrouting", "FLANNEL-POSTRTG", "-A X -j MASQUERADE", "accept", owner="Flannel"
    )
    masqueraded = connection(seen="192.0.2.1")
    assert texts(FORWARD, seen(DNAT, cni, connection=masqueraded)) == [
        (
            2,
            "the endpoint sees 192.0.2.1 instead of 10.1.0.9: the packet is masqueraded by a rule"
            " of Flannel in chain FLANNEL-POSTRTG (postrouting): -j MASQUERADE",
        )
    ]
    assert texts(FORWARD, seen(DNAT, connection=masqueraded))[0] == (
        0,
        "the endpoint sees 192.0.2.1 instead of 10.1.0.9: the packet is masqueraded by a rule that"
        " was not seen",
    )
    assert texts(MASQUERADED, seen(DNAT))[0][1].startswith("not masqueraded: the endpoint sees")
    assert compare(MASQUERADED, seen(DNAT, local=("10.1.0.9",))) == ()  # its own address already
    assert compare(MASQUERADED, seen(DNAT, terminates=True)) == ()
    to_itself = connection(seen="192.0.2.1", source=A.ip)
    assert compare(FORWARD, seen(DNAT, connection=to_itself)) == ()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("reset", "the endpoint 10.1.0.5:8080 refuses the connection: why"),
        ("icmp", "the endpoint 10.1.0.5:8080 refuses the connection: why"),
        ("none", "the packet was sent to the endpoint 10.1.0.5:8080, which did not answer: why"),
        ("not-sent", "why"),
    ],
)
def test_the_answer(answer: str, text: str) -> None:
    assert texts(FORWARD, seen(DNAT, answer=answer, answer_text="why")) == [(0, text)]


def test_a_packet_that_was_not_sent_went_nowhere() -> None:
    what = seen(JUMP, connection=None, answer="not-sent", answer_text="no route")
    assert texts(FORWARD, what) == [(0, "no route")]


def test_an_answer_that_does_not_arrive() -> None:
    back = TraceStep("forward", "x", "", "accept", direction="reply")
    what = seen(DNAT, back, answer="none", answer_text="nothing")
    assert texts(FORWARD, what) == [
        (
            0,
            "the endpoint 10.1.0.5:8080 answered, but its answer did not reach the client: nothing",
        )
    ]
    dropped = TraceStep("forward", "x", "drop", "drop", "ip t", 4, "ufw", direction="reply")
    assert texts(FORWARD, seen(DNAT, dropped, answer="none")) == [
        (
            2,
            "the answer was dropped by a rule of ufw in chain x of table ip t (forward, handle 4):"
            " drop",
        )
    ]


def test_an_untouched_packet_has_a_destination() -> None:
    what = seen(JUMP, connection=None, answer="reset", answer_text="RST")
    assert texts(TraceResult("accept"), what)[0][1] == "the destination refuses the connection: RST"


@pytest.mark.parametrize(
    ("predicted", "what", "step", "expected"),
    [
        (FORWARD, seen(JUMP), JUMP, ("", True)),
        (FORWARD, seen(DNAT), DNAT, ("to one of 2 endpoints", True)),
        (TraceResult("forward", (B,)), seen(DNAT), DNAT, ("to 10.1.1.7:8080", False)),
        (TraceResult("drop"), seen(DNAT), DNAT, ("dropped", False)),
        (TraceResult("drop"), seen(OWN_DROP), OWN_DROP, ("dropped", True)),
        (TraceResult("drop"), seen(FIREWALL), FIREWALL, ("dropped", False)),
        (FORWARD, seen(FIREWALL), FIREWALL, ("forwarded", False)),
        (MASQUERADED, seen(SNAT), SNAT, ("masqueraded", True)),
        (FORWARD, seen(SNAT), SNAT, ("not masqueraded", False)),
        (FORWARD, seen(SNAT, connection=None), SNAT, ("", True)),
        (
            FORWARD,
            seen(SNAT, connection=connection(A, "192.0.2.1", source=A.ip)),
            SNAT,
            ("masqueraded", True),
        ),
    ],
)
def test_a_step_is_shown_beside_its_prediction(
    predicted: TraceResult, what: Observation, step: TraceStep, expected: tuple[str, bool]
) -> None:
    assert expectation(predicted, what, step) == expected


@pytest.mark.parametrize(("verdict", "text"), [("drop", "passes"), ("accept", "")])
def test_an_answer_should_pass(verdict: str, text: str) -> None:
    step = TraceStep("forward", "x", "", verdict, direction="reply")
    assert expectation(FORWARD, seen(step), step) == (text, not text)


@pytest.mark.parametrize(
    ("predicted", "text"),
    [
        (FORWARD, "forwarded to 10.1.0.5:8080 or 10.1.1.7:8080, not masqueraded"),
        (MASQUERADED, "forwarded to 10.1.0.5:8080 or 10.1.1.7:8080, masqueraded"),
        (TraceResult("accept"), "left alone"),
        (TraceResult("reject"), "rejected"),
    ],
)
def test_predictions_in_words(predicted: TraceResult, text: str) -> None:
    assert prediction(predicted) == text


def test_a_proxy_is_no_endpoint() -> None:
    assert prediction(FORWARD, True) == "forwarded by the proxy to 10.1.0.5:8080 or 10.1.1.7:8080"
    relay = TraceStep("relay", "proxy", "connects to B", "forward", endpoint=str(B))
    assert seen(relay, terminates=True).endpoint == str(B)
    assert seen(JUMP, terminates=True).endpoint == ""


def test_the_proxy_answers_before_the_endpoint() -> None:
    relay = TraceStep("proxy", "x (pid 1)", "connects", "connecting", endpoint=str(A))
    assert texts(FORWARD, seen(JUMP, relay, terminates=True)) == [
        (2, "the endpoint 10.1.0.5:8080 has not answered the proxy yet")
    ]
    assert texts(FORWARD, seen(JUMP, terminates=True)) == [
        (
            0,
            "the proxy accepted the connection, but has none to 10.1.0.5:8080 or 10.1.1.7:8080:"
            " they may refuse it",
        )
    ]
    # Only an endpoint answers a datagram, also if the proxy's socket to it is not seen.
    name = ServicePortName("shop", "web", "", Protocol.UDP)
    datagram = replace(FORWARD, plan=PlanKey(name, Family.IPV4))
    assert texts(datagram, seen(JUMP, terminates=True)) == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("dnat to 10.1.0.5", "dnat to 10.1.0.5"),
        (
            '-A KUBE-SVC-X -d 10.0.0.1/32 -m comment --comment "shop/web cluster IP" -j KUBE-X',
            "-d 10.0.0.1/32 -j KUBE-X /* shop/web cluster IP */",
        ),
        ("-A FORWARD -m comment --comment one -j DROP", "-j DROP /* one */"),
    ],
)
def test_rules_of_iptables_are_shown_without_their_chain(rule: str, text: str) -> None:
    assert short_rule(rule) == text


FOREIGN_DNAT = TraceStep(
    "prerouting", "c", "dnat to 10.9.9.9:1", "accept", "ip other", 4, "another program",
    endpoint="10.9.9.9:1",
)  # fmt: skip
NOTRACK = TraceStep("prerouting", "c", "notrack", "continue", "inet raw", 5, "another program")
EARLY = TraceStep(
    "prerouting", "PREROUTING", "-A PREROUTING -j ACCEPT", "accept", "ip nat (legacy)", 1, "Docker"
)
REMARK = TraceStep(
    "postrouting", "c", "meta mark set 0x00000000", "continue", "ip6 mangle", 6, "another program"
)


@pytest.mark.parametrize(
    ("what", "code", "words", "shows"),
    [
        (
            seen(FOREIGN_DNAT, JUMP, connection=None),
            "foreign-translation",
            "went to 10.9.9.9:1 instead of to 10.1.0.5:8080 or 10.1.1.7:8080, by a rule of another"
            " program in chain c of table ip other (prerouting, handle 4): dnat to 10.9.9.9:1",
            "nft -a list chain ip other c",
        ),
        (
            seen(NOTRACK, connection=None),
            "not-tracked",
            "was not translated to 10.1.0.5:8080 or 10.1.1.7:8080: it is not tracked, by"
            " a rule of another program in chain c of table inet raw",
            "nft -a list chain inet raw c",
        ),
        (
            seen(EARLY, connection=None),
            "foreign-accept",
            "it does not reach the Service's rules, by a rule of Docker in chain PREROUTING",
            "iptables-legacy -t nat -S PREROUTING",
        ),
        (
            seen(JUMP, connection=None),
            "rules",
            "was not translated to 10.1.0.5:8080 or 10.1.1.7:8080; steersman drift says",
            "steersman drift",
        ),
    ],
)
def test_who_led_the_packet_elsewhere(what: Observation, code: str, words: str, shows: str) -> None:
    (found,) = compare(FORWARD, what)
    assert (found.code, found.shows) == (code, shows)
    assert words in found.text


def test_who_changed_the_mark() -> None:
    what = seen(JUMP, DNAT, REMARK)
    (found,) = compare(MASQUERADED, what)
    assert (found.code, found.step) == ("mark-changed", 3)
    assert found.shows == "ip6tables -t mangle -S c"
    assert found.text.startswith(
        "not masqueraded: the endpoint sees 10.1.0.9 instead of an address of this node, as the"
        " packet's mark is changed by a rule of another program in chain c of table ip6 mangle"
    )
    assert mark_of(what.steps) == 0
    assert mark_of([replace(REMARK, rule="-A c -j MARK --set-xmark 0x4000/0x4000")]) == 0x4000
    assert mark_of([JUMP]) == 0


def test_who_kept_the_packet_from_being_masqueraded() -> None:
    accept = replace(
        EARLY, hook="postrouting", chain="POSTROUTING", rule="-A POSTROUTING -j ACCEPT"
    )
    (found,) = compare(MASQUERADED, seen(JUMP, DNAT, accept))
    assert (found.code, found.step) == ("foreign-accept", 3)
    assert "it does not reach the rules for that, by a rule of Docker in chain POST" in found.text


def test_a_program_has_no_chain_to_show() -> None:
    program = TraceStep("ingress", "sm_ingress", "", "drop", "eth0", owner="the kernel")
    assert command_for(program) == ""


PLACE = Surroundings("this node", to=Hop("10.1.0.5", "pod1"))
NOWHERE = Surroundings("this node", to=Hop("10.1.0.5", trouble="a blackhole route"))
SENT = Sighting("sent", 1, "eth0", "10.1.0.9", 4000, "10.96.0.1", 80)
RECEIVED = Sighting("received", 2, "pod9", "10.1.0.9", 4000, "10.96.0.1", 80)
FREED = Sighting(
    "dropped", 2, "pod9", "10.1.0.9", 4000, "10.96.0.1", 80, reason="TC_INGRESS"
)  # fmt: skip


def lost(*sightings: Sighting, around: Surroundings | None = PLACE, **more: Any) -> Observation:
    """A packet that nobody answered, and where it was seen."""
    values: dict[str, Any] = {"answer": "none", "connection": None, "around": around} | more
    steps = values.pop("steps", ())
    return seen(*steps, sightings=sightings, **values)


def test_a_pod_that_meets_itself_without_masquerading_drops_its_own_packet() -> None:
    itself = connection(source=A.ip, seen=A.ip)
    back = replace(FREED, reason="IP_LOCAL_SOURCE", source=A.ip)
    accept = TraceStep("postrouting", "POSTROUTING", "-A X -j ACCEPT", "accept", "ip nat", 4, "Y")
    what = lost(SENT, back, steps=(DNAT, accept), connection=itself)
    (found,) = compare(FORWARD, what)
    assert (found.step, found.code) == (2, "foreign-accept")
    assert "it does not reach the rules for that, by a rule of Y" in found.text


def test_a_drop_beside_the_rules_is_named() -> None:
    (found,) = compare(FORWARD, lost(SENT, RECEIVED, FREED))
    assert found.code == "device-program"
    assert found.text == "dropped by a filter or program of tc at the ingress of pod9 of this node"
    # After the answer it does not matter, and without look-ups it is not judged.
    assert compare(FORWARD, seen(JUMP, DNAT, sightings=[FREED], around=PLACE)) == ()
    (found,) = compare(FORWARD, lost(FREED, around=None))
    assert found.code == "unseen"
    # A rule that dropped the packet is named itself; the kernel's own step says less.
    (found,) = compare(FORWARD, lost(FREED, steps=(FIREWALL,)))
    assert found.code == "foreign-drop"
    kernel = TraceStep("kernel", "f", "TC_INGRESS", "drop", "", owner="the kernel")
    (found,) = compare(FORWARD, lost(FREED, steps=(kernel,)))
    assert found.code == "device-program"
    # What no rule translated left this node as it came, and is dropped elsewhere.
    passed = Sighting("sent", 2, "eth1", "10.1.0.9", 4000, "10.96.0.1", 80)
    found, *_ = compare(FORWARD, lost(SENT, RECEIVED, passed, FREED, steps=(JUMP,), node=2))
    assert found.code == "rules"
    # An ICMP error about it has left, and not the packet.
    freed = replace(FREED, reason="NEIGH_FAILED")
    told = Sighting("sent", 2, "pod9", "10.1.0.9", 4000, "10.96.0.1", 80, True, "an ICMP error")
    (found,) = compare(FORWARD, lost(SENT, RECEIVED, told, freed, steps=(JUMP,), node=2))
    assert found.code == "neighbour"
    # What another program's rule led elsewhere is its fault, wherever it ended.
    found, *_ = compare(FORWARD, lost(FREED, steps=(FOREIGN_DNAT,)))
    assert found.code == "foreign-translation"


def test_a_packet_that_vanishes_after_our_rule_was_not_left_alone() -> None:
    rule = replace(DNAT, endpoint="")
    (found,) = compare(FORWARD, lost(SENT, RECEIVED, steps=(JUMP, rule), around=NOWHERE))
    assert found.code == "no-route"
    # Programs of devices translate after the device is seen to receive.
    (found,) = compare(FORWARD, lost(SENT, RECEIVED, steps=(JUMP,), around=NOWHERE))
    assert found.code == "no-route"
    (found, *_) = compare(FORWARD, lost(SENT, steps=(JUMP,), around=NOWHERE))
    assert found.code == "rules"
    (found, *_) = compare(FORWARD, lost(SENT, RECEIVED, steps=(JUMP,), around=None))
    assert found.code == "rules"


@pytest.mark.parametrize(
    ("what", "code"),
    [
        (lost(SENT, RECEIVED, steps=(JUMP, DNAT)), "not-forwarded"),
        (lost(SENT, steps=(JUMP, DNAT), answer="reset"), "refused"),
        (
            lost(SENT, steps=(JUMP, DNAT), answer="icmp", answer_text="ICMP port unreachable"),
            "refused",
        ),
        (lost(SENT, steps=(JUMP, DNAT), answer="icmp", answer_text="ICMP TTL exceeded"), "left"),
        (
            lost(
                SENT, RECEIVED, steps=(JUMP, DNAT), answer="icmp",
                answer_text="ICMP administratively prohibited", around=NOWHERE,
            ),
            "no-route",
        ),
        (
            lost(
                SENT,
                replace(SENT, kind="received", reply=True, what="SYN-ACK"),
                steps=(JUMP, DNAT), answer="icmp", answer_text="ICMP host unreachable", client=1,
            ),
            "refused",
        ),
        (lost(steps=(JUMP, DNAT)), "not-answered"),
        (lost(SENT, steps=(JUMP, DNAT), terminates=True), "not-answered"),
        (
            lost(SENT, steps=(JUMP, DNAT), around=Surroundings("x", holders=("a", "b"))),
            "shared-address",
        ),
        (
            lost(
                SENT,
                Sighting("sent", 3, "eth0", "10.1.0.6", 8080, "10.1.0.9", 4000, True, "SYN-ACK"),
                steps=(JUMP, DNAT),
            ),
            "answer-source",
        ),
        (
            lost(SENT, replace(FREED, reply=True), steps=(JUMP, DNAT)),
            "device-program",
        ),
        (
            lost(steps=(JUMP, DNAT), answer="not-sent", around=NOWHERE),
            "no-route",
        ),
        (lost(steps=(JUMP, DNAT), answer="not-sent", answer_text="x"), "not-sent"),
        (lost(around=NOWHERE), "no-route"),
        (
            lost(
                steps=(JUMP, replace(DNAT, endpoint="")),
                answer="icmp",
                answer_text="ICMP host unreachable",
                around=NOWHERE,
            ),
            "no-route",
        ),
        (lost(SENT), "left"),
        (lost(answer="unknown"), "unseen"),
    ],
)  # fmt: skip
def test_where_nothing_came_back(what: Observation, code: str) -> None:
    (found,) = compare(FORWARD, what)
    assert found.code == code


@pytest.mark.parametrize("drifted", [True, False, None])
def test_only_the_process_says_whether_rules_have_drifted(
    drifted: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find() -> DriftAnswer:
        if drifted is None:
            raise QuestionError("no process answers")
        return DriftAnswer(state=DriftState("x", differs=Drift(1.0, 1) if drifted else None))

    monkeypatch.setattr("steersman.operate.trace.find_drift", find)
    before = world_of(service(), slice_(endpoint("10.1.0.5")))

    async def renew(world: World, _: object) -> World:
        return world

    question = TraceQuestion("10.96.0.10", 80, wait=True)
    process = msgspec.structs.replace(before, origin=Origin("process", "a process"))
    answer = asyncio.run(trace_packet(process, question, _Waited, renew))
    (found,) = answer.differences
    assert found.code == {True: "rules-differ", False: "rules-agree", None: "rules"}[drifted]
    assert ("are not those of the plan: see" in found.text) is bool(drifted)
    assert ("are those of the plan: something" in found.text) is (drifted is False)
