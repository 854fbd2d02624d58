"""New connections to Services, opened from this node, to see whether a change harms them.

The canary connects to the cluster IPs and node ports of some Services by TCP, sends nothing, and
closes the connection. Only destinations that answered before the change are watched after it, so an
endpoint that was down already says nothing about the change:

    watched = await canary.prove()      before: keep the destinations that answer
    async with canary.watching():       dial them in turn, from a task
        ...                             the change
    canary.failing                      destinations that have failed again and again since

A connection that fails once is counted; `failing` needs several in a row, as one SYN may be lost by
chance, and a lost one is retransmitted only after a second.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import cycle
from typing import NamedTuple

from steersman.host.connect import socket_address
from steersman.model.addresses import join_host_port
from steersman.model.names import Protocol
from steersman.model.plan import FrontendKind, NodePlan, Verdict

MOST_TARGETS = 24
"""Destinations that are watched; of more, some are chosen evenly."""
_TIMEOUT = 3.0
"""Seconds until a dial has failed: two retransmissions of the SYN."""
_PAUSE = 0.05  # seconds between two dials
_PROOFS, _MOST_PROOFS = 4, 16
"""Dials for each endpoint before the change: a dead one among them has to be noticed. The most in
all, for a Service with many endpoints."""
_IN_A_ROW = 3
"""Failed dials after which a destination counts as failing."""
_MOST_NOTES = 5
"""Failures that are kept as text."""


class Target(NamedTuple):
    """A destination of a Service that this node can connect to."""

    service: str
    """The ServicePort, as printed."""
    address: str
    port: int
    endpoints: tuple[tuple[str, int], ...] = ()
    """Addresses and ports that it leads connections of this node to."""

    def __str__(self) -> str:
        return f"{self.service} at {join_host_port(self.address, self.port)}"


Dial = Callable[[Target], Awaitable[str]]
"""Opens and closes a connection; returns what went wrong, "" for nothing."""


def targets_of(plan: NodePlan, most: int = MOST_TARGETS) -> list[Target]:
    """Return TCP destinations that forward connections of this node to endpoints."""
    found = []
    for key, service in plan.services.items():
        settings = plan.settings.family(key.family)
        serving, node_ip = settings.node_port_addresses, settings.node_ip
        # A node port is dialled at the node's own address, if it is served there.
        addresses = {FrontendKind.NODE_PORT: node_ip if not serving or node_ip in serving else ""}
        for frontend in service.frontends:
            if frontend.kind is FrontendKind.CLUSTER_IP:
                addresses[frontend.kind] = frontend.address
            address = addresses.get(frontend.kind, "")
            forwards = frontend.node.verdict is Verdict.FORWARD and not frontend.source_ranges
            if address and forwards and key.name.protocol is Protocol.TCP:
                ends = tuple((e.ip, e.port) for e in service.pool(frontend.node.pool))
                found.append(Target(str(key), address, frontend.port, ends))
    found.sort()
    # Evenly over all Services, whatever their number.
    return [found[at * len(found) // most] for at in range(most)] if len(found) > most else found


async def dial(target: Target) -> str:
    """Connect to a destination and close the connection; return what went wrong, "" if nothing."""
    family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            async with asyncio.timeout(_TIMEOUT):
                where = socket_address(target.address, target.port)
                await asyncio.get_running_loop().sock_connect(sock, where)
    except TimeoutError:
        return f"no answer in {_TIMEOUT:g} s"
    except OSError as error:
        return os.strerror(error.errno or errno.EIO)
    return ""


class Canary:
    """Dials destinations before and during a change."""

    def __init__(
        self,
        targets: list[Target],
        dial: Dial = dial,
        *,
        proxied: bool = False,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Choose the destinations; nothing is dialled before `prove`.

        Args:
            proxied: connections end in this process, so that they succeed without an endpoint.
        """
        self.proven: list[Target] = []
        """Destinations that answered before the change."""
        self.dials = 0
        """Dials of proven destinations so far."""
        self.failures: list[str] = []
        """The first failures, a sentence each."""
        self.failed = 0
        """Failed dials of proven destinations so far."""
        self._targets = targets
        self._dial = dial
        self._proxied = proxied
        self._sleep = sleep
        self._in_a_row: Counter[Target] = Counter()

    @property
    def failing(self) -> list[Target]:
        """Proven destinations whose last dials have all failed."""
        return [target for target, failed in self._in_a_row.items() if failed >= _IN_A_ROW]

    def forget(self) -> None:
        """Forget failures so far: from here on they belong to another change."""
        self._in_a_row.clear()

    async def prove(self) -> None:
        """Dial every destination several times, and keep those that always answer."""

        async def answers(target: Target) -> bool:
            count = min(_PROOFS * len(target.endpoints) or 1, _MOST_PROOFS)
            dialled = [target] * count
            if self._proxied:
                ends = target.endpoints[:_MOST_PROOFS]
                dialled = [target, *(Target(target.service, *end) for end in ends)]
            for each in dialled:
                if await self._dial(each):
                    return False
            return True

        found = await asyncio.gather(*map(answers, self._targets))
        self.proven = [
            target for target, proven in zip(self._targets, found, strict=True) if proven
        ]

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Dial the proven destinations in turn for as long as the block lasts."""
        task = asyncio.create_task(self._watch(cycle(self.proven))) if self.proven else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _watch(self, targets: Iterator[Target]) -> None:
        # Several at a time, so that one that does not answer delays no other.
        busy: set[Target] = set()

        async def once(target: Target) -> None:
            began = time.monotonic()
            wrong = await self._dial(target)
            busy.discard(target)
            self.dials += 1
            if not wrong:
                self._in_a_row.pop(target, None)
                return
            self.failed += 1
            self._in_a_row[target] += 1
            if len(self.failures) < _MOST_NOTES:
                self.failures.append(f"{target}: {wrong} after {time.monotonic() - began:.1f} s")

        async with asyncio.TaskGroup() as group:
            for target in targets:
                if target not in busy:
                    busy.add(target)
                    group.create_task(once(target))
                await self._sleep(_PAUSE)
