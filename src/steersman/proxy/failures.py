"""See connections to endpoints fail: the results of the proxy's own dials.

If a dial fails, the next endpoint is dialled, so its client notices little. Failover hears of it
(run/observe/failover.py) and may take the endpoint out, so that no other client has to wait there.

A dial counts as silent when its time is up, which is sooner than its SYN is sent again
(tcp.DIAL_TIMEOUTS). Dials come from this node as probes do, so no policy that drops a client's own
packets makes them fail.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

from steersman.failover.watch import Failure, FailureWatch
from steersman.host.probe import outcome_of
from steersman.model.addresses import canonical_ip
from steersman.model.failover import Backend, Observation
from steersman.model.names import PlanKey
from steersman.model.plan import Endpoint
from steersman.proxy.dials import DialRegistry

_ATTENTION = 5.0  # seconds after a failure in which answers of the ServicePort are reported, too
_QUIET = 1.5  # seconds without an answer before the first failure that are worth knowing
_BATCH = 0.1  # seconds in which answers are gathered
_MOST = 1024  # failures that wait to be received; more prove no more


class DialWatch(FailureWatch):
    """Takes note of dials from its opening to `close`; one at a time."""

    counts_answers = True
    of_this_node = True

    def __init__(self, dials: DialRegistry) -> None:
        """Watch the dials of all listeners, which are on the event loop."""
        self._dials = dials
        self._found: list[Failure] = []
        self._answered: set[Backend] = set()
        """The endpoints whose answers are in `_found`."""
        self._some = asyncio.Event()
        self._attention: dict[PlanKey, float] = {}
        """ServicePorts of which a dial failed, and until when answers are reported."""
        self._batch: asyncio.TimerHandle | None = None
        dials.watch = self

    async def receive(self) -> list[Failure]:
        """Wait for failures."""
        await self._some.wait()
        self._some.clear()
        if self._batch is not None:
            self._batch.cancel()
            self._batch = None
        found, self._found = self._found, []
        self._answered.clear()
        return found

    async def cut(self, backends: Collection[Backend]) -> int:
        """Give up the dials to endpoints, so that the next endpoint is dialled at once."""
        return self._dials.give_up(backends)

    async def aclose(self) -> None:
        """Take no more notes."""
        if self._dials.watch is self:
            self._dials.watch = None
        if self._batch is not None:
            self._batch.cancel()

    def failed(
        self, owner: PlanKey, endpoint: Endpoint, client: str, error: OSError, answered_at: float
    ) -> None:
        """Note a dial that failed; errors of this machine, such as no free port, say nothing.

        Args:
            owner: the ServicePort.
            endpoint: the endpoint.
            client: address of the client that it was for.
            error: what the socket said; TimeoutError if nothing.
            answered_at: when this endpoint last answered, by time.monotonic().
        """
        outcome = outcome_of(error)
        if outcome is None or len(self._found) >= _MOST:
            return
        now, backend = time.monotonic(), _backend(owner, endpoint)
        if self._attention.get(owner, 0.0) <= now:
            self._attention = {key: until for key, until in self._attention.items() if until > now}
            # Answers were not reported until now: the failure may be the only one of many dials.
            if answered_at > now - _QUIET:
                self._found.append(Failure(backend, Observation.ANSWERED))
        self._attention[owner] = now + _ATTENTION
        self._found.append(Failure(backend, Observation(outcome), canonical_ip(client) or client))
        self._some.set()

    def answered(self, owner: PlanKey, endpoint: Endpoint) -> None:
        """Note an answer; it is reported if others of the ServicePort do not answer."""
        if self._attention.get(owner, 0.0) <= time.monotonic():
            return
        backend = _backend(owner, endpoint)
        if backend in self._answered:
            return
        self._answered.add(backend)
        self._found.append(Failure(backend, Observation.ANSWERED))
        if self._batch is None:  # a busy Service must not wake the receiver for each client
            self._batch = asyncio.get_running_loop().call_later(_BATCH, self._some.set)


class WithDials(FailureWatch):
    """Another watch, and with it the dials of a proxy that serves some of the same clients."""

    def __init__(self, watch: FailureWatch, dials: DialRegistry) -> None:
        """Add the dials to a watch, whose way of counting and believing is kept."""
        self.counts_answers = watch.counts_answers
        self.of_this_node = watch.of_this_node
        self._parts = (watch, DialWatch(dials))
        self._receiving: dict[FailureWatch, asyncio.Task[list[Failure]]] = {}

    async def receive(self) -> list[Failure]:
        """Wait for failures of either kind."""
        for watch in self._parts:
            if watch not in self._receiving:
                self._receiving[watch] = asyncio.create_task(watch.receive())
        await asyncio.wait(self._receiving.values(), return_when=asyncio.FIRST_COMPLETED)
        done = [watch for watch, task in self._receiving.items() if task.done()]
        return [failure for watch in done for failure in self._receiving.pop(watch).result()]

    async def cut(self, backends: Collection[Backend]) -> int:
        """Let connections of either kind begin again."""
        return sum([await watch.cut(backends) for watch in self._parts])

    async def aclose(self) -> None:
        """Stop both."""
        for task in self._receiving.values():
            task.cancel()
        await asyncio.gather(*self._receiving.values(), return_exceptions=True)
        for watch in self._parts:
            await watch.aclose()


def _backend(owner: PlanKey, endpoint: Endpoint) -> Backend:
    return Backend(endpoint.ip, endpoint.port, owner.name.protocol)
