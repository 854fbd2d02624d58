"""From events to steps: what the mode and the kernel did with a packet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec.structs import replace

from steersman.host.packet_watch import drop_reasons, function_at
from steersman.model.plan import SourceClass
from steersman.model.tracing import DROP_REASONS, STEERSMAN, TraceStep, WatchedFlow
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.trace_events import Kind, TraceEvent
from steersman.modes.ebpf.trace_maps import Ruling, TraceMaps

KERNEL = "the kernel"
"""Owner of what no rule decides."""
_NO_PROGRAMS = "lo"  # the device without programs
_RST = 4  # flag of TCP
# Reasons that are none: freed after use, or not known.
_NO_REASON = ("SKB_NOT_DROPPED_YET", "SKB_CONSUMED", "NOT_SPECIFIED", "")
_BY_PROGRAM = {"TC_INGRESS": ("ingress", "sm_ingress"), "TC_EGRESS": ("egress", "sm_egress")}
Direction: TypeAlias = Literal["original", "reply"]


class Story:
    """Turns the events of one flow into steps."""

    def __init__(self, wanted: WatchedFlow, maps: TraceMaps, node: int) -> None:
        """Begin.

        Args:
            wanted: the flow as its client sends it.
            maps: the mode's maps.
            node: inode of the network namespace with the mode's programs.
        """
        self._asked = layout.pack_address(wanted.destination) + wanted.port.to_bytes(2, "big")
        self._protocol = wanted.protocol.number
        self._maps = maps
        self._node = node
        self._steps: list[TraceStep] = []
        # By direction: the ends when last seen, and the place of the last step of ingress.
        self._last: dict[Direction, tuple[bytes, bytes]] = {}
        self._ingress: dict[Direction, int] = {}
        # What the maps say about the packet as its client sent it, and who the client is.
        self._ruling = Ruling("", "")
        self._client = b""
        self._answered = False

    def tell(self, events: Sequence[TraceEvent]) -> tuple[TraceStep, ...]:
        """Return the steps. A repeated packet adds none where it takes the same way."""
        seen = set()
        for event in sorted(events, key=lambda event: event.time):
            here = event.netns == self._node and event.name != _NO_PROGRAMS
            what = (event.kind, event.netns, event.device, event.reply, event.quoted)
            if (what, event.source, event.destination) in seen:
                continue
            seen.add((what, event.source, event.destination))
            if event.kind is Kind.CALLED:
                self._called(event)
            elif event.kind is Kind.FREED:
                self._freed(event, here)
            elif event.quoted or not here:
                self._hop(event, here)
            elif event.kind is Kind.RECEIVED:
                self._received(event)
            else:
                self._sent(event)
        return tuple(self._steps)

    def _called(self, event: TraceEvent) -> None:
        """Add the step of a socket program: it replaced the address, refused, or left it alone."""
        client = self._maps.class_of_socket(event.netns_cookie)
        self._client = layout.netns_client(event.netns_cookie)
        ruling = self._ruling = self._maps.rule(self._protocol, event.source, self._asked, client)
        hook = "sendmsg" if event.datagram else "connect"
        program = f"sm_{hook}{4 if layout.is_ipv4(self._asked) else 6}"
        verdict, note, endpoint = "continue", "", ""
        if event.translated:
            endpoint = layout.print_endpoint(event.destination)
            note = self._translation(event.destination)
            self._last["original"] = event.source, event.destination
        elif event.result:
            verdict = "drop" if ruling.verdict == "drop" else "reject"
            note = f"{hook}() fails: {os.strerror(-event.result)}"
            note = f"{ruling.why}; {note}" if ruling.why else note
        elif ruling.text:
            note = "left to the programs of devices" + (f": {ruling.why}" if ruling.why else "")
        process = f"{event.name} (pid {event.process})"
        self._steps.append(
            TraceStep(hook, program, ruling.text, verdict, process, note=note, endpoint=endpoint)
        )

    def _translation(self, endpoint: bytes) -> str:
        how = self._maps.chosen_by(self._ruling.service, self._client, endpoint)
        text = f"the destination is now {layout.print_endpoint(endpoint)}"
        return f"{text}, {how}" if how else text

    def _answer(self, event: TraceEvent) -> str:
        """Say what kind of answer a packet is, where it is seen first."""
        if not event.reply or not event.tcp_flags or self._answered:
            return ""
        self._answered = True
        return "a reset" if event.tcp_flags & _RST else "SYN-ACK"

    # Packets, on devices with the mode's programs

    def _received(self, event: TraceEvent) -> None:
        """Add the step of ingress; what it does is seen when the packet is sent."""
        direction = _direction(event)
        rule = ""
        if event.destination == self._asked:
            client = self._maps.class_of_packet(event.source, event.device)
            self._ruling = self._maps.rule(self._protocol, event.source, event.destination, client)
            self._client = event.source[: layout.ADDRESS_SIZE]
            rule = self._ruling.text
        self._last[direction] = event.source, event.destination
        self._ingress[direction] = len(self._steps)
        self._steps.append(
            TraceStep(
                *("ingress", "sm_ingress", rule, "continue", event.name),
                note=self._answer(event),
                direction=direction,
            )
        )

    def _sent(self, event: TraceEvent) -> None:
        """Add the step of egress, and to that of ingress what it has done."""
        direction = _direction(event)
        before = self._last.get(direction)
        if before is None and not event.reply:  # of this node, rewritten before it was seen
            self._own_packet(event)
            before = event.source, self._asked
        source, destination = before or (event.source, event.destination)
        self._last[direction] = event.source, event.destination
        rule, notes, endpoint = "", [], ""
        if event.destination != destination:
            text = f"the destination is now {layout.print_endpoint(event.destination)}"
            if not event.reply:
                text = self._translation(event.destination)
                endpoint = layout.print_endpoint(event.destination)
            place = self._ingress.get(direction)
            if place is None:
                rule, notes = self._ruling.text, [text]
            else:
                notes_before = filter(None, (self._steps[place].note, text))
                self._steps[place] = replace(
                    self._steps[place], note="; ".join(notes_before), endpoint=endpoint
                )
                endpoint = ""
        known = any(source[: layout.ADDRESS_SIZE])  # a socket may be bound to no address yet
        if known and event.source != source:
            notes.append(f"the source is now {layout.print_endpoint(event.source)}")
            rule = "masquerade" if direction == "original" else "the Service's address"
        self._steps.append(
            TraceStep(
                *("egress", "sm_egress", rule, "continue", event.name),
                note="; ".join(notes) or self._answer(event),
                endpoint=endpoint,
                direction=direction,
            )
        )

    def _own_packet(self, event: TraceEvent) -> None:
        """Look up a packet of this node that no socket program has balanced."""
        self._client = event.source[: layout.ADDRESS_SIZE]
        self._ruling = self._maps.rule(self._protocol, event.source, self._asked, SourceClass.NODE)

    # The kernel

    def _hop(self, event: TraceEvent, here: bool) -> None:
        """Add a device without programs, or an ICMP error, which may be the packet itself."""
        if event.quoted and here:
            if not self._steps:  # egress has turned a packet of this node around
                self._own_packet(event)
            untouched = event.destination == self._asked
            refused = any(step.ends for step in self._steps)
            if untouched and self._ruling.verdict == "reject" and not refused:
                place = self._ingress.get("original", len(self._steps))
                note = f"{self._ruling.why}; answered by ICMP port unreachable"
                step = TraceStep(
                    "egress", "sm_egress", self._ruling.text, "reject", event.name, note=note
                )
                if place < len(self._steps):
                    step = replace(self._steps[place], verdict="reject", note=note)
                self._steps[place : place + 1] = [step]
                return
        hook = "send" if event.kind is Kind.SENT else "receive"
        where = "" if event.netns == self._node else f"netns {event.netns}"
        note = "ICMP error" if event.quoted else self._answer(event)
        step = TraceStep(hook, event.name, "", "continue", where, owner=KERNEL, note=note)
        self._steps.append(replace(step, direction=_direction(event)))

    def _freed(self, event: TraceEvent, here: bool) -> None:
        """Add who drops a packet, and why."""
        reason = drop_reasons().get(event.result, "")
        if event.quoted or event.tcp_flags & _RST or reason in _NO_REASON:
            return
        direction = _direction(event)
        if not here or reason not in _BY_PROGRAM:
            # If nobody listens, the answer (a reset or an ICMP error) says the same.
            verdict = "no socket" if reason == "NO_SOCKET" else "drop"
            owner = "netfilter" if reason == "NETFILTER_DROP" else KERNEL
            where = "" if event.netns == self._node else f"netns {event.netns}"
            note, place = DROP_REASONS.get(reason, ""), function_at(event.location)
            step = TraceStep("kernel", place, reason, verdict, where, owner=owner, note=note)
            self._steps.append(replace(step, direction=direction))
            return

        # A program of the device: ours if the maps say so, or if it has counted a drop.
        hook, program = _BY_PROGRAM[reason]
        received = self._ingress.pop(direction, None) if hook == "ingress" else None
        if received is None and not event.reply and event.destination == self._asked:
            self._own_packet(event)
        rule, owner, note = self._ruling.text, STEERSMAN, self._ruling.why
        if self._ruling.verdict != "drop" or event.reply:
            counters = ", ".join(self._maps.new_drops())
            rule, note = "", f"counted as {counters}" if counters else ""
            if not counters:
                program, owner = "", "another program of the device"
        step = TraceStep(hook, program, rule, "drop", event.name, owner=owner, note=note)
        step = replace(step, direction=direction)
        if received is not None and owner == STEERSMAN:
            self._steps[received] = step
        else:
            self._steps.append(step)


def _direction(event: TraceEvent) -> Direction:
    return "reply" if event.reply else "original"
