"""Endpoints that fail, TCP clients that try them, and what the kernel tells of it.

Faults of addresses and nodes decide which client gets an answer. Clients connect by the rules as
planned, and the watches of processes hear of connections that fail, true ones and those that an
attacker makes up. Each ejection is judged at once; whether it ends, when all is at rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from steersman.failover.policy import Policy
from steersman.failover.watch import Failure, FailureWatch
from steersman.model.errors import BusyError
from steersman.model.failover import Backend, Ejection, Observation, Probe
from steersman.model.names import ObjectName, PlanKey, Protocol
from steersman.model.plan import NodePlan, Verdict
from tests.sim.universe import Universe

EVERYTHING = "*"
"""The key of a fault of all endpoints, or of this node's own link."""
NAMES = "10.244.4."
"""Addresses on a node that has endpoints of UDP only."""
BLACKHOLES = ("198.18.0.1", "198.18.0.2")
ATTACKER = "10.244.3.66"
_CANARIES = range(240, 250)
"""Last numbers of the addresses of canaries: they fail only if everything does."""
_SERIES = 3.0
"""Seconds that confirming takes at most, and what a late process needs."""
_RETURN = 12.0
"""Seconds after its hold within which an endpoint that answers is used again: a probe that is lost
or late, and the next one."""


