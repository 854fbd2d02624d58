"""What the kernel does with a packet, beside what the plan predicts: `steersman trace`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from steersman.compile.trace import Flow, TraceResult, trace
from steersman.host.netns import HERE, find_namespace
from steersman.host.packet_watch import PacketWatch
from steersman.model.names import ObjectName, Protocol
from steersman.model.plan import SourceClass
from steersman.model.tracing import Sighting, TraceStep, TrackedConnection, WatchedFlow
from steersman.model.world import World
from steersman.modes.base import Mode
from steersman.modes.tracer import Tracer
from steersman.operate.answer import Answer, Block, Cell, Line, QuestionError, Table
from steersman.operate.drift import find_drift
from steersman.operate.load import world_again
from steersman.operate.probe_packet import ProbePacket, Reply
from steersman.operate.trace_compare import (
    Observation,
    compare,
    expectation,
    prediction,
    short_rule,
)
from steersman.operate.trace_lookups import look_around
from steersman.operate.trace_loss import Difference
from steersman.operate.trace_question import TraceQuestion

_SEEN_WITHIN = 1.0  # seconds for the events of a packet that was answered or given up
_SETTLED_WITHIN = 3.0  # seconds for the answer to a packet of real traffic
_PAUSE = 0.05
_WATCHED = 6
"""Packets that are watched at most, to see one fail of those that fail only sometimes."""
_UDP = Protocol.UDP
_LONGEST_RULE = 90


class ShownStep(msgspec.Struct, frozen=True, rename="camel"):
    """A step, and what was predicted about it."""

    number: int
    step: TraceStep
    predicted: str = ""
    matches: bool = True


class TraceAnswer(Answer, frozen=True, kw_only=True, rename="camel"):
    """The way of one packet."""

    flow: str
    mode: str
    service: str = ""
    """Name of the ServicePort at the destination; "" if there is none."""
    predicted: str
    reasons: tuple[str, ...] = ()
    steps: tuple[ShownStep, ...] = ()
    connection: TrackedConnection | None = None
    reply: Reply | None = None
    """None for a packet of real traffic."""
    endpoint: str = ""
    differences: tuple[Difference, ...] = ()
    sightings: tuple[Sighting, ...] = ()
    """Where devices of this machine sent and received the packet and its answer, and where the
    kernel dropped them; () for a packet of real traffic, or if the kernel cannot tell."""
    refused: bool = False
    """The plan itself drops or rejects the packet."""

    @property
    def exit_code(self) -> int:
        """1 if something differs, or if the plan refuses the packet."""
        return int(bool(self.differences) or self.refused)

    def blocks(self, wide: bool) -> Iterator[Block]:
        """Yield the prediction, the steps, the connection and the verdict."""
        at = f" ({self.service})" if self.service else ""
        yield Line(f"{self.flow}{at}, {self.mode} mode", "title")
        yield Line(f"explain predicts: {self.predicted}")
        for reason in self.reasons if wide else ():
            yield Line(reason, "dim", indent=2)
        yield Line("")
        columns = ("#", "HOOK", "TABLE", "CHAIN", "HANDLE", "VERDICT", "BY", "PREDICTED", "RULE")
        rows: list[list[Cell]] = []
        for shown in self.steps:
            step = shown.step
            quiet = not step.rule and not step.handle and not step.ends and not step.note
            if quiet and not wide:  # the end of a chain where nothing happened
                continue
            rows.append(_row(shown, wide))
        yield Table(columns, rows, empty="no hook of the kernel reported the packet")
        yield Line("")
        if self.connection is not None:
            yield Line(f"connection: {self.connection}")
        for reply in (False, True) if wide else ():
            way = [
                f"{each.device} (dropped)" if each.kind == "dropped" else each.device
                for each in self.sightings
                if each.reply is reply
            ]
            if way:
                yield Line(f"{'way back' if reply else 'way':<11} {' > '.join(way)}")
        if self.endpoint:
            yield Line(f"endpoint:   {self.endpoint}")
        if self.reply is not None:
            took = f" after {self.reply.milliseconds:g} ms" if self.reply.answered else ""
            yield Line(f"answer:     {self.reply.text}{took}", "" if took else "warn")
        for number, difference in enumerate(self.differences):
            head = "also" if number else "first difference"
            step_text = f" (step {difference.step})" if difference.step else ""
            yield Line(f"{head}{step_text}: {difference.text}", "bad")
        if not self.differences:
            yield Line("the kernel did what explain predicts", "warn" if self.refused else "good")


def _row(shown: ShownStep, wide: bool) -> list[Cell]:
    step = shown.step
    rule = short_rule(step.rule)
    if len(rule) > _LONGEST_RULE and not wide:
        rule = f"{rule[:_LONGEST_RULE]}…"
    rule = f"{rule} ({step.note})" if step.note and rule else rule or step.note
    ours = step.owner == "steersman"
    return [
        str(shown.number),
        step.hook if step.direction == "original" else f"{step.hook}, answer",
        step.table,
        step.chain,
        str(step.handle) if step.handle else "",
        (step.verdict, "bad" if step.ends else ""),
        (step.owner, "" if ours else "warn"),
        (shown.predicted, "" if not shown.predicted else "good" if shown.matches else "bad"),
        (rule, "dim"),
    ]


# The question


def make_tracer(world: World, mode: Mode | None) -> Tracer:
    """Return a tracer of a World's mode.

    Args:
        world: has the mode's name.
        mode: the mode itself; None if it cannot be built here.

    Raises:
        QuestionError: the mode cannot trace.
    """
    if mode is None or mode.tracer is None:
        raise QuestionError(f"the {world.mode} mode cannot trace packets")
    return mode.tracer()


_Seen: TypeAlias = tuple[WatchedFlow, Observation, Reply | None]
"""The packet, what the kernel did with it, and the answer to a probe."""


async def trace_packet(
    world: World,
    question: TraceQuestion,
    make: Callable[[], Tracer],
    renew: Callable[[World, Collection[ObjectName]], Awaitable[World]] = world_again,
) -> TraceAnswer:
    """Follow one packet through the kernel of this machine, and compare with the plan.

    If something differs, or nobody answers, further packets are also watched on all devices, until
    one fails as well: each may go to another endpoint. The answer is about that one.

    Args:
        world: the plan to compare with.
        question: the packet.
        make: makes a tracer of the World's mode.
        renew: returns the World as it is now, as far as it is about some Services.

    Raises:
        QuestionError: the packet cannot be sent, or did not come in time.
        BusyError: the kernel cannot trace it; the message says why.
    """
    if question.wait:
        flow, seen, reply = await _wait(world, question, make())
    else:
        question = replace(question, netns=await _namespace(question))
        flow, seen, reply = await _probe(world, question, make(), watches=False)
    predicted = predict(world, flow)
    if not question.wait and (seen.answer == "unknown" or compare(predicted, seen)):
        for _ in range(_WATCHED):
            again = await _probe(world, question, make(), watches=True)
            if (again[2] and not again[2].answered) or compare(predict(world, again[0]), again[1]):
                flow, seen, reply = again
                predicted = predict(world, flow)
                break
    if seen.sightings or compare(predicted, seen):
        with suppress(OSError):
            client = question.netns or HERE
            seen = await asyncio.to_thread(look_around, flow, predicted, seen, client)
        if any(each.code == "rules" for each in compare(predicted, seen)):
            seen = seen._replace(drifted=await _has_drifted(world))
        # The plan may have changed since it was asked for, with --wait long ago.
        service = predicted.plan
        later = await renew(world, [service.name.object_name] if service else ())
        now = predict(later, flow)
        if len(compare(now, seen)) < len(compare(predicted, seen)):
            world, predicted = later, now
    return _answer(world, flow, predicted, seen, reply)


async def _namespace(question: TraceQuestion) -> Path | None:
    """Return the network namespace to send from; None for that of this process."""
    if question.netns is not None or not question.source:
        return question.netns
    netns = await asyncio.to_thread(find_namespace, question.source)
    if netns is None:
        raise QuestionError(
            f"no network namespace that this process sees has the address {question.source}:"
            " run this on the client's node (a container sees other pods only with hostPID), or"
            " give --wait to follow its next packet that comes here"
        )
    return None if netns == HERE else netns


async def _probe(world: World, question: TraceQuestion, tracer: Tracer, *, watches: bool) -> _Seen:
    """Send a packet, and see what happens to it; `watches` on all devices, too."""
    with ProbePacket(
        question.protocol,
        question.destination,
        question.port,
        source=question.source,
        netns=question.netns,
    ) as probe:
        watch = await _watch(probe.flow, question.netns or HERE) if watches else nullcontext()
        try:
            with watch as watching:
                await tracer.start(probe.flow)
                reply = await probe.send(question.timeout)
                flow = probe.flow
                with suppress(TimeoutError):
                    async with asyncio.timeout(_SEEN_WITHIN):
                        flow = await tracer.first_packet()
                flow, seen, _ = await _seen(world, flow, tracer, reply)
                if reply.kind == "none" and not question.must_answer and flow.protocol is _UDP:
                    seen = seen._replace(answer="unknown")  # a server need not answer
                if watching:
                    seen = seen._replace(sightings=watching.sightings(), client=watching.netns)
                return flow, seen, reply
        finally:
            await tracer.aclose()


async def _watch(flow: WatchedFlow, client: Path) -> PacketWatch | nullcontext[None]:
    """Watch all devices of this machine, as far as the kernel allows it."""
    with suppress(OSError):
        netns = await asyncio.to_thread(client.stat)
        return await asyncio.to_thread(PacketWatch, flow, netns.st_ino)
    return nullcontext()


async def _wait(world: World, question: TraceQuestion, tracer: Tracer) -> _Seen:
    """Wait for a packet of real traffic, and see what happens to it."""
    watched = WatchedFlow(question.protocol, question.destination, question.port, question.source)
    try:
        await tracer.start(watched)
        try:
            async with asyncio.timeout(question.timeout):
                flow = await tracer.first_packet()
        except TimeoutError:
            raise QuestionError(
                f"no packet that opens a connection from {watched} came within"
                f" {question.timeout:g} s"
            ) from None
        return await _settled(world, flow, tracer)
    finally:
        await tracer.aclose()


async def _settled(world: World, flow: WatchedFlow, tracer: Tracer) -> _Seen:
    """Return what happened to a packet of real traffic, once it is answered or given up."""
    # The packet is real, so its answer is not ours to wait for: the connection table tells. A short
    # connection may be gone from there before it is seen.
    connection: TrackedConnection | None = None
    with suppress(TimeoutError):
        async with asyncio.timeout(_SETTLED_WITHIN):
            while connection is None or connection.state == "unreplied":
                await asyncio.sleep(_PAUSE if connection else 0)
                now = await tracer.connection(flow)
                if now is None and connection is not None:
                    break
                connection = now
    return await _seen(world, flow, tracer, None, connection)


async def _seen(
    world: World,
    flow: WatchedFlow,
    tracer: Tracer,
    reply: Reply | None,
    connection: TrackedConnection | None = None,
) -> _Seen:
    steps = await tracer.steps()
    connection = connection or await tracer.connection(flow)
    seen = Observation(
        steps,
        connection,
        "unknown" if reply is None else reply.kind,
        reply.text if reply else "",
        world.plan.settings.traits.terminates_connections,
        world.plan.settings.family(flow.family).local_addresses,
        asked=(flow.destination, flow.port),
    )
    return flow, seen, reply


async def _has_drifted(world: World) -> bool | None:
    """Return whether the running process finds other rules in the kernel; None if none tells."""
    if world.origin.kind != "process":
        return None
    with suppress(QuestionError):
        return (await find_drift()).state.differs is not None
    return None


def _answer(
    world: World,
    flow: WatchedFlow,
    predicted: TraceResult,
    seen: Observation,
    reply: Reply | None,
) -> TraceAnswer:
    shown = tuple(
        ShownStep(number, step, *expectation(predicted, seen, step))
        for number, step in enumerate(seen.steps, 1)
    )
    return TraceAnswer(
        source=world.origin.text,
        flow=str(flow),
        mode=world.mode,
        service=str(predicted.plan.name) if predicted.plan else "",
        predicted=prediction(predicted, seen.terminates),
        reasons=predicted.reasons,
        steps=shown,
        connection=seen.connection,
        reply=reply,
        endpoint=seen.endpoint,
        differences=compare(predicted, seen),
        sightings=tuple(seen.sightings),
        refused=predicted.verdict in ("drop", "reject"),
    )


def predict(world: World, flow: WatchedFlow) -> TraceResult:
    """Return what the plan does with a flow; without a client's address, as if from this node."""
    source = flow.source or SourceClass.NODE
    return trace(world.plan, Flow(source, flow.destination, flow.port, flow.protocol))
