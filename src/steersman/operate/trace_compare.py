"""Compare what the kernel did with a packet with what the plan predicts. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from steersman.compile.trace import TraceResult
from steersman.model.addresses import join_host_port
from steersman.model.names import Protocol
from steersman.model.tracing import STEERSMAN, Sighting, TraceStep, TrackedConnection
from steersman.netfilter.trace.rules import LEGACY, show_chain
from steersman.operate.trace_loss import (
    Difference,
    Surroundings,
    explain_drop,
    explain_silence,
    explain_unsent,
    first_drop,
    last_place,
    other_source,
    shared_address,
)

_MASQUERADES = re.compile(r"(^|\s)(-j (MASQUERADE|SNAT)|(masquerade|snat)( |$))")
_COMMENT = re.compile(r' -m comment --comment ("(?:[^"\\]|\\.)*"|\S+)')
_PASSIVE = {"drop": "dropped", "reject": "rejected", "forward": "forwarded", "accept": "left alone"}
_TRANSLATES = re.compile(r"(^|\s)(-j (DNAT|REDIRECT|NETMAP)|(dnat|redirect)( |$))")
_UNTRACKS = re.compile(r"(^|\s)(-j (NOTRACK|CT --notrack)|notrack( |$))")
_SETS_MARK = re.compile(r"(^|\s)(-j (MARK|CONNMARK)|(meta )?mark set)( |$)")
_NUMBER = re.compile(r"0x[0-9a-f]+")
_NETFILTER_HOOKS = ("prerouting", "input", "forward", "output", "postrouting")
_REFUSALS = ("port unreachable", "prohibited")
_UNANSWERED = ("none", "icmp", "not-sent", "unknown")
_DRIFT = {
    True: (
        "rules-differ",
        "the rules in the kernel are not those of the plan: see steersman drift",
    ),
    False: (
        "rules-agree",
        "the rules in the kernel are those of the plan: something else decided",
    ),
    None: ("rules", "steersman drift says whether the rules in the kernel are those of the plan"),
}
"""Codes and words by whether the rules have drifted."""


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
    sightings: Sequence[Sighting] = ()
    """Where the packet and its answer were seen, in order of time."""
    asked: tuple[str, int] = ("", 0)
    """The address and port that the client named."""
    client: int = 0
    """Inode of the client's network namespace; 0 if it is not known."""
    node: int = 0
    """Inode of this node's network namespace; 0 if it is not known."""
    around: Surroundings | None = None
    """Look-ups where the packet was seen last; None before they are made, or without need."""
    drifted: bool | None = None
    """Whether the rules in the kernel are not those of the plan; None if it is not known."""

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
    if not step.rule and not step.handle:
        return f"{done} by the policy of {_chain(step)} ({step.hook})"
    return f"{done} by {describe_rule(step)}"


def describe_rule(step: TraceStep) -> str:
    """Name the rule of a step with its owner, its place and its text."""
    at = f"{step.hook}, handle {step.handle}" if step.handle else step.hook
    return f"a rule of {step.owner} in {_chain(step)} ({at}): {short_rule(step.rule)}"


def _chain(step: TraceStep) -> str:
    return f"chain {step.chain}" + (f" of table {step.table}" if step.table else "")


def command_for(step: TraceStep) -> str:
    """Return the command that shows the chain of a step; "" for a program or the kernel."""
    return show_chain(step.table, step.chain) if step.hook in _NETFILTER_HOOKS else ""


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
    drop = first_drop(seen.sightings) if seen.answer in _UNANSWERED else None
    dropped = drop is not None and not drop.reply and seen.around is not None
    if seen.end:
        number, step = seen.end
        if step.owner == STEERSMAN:
            if step.verdict == predicted.verdict:
                return ()
            return (_against_the_plan(describe_end(step), seen, number, step),)
        if not _by_kernel(step) or not seen.around:
            shows = command_for(step)
            return (Difference("foreign-drop", describe_end(step), shows, step=number),)
    elsewhere = predicted.verdict == "forward" and endpoint not in endpoints
    if elsewhere:  # if another program's rule or no rule led it there, it may end anywhere
        has_left = any(
            each.kind == "sent" and each.netns == seen.node and each.what != "an ICMP error"
            for each in seen.sightings
        )
        dropped = ((dropped and not has_left) or _vanished(seen)) and not _misled(seen)
    masquerading: list[Difference] = []
    if predicted.verdict == "forward" and endpoint in endpoints:
        masquerading = [*_masquerading(predicted, seen, endpoint)]
    if drop is not None and drop.reason == "IP_LOCAL_SOURCE" and masquerading:
        return tuple(masquerading)  # the pod got a packet from its own address
    if dropped and (loss := _lost(seen, endpoint)):
        return (loss,)
    if not seen.steps and seen.connection is None and seen.answer != "not-sent":
        if loss := _lost(seen, endpoint):
            return (loss,)
        text = "no hook of this node's kernel saw the packet: it took another way"
        return (Difference("unseen", text),)
    return (*_going(predicted, seen), *masquerading, *_answering(predicted, seen, endpoint))