class Endpoints:
    """The endpoints of a cluster as this node reaches them."""

    def __init__(self, universe: Universe, fail: Callable[[str], None]) -> None:
        self._universe = universe
        self._fail = fail
        self._faults: dict[str, Observation] = {}
        """By address, node or EVERYTHING."""
        self._begun: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self.denied: set[str] = set()
        """Addresses that answer clients only: a policy denies the probes of nodes."""
        self.loss = 0.0
        """Share of connections and probes whose packets are lost."""
        self.blind = False
        """The kernel does not let connections be watched."""
        self.open: dict[Backend, float] = {}
        """Endpoints whose waiting connections were cut, and when."""
        self.changed_at = 0.0
        """When an ejection last began or ended."""
        self._denied_at = 0.0
        self._lossy_until = 0.0
        self._watches: dict[SimWatch, None] = {}

    # What answers

    def break_(self, key: str, how: Observation = Observation.SILENT) -> None:
        """Let an address, a node or EVERYTHING fail."""
        self._faults[key] = how
        self._begun[key] = self._universe.now

    def is_broken(self, key: str) -> bool:
        """Return whether an address, a node or EVERYTHING fails as such."""
        return key in self._faults

    def revive(self, key: str) -> None:
        """End one fault."""
        if self._faults.pop(key, None) is not None:
            self._ended[key] = self._universe.now

    def deny(self, ips: Collection[str]) -> None:
        """Let a policy deny the probes of nodes."""
        self._ended.update(dict.fromkeys(self.denied.difference(ips), self._universe.now))
        self.denied = set(ips)
        self._denied_at = self._universe.now

    def heal(self) -> None:
        """Let everything answer."""
        for key in self._faults:
            self._ended[key] = self._universe.now
        if self.loss:
            self._lossy_until = self._universe.now
        self._faults, self.loss, self.blind = {}, 0.0, False

    def answer(self, backend: Backend, client: str = "") -> Observation:
        """What a connection of a client meets now; "" for a probe of this node."""
        for key in self._keys(backend.ip):
            if key in self._faults:
                return self._faults[key]
        denied = not client and backend.ip in self.denied
        lost = self.loss and self._universe.dice.random() < self.loss
        return Observation.SILENT if denied or lost else Observation.ANSWERED

    @staticmethod
    def _keys(ip: str) -> tuple[str, ...]:
        """The keys of faults that concern an address."""
        parts = ip.split(":") if ":" in ip else ip.split(".")
        if ip.startswith(("10.244.", "fd00:10:244:")) and int(parts[-1], 16) != 0:
            if ":" not in ip and int(parts[3]) in _CANARIES:
                return (EVERYTHING,)
            return ip, f"node-{'abcd'[int(parts[3 if ':' in ip else 2]) - 1]}", EVERYTHING
        return ip, EVERYTHING

    def _answers_since(self, ip: str) -> float | None:
        """Since when every probe is answered; None if one may fail."""
        keys = self._keys(ip)
        if self.loss or ip in self.denied or any(key in self._faults for key in keys):
            return None
        return max(self._lossy_until, *(self._ended.get(key, 0.0) for key in (ip, *keys)))

    # Clients

    async def try_backend(self, probe: Probe) -> Observation:
        """Connect to an endpoint, as the process does."""
        outcome = self.answer(probe.backend)
        if outcome is not Observation.SILENT:
            await asyncio.sleep(self._universe.dice.uniform(1e-4, 5e-3))
            return outcome
        udp = probe.backend.protocol is Protocol.UDP
        await asyncio.sleep(0.3 if udp else probe.timeout)
        return Observation.ANSWERED if udp else Observation.SILENT

    def connect(self, plan: NodePlan) -> None:
        """Have a client connect to some Service, as the rules are now."""
        dice = self._universe.dice
        plans = [p for p in plan.services.values() if p.key.name.protocol is not Protocol.SCTP]
        frontends = dice.choice(plans).frontends if plans else ()
        if not frontends:
            return
        service = next(p for p in plans if p.frontends is frontends)
        frontend = dice.choice(frontends)
        if frontend.external.verdict is Verdict.FORWARD:
            end = dice.choice(service.pool(frontend.external.pool))
            backend = Backend(end.ip, end.port, service.key.name.protocol)
            self.send(backend, f"10.244.1.{dice.randrange(2, 200)}")

    def send(self, backend: Backend, client: str) -> None:
        """Have a client connect to an endpoint, and try again each second while it is silent."""
        self._send(backend, client, self._universe.now, 0)

    def _send(self, backend: Backend, client: str, began: float, number: int) -> None:
        if number and self.open.get(backend, 0.0) >= began:
            return  # it was cut, and goes on with another endpoint
        if number:
            self.tell(Failure(backend, Observation.SILENT, client))
        outcome = self.answer(backend, client)
        if outcome is not Observation.SILENT:
            self.tell(Failure(backend, outcome, client))
        elif number < 5 and backend.protocol is Protocol.TCP:
            self._universe.after(1.0, lambda: self._send(backend, client, began, number + 1))

    # What processes hear

    def tell(self, failure: Failure) -> None:
        """Let every process that watches hear of a connection."""
        for watch in tuple(self._watches):
            if watch.loop.is_closed():
                del self._watches[watch]
            elif watch.counts_answers or failure.observation is not Observation.ANSWERED:
                self._universe.inside(watch.loop, lambda w=watch: w.hear(failure))  # type: ignore[misc]

    def watch(self, *, counts_answers: bool) -> FailureWatch:
        """Begin to watch, as a mode does.

        Raises:
            BusyError: the kernel does not let connections be watched.
        """
        if self.blind:
            raise BusyError("the kernel refuses to log packets")
        watch = SimWatch(self, counts_answers)
        self._watches[watch] = None
        return watch

    def forget(self, watch: SimWatch) -> None:
        self._watches.pop(watch, None)

    def break_watches(self) -> None:
        """No process can watch any more, until `heal`."""
        self.blind = True
        for watch in tuple(self._watches):
            if not watch.loop.is_closed():
                self._universe.inside(watch.loop, watch.fail)

    # What must be true

    def judge(
        self, service: ObjectName, before: Collection[Ejection], after: Iterable[Ejection]
    ) -> None:
        """See that the new ejections of a Service are right."""
        known = {each.backend for each in before}
        now = self._universe.now
        self.changed_at = now
        for ejection in after:
            backend = ejection.backend
            if backend in known:
                continue
            since = self._answers_since(backend.ip)
            # A limit may have kept it in the pool for a part of its hold.
            decided = now - (time.time() - ejection.since)
            if since is not None and decided - since > _SERIES:
                self._fail(f"{backend} is ejected ({ejection.reason}), and it answers")
            broken = any(key in self._faults for key in self._keys(backend.ip))
            # For its own Service the attacker may do without them.
            denied = backend.ip in self.denied and now - self._denied_at > _SERIES
            if denied and not broken and service.namespace != "evil":
                self._fail(f"{backend} is ejected, and only the node's probes are denied")
            dark = now - self._begun[EVERYTHING] if EVERYTHING in self._faults else 0.0
            # One that refuses connections is reached, whatever the others do.
            if dark > _SERIES and self.answer(backend) is Observation.SILENT:
                self._fail(f"{backend} is ejected, and this node reaches no endpoint")

    def overdue(self, policy: Policy[PlanKey]) -> str:
        """Say which ejection should have ended; "" if all is well."""
        now = self._universe.now
        for ejection in policy.ejections:
            since = self._answers_since(ejection.backend.ip)
            if since is not None and now > max(since, ejection.until) + _RETURN:
                return f"{ejection.backend} answers since {since}, and is still ejected"
            if ejection.until - ejection.since > 300.5:
                return f"{ejection.backend} is ejected for more than five minutes"
        return ""


class SimWatch(FailureWatch):
    """What one process hears of failing connections."""

    def __init__(self, endpoints: Endpoints, counts_answers: bool) -> None:
        self.loop: Any = asyncio.get_running_loop()
        self.counts_answers = counts_answers
        self._endpoints = endpoints
        self._heard: list[Failure] = []
        self._news = asyncio.Event()
        self._broken = False

    def hear(self, failure: Failure) -> None:
        """Tell the process."""
        self._heard.append(failure)
        self._news.set()

    def fail(self) -> None:
        """Break down."""
        self._broken = True
        self._news.set()

    async def receive(self) -> list[Failure]:
        await self._news.wait()
        if self._broken:
            raise OSError("the socket is gone")
        self._news.clear()
        heard, self._heard = self._heard, []
        return heard

    async def cut(self, backends: Collection[Backend]) -> int:
        for backend in backends:
            self._endpoints.open[backend] = self._endpoints._universe.now
        return len(backends)

    async def aclose(self) -> None:
        self._endpoints.forget(self)
