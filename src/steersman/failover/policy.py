"""The policy of failover: observations go in, probes and ejections come out; no clock, no I/O.

The rules that the code refers to by number are in the docstring of this package.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping
from heapq import heappop, heappush
from itertools import chain, islice
from typing import Generic, TypeVar

from steersman.failover.memory import Known, Series, probes_needed
from steersman.model.failover import Backend, Ejection, Observation, Probe, Settings
from steersman.model.names import Protocol

Pool = TypeVar("Pool", bound=Hashable)
_MOST_ASKED = 200
"""Members of a pool whose last probes are looked at."""


class Policy(Generic[Pool]):
    """Decides which endpoints are ejected. All times are seconds of one monotonic clock."""

    def __init__(self, settings: Settings | None = None, *, counts_answers: bool = False) -> None:
        """Create a policy without endpoints.

        Args:
            settings: its parameters.
            counts_answers: whether observations include successes, so that an endpoint from which
                nothing comes can be ejected before it is confirmed.
        """
        self.settings = settings or Settings()
        self.counts_answers = counts_answers
        self.of_this_node = False
        """Whether this node opens the connections: then rule 3 does not apply."""
        self._pools: dict[Pool, tuple[Backend, ...]] = {}
        self._owners: dict[Pool, str] = {}
        self._backends: dict[Backend, Known] = {}
        self._on_node: defaultdict[str, set[Backend]] = defaultdict(set)
        self._waiting: deque[Backend] = deque()
        self._new: deque[Backend] = deque()
        self._first_at = float("-inf")
        self._answers: tuple[tuple[float, Backend | None], ...] = ()
        """The last answers of two different endpoints."""
        self._running: set[Backend] = set()
        self._timers: list[tuple[float, Backend]] = []
        self._rotation = 0
        self._changed: set[Pool] = set()

    def configure(self, settings: Settings) -> None:
        """Change the parameters; holds that have begun keep their end."""
        if settings != self.settings:
            self.settings = settings
            self._changed.update(self._pools)

    # The endpoints

    def serve(self, pool: Pool, members: Mapping[Backend, str], owner: str = "") -> None:
        """Replace the members of a pool; an endpoint that leaves every pool is forgotten.

        Args:
            pool: its key.
            members: the usable endpoints, and the names of their nodes ("" if not known).
            owner: whose it is: those of one owner trust each other.
        """
        before = self._pools.pop(pool, ())
        self._owners.pop(pool, None)
        for backend in before:
            if backend not in members:
                self._leave(backend, pool)
        for backend, node in members.items():
            found = self._backends.get(backend)
            if found is None:
                found = self._backends[backend] = Known(node, set())
                if backend.protocol is Protocol.TCP:
                    self._new.append(backend)
            if found.node != node or not found.pools:
                self._on_node[found.node].discard(backend)
                found.node = node
                self._on_node[node].add(backend)
            found.pools.add(pool)
        if members:
            self._pools[pool] = tuple(members)
            self._owners[pool] = owner
        if set(before) != set(members):
            self._changed.add(pool)

    def renew(self, backend: Backend) -> None:
        """Kubernetes reports something new about an endpoint: forget its failures."""
        if found := self._backends.get(backend):
            self._lift(backend, found)
            found.strikes, found.cleared_at = 0, float("-inf")

    def _leave(self, backend: Backend, pool: Pool) -> None:
        found = self._backends[backend]
        found.pools.discard(pool)
        if not found.pools:
            self._lift(backend, found)
            self._running.discard(backend)
            del self._backends[backend]
            self._on_node[found.node].discard(backend)
            if not self._on_node[found.node]:
                del self._on_node[found.node]

    # Observations

    def observe(self, now: float, backend: Backend, outcome: Observation, client: str = "") -> None:
        """Take note of what happened to a client's connection.

        Args:
            now: the time.
            backend: the endpoint; those that are not served are ignored.
            outcome: of the connection.
            client: its address, if known.
        """
        found = self._backends.get(backend)
        if found is None:
            return
        if outcome is Observation.ANSWERED:
            self._answered(now, backend, found)
            return
        if outcome is Observation.SILENT:
            found.silent.append(now)
        if client and client not in found.clients:
            found.clients = (*found.clients[-1:], client)
        # Only a refusal says anything about UDP; SCTP is left alone.
        refused_udp = backend.protocol is Protocol.UDP and outcome is Observation.REFUSED
        if found.ejection is not None or not (backend.protocol is Protocol.TCP or refused_udp):
            return
        self._suspect(now, backend, found)
        if self._seems_down(now, backend, found):
            self._eject(now, backend, found, outcome, confirmed=False)

    def _seems_down(self, now: float, backend: Backend, found: Known) -> bool:
        """Whether clients and a probe show that it does not answer, while others do."""
        settings, series = self.settings, found.series
        if not self.counts_answers or series is None:
            return False
        if now < series.began + settings.probe_interval:  # several connects are reported together
            return False
        recent = [at for at in found.silent if at > now - settings.silent_window]
        silent = len(recent) >= settings.silent_connects
        quiet = found.answered_at <= now - settings.quiet
        return (
            silent
            and quiet
            and self._is_believed(found)
            and self._others_answer(backend, found, series.began)
            and self._probes_needed(now, found) > 0
        )

    def _others_answer(self, backend: Backend, found: Known, since: float) -> bool:
        """Whether another endpoint of a pool, or anyone if it is alone, answered a probe since."""
        mates = [other for p in found.pools for other in self._pools[p] if other != backend]
        if not mates:
            return any(at >= since for at, other in self._answers if other != backend)
        return any(self._backends[other].probed_at >= since for other in mates)

    def _answered(self, now: float, backend: Backend, found: Known) -> None:
        """Note an answer: a suspicion was wrong, and so was an ejection without confirmation."""
        self._reconsider(now, backend, found)
        others = [each for each in self._answers if each[1] != backend]
        self._answers = ((now, backend), *others[:1])
        found.answered_at = now
        found.clients = ()
        found.fruitless = 0
        found.silent.clear()
        if (series := found.series) is not None:
            found.cleared_at = now
            found.misses = max(0, series.count - series.left - 1)
            self._end_series(now, backend, found)
        if found.ejection is not None and not found.ejection.confirmed:
            self._lift(backend, found)
            found.cleared_at = now

    def _reconsider(self, now: float, backend: Backend, found: Known) -> None:
        """Confirm again which others are down of those that are used as nobody answered.

        They may have recovered long ago, and would leave now that somebody answers.
        """
        mates = {other for pool in found.pools for other in self._pools[pool]} - {backend}
        for other in sorted(each for each in mates if self._backends[each].ejection):
            known = self._backends[other]
            used = not any(self.ejected(pool) for pool in known.pools)
            if used and known.ejection and not known.ejection.node:
                self._lift(other, known)
                known.returned_at, known.tried_at = now, float("-inf")
                self._suspect(now, other, known)

    # Suspicion and confirmation

    def _suspect(self, now: float, backend: Backend, found: Known) -> None:
        settings = self.settings
        rest = min(settings.rest * 2**found.fruitless, settings.longest_rest)
        if found.series or found.waits or now - found.tried_at < rest:
            return
        if self._has_room:
            self._begin(now, backend, found)
        else:
            found.waits = True
            self._waiting.append(backend)

    def _begin(self, now: float, backend: Backend, found: Known) -> None:
        settings = self.settings
        count = self._probes_needed(now, found) or settings.probes
        ends = now + count * settings.probe_interval
        found.series = Series(now, ends, count, count, now)
        found.suspected_at = now
        self._running.add(backend)
        heappush(self._timers, (now, backend))

    def _probes_needed(self, now: float, found: Known) -> int:
        pools = (
            # Of a large pool some members say as much as all of them.
            [self._backends[each] for each in members[:: 1 + len(members) // _MOST_ASKED]]
            for members in (self._pools[pool] for pool in found.pools)
        )
        return probes_needed(now, found, pools, self.settings)

    def _end_series(self, now: float, backend: Backend, found: Known) -> None:
        found.series = None
        found.tried_at = now
        self._running.discard(backend)

    def _witnesses(self, backend: Backend, found: Known) -> Iterator[Backend]:
        """Yield up to three others of each pool that are well, on other nodes if possible."""
        self._rotation += 1
        # Some Services have the same endpoints; more than four are not asked for.
        groups = [self._pools[pool] for pool in islice(found.pools, 4)]
        if all(len(members) == 1 for members in groups):
            groups = [tuple(islice(self._backends, 64))]
        chosen: dict[Backend, None] = {}
        for members in groups:
            start = self._rotation % len(members)
            turned = chain(islice(members, start, None), islice(members, start))
            well = {
                other: known.node
                for other in islice(turned, 64)
                if (known := self._backends[other]).series is None and known.ejection is None
                if other != backend and other.protocol is Protocol.TCP
            }
            # One of each other node, then any.
            first = {node: other for other, node in well.items() if node != found.node}
            chosen.update(dict.fromkeys(islice(dict.fromkeys((*first.values(), *well)), 3)))
        yield from chosen

    # Time and probes

    @property
    def deadline(self) -> float | None:
        """When `advance` must be called next; None if nothing is under way."""
        due = [self._timers[0][0]] if self._timers else []
        if self._new:
            due.append(self._first_at)
        if self._waiting and self._has_room:
            due.append(float("-inf"))
        return min(due, default=None)

    @property
    def _has_room(self) -> bool:
        return len(self._running) < self.settings.most_suspects

    def advance(self, now: float) -> list[Probe]:
        """Do all that is due; return the probes to start now. Report each by `probed`."""
        probes: list[Probe] = []
        while self._waiting and self._has_room:
            backend = self._waiting.popleft()
            found = self._backends.get(backend)
            if found is not None and found.waits:
                found.waits = False
                self._begin(now, backend, found)
        if self._new and now >= self._first_at:
            self._first_at = now + self.settings.first_interval
            for _ in range(min(self.settings.first_probes, len(self._new))):
                probes += self._probe(self._new.popleft(), 1.0)
        while self._timers and self._timers[0][0] <= now:
            _, backend = heappop(self._timers)
            found = self._backends.get(backend)
            if found is None:
                continue
            if found.series is not None:
                probes += self._advance_series(now, backend, found, found.series)
            elif (ejection := found.ejection) is None or found.by_check or found.returning:
                continue
            elif now >= ejection.until:
                found.returning = True
                probes.append(Probe(backend, self.settings.return_interval))
        return probes

    def _advance_series(
        self, now: float, backend: Backend, found: Known, series: Series
    ) -> Iterator[Probe]:
        if series.left and now >= series.next_at:
            series.ends += now - series.next_at
            if series.next_at == series.began:  # the first probe
                for witness in self._witnesses(backend, found):
                    yield from self._probe(witness, series.ends - now)
            series.left -= 1
            series.next_at = now + self.settings.probe_interval
            yield from self._probe(backend, series.ends - now)
        if found.ejection is None and self._seems_down(now, backend, found):
            self._eject(now, backend, found, Observation.SILENT, confirmed=False)
        if series.left or now < series.ends:
            heappush(self._timers, (series.next_at if series.left else series.ends, backend))
        elif not found.pending:
            self._confirm(now, backend, found, series)

    def _probe(self, backend: Backend, timeout: float) -> Iterator[Probe]:
        """Yield a probe, unless the endpoint has gone."""
        if found := self._backends.get(backend):
            found.pending += 1
            yield Probe(backend, timeout)

    def probed(self, now: float, backend: Backend, outcome: Observation) -> None:
        """Take the result of a probe; a UDP probe counts as answered unless it was refused."""
        found = self._backends.get(backend)
        if found is None:
            return
        returning, found.returning = found.returning, False
        if not returning:
            found.pending = max(found.pending - 1, 0)
        if outcome is Observation.ANSWERED:
            found.probed_at = now
            self._answered(now, backend, found)
            if returning:
                self._return(now, backend, found)
        elif returning:
            # A silent probe has already taken its time.
            at = now if outcome is Observation.SILENT else now + self.settings.return_interval
            heappush(self._timers, (at, backend))
        elif (series := found.series) is not None and outcome is Observation.REFUSED:
            series.refusals += 1
            if series.refusals >= self.settings.refused_probes:
                self._confirm(now, backend, found, series)
            elif series.left:
                series.next_at = min(series.next_at, now + self.settings.refused_interval)
                heappush(self._timers, (series.next_at, backend))
        elif series is not None and not (series.left or found.pending) and now >= series.ends:
            self._confirm(now, backend, found, series)

    def _confirm(self, now: float, backend: Backend, found: Known, series: Series) -> None:
        """Every probe failed: eject the endpoint, unless the fault may lie elsewhere."""
        refused = series.refusals >= self.settings.refused_probes
        needed = self._probes_needed(now, found)
        if needed > series.count and backend.protocol is Protocol.TCP and not refused:
            # Others have become suspect meanwhile, or lost probes: that may be why it is silent.
            series.left = needed - series.count
            series.ends += series.left * self.settings.probe_interval
            series.count, series.next_at = needed, now
            heappush(self._timers, (now, backend))
            return
        self._end_series(now, backend, found)
        works = self._others_answer(backend, found, series.began) and (needed > 0 or refused)
        believed = works and self._is_believed(found)
        if refused and (believed or backend.protocol is Protocol.UDP):
            self._eject(now, backend, found, Observation.REFUSED, confirmed=True)
            return
        if backend.protocol is Protocol.TCP and believed:
            self._eject(now, backend, found, Observation.SILENT, confirmed=True)
            self._suspect_node(now, found.node)
        else:
            found.fruitless = min(found.fruitless + 1, 10)

    def _is_believed(self, found: Known) -> bool:
        """Whether failed probes of an endpoint show that it is down (rule 3)."""
        return self.of_this_node or found.probed_at > float("-inf") or len(found.clients) > 1

    def _owners_of(self, found: Known) -> set[str]:
        return {self._owners[pool] for pool in found.pools}

    def _suspect_node(self, now: float, node: str) -> None:
        """Confirm all other endpoints of a node; eject those of UDP if it is dead."""
        if not node:
            return
        backends = sorted(self._on_node[node])
        silent: set[str] = set()
        owners: set[str] = set()
        dead = True
        for backend in backends:
            found = self._backends[backend]
            if backend.protocol is not Protocol.TCP:
                continue
            if found.ejection is None:
                self._suspect(now, backend, found)
                dead = False
            elif found.ejection.reason is Observation.SILENT:
                silent.add(backend.ip)
                owners |= self._owners_of(found)
            else:
                dead = False
        if dead and len(silent) > 1:
            for backend in backends:
                found = self._backends[backend]
                if backend.protocol is Protocol.UDP and self._owners_of(found) <= owners:
                    self._eject(now, backend, found, Observation.SILENT, confirmed=True, node=node)

    def _return(self, now: float, backend: Backend, found: Known) -> None:
        """End an ejection; if it was of a dead node, its UDP endpoints return, too."""
        self._lift(backend, found)
        found.returned_at = now
        for other in self._on_node[found.node]:
            known = self._backends[other]
            if known.ejection is not None and known.ejection.node:
                self._lift(other, known)
                known.returned_at = now

    # Checks that a Service asks for

    def fail_check(self, now: float, backend: Backend, reason: Observation) -> None:
        """Eject an endpoint whose checks fail while those of others pass (failover/checks.py)."""
        found = self._backends.get(backend)
        if found is not None and found.ejection is None:
            found.by_check = True
            self._eject(now, backend, found, reason, confirmed=True)

    def pass_check(self, now: float, backend: Backend) -> None:
        """Take note that the checks of an endpoint pass; end its ejection by checks, if held."""
        found = self._backends.get(backend)
        if found is None:
            return
        if found.ejection is not None and found.by_check and now >= found.ejection.until:
            self._return(now, backend, found)
        self._answered(now, backend, found)

    # Ejections

    def _eject(
        self,
        now: float,
        backend: Backend,
        found: Known,
        reason: Observation,
        *,
        confirmed: bool,
        node: str = "",
    ) -> None:
        settings = self.settings
        if found.ejection is None:
            if now - found.returned_at > settings.forgiveness:
                found.strikes = 0
            found.strikes += 1
        hold = min(settings.hold * 2 ** (found.strikes - 1), settings.longest_hold)
        found.ejection = Ejection(backend, reason, now, now + hold, found.strikes, confirmed, node)
        if not (node or found.by_check):
            heappush(self._timers, (now + hold, backend))
        self._changed.update(found.pools)

    def _lift(self, backend: Backend, found: Known) -> None:
        found.series = None
        found.waits = False
        found.returning = False
        found.by_check = False
        self._running.discard(backend)
        if found.ejection is not None:
            found.ejection = None
            self._changed.update(found.pools)

    def take_changed(self) -> list[Pool]:
        """Return the pools whose ejections may have changed since the last call; some are empty."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def ejected(self, pool: Pool) -> tuple[Ejection, ...]:
        """Return the ejections in force in a pool: confirmed ones first, then by age.

        Endpoints beyond the limits stay in the pool although they are down; so do all if every
        member is down (or the panic share of them), because then no choice is better than another.
        """
        members = self._pools.get(pool, ())
        known = [self._backends[each] for each in members]
        down = [found for each in known if (found := each.ejection)]
        down.sort(key=lambda each: (not each.confirmed, each.since, each.backend))
        if not down or len(down) >= len(members) * self.settings.panic_share:
            return ()
        confirmed = self._limit(len(members), self.settings.confirmed_share)
        unconfirmed = self._limit(len(members), self.settings.unconfirmed_share)
        answered = max(each.probed_at for each in known if not each.ejection)
        return tuple(
            each
            for number, each in enumerate(down)
            if number < (confirmed if each.confirmed else unconfirmed)
            and (
                each.backend.protocol is Protocol.UDP
                or self._backends[each.backend].suspected_at <= answered
            )
        )

    @staticmethod
    def _limit(members: int, share: float) -> int:
        return min(members - 1, max(1, int(members * share))) if members > 1 else 0

    @property
    def ejections(self) -> Iterator[Ejection]:
        """All endpoints that are down, whether limits keep them in a pool or not."""
        return (found.ejection for found in self._backends.values() if found.ejection)
