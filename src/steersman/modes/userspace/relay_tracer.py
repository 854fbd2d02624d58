"""Follow a packet in userspace mode: netfilter's rules, and what the proxy dials for it.

The proxy is another process. Its sockets tell: the one that listens where the packet goes, and the
connected ones that were not there before.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path

from steersman.host.exec import Exec
from steersman.host.listening import sockets
from steersman.host.worker import KernelWorker
from steersman.model.addresses import join_host_port
from steersman.model.tracing import TraceStep, WatchedFlow
from steersman.modes.netfilter_tracer import NetfilterTracer

_DIALLED_WITHIN = 2.0  # seconds
_PAUSE = 0.02
_SYN_SENT = 0x02  # a state of linux/tcp_states.h
_TABLE = " kube-portals"
_CHAINS = "KUBE-PORTALS-"


class RelayTracer(NetfilterTracer):
    """Also shows the proxy's connection to an endpoint."""

    translates_to_endpoint = False

    def __init__(self, execute: Exec) -> None:
        """Create a tracer; execute: runs the programs that print rules."""
        super().__init__(
            execute, lambda table, chain: table.endswith(_TABLE) or chain.startswith(_CHAINS)
        )
        self._worker = KernelWorker()
        self._before: frozenset[int] = frozenset()

    async def start(self, flow: WatchedFlow) -> None:
        """Remember the sockets of this node, then follow the first packet."""
        self._before = frozenset(each.inode for each in sockets((flow.protocol,)))
        await super().start(flow)

    async def steps(self) -> tuple[TraceStep, ...]:
        """Return the steps of the packet, those of the proxy, and those of the answer."""
        assert self.flow is not None
        entry = await self.connection(self.flow)
        port = entry.endpoint_port if entry else self.flow.port
        # Before the programs that print rules run: a session of UDP may end within 250 ms.
        dialled = await self._worker.do(self._dialled, port)
        steps = await super().steps()
        if any(step.ends for step in steps if step.direction == "original"):
            return steps
        ends = time.monotonic() + _DIALLED_WITHIN
        while not dialled or any(step.verdict == "connecting" for step in dialled):
            if time.monotonic() > ends:
                break
            await asyncio.sleep(_PAUSE)
            dialled = await self._worker.do(self._dialled, port)
        at = sum(step.direction == "original" for step in steps)
        return (*steps[:at], *dialled, *steps[at:])

    async def aclose(self) -> None:
        """Stop following the packet."""
        await super().aclose()
        await self._worker.close()

    def _dialled(self, port: int) -> tuple[TraceStep, ...]:
        """Return the connections that the process behind a port has opened since `start`."""
        assert self.flow is not None
        every = list(sockets((self.flow.protocol,)))
        listeners = {
            each.inode
            for each in every
            if each.local[1] == port and not each.remote[1] and each.is_listening
        }
        process = find_process(listeners)
        if process is None:
            return ()
        name, inodes = process
        client = self.flow.source, self.flow.source_port
        found = [
            each
            for each in every
            if each.inode in inodes - self._before
            and each.remote[1]
            and each.local[1] not in (port, self.flow.source_port)  # nor the client's own end
            and each.remote != client
        ]
        return tuple(
            TraceStep(
                hook="proxy",
                chain=name,
                rule=f"connects to {join_host_port(*each.remote)}",
                verdict="connecting" if each.state == _SYN_SENT else "connected",
                note="" if len(found) == 1 else f"one of {len(found)} opened meanwhile",
                endpoint=join_host_port(*each.remote),
            )
            for each in sorted(found)
        )


def find_process(inodes: set[int], proc: Path = Path("/proc")) -> tuple[str, frozenset[int]] | None:
    """Return name and pid, and the inodes of all sockets, of the process that has one of these.

    A child that was just forked has the sockets of its parent, except for those that came later: of
    several processes it is the one with most sockets, and of those the oldest.
    """
    found: list[tuple[tuple[int, int], str, frozenset[int]]] = []
    for folder in proc.glob("[0-9]*"):
        own = set()
        with suppress(OSError):  # it has ended, or is another user's
            for link in os.scandir(folder / "fd"):
                with suppress(OSError):
                    target = os.readlink(link.path)
                    if target.startswith("socket:["):
                        own.add(int(target[8:-1]))
            if own & inodes:
                name = f"{(folder / 'comm').read_text().strip()} (pid {folder.name})"
                # Field 22 of proc_pid_stat(5): when it started.
                started = int((folder / "stat").read_text().rpartition(")")[2].split()[19])
                found.append(((len(own), -started), name, frozenset(own)))
    return max(found, key=lambda each: each[0])[1:] if found else None
