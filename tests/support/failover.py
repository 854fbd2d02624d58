"""A network in which endpoints fail, with the policy in the loop: simulated time, no sockets.

A connection is sent to a random endpoint that is not ejected. Its SYN leaves at 0, 1, 2, 3, 4 and
5 s, as with net.ipv4.tcp_syn_linear_timeouts=4; each round trip is lost with the given probability.
The node sees each retransmission. A connection fails if nothing answers its six SYNs, or if it is
refused. When its endpoint is ejected its next SYN goes to another one, as the node deletes the
unreplied conntrack entries. An endpoint with a capacity drops the SYNs beyond it, as a full accept
queue does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from steersman.failover.policy import Policy
from steersman.model.failover import Backend, Observation, Settings
from steersman.model.names import Protocol

SYNS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
ROUND_TRIP = 0.002
QUEUE = 1.0
"""Length of an accept queue, in seconds of the endpoint's capacity."""


class Fault(NamedTuple):
    """Something that happens to some endpoints for a while."""

    backends: frozenset[Backend]
    begins: float
    ends: float
    kind: Observation = Observation.SILENT
    share: float = 1.0
    """Of the SYNs."""
    clients: frozenset[str] | None = None
    """Those that it concerns; None for all, the node's probes included."""


class Connection(NamedTuple):
    began: float
    client: str
    outcome: str
    """answered, slow (after a second or more), or failed."""
    ended: float


def endpoints(number: int, nodes: int = 3) -> dict[Backend, str]:
    """Endpoints, dealt to the nodes in turn."""
    return {
        Backend(f"10.0.{i % nodes}.{i}", 80, Protocol.TCP): f"node-{i % nodes}"
        for i in range(number)
    }


def on_node(members: Mapping[Backend, str], *nodes: str) -> frozenset[Backend]:
    return frozenset(backend for backend, node in members.items() if node in nodes)


class Network:
    """Connections, faults, and a node that observes and probes."""

    def __init__(
        self,
        members: Mapping[Backend, str],
        *,
        seed: int,
        faults: tuple[Fault, ...] = (),
        loss: float = 0.0,
        policy: Policy[str] | None = None,
        clients: int = 20,
        sees_answers: bool = False,
        capacity: float = 0.0,
    ) -> None:
        """Create the network.

        Args:
            members: the endpoints, and their nodes.
            seed: of all random numbers.
            faults: what goes wrong.
            loss: probability that a round trip is lost.
            policy: of the node; None for one that ejects nothing.
            clients: their number.
            sees_answers: whether the node sees connections succeed, too.
            capacity: connections that each endpoint accepts in a second; 0 for no limit.
        """
        self.members = members
        self.policy = policy
        self.connections: list[Connection] = []
        self.ejections: list[tuple[float, Backend]] = []
        self.returns: list[tuple[float, Backend]] = []
        self.probes = 0
        self.now = 0.0
        self._random = random.Random(seed)
        self._faults, self._loss, self._sees = faults, loss, sees_answers
        self._capacity = capacity
        self._queues = dict.fromkeys(members, (0.0, 0.0))
        """When the accept queue was looked at, and its length then."""
        self._clients = [f"client-{number}" for number in range(clients)]
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = count()
        self._out: frozenset[Backend] = frozenset()
        self._alarm = 0.0
        """When the policy is asked next."""
        if policy is not None:
            policy.serve("pool", members)

    def run(self, seconds: float, rate: float) -> Counter[str]:
        """Let clients connect `rate` times a second; return the outcomes."""
        at = self._random.expovariate(rate)
        while at < seconds:
            self._at(at, self._connect, at, self._random.choice(self._clients))
            at += self._random.expovariate(rate)
        while self._due and self._due[0][0] < seconds + 6:
            self.now, _, work, arguments = heappop(self._due)
            work(*arguments)
            self._advance()
        return Counter(each.outcome for each in self.connections)

    def _at(self, when: float, work: Callable[..., None], *arguments: Any) -> None:
        heappush(self._due, (when, next(self._number), work, arguments))

    def _pick(self) -> Backend:
        return self._random.choice([each for each in self.members if each not in self._out])

    def _answer(self, backend: Backend, client: str) -> Observation:
        """What a SYN, or a probe (client ""), meets now."""
        if self._random.random() < self._loss:
            return Observation.SILENT
        for fault in self._faults:
            if backend in fault.backends and fault.begins <= self.now < fault.ends:
                concerned = fault.clients is None or client in fault.clients
                if concerned and self._random.random() < fault.share:
                    return fault.kind
        if self._capacity:
            at, length = self._queues[backend]
            length = max(0.0, length - (self.now - at) * self._capacity)
            full = length >= max(1.0, self._capacity * QUEUE)
            self._queues[backend] = (self.now, length if full else length + 1)
            if full:
                return Observation.SILENT
        return Observation.ANSWERED

    def _connect(
        self, began: float, client: str, syn: int = 0, backend: Backend | None = None
    ) -> None:
        if backend is None or backend in self._out:
            backend, moved = self._pick(), backend is not None
        else:
            moved = False
        if syn and not moved:
            self._observe(backend, Observation.SILENT, client)
        what = self._answer(backend, client)
        if what is Observation.SILENT and syn + 1 < len(SYNS):
            self._at(began + SYNS[syn + 1], self._connect, began, client, syn + 1, backend)
            return
        if what is Observation.ANSWERED:
            self._observe(backend, what, client) if self._sees else None
            outcome = "slow" if syn else "answered"
        else:
            self._observe(backend, what, client) if what is Observation.REFUSED else None
            outcome = "failed"
        self.connections.append(Connection(began, client, outcome, self.now))

    def _observe(self, backend: Backend, what: Observation, client: str) -> None:
        if self.policy is not None:
            self.policy.observe(self.now, backend, what, client)

    def _advance(self) -> None:
        policy = self.policy
        if policy is None:
            return
        for backend, timeout, *_ in policy.advance(self.now):
            self.probes += 1
            what = self._answer(backend, "")
            took = timeout if what is Observation.SILENT else ROUND_TRIP
            self._at(self.now + took, self._probed, backend, what)
        if policy.take_changed():
            out = frozenset(each.backend for each in policy.ejected("pool"))
            self.ejections += [(self.now, each) for each in sorted(out - self._out)]
            self.returns += [(self.now, each) for each in sorted(self._out - out)]
            self._out = out
        deadline = policy.deadline
        if deadline is not None and not self.now < self._alarm <= deadline:
            self._alarm = max(deadline, self.now)
            self._at(self._alarm, lambda: None)

    def _probed(self, backend: Backend, what: Observation) -> None:
        assert self.policy is not None
        self.policy.probed(self.now, backend, what)

    @property
    def failed(self) -> int:
        """How many connections failed."""
        return sum(each.outcome == "failed" for each in self.connections)

    @property
    def last_failure(self) -> float:
        """When the last connection began that failed; 0 if none did."""
        return max(
            (each.began for each in self.connections if each.outcome == "failed"), default=0.0
        )


def network(
    members: Mapping[Backend, str], *, settings: Settings | None = None, **more: Any
) -> Network:
    """A network whose node ejects endpoints."""
    counts = bool(more.get("sees_answers"))
    return Network(members, policy=Policy(settings, counts_answers=counts), **more)
