"""Active checks: which endpoints are probed when nobody connects to them; no clock, no I/O.

A Service asks for them by annotation, because its traffic is too thin to show failures. Each node
checks only what it would use itself. Checks are spread over the interval, and few run at a time:

    well --a check fails, as often as the threshold says--> failing --successes in a row--> well

Failing is what the policy takes for a confirmed suspicion: it ejects within its limits. What keeps
an endpoint in is that another one of the Service must have passed its last check. If all of them
fail (a database that all need is down, or the path is wrong), none is ejected for that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar

import msgspec

from steersman.failover import tuning
from steersman.model.failover import Backend, Check, Observation, Probe, Settings

Pool = TypeVar("Pool", bound=Hashable)


class _Checked(msgspec.Struct):
    """An endpoint that is checked, for each of its pools by that pool's Check."""

    checks: dict[Any, Check]
    running: bool = False
    failures: int = 0
    """In a row."""
    passes: int = 0
    """In a row."""


class Checks(Generic[Pool]):
    """Schedules the checks of endpoints, and judges their results."""

    def __init__(self, random: Callable[[], float], settings: Settings | None = None) -> None:
        """Check nothing yet.

        Args:
            settings: interval, if a Check names none, and timeout.
        """
        self.settings = settings or Settings()
        self._random = random
        self._pools: dict[Pool, tuple[Backend, ...]] = {}
        self._backends: dict[Backend, _Checked] = {}
        self._timers: list[tuple[float, Backend]] = []
        self._running = 0

    def __bool__(self) -> bool:
        return bool(self._backends)

    def serve(self, now: float, pool: Pool, members: Collection[Backend], check: Check) -> None:
        """Replace the endpoints of a pool that are checked."""
        for backend in self._pools.pop(pool, ()):
            if backend not in members:
                self._leave(backend, pool)
        if members:
            self._pools[pool] = tuple(members)
        for backend in members:
            if backend not in self._backends:
                self._backends[backend] = _Checked({})
                heappush(self._timers, (now + self._random() * self._interval(check), backend))
            self._backends[backend].checks[pool] = check

    def forget(self, pool: Pool) -> None:
        """Check the endpoints of a pool no longer."""
        for backend in self._pools.pop(pool, ()):
            self._leave(backend, pool)

    def _leave(self, backend: Backend, pool: Pool) -> None:
        checked = self._backends[backend]
        del checked.checks[pool]
        if not checked.checks:
            self._running -= checked.running
            del self._backends[backend]

    def _interval(self, check: Check) -> float:
        return check.interval or self.settings.check_interval

    def _check_of(self, checked: _Checked) -> Check:
        """Return the Check to use: the most frequent one."""
        return min(checked.checks.values(), key=lambda each: (self._interval(each), each.path))

    @property
    def deadline(self) -> float | None:
        """When `advance` must be called next; None if a result comes first, or nothing is due."""
        room = self._running < tuning.MOST_CHECKS
        return self._timers[0][0] if self._timers and room else None

    def advance(self, now: float) -> list[Probe]:
        """Return the checks to start now. Report each by `checked`, or by `lose`."""
        probes: list[Probe] = []
        while self._timers and self._timers[0][0] <= now:
            if self._running >= tuning.MOST_CHECKS:
                break
            _, backend = heappop(self._timers)
            checked = self._backends.get(backend)
            if checked is None or checked.running:
                continue
            checked.running = True
            self._running += 1
            probes.append(
                Probe(
                    backend, self.settings.check_timeout, self._check_of(checked).path, check=True
                )
            )
        return probes

    def checked(self, now: float, backend: Backend, outcome: Observation) -> bool | None:
        """Take the result of a check; return whether the endpoint is well, None if that is open."""
        checked = self._backends.get(backend)
        if checked is None or not checked.running:  # it has gone, or is another one by now
            return None
        checked.running = False
        self._running -= 1
        check = self._check_of(checked)
        wait = self._interval(check) * (0.9 + 0.2 * self._random())
        heappush(self._timers, (now + wait, backend))
        if outcome is Observation.ANSWERED:
            checked.failures, checked.passes = 0, checked.passes + 1
            return True if checked.passes >= check.successes else None
        checked.failures, checked.passes = checked.failures + 1, 0
        enough = checked.failures >= check.failures
        return False if enough and self._others_pass(backend, checked) else None

    def lose(self, now: float, backend: Backend) -> None:
        """Take note that a check has no result: it was cancelled, or could not be sent."""
        checked = self._backends.get(backend)
        if checked is not None and checked.running:
            checked.running = False
            self._running -= 1
            again = min(tuning.RETURN_INTERVAL, self._interval(self._check_of(checked)))
            heappush(self._timers, (now + again, backend))

    def _others_pass(self, backend: Backend, checked: _Checked) -> bool:
        return all(
            any(self._backends[other].passes for other in self._pools[pool] if other != backend)
            for pool in checked.checks
        )
