"""Where IPVS takes a traced packet, and which real server got it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from steersman.host.exec import SubprocessExec
from steersman.model.names import Protocol
from steersman.model.tracing import TraceStep, TrackedConnection, WatchedFlow
from steersman.modes.ipvs import tracer as module
from steersman.modes.ipvs.objects import Target
from steersman.modes.ipvs.tracer import IpvsTracer, where_taken
from steersman.modes.netfilter_tracer import NetfilterTracer

FLOW = WatchedFlow(Protocol.TCP, "10.96.0.1", 80, "10.244.1.7", 5000)
A: Target = ("10.244.2.1", 8080)
B: Target = ("10.244.2.2", 8080)
C: Target = ("10.244.2.3", 8080)
BEFORE = {A: 3, B: 0, C: 1}
TRANSLATED = "the destination is now 10.244.2.2:8080"


def step(hook: str, verdict: str = "accept", **more: object) -> TraceStep:
    return TraceStep(hook, "CHAIN", "", verdict, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hooks", "taken"),
    [
        (["prerouting", "input", "input", "postrouting"], ("input", 3)),
        (["output", "postrouting", "prerouting", "input"], ("output", 1)),
        (["prerouting", "postrouting"], ("input", 2)),
        ([], ("input", 0)),
    ],
)
def test_ipvs_takes_a_packet_behind_the_chains_of_its_hook(
    hooks: list[str], taken: tuple[str, int]
) -> None:
    assert where_taken(step(hook) for hook in hooks) == taken


async def traced(
    monkeypatch: pytest.MonkeyPatch,
    way: list[TraceStep],
    after: Mapping[Target, int],
    entry: Target | None = None,
) -> tuple[TraceStep, ...]:
    async def steps(_: NetfilterTracer) -> tuple[TraceStep, ...]:
        return tuple(way)

    async def start(tracer: NetfilterTracer, flow: WatchedFlow) -> None:
        tracer.flow = flow

    async def connection(*_: object) -> TrackedConnection | None:
        at = FLOW.source, FLOW.source_port, FLOW.destination, FLOW.port
        return TrackedConnection(*at, *entry, *at[:2]) if entry else None

    monkeypatch.setattr(NetfilterTracer, "start", start)
    monkeypatch.setattr(NetfilterTracer, "steps", steps)
    monkeypatch.setattr(NetfilterTracer, "connection", connection)
    counts = iter([BEFORE, after])
    monkeypatch.setattr(module, "connections_of", lambda _: next(counts))
    tracer = IpvsTracer(SubprocessExec())
    await tracer.start(FLOW)
    return await tracer.steps()


WAY = [
    step("prerouting"),
    step("input"),
    step("postrouting", note=TRANSLATED),
    step("postrouting", direction="reply"),
]


async def test_conntrack_knows_the_real_server(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = await traced(monkeypatch, WAY, {**BEFORE, A: 4, B: 1}, B)
    assert [each.endpoint for each in steps] == ["", "", "10.244.2.2:8080", "", ""]
    taken = steps[2]
    assert taken.hook == "input"
    assert taken.chain == "virtual server TCP 10.96.0.1:80"
    assert taken.rule == "-> 10.244.2.2:8080"
    assert not any(each.note for each in steps)


async def test_without_conntrack_the_counts_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere: Target = ("10.96.0.1", 80)
    steps = await traced(monkeypatch, WAY, {**BEFORE, A: 4, C: 0}, elsewhere)
    assert [each.endpoint for each in steps if each.endpoint] == ["10.244.2.1:8080"]


async def test_two_that_got_connections_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = await traced(monkeypatch, WAY, {A: 4, B: 1})
    notes = [(each.endpoint, each.note) for each in steps if each.endpoint]
    doubt = "one of 2 that got connections meanwhile"
    assert notes == [("10.244.2.1:8080", doubt), ("10.244.2.2:8080", doubt)]


async def test_a_packet_that_was_dropped_before_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    way = [step("prerouting", "drop", handle=3, note="a note of a rule")]
    assert await traced(monkeypatch, way, {**BEFORE, A: 4}) == tuple(way)