def _going(predicted: TraceResult, seen: Observation) -> Iterator[Difference]:
    """Yield where the packet went if that is not to an endpoint of the plan."""
    ends, endpoint = tuple(map(str, predicted.endpoints)), seen.endpoint
    if predicted.verdict == "forward" and endpoint not in ends:
        if seen.terminates and not endpoint and seen.answer == "answer":
            # Only an endpoint answers a datagram; the proxy has closed its socket since.
            if predicted.plan is None or predicted.plan.name.protocol is not Protocol.UDP:
                text = "the proxy accepted the connection, but has none to"
                yield Difference("refused", f"{text} {' or '.join(ends)}: they may refuse it")
        elif endpoint or seen.answer != "not-sent":
            went = f"went to {endpoint} instead of" if endpoint else "was not translated"
            text = f"the packet {went} to {' or '.join(ends)}"
            yield _translated_otherwise(text, seen)
    elif predicted.verdict == "accept" and endpoint:
        text = f"the packet went to {endpoint}, but no rule should change it"
        yield _translated_otherwise(text, seen)
    elif predicted.verdict in ("drop", "reject") and (endpoint or seen.answer == "answer"):
        went = f"went to {endpoint}" if endpoint else "passed"
        yield _translated_otherwise(f"no rule stopped the packet: it {went}", seen)


def _against_the_plan(
    text: str, seen: Observation, number: int = 0, step: TraceStep | None = None
) -> Difference:
    """Return that our own rules decided otherwise than the plan."""
    code, drift = _DRIFT[seen.drifted]
    shows = command_for(step) if step else "steersman drift"
    return Difference(code, f"{text}; {drift}", shows, step=number)


def _foreign(seen: Observation, rules: re.Pattern[str]) -> tuple[int, TraceStep] | None:
    """Return the last rule of another program of a kind that the packet met, with its number."""
    for number, step in reversed(list(enumerate(seen.steps, 1))):
        if step.owner != STEERSMAN and step.direction == "original" and rules.search(step.rule):
            return number, step
    return None


def _misled(seen: Observation) -> tuple[str, str, int] | None:
    """Return how another program kept the packet from the Service's rules: code, words, step."""
    if found := _foreign(seen, _TRANSLATES):
        return "foreign-translation", ", by ", found[0]
    if seen.endpoint:
        return None
    if found := _foreign(seen, _UNTRACKS):
        return "not-tracked", ": it is not tracked, by ", found[0]
    if skipped := _skipped(seen, ("prerouting", "output")):
        return "foreign-accept", ": it does not reach the Service's rules, by ", skipped[0]
    return None


def _skipped(seen: Observation, hooks: Collection[str]) -> tuple[int, TraceStep] | None:
    """Return the rule of another program that ended the chain of nat before the jump to ours."""
    for number, step in enumerate(seen.steps, 1):
        table = step.table.removesuffix(LEGACY).partition(" ")[2]
        skips = step.verdict in ("accept", "return") and table == "nat" and step.hook in hooks
        if skips and step.rule and step.owner != STEERSMAN and step.direction == "original":
            return number, step
    return None


def _translated_otherwise(text: str, seen: Observation) -> Difference:
    """Return who sent the packet elsewhere: another program's rule, or our own."""
    if found := _misled(seen):
        code, words, number = found
        step = seen.steps[number - 1]
        return Difference(
            code, f"{text}{words}{describe_rule(step)}", command_for(step), step=number
        )
    number = _translator(seen.steps)
    return _against_the_plan(text, seen, number, seen.steps[number - 1] if number else None)


def _vanished(seen: Observation) -> bool:
    """Return whether the packet may well have been translated, but was seen no more after that."""
    steps = [step for step in seen.steps if step.direction == "original"]
    if steps and steps[-1].owner == STEERSMAN and _TRANSLATES.search(steps[-1].rule):
        return True
    # Programs of devices translate a packet after the device was seen to receive it.
    last, around = last_place(seen.sightings), seen.around
    received = last is not None and last.kind == "received" and not last.reply
    return received and around is not None and bool(around.to.trouble or around.neighbour)


