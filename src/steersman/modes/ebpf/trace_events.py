"""The programs that watch a flow (c/trace.bpf.c), and the steps that their events tell.

Nothing is pinned: when this process ends, however it does, the kernel detaches and frees all.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import os
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from msgspec.structs import replace

from steersman.model.plan import SourceClass
from steersman.model.tracing import STEERSMAN, TraceStep, WatchedFlow
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.bpf import CGROUP_ATTACH_TYPES, HashMap
from steersman.modes.ebpf.dump import Ruling, TraceMaps, endpoint_name
from steersman.modes.ebpf.loader import BesideObject, library

# -- The programs ----------------------------------------------------------------------------------

FILE = Path(__file__).with_name(f"trace-{'el' if sys.byteorder == 'little' else 'eb'}.o")
"""The object for this machine; the build creates it (hatch_build.py)."""
FILTER = struct.Struct("=16s16s2s2sB3xIII4x")
EVENT = struct.Struct("=QQQ40siIII6B2xI16s4x")
_SIZES = {"trace_filter": FILTER.size, "trace_event": EVENT.size}
_ONLY_KEY = layout.number_key(0)
_BTF_KIND_ENUM = 6
_REASON_PREFIX = "SKB_DROP_REASON_"
_SYMBOLS = Path("/proc/kallsyms")


class Kind(enum.IntEnum):
    """`enum trace_kind`."""

    CALLED = 1
    SENT = 2
    RECEIVED = 3
    FREED = 4


class TraceEvent(NamedTuple):
    """A `struct trace_event`; ends are packed endpoints, as in layout.py."""

    time: int
    """CLOCK_MONOTONIC, ns."""
    netns_cookie: int
    """Network namespace of a socket."""
    location: int
    """Address of the kernel's function that drops the packet."""
    source: bytes
    destination: bytes
    result: int
    """CALLED: the errno, 0 if the call goes on. FREED: the reason."""
    flow: int
    netns: int
    """Inode of the device's network namespace."""
    process: int
    kind: Kind
    translated: bool
    """Whether the socket was balanced."""
    datagram: bool
    """Whether the call was sendmsg()."""
    reply: bool
    """Whether the packet is an answer."""
    tcp_flags: int
    quoted: bool
    """Whether an ICMP error quotes the packet."""
    device: int
    """Index of the device; 0 if there is none."""
    name: str
    """Of the device or the process."""

    @classmethod
    def unpack(cls, data: bytes) -> TraceEvent:
        """Take a record of the ring buffer apart."""
        time, cookie, location, key, result, flow, netns, process, *more = EVENT.unpack(data)
        kind, translated, datagram, reply, tcp_flags, quoted, device, text = more
        source, destination, source_port, destination_port, *_ = layout.FLOW_KEY.unpack(key)
        return cls(
            *(time, cookie, location, source + source_port, destination + destination_port),
            *(result, flow, netns, process),
            kind=Kind(kind),
            translated=bool(translated),
            datagram=bool(datagram),
            reply=bool(reply),
            tcp_flags=tcp_flags,
            quoted=bool(quoted),
            device=device,
            name=text.split(b"\0")[0].decode(errors="replace"),
        )


class Watcher(BesideObject):
    """Watches flows while it is open; to open and to close it blocks, for some milliseconds."""

    def __init__(self, maps: Path, cgroup: int, wanted: bytes) -> None:
        """Load and attach.

        Args:
            maps: directory of the mode's pinned maps.
            cgroup: descriptor of the cgroup whose sockets the mode balances; -1 for none.
            wanted: a FILTER.

        Raises:
            OSError, StaleMapsError: as BesideObject.
        """
        self._events: list[TraceEvent] = []
        super().__init__(FILE, maps, _SIZES)
        try:
            self._filter = HashMap(self.maps["filter"])
            self._filter.put(_ONLY_KEY, wanted)
            self.listen("events", lambda data: self._events.append(TraceEvent.unpack(data)))
            for name in self.programs:
                attach_type = CGROUP_ATTACH_TYPES.get(name.replace("trace_", "sm_"))
                if attach_type is None:
                    self.attach(name)
                elif cgroup >= 0:
                    self.attach_socket(name, cgroup, attach_type)
        except BaseException:
            self.close()
            raise

    def read(self) -> Sequence[TraceEvent]:
        """Return the events since the last time."""
        self.consume()
        events, self._events = self._events, []
        return events

    def count_lost(self) -> int:
        """Count the events for which the buffer had no room."""
        lost: int = FILTER.unpack(self._filter.get(_ONLY_KEY) or bytes(FILTER.size))[-1]
        return lost


