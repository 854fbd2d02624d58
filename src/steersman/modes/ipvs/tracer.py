"""Follow a packet in ipvs mode: netfilter's rules, and the virtual server that took it.

IPVS reports no packet. Conntrack has the real server that got it; without an entry there, it is
the one that has more connections than before. (Those counts are exact at once. The statistics
over netlink are up to two seconds old.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from steersman.host.exec import Exec
from steersman.model.addresses import join_host_port
from steersman.model.tracing import TraceStep, WatchedFlow
from steersman.modes.ipvs.listings import parse_servers
from steersman.modes.ipvs.objects import CHAINS, ServerKey, Target
from steersman.modes.netfilter_tracer import NetfilterTracer

_HOOKS = ("input", "output")
"""The hooks in which IPVS takes packets: to this node, and of this node."""


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
        steps = list(await super().steps())
        servers = await asyncio.to_thread(connections_of, self.flow)
        # IPVS takes packets to this node behind the input chains, its own behind the output chains.
        # The change of the destination is no rule's: it belongs to the step of IPVS.
        steps = [step if step.handle else replace(step, note="") for step in steps]
        own = [step for step in steps if step.direction == "original"]
        hook = next((step.hook for step in own if step.hook in _HOOKS), _HOOKS[0])
        first = next((n for n, step in enumerate(own) if step.hook == hook), len(own))
        at = next((n for n in range(first, len(own)) if own[n].hook != hook), len(own))
        if any(step.ends for step in own[:at]):
            return tuple(steps)
        entry = await self.connection(self.flow)
        chosen = [
            target for target, count in servers.items() if count > self._before.get(target, 0)
        ]
        if entry is not None and (entry.endpoint, entry.endpoint_port) in servers:
            chosen = [(entry.endpoint, entry.endpoint_port)]
        server = f"{self.flow.protocol} {join_host_port(self.flow.destination, self.flow.port)}"
        found = [
            TraceStep(
                hook=hook,
                chain=f"virtual server {server}",
                rule=f"-> {join_host_port(*target)}",
                verdict="forward",
                table="ip_vs",
                note=""
                if len(chosen) == 1
                else f"one of {len(chosen)} that got connections meanwhile",
                endpoint=join_host_port(*target),
            )
            for target in chosen
        ]
        return (*steps[:at], *found, *steps[at:])


def connections_of(flow: WatchedFlow, proc: Path = Path("/proc")) -> dict[Target, int]:
    """Return the connections of the real servers behind a destination; {} if there are none."""
    try:
        table = parse_servers((proc / "thread-self/net/ip_vs").read_text())
    except OSError:  # ip_vs is not loaded
        return {}
    key = ServerKey(flow.protocol, flow.destination, flow.port)
    return {each.target: each.active + each.inactive for each in table.get(key, ())}
