"""Compare what the kernel did with a packet with what the plan predicts. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from steersman.compile.trace import TraceResult
from steersman.model.addresses import join_host_port
from steersman.model.plan import Value
from steersman.model.tracing import STEERSMAN, TraceStep, TrackedConnection

_MASQUERADES = re.compile(r"(^|\s)(-j (MASQUERADE|SNAT)|(masquerade|snat)( |$))")
_COMMENT = re.compile(r' -m comment --comment ("(?:[^"\\]|\\.)*"|\S+)')
_PASSIVE = {"drop": "dropped", "reject": "rejected", "forward": "forwarded", "accept": "left alone"}
REMEDY = "the rules in the kernel are not those of the plan: see steersman drift"


class Difference(Value, frozen=True):
    """One point in which the kernel did something else."""

    text: str
    step: int = 0
    """Number of the step, from 1; 0 if it is about none."""


class Observation(NamedTuple):
    """What was seen of one packet."""

    steps: Sequence[TraceStep] = ()
    connection: TrackedConnection | None = None
    answer: str = "none"
    """Kind of the answer: `answer`, `reset`, `icmp`, `none`, `not-sent`; `unknown` if nobody
    waited for it, or silence means nothing (UDP)."""
    answer_text: str = ""
    terminates: bool = False
    """Whether the mode carries connections itself, so that conntrack's end is the proxy."""
    local: Collection[str] = ()
    """This node's addresses."""

    @property
    def end(self) -> tuple[int, TraceStep] | None:
        """The step that dropped or rejected the packet, with its number."""
        return self._first_end("original")

    @property
    def answer_end(self) -> tuple[int, TraceStep] | None:
        """The step that dropped or rejected the answer, with its number."""
        return self._first_end("reply")

    def _first_end(self, direction: str) -> tuple[int, TraceStep] | None:
        for number, step in enumerate(self.steps, 1):
            if step.direction == direction and step.ends:
                return number, step
        return None

    @property
    def endpoint(self) -> str:
        """The endpoint that the packet was sent to, as `address:port`; "" if it has none."""
        chosen = [step.endpoint for step in self.steps if step.endpoint]
        if chosen:
            return chosen[-1]
        found = self.connection
        if self.terminates or found is None:
            return ""
        if (found.endpoint, found.endpoint_port) == (found.destination, found.port):
            return ""
        return join_host_port(found.endpoint, found.endpoint_port)


def prediction(result: TraceResult, terminates: bool = False) -> str:
    """Return what the plan predicts, in words; terminates: see Observation."""
    if result.verdict != "forward":
        return _PASSIVE[result.verdict]
    if terminates:
        return f"forwarded by the proxy to {' or '.join(map(str, result.endpoints))}"
    masqueraded = "masqueraded" if result.masquerade else "not masqueraded"
    return f"forwarded to {' or '.join(map(str, result.endpoints))}, {masqueraded}"


def describe_end(step: TraceStep) -> str:
    """Say who dropped or rejected a packet, and by which rule."""
    done = _PASSIVE[step.verdict]
    where = f"chain {step.chain}" + (f" of table {step.table}" if step.table else "")
    if not step.rule and not step.handle:
        return f"{done} by the policy of {where} ({step.hook})"
    at = f"{step.hook}, handle {step.handle}" if step.handle else step.hook
    return f"{done} by a rule of {step.owner} in {where} ({at}): {short_rule(step.rule)}"


def short_rule(rule: str) -> str:
    """Return a rule of iptables-save with its comment at the end, without its chain."""
    if not rule.startswith("-A "):
        return rule
    comments = [found.strip('"') for found in _COMMENT.findall(rule)]
    matches = _COMMENT.sub("", rule).partition(" ")[2].partition(" ")[2]
    return " ".join([matches, *(f"/* {each} */" for each in comments)])


