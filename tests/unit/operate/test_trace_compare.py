"""What the kernel did beside what was predicted: the first difference is the one that counts."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from steersman.compile.trace import TraceResult
from steersman.model.plan import Endpoint
from steersman.model.tracing import TraceStep, TrackedConnection, WatchedFlow
from steersman.model.world import World
from steersman.modes.base import Tracer
from steersman.operate.trace import TraceAnswer, trace_packet
from steersman.operate.trace_compare import (
    Observation,
    compare,
    describe_end,
    expectation,
    prediction,
    short_rule,
)
from steersman.operate.trace_question import TraceQuestion
from tests.support.builders.doctor import world_of
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
    ((step, text),) = texts(FORWARD, seen(OWN_DROP, connection=None, answer="none"))
    assert step == 1
    assert text.endswith(
        "drop; the rules in the kernel are not those of the plan: see steersman drift"
    )
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
        (FORWARD, (JUMP,), "the packet was not translated instead of to 10.1.0.5:8080 or"),
        (TraceResult("accept"), (DNAT,), "the packet went to 10.1.0.5:8080, but no rule should"),
        (TraceResult("drop"), (DNAT,), "no rule stopped the packet: it went to 10.1.0.5:8080"),
        (TraceResult("reject"), (JUMP,), "no rule stopped the packet: it passed"),
        (FORWARD, (), "no hook of this node's kernel saw the packet"),
    ],
)
def test_what_became_of_it(predicted: TraceResult, steps: tuple[TraceStep, ...], text: str) -> None:
    assert texts(predicted, seen(*steps, connection=None))[0][1].startswith(text)


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
        async def renew(_: World) -> World:
            return now

        question = TraceQuestion("10.96.0.10", 80, wait=True, timeout=60.0)
        return asyncio.run(trace_packet(before, question, _Waited(), renew))

    assert not traced(later).differences
    assert traced(later).predicted.startswith("forwarded to 10.1.0.6:8080")
    assert traced(before).differences[0].text.startswith("the packet went to 10.1.0.6:8080 instead")


def test_masquerading() -> None:
    cni = TraceStep(
        "postrouting", "FLANNEL-POSTRTG", "-A X -j MASQUERADE", "accept", owner="Flannel"
    )
    masqueraded = connection(seen="192.0.2.1")
    assert texts(FORWARD, seen(DNAT, cni, connection=masqueraded)) == [
        (2, "masqueraded by Flannel: the endpoint sees 192.0.2.1 instead of 10.1.0.9")
    ]
    assert texts(FORWARD, seen(DNAT, connection=masqueraded))[0] == (
        0,
        "masqueraded by a rule that was not seen: the endpoint sees 192.0.2.1 instead of 10.1.0.9",
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