@functools.cache
def drop_reasons() -> dict[int, str]:
    """Return the kernel's names for why it drops a packet (`enum skb_drop_reason`), by number."""
    btf = library().btf__load_vmlinux_btf()
    if not btf:
        return {}
    try:
        number = library().btf__find_by_name_kind(btf, b"skb_drop_reason", _BTF_KIND_ENUM)
        if number < 0:
            return {}
        # libbpf has no accessors: read struct btf_type, and the struct btf_enum after it.
        start = library().btf__type_by_id(btf, number)
        _, info, _ = struct.unpack("=III", ctypes.string_at(start, 12))
        values = struct.iter_unpack("=Ii", ctypes.string_at(start + 12, 8 * (info & 0xFFFF)))
        return {
            value: library().btf__name_by_offset(btf, text).decode().removeprefix(_REASON_PREFIX)
            for text, value in values
        }
    finally:
        library().btf__free(btf)


def function_at(address: int) -> str:
    """Return the function of the kernel that an address is in; "" if the kernel hides that."""
    best, name = 0, ""
    with _SYMBOLS.open() as lines:
        for line in lines:
            start = int(line[:16], 16)
            if best < start <= address:
                best, name = start, line.split()[2]
    return name


# -- Steps -----------------------------------------------------------------------------------------
#
# From events to steps: what the mode and the kernel did with a packet.

KERNEL = "the kernel"
"""Owner of what no rule decides."""
_NO_PROGRAMS = "lo"  # the device without programs
_RST = 4  # flag of TCP
# Reasons that are none: freed after use, or not known.
_NO_REASON = ("SKB_NOT_DROPPED_YET", "SKB_CONSUMED", "NOT_SPECIFIED", "")
_BY_PROGRAM = {"TC_INGRESS": ("ingress", "sm_ingress"), "TC_EGRESS": ("egress", "sm_egress")}
_REASONS = {
    "NETFILTER_DROP": "a rule of netfilter drops it: a firewall, or a NetworkPolicy",
    "IP_RPFILTER": "its source is reached by another device (net.ipv4.conf.*.rp_filter)",
    "NO_SOCKET": "nothing listens there",
    "IP_INNOROUTES": "there is no route for it",
    "IP_OUTNOROUTES": "there is no route for it",
    "IP_INADDRERRORS": "its addresses may not be forwarded",
    "IP_LOCALNET": "it is for 127.0.0.0/8, but comes from outside",
    "NEIGH_FAILED": "the next hop does not answer ARP or neighbour discovery",
    "PKT_TOO_BIG": "it is larger than the MTU of the next link",
    "TCP_LISTEN_OVERFLOW": "the queue of the listening socket is full",
    "SOCKET_RCVBUFF": "the buffer of the receiving socket is full",
    "QDISC_DROP": "the queue of the device is full",
}
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
            endpoint = endpoint_name(event.destination)
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
        text = f"the destination is now {endpoint_name(endpoint)}"
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
            text = f"the destination is now {endpoint_name(event.destination)}"
            if not event.reply:
                text = self._translation(event.destination)
                endpoint = endpoint_name(event.destination)
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
            notes.append(f"the source is now {endpoint_name(event.source)}")
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
            note, place = _REASONS.get(reason, ""), function_at(event.location)
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
