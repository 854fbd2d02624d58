"""Follow a packet through the programs of this mode, and through the kernel around them.

Programs that go with this process (trace_events.py) report where the packet was seen, and with
which addresses; the difference between two places is what the mode's programs did there. Why they
did it is looked up in their maps (dump.py, trace_events.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence

from msgspec.structs import replace

from steersman.host.exec import Exec
from steersman.host.worker import KernelWorker
from steersman.model.errors import BusyError
from steersman.model.tracing import TraceStep, TrackedConnection, WatchedFlow
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.datapath import EbpfOptions
from steersman.modes.ebpf.loader import StaleMapsError, explain
from steersman.modes.ebpf.pins import Pins
from steersman.modes.ebpf.probe import cgroup_root
from steersman.modes.ebpf.trace_events import FILE, FILTER, Kind, TraceEvent, Watcher
from steersman.modes.ebpf.trace_maps import TraceMaps
from steersman.modes.ebpf.trace_story import Story
from steersman.modes.netfilter_tracer import NetfilterTracer
from steersman.modes.tracer import Tracer

_BEFORE_RULES = ("connect", "sendmsg", "ingress")


class EbpfTracer(Tracer):
    """Follows flows with programs of its own; the mode's programs stay as they are."""

    def __init__(self, worker: KernelWorker, options: EbpfOptions, execute: Exec) -> None:
        """Create a tracer.

        Args:
            worker: the thread in which maps and programs are used.
            options: where the mode's maps and cgroup are.
            execute: runs the programs that print rules of netfilter.
        """
        self._worker = worker
        self._options = options
        self._execute = execute
        self._rules: NetfilterTracer | None = None
        self._watcher: Watcher | None = None
        self._maps: TraceMaps | None = None
        self._events: list[TraceEvent] = []
        self._news = asyncio.Event()
        self._wanted: WatchedFlow | None = None
        self._node = 0
        self._followed = 0

    async def start(self, flow: WatchedFlow) -> None:
        """Load and attach the programs."""
        self._wanted = flow
        pins = Pins(self._options.pins)

        def watch() -> None:
            self._node = os.stat("/proc/thread-self/ns/net").st_ino
            self._maps = TraceMaps(pins.maps)
            source = layout.pack_address(flow.source) if flow.source else bytes(16)
            wanted = FILTER.pack(
                *(source, layout.pack_address(flow.destination)),
                *(flow.source_port.to_bytes(2, "big"), flow.port.to_bytes(2, "big")),
                *(flow.protocol.number, self._node, 0, 0),
            )
            root = self._options.cgroup or cgroup_root()
            with contextlib.ExitStack() as stack:
                cgroup = -1
                if root and "sm_connect4" in pins.link_names():  # sockets are balanced
                    cgroup = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
                    stack.callback(os.close, cgroup)
                self._watcher = Watcher(pins.maps, cgroup, wanted)
            if flow.source_port:  # by which netfilter recognises the packet
                # The packet has the endpoint's address already, and no rule is the mode's.
                rules = NetfilterTracer(
                    self._execute, lambda _table, _chain: False, replies=False, to_anywhere=True
                )
                with contextlib.suppress(BusyError):  # it has no nf_tables: then it has no rules
                    rules.mark(flow)
                    self._rules = rules

        try:
            await self._worker.do(watch)
        except (OSError, StaleMapsError) as error:
            await self.aclose()
            raise BusyError(f"ebpf: nothing can be traced: {explain(error, FILE)}") from error
        assert self._watcher
        asyncio.get_running_loop().add_reader(self._watcher.fileno(), self._read)

    def _read(self) -> None:
        assert self._watcher
        self._events += self._watcher.read()
        self._news.set()

    async def first_packet(self) -> WatchedFlow:
        """Wait for a packet of the flow, or for a call that is refused."""
        assert self._wanted
        sources, ports = ("", self._wanted.source), (0, self._wanted.source_port)
        while True:
            for event in self._events:
                # A call that goes on may be another client's; an error quotes the packet itself.
                goes_on = event.kind is Kind.CALLED and not event.result
                if goes_on or (event.reply and not event.quoted):
                    continue
                source, port = layout.split_endpoint(event.source)
                # A socket may be bound to no address when it is refused.
                name = layout.print_address(source) if any(source) else ""
                wanted = not self._wanted.source or name in sources
                if wanted and (not self._wanted.source_port or port in ports):
                    self._followed = event.flow
                    return replace(
                        self._wanted, source=name or self._wanted.source, source_port=port
                    )
            self._news.clear()
            await self._news.wait()

    async def steps(self) -> tuple[TraceStep, ...]:
        """Return the way of the packet and of the first answer."""
        self._read()
        assert self._wanted
        assert self._maps
        events = [event for event in self._events if event.flow == self._followed]
        story = Story(self._wanted, self._maps, self._node)
        steps = await self._worker.do(story.tell, events)
        return with_rules(steps, await self._rules.steps()) if self._rules else steps

    async def connection(self, flow: WatchedFlow) -> TrackedConnection | None:
        """Return the addresses with which the packet was seen last; None if it was refused."""
        self._read()
        packets = [
            event
            for event in self._events
            if event.flow == self._followed and not event.quoted and event.kind is not Kind.CALLED
        ]
        seen = [event for event in packets if not event.reply and event.kind is not Kind.FREED]
        if not seen or any(step.ends for step in await self.steps()):
            return None
        source, source_port = layout.split_endpoint(seen[-1].source)
        endpoint, endpoint_port = layout.split_endpoint(seen[-1].destination)
        return TrackedConnection(
            *(flow.source, flow.source_port, flow.destination, flow.port),
            *(layout.print_address(endpoint), endpoint_port),
            *(layout.print_address(source), source_port),
            "replied" if any(event.reply for event in packets) else "unreplied",
        )

    async def count_lost(self) -> int:
        """Count the events that were lost, as nobody read them in time."""
        return await self._worker.do(self._watcher.count_lost) if self._watcher else 0

    async def aclose(self) -> None:
        """Detach the programs."""
        if self._watcher:
            asyncio.get_running_loop().remove_reader(self._watcher.fileno())
            await self._worker.do(self._watcher.close)
        if self._maps:
            await self._worker.do(self._maps.close)
        if self._rules:
            await self._rules.aclose()
        self._watcher = self._maps = self._rules = None


def with_rules(steps: Sequence[TraceStep], rules: Sequence[TraceStep]) -> tuple[TraceStep, ...]:
    """Put the steps of rules where the packet met them: after ingress, before egress."""
    if not rules:
        return tuple(steps)
    before = [
        place
        for place, step in enumerate(steps)
        if step.direction == "original" and step.hook in _BEFORE_RULES
    ]
    place = before[-1] + 1 if before else 0
    rest = steps[place:]
    if any(step.ends for step in rules):  # the kernel's own report of the drop says less
        rest = [step for step in rest if step.direction == "reply" or not step.ends]
    return (*steps[:place], *rules, *rest)
