"""Put the events of a traced packet together: in order, with the rules they are about. Pure.

Events of nf_tables and of iptables-legacy arrive over two sockets. A packet passes the hooks in a
known order and each hook by priority, so that order merges them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from msgspec.structs import replace

from steersman.model.addresses import join_host_port
from steersman.model.tracing import STEERSMAN, TraceStep, WatchedFlow
from steersman.netfilter.nflog import ICMP, ICMP6
from steersman.netfilter.nft.wire import HOOKS
from steersman.netfilter.trace.events import FIRST, REPLY, Headers, TraceEvent
from steersman.netfilter.trace.owners import ANOTHER, owner_of
from steersman.netfilter.trace.rules import LEGACY, BaseChain, RuleBook

Direction: TypeAlias = Literal["original", "reply"]
Owns: TypeAlias = Callable[[str, str], bool]
"""Whether a chain is ours: by family and table (`ip nat`), and chain."""
_FROM_INSIDE = ("output", "postrouting", "prerouting", "input", "forward")
_TARGET = re.compile(r" -([jg]) (\S+)")
_FINAL = {"ACCEPT", "DNAT", "SNAT", "MASQUERADE", "REDIRECT", "NETMAP", "TPROXY"}
_REJECTS = re.compile(r"(^|\s)(reject\b|-j REJECT\b)")
_CHANGES_DESTINATION = re.compile(r"(^|\s)(-j (DNAT|REDIRECT|NETMAP)|(dnat|redirect)( |$))")
_CHANGES_SOURCE = re.compile(r"(^|\s)(-j (SNAT|MASQUERADE|NETMAP)|(snat|masquerade)( |$))")


class _Item(NamedTuple):
    """A step with its place."""

    step: TraceStep
    priority: int
    headers: Headers | None


class _Directions:
    """Tells the packet from its first answer."""

    def __init__(self, events: Iterable[TraceEvent], table: str, flow: WatchedFlow) -> None:
        self._answers = {event.packet for event in events if event.marks(table, REPLY)}
        self._known: dict[int, Direction] = {}
        """By number of the packet; legacy has none, but always headers."""
        self._clients = {(flow.source, flow.source_port)}
        for event in events:
            # Before conntrack translates it, an answer goes to a masquerading node.
            if event.packet in self._answers and event.headers:
                self._clients.add((event.headers.destination, event.headers.port))

    def of(self, event: TraceEvent) -> Direction:
        """Return which of the two an event is about; ask for the events in their order."""
        if event.packet and event.packet in self._known:
            return self._known[event.packet]
        headers, answers = event.headers, event.packet in self._answers
        if headers and not answers:
            is_error = headers.protocol in (ICMP, ICMP6)
            answers = is_error or (headers.destination, headers.port) in self._clients
            if not answers:
                self._clients.add((headers.source, headers.source_port))
        direction = self._known[event.packet] = "reply" if answers else "original"
        return direction


def first_headers(events: Iterable[TraceEvent], table: str) -> Headers | None:
    """Return the headers of the first packet that our table has marked; None if none was yet."""
    for event in events:
        if event.headers and event.marks(table, FIRST):
            return event.headers
    return None


def to_steps(
    events: Sequence[TraceEvent],
    book: RuleBook,
    flow: WatchedFlow,
    *,
    table: str,
    owns: Owns,
    to_endpoint: bool = True,
) -> tuple[TraceStep, ...]:
    """Return the steps of the packet, and then those of the first answer.

    Args:
        events: as they arrived, those of each backend in order.
        book: the rules.
        flow: the packet's.
        table: our table that marks packets; it is left out.
        owns: which chains are ours.
        to_endpoint: whether the rule that changes the destination chooses the endpoint.
    """
    directions = _Directions(events, table, flow)
    ways: dict[Direction, list[_Item]] = {"original": [], "reply": []}
    bases: dict[int, BaseChain] = {}
    """The last base chain of each packet: chains that others jump to belong to its hook."""
    kept: dict[int, Headers | None] = {}
    for event in events:
        direction = directions.of(event)
        before = ways[direction]
        base = book.base(event)
        if base:
            bases[event.packet] = base
        elif event.backend == "legacy":
            base = BaseChain(event.hook, before[-1].priority if before else 0)
        else:
            base = bases.get(event.packet, BaseChain("", 0))
        if event.backend == "nft" and event.kind == "rule" and not event.number:
            # The end of a chain, once more; but it may have the headers of the hook.
            kept[event.packet] = event.headers
            continue
        headers = event.headers or kept.pop(event.packet, None)
        before.append(_Item(_step(event, book, base, direction, owns), base.priority, headers))
    if len({event.backend for event in events}) > 1:
        for items in filter(None, ways.values()):
            _sort_as_met(items)
    merged = [_with_translations(items, to_endpoint) for items in ways.values()]
    return tuple(step for steps in merged for step in steps if step.table != f"inet {table}")


def _sort_as_met(items: list[_Item]) -> None:
    """Put the steps of both backends in the order in which a packet meets them."""
    hooks = _FROM_INSIDE if items[0].step.hook == "output" else HOOKS
    rank = {hook: number for number, hook in enumerate(hooks)}
    items.sort(key=lambda item: (rank.get(item.step.hook, len(hooks)), item.priority))


def _step(
    event: TraceEvent,
    book: RuleBook,
    base: BaseChain,
    direction: Direction,
    owns: Owns,
) -> TraceStep:
    rule = book.text(event)
    name = f"{event.family} {event.table}"
    if event.backend == "legacy":
        name += LEGACY
    is_base = book.base(event) is not None
    if owns(f"{event.family} {event.table}", event.chain):
        owner = STEERSMAN
    else:
        owner = owner_of(event.table, event.chain, rule, base=is_base)
        targets = [event.verdict.partition(" ")[2], *(found[1] for found in _TARGET.findall(rule))]
        if is_base and any(owns(f"{event.family} {event.table}", name) for name in targets):
            owner = STEERSMAN  # our jump in a chain of all programs
    return TraceStep(
        hook=base.hook,
        chain=event.chain,
        rule=rule,
        verdict=_verdict(event, book, rule),
        table=name,
        handle=event.number,
        owner=owner if event.kind == "rule" or owner == STEERSMAN else ANOTHER,
        note="" if rule or event.kind != "rule" else "the text of this rule cannot be read",
        direction=direction,
    )


def _verdict(event: TraceEvent, book: RuleBook, rule: str) -> str:
    """Return the verdict as in `TraceStep.verdict`; that of legacy follows from the rule."""
    if event.kind == "return":
        return "return"
    if event.verdict:
        return "reject" if event.verdict == "drop" and _REJECTS.search(rule) else event.verdict
    if event.kind == "policy":
        return book.policies.get((event.family, event.table, event.chain), "accept")
    found = _TARGET.search(rule)
    if not found:
        return "continue"
    kind, target = found.groups()
    if target in ("DROP", "REJECT", "RETURN"):
        return target.lower()
    if target in _FINAL:
        return "accept"
    # Other names than those of chains are targets that let the packet go on, such as MARK.
    if (event.family, event.table, target) not in book.policies:
        return "continue"
    return f"{'jump' if kind == 'j' else 'goto'} {target}"


def _with_translations(items: list[_Item], to_endpoint: bool) -> list[TraceStep]:
    """Note a change of the packet's addresses at the rule before it that made it.

    Conntrack translates answers back without any rule.
    """
    steps: list[TraceStep] = []
    known: Headers | None = None
    for item in items:
        now = item.headers
        if now and known and item.step.direction == "original":
            if (now.destination, now.port) != (known.destination, known.port):
                where = join_host_port(now.destination, now.port)
                place = _note(steps, _CHANGES_DESTINATION, f"the destination is now {where}")
                if to_endpoint:
                    steps[place] = replace(steps[place], endpoint=where)
            if (now.source, now.source_port) != (known.source, known.source_port):
                where = join_host_port(now.source, now.source_port)
                _note(steps, _CHANGES_SOURCE, f"the source is now {where}")
        known = now or known
        steps.append(item.step)
    return steps


def _note(steps: list[TraceStep], kind: re.Pattern[str], change: str) -> int:
    """Note a change at the last rule of its kind, or else at the last step; return its place."""
    found = [place for place, step in enumerate(steps) if kind.search(step.rule)]
    place = found[-1] if found else len(steps) - 1
    note = ", ".join(filter(None, (steps[place].note, change)))
    steps[place] = replace(steps[place], note=note)
    return place