def compare(predicted: TraceResult, seen: Observation) -> tuple[Difference, ...]:
    """Return every difference, in the order of the packet's way; () if all is as predicted."""
    endpoints = tuple(map(str, predicted.endpoints))
    endpoint = seen.endpoint
    if seen.end:
        number, step = seen.end
        if step.owner != STEERSMAN:
            return (Difference(describe_end(step), number),)
        if step.verdict != predicted.verdict:
            return (Difference(f"{describe_end(step)}; {REMEDY}", number),)
        return ()
    if not seen.steps and seen.connection is None and seen.answer != "not-sent":
        return (Difference("no hook of this node's kernel saw the packet: it took another way"),)
    # Where it went
    found: list[Difference] = []
    if predicted.verdict == "forward" and endpoint not in endpoints:
        ends = " or ".join(endpoints)
        if seen.terminates and not endpoint and seen.answer == "answer":
            text = f"the proxy accepted the connection, but has none to {ends}: they may refuse it"
            found.append(Difference(text))
        elif endpoint or seen.answer != "not-sent":
            went = f"went to {endpoint}" if endpoint else "was not translated"
            text = f"the packet {went} instead of to {ends}; {REMEDY}"
            found.append(Difference(text, _translator(seen.steps)))
    elif predicted.verdict == "accept" and endpoint:
        text = f"the packet went to {endpoint}, but no rule should change it; {REMEDY}"
        found.append(Difference(text, _translator(seen.steps)))
    elif predicted.verdict in ("drop", "reject") and (endpoint or seen.answer == "answer"):
        went = f"went to {endpoint}" if endpoint else "passed"
        found.append(Difference(f"no rule stopped the packet: it {went}; {REMEDY}"))
    # Its source
    if predicted.verdict == "forward" and endpoint in endpoints:
        found += _masquerading(predicted, seen, endpoint)
    found += _answering(predicted, seen, endpoint)
    return tuple(found)


def _masquerading(predicted: TraceResult, seen: Observation, endpoint: str) -> Iterator[Difference]:
    found = seen.connection
    if found is None or seen.terminates:
        return
    # An endpoint that calls itself is masqueraded in any case.
    wanted = predicted.masquerade or join_host_port(found.source, found.endpoint_port) == endpoint
    if found.masqueraded and not wanted:
        number, owner = next(
            (
                (number, step.owner)
                for number, step in enumerate(seen.steps, 1)
                if _MASQUERADES.search(step.rule)
            ),
            (0, "a rule that was not seen"),
        )
        yield Difference(
            f"masqueraded by {owner}: the endpoint sees {found.seen_source} instead of"
            f" {found.source}",
            number,
        )
    elif wanted and not found.masqueraded and found.source not in seen.local:
        yield Difference(
            f"not masqueraded: the endpoint sees {found.source} instead of an address of this"
            f" node; {REMEDY}"
        )


def _answering(predicted: TraceResult, seen: Observation, endpoint: str) -> Iterator[Difference]:
    who = f"endpoint {endpoint}" if endpoint else "destination"
    for number, step in enumerate(seen.steps, 1):
        if step.endpoint and step.verdict == "connecting":  # the client has the proxy's answer
            yield Difference(f"the {who} has not answered the proxy yet", number)
    if seen.answer_end:
        number, step = seen.answer_end
        yield Difference(f"the answer was {describe_end(step)}", number)
    elif seen.answer == "not-sent":
        yield Difference(seen.answer_text)
    elif predicted.verdict not in ("forward", "accept"):
        return
    elif seen.answer in ("reset", "icmp"):
        yield Difference(f"the {who} refuses the connection: {seen.answer_text}")
    elif seen.answer == "none":
        if any(step.direction == "reply" for step in seen.steps):
            text = f"the {who} answered, but its answer did not reach the client"
        else:
            text = f"the packet was sent to the {who}, which did not answer"
        yield Difference(f"{text}: {seen.answer_text}")


def _translator(steps: Sequence[TraceStep]) -> int:
    """Return the number of the step that chose the endpoint; 0 if none did."""
    for number, step in enumerate(steps, 1):
        if step.endpoint:
            return number
    return 0


def expectation(predicted: TraceResult, seen: Observation, step: TraceStep) -> tuple[str, bool]:
    """Return what the plan predicts about a step, "" for nothing, and whether it came true."""
    if step.direction == "reply":
        return ("passes", False) if step.ends else ("", True)
    if step.ends:
        same = step.owner == STEERSMAN and step.verdict == predicted.verdict
        return _PASSIVE[predicted.verdict], same
    if step.endpoint:
        if predicted.verdict != "forward":
            return _PASSIVE[predicted.verdict], False
        ends = tuple(map(str, predicted.endpoints))
        to = ends[0] if len(ends) == 1 else f"one of {len(ends)} endpoints"
        return f"to {to}", seen.endpoint in ends
    if _MASQUERADES.search(step.rule) and seen.connection is not None:
        wanted = predicted.masquerade or seen.connection.masqueraded
        return "masqueraded" if wanted else "not masqueraded", wanted
    return "", True
