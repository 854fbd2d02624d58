"""Follow a packet in ipvs mode: netfilter's rules, and the virtual server that took it.

IPVS reports no packet. Conntrack has the real server that got it; without an entry there, it is
the one that has more connections than before. (Those counts are exact at once. The statistics
over netlink are up to two seconds old.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

from msgspec.structs import replace

from steersman.host.exec import Exec
from steersman.model.addresses import join_host_port
from steersman.model.tracing import TraceStep, WatchedFlow
from steersman.modes.ipvs.listings import parse_servers
from steersman.modes.ipvs.objects import CHAINS, ServerKey, Target
from steersman.modes.netfilter_tracer import NetfilterTracer


class IpvsTracer(NetfilterTracer):
    """Also names the real server of the virtual server at the destination."""

    translates_to_endpoint = False

    def __init__(self, execute: Exec) -> None:
        """Create a tracer; execute: runs the programs that print rules."""
        super().__init__(execute, lambda table, chain: (table.partition(" ")[2], chain) in CHAINS)
        self._before: Mapping[Target, int] = {}

    async def start(self, flow: WatchedFlow) -> None:
        """Count connections, then follow the first packet."""
        self._before = await asyncio.to_thread(connections_of, flow)
        await super().start(flow)

    async def steps(self) -> tuple[TraceStep, ...]:
        """Return the steps, with that of IPVS behind those of the hook in which it took over."""
        assert self.flow is not None
        # The change of the destination is no rule's: it belongs to the step of IPVS.
        steps = [step if step.handle else replace(step, note="") for step in await super().steps()]
        hook, place = where_taken([step for step in steps if step.direction == "original"])
        if any(step.ends for step in steps[:place]):
            return tuple(steps)
        targets = await self._targets(self.flow)
        doubt = f"one of {len(targets)} that got connections meanwhile"
        server = f"{self.flow.protocol} {join_host_port(self.flow.destination, self.flow.port)}"
        taken = [
            TraceStep(
                hook=hook,
                chain=f"virtual server {server}",
                rule=f"-> {endpoint}",
                verdict="forward",
                table="ip_vs",
                note="" if len(targets) == 1 else doubt,
                endpoint=endpoint,
            )
            for endpoint in (join_host_port(*target) for target in targets)
        ]
        return (*steps[:place], *taken, *steps[place:])

    async def _targets(self, flow: WatchedFlow) -> list[Target]:
        """Return the real servers that may have got the packet."""
        now = await asyncio.to_thread(connections_of, flow)
        entry = await self.connection(flow)
        if entry is not None and (target := (entry.endpoint, entry.endpoint_port)) in now:
            return [target]
        return [target for target, count in now.items() if count > self._before.get(target, 0)]


def where_taken(way: Iterable[TraceStep]) -> tuple[str, int]:
    """Return the hook in which IPVS takes a packet, and at which place among its steps.

    It takes packets to this node behind the input chains, its own behind the output chains.
    """
    place = 0
    for hook, steps in groupby(way, key=lambda step: step.hook):
        place += len(list(steps))
        if hook in ("input", "output"):
            return hook, place
    return "input", place


def connections_of(flow: WatchedFlow, proc: Path = Path("/proc")) -> dict[Target, int]:
    """Return the connections of the real servers behind a destination; {} if there are none."""
    try:
        table = parse_servers((proc / "thread-self/net/ip_vs").read_text())
    except OSError:  # ip_vs is not loaded
        return {}
    key = ServerKey(flow.protocol, flow.destination, flow.port)
    return {each.target: each.active + each.inactive for each in table.get(key, ())}