def _by_kernel(step: TraceStep) -> bool:
    """Return whether no rule dropped the packet: its sightings then tell more than the step."""
    return step.owner != STEERSMAN and step.hook not in _NETFILTER_HOOKS


def _masquerading(predicted: TraceResult, seen: Observation, endpoint: str) -> Iterator[Difference]:
    found = seen.connection
    if found is None or seen.terminates:
        return
    # An endpoint that calls itself is masqueraded in any case.
    wanted = predicted.masquerade or join_host_port(found.source, found.endpoint_port) == endpoint
    if found.masqueraded and not wanted:
        text = (
            f"the endpoint sees {found.seen_source} instead of {found.source}: the packet is"
            " masqueraded by "
        )
        for number, step in enumerate(seen.steps, 1):
            if _MASQUERADES.search(step.rule):
                text += describe_rule(step)
                yield Difference("foreign-masquerade", text, command_for(step), step=number)
                return
        yield Difference("foreign-masquerade", f"{text}a rule that was not seen")
    elif wanted and not found.masqueraded and found.source not in seen.local:
        text = (
            f"not masqueraded: the endpoint sees {found.source} instead of an address of this node"
        )
        if changed := _foreign(seen, _SETS_MARK):
            number, step = changed
            text = f"{text}, as the packet's mark is changed by {describe_rule(step)}"
            yield Difference("mark-changed", text, command_for(step), step=number)
        elif skipped := _skipped(seen, ("postrouting",)):
            number, step = skipped
            text = f"{text}: it does not reach the rules for that, by {describe_rule(step)}"
            yield Difference("foreign-accept", text, command_for(step), step=number)
        else:
            yield _against_the_plan(text, seen)


def _answering(predicted: TraceResult, seen: Observation, endpoint: str) -> Iterator[Difference]:
    who = f"endpoint {endpoint}" if endpoint else "destination"
    for number, step in enumerate(seen.steps, 1):
        if step.endpoint and step.verdict == "connecting":  # the client has the proxy's answer
            yield Difference(
                "not-answered", f"the {who} has not answered the proxy yet", step=number
            )
    if seen.answer_end and (not _by_kernel(seen.answer_end[1]) or not seen.around):
        number, step = seen.answer_end
        text = f"the answer was {describe_end(step)}"
        yield Difference("foreign-drop", text, command_for(step), step=number)
    elif predicted.verdict not in ("forward", "accept") and seen.answer != "not-sent":
        return
    elif loss := _lost(seen, endpoint):
        yield loss
    elif seen.answer == "not-sent":
        yield Difference("not-sent", seen.answer_text)
    elif seen.answer in ("reset", "icmp"):
        yield Difference("refused", f"the {who} refuses the connection: {seen.answer_text}")
    elif seen.answer == "none":
        if any(step.direction == "reply" for step in seen.steps):
            text = f"the {who} answered, but its answer did not reach the client"
        else:
            text = f"the packet was sent to the {who}, which did not answer"
        yield Difference("not-answered", f"{text}: {seen.answer_text}")


def _lost(seen: Observation, endpoint: str) -> Difference | None:
    """Return where the packet or its answer was lost, as far as it was followed."""
    around = seen.around
    if around is None or seen.terminates or seen.answer == "answer":
        return None
    refused = seen.answer == "icmp" and any(each in seen.answer_text for each in _REFUSALS)
    refused = refused and not around.to.trouble  # a route of type prohibit answers the same
    if not seen.sightings and not refused and seen.answer in ("not-sent", "none", "icmp"):
        return explain_unsent(around)
    end = endpoint or join_host_port(*seen.asked)
    found = shared_address(end, around) or other_source(seen.sightings, endpoint)
    if found:
        return found
    last = last_place(seen.sightings)
    if last and last.kind == "dropped" and seen.answer in _UNANSWERED:
        return explain_drop(last, around)
    if last is None or refused or seen.answer not in ("none", "icmp"):
        return None
    if seen.answer == "icmp" and last.reply and last.netns == seen.client:
        return None  # the answer itself tells
    return explain_silence(last, around, seen.asked, seen.client)


def mark_of(steps: Sequence[TraceStep]) -> int:
    """Return the mark that rules gave the packet; 0 if none did."""
    marks = [
        found
        for step in steps
        if step.direction == "original" and _SETS_MARK.search(step.rule)
        for found in _NUMBER.findall(step.rule)[:1]
    ]
    return int(marks[-1], 16) if marks else 0


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
