"""The policy of failover: observations go in, probes and ejections come out; no clock, no I/O.

The rules that the code refers to by number are in the docstring of this package; states.py has the
states, and the theory of them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping
from heapq import heappop, heappush
from itertools import chain, islice
from typing import Generic, TypeVar

from msgspec.structs import replace

from steersman.failover import tuning
from steersman.failover.endpoint import Endpoint, probes_needed
from steersman.failover.states import (
    NEVER,
    TRANSITIONS,
    Ejected,
    FailedCheck,
    Healthy,
    NodeDead,
    Presumed,
    Returning,
    Series,
    State,
    Suspect,
    Waiting,
    due_of,
    ejection_of,
    suspected_at,
)
from steersman.model.failover import Backend, Ejection, Observation, Probe, Settings
from steersman.model.names import Protocol

Pool = TypeVar("Pool", bound=Hashable)


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
        self._endpoints: dict[Backend, Endpoint] = {}
        self._on_node: defaultdict[str, set[Backend]] = defaultdict(set)
        self._waiting: deque[Backend] = deque()
        """Those that may be in the state Waiting, in order."""
        self._confirming = 0
        """Number of those that have a series."""
        self._new: deque[Backend] = deque()
        """Those that have not been probed."""
        self._first_at = NEVER
        """When the next of them are."""
        self._answers: tuple[tuple[float, Backend | None], ...] = ()
        """The last answers of two different endpoints."""
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
            endpoint = self._endpoints.get(backend)
            if endpoint is None:
                endpoint = self._endpoints[backend] = Endpoint(node, set())
                self._on_node[node].add(backend)
                if backend.protocol is Protocol.TCP:
                    self._new.append(backend)
            elif endpoint.node != node:
                self._leave_node(backend, endpoint)
                endpoint.node = node
                self._on_node[node].add(backend)
            endpoint.pools.add(pool)
        if members:
            self._pools[pool] = tuple(members)
            self._owners[pool] = owner
        if set(before) != set(members):
            self._changed.add(pool)

    def renew(self, backend: Backend) -> None:
        """Kubernetes reports something new about an endpoint: forget its failures."""
        if endpoint := self._endpoints.get(backend):
            self._reset(backend, endpoint)
            endpoint.strikes, endpoint.cleared_at = 0, NEVER

    def _leave(self, backend: Backend, pool: Pool) -> None:
        endpoint = self._endpoints[backend]
        endpoint.pools.discard(pool)
        if not endpoint.pools:
            self._leave_node(backend, endpoint)
            self._reset(backend, endpoint)
            del self._endpoints[backend]

    def _leave_node(self, backend: Backend, endpoint: Endpoint) -> None:
        self._on_node[endpoint.node].discard(backend)
        if isinstance(endpoint.state, NodeDead):
            self._reset(backend, endpoint)
        self._release_node(endpoint.node)
        if not self._on_node[endpoint.node]:
            del self._on_node[endpoint.node]

    # The state of an endpoint

    def _enter(self, backend: Backend, endpoint: Endpoint, state: State) -> None:
        """Change the state of an endpoint; nothing else does."""
        before = endpoint.state
        assert type(state) in TRANSITIONS[type(before)], f"{before} -> {state}"
        endpoint.state = state
        series = (Suspect, Presumed)
        self._confirming += isinstance(state, series) - isinstance(before, series)
        if isinstance(state, Waiting):
            self._waiting.append(backend)
        if (due := due_of(state)) is not None:
            heappush(self._timers, (due, backend))
        if ejection_of(before) != ejection_of(state):
            self._changed.update(endpoint.pools)
            if endpoint.ejection is None and not isinstance(before, NodeDead):
                self._release_node(endpoint.node)

    def _reset(self, backend: Backend, endpoint: Endpoint) -> None:
        if not isinstance(endpoint.state, Healthy):
            self._enter(backend, endpoint, Healthy())

    def _release_node(self, node: str) -> None:
        """Take the UDP endpoints of a node back if none of the others is down any more."""
        on_node = [(each, self._endpoints[each]) for each in self._on_node.get(node, ())]
        dead = [each for each in on_node if isinstance(each[1].state, NodeDead)]
        if sum(each.ejection is not None for _, each in on_node) == len(dead):
            for backend, endpoint in dead:
                self._enter(backend, endpoint, Healthy())

    # Observations

    def observe(self, now: float, backend: Backend, outcome: Observation, client: str = "") -> None:
        """Take note of what happened to a client's connection.

        Args:
            now: the time.
            backend: the endpoint; those that are not served are ignored.
            outcome: of the connection.
            client: its address, if known.
        """
        endpoint = self._endpoints.get(backend)
        if endpoint is None:
            return
        if outcome is Observation.ANSWERED:
            self._answered(now, backend, endpoint)
            return
        if outcome is Observation.SILENT:
            endpoint.silent.append(now)
        if client and client not in endpoint.clients:
            endpoint.clients = (*endpoint.clients[-1:], client)
        # Only a refusal says anything about UDP; SCTP is left alone.
        refused_udp = backend.protocol is Protocol.UDP and outcome is Observation.REFUSED
        if backend.protocol is Protocol.TCP or refused_udp:
            self._suspect(now, backend, endpoint)
            self._presume(now, backend, endpoint, outcome)

    def _suspect(self, now: float, backend: Backend, endpoint: Endpoint) -> None:
        rest = min(tuning.REST * 2**endpoint.fruitless, tuning.LONGEST_REST)
        if isinstance(endpoint.state, Healthy) and now - endpoint.state.tried_at >= rest:
            self._enter(backend, endpoint, Waiting())

    def _presume(
        self, now: float, backend: Backend, endpoint: Endpoint, reason: Observation
    ) -> None:
        """Eject a suspect if clients, and its first probe, show that it is down."""
        state = endpoint.state
        if (
            self.counts_answers
            and backend.protocol is Protocol.TCP
            and isinstance(state, Suspect)
            # Several connects are reported together: not before the first probe had its time.
            and now >= state.series.began + tuning.PROBE_INTERVAL
            and len(endpoint.silent) == tuning.SILENT_CONNECTS
            and endpoint.silent[0] > now - tuning.SILENT_WINDOW
            and endpoint.answered_at <= now - tuning.QUIET
            and self._is_believed(endpoint)
            and self._others_answer(backend, endpoint, state.series.began)
            and self._probes_needed(now, endpoint) > 0
        ):
            ejection = self._ejection(now, backend, endpoint, reason, confirmed=False)
            self._enter(backend, endpoint, Presumed(state.series, ejection))

    def _is_believed(self, endpoint: Endpoint) -> bool:
        """Whether failed probes of an endpoint show that it is down (rule 3)."""
        return self.of_this_node or endpoint.probed_at > NEVER or len(endpoint.clients) > 1

    def _others_answer(self, backend: Backend, endpoint: Endpoint, since: float) -> bool:
        """Whether another endpoint of a pool, or anyone if it is alone, answered a probe since."""
        mates = [other for p in endpoint.pools for other in self._pools[p] if other != backend]
        if not mates:
            return any(at >= since for at, other in self._answers if other != backend)
        return any(self._endpoints[other].probed_at >= since for other in mates)

    def _probes_needed(self, now: float, endpoint: Endpoint) -> int:
        pools = (
            # Of a large pool some members say as much as all of them.
            [self._endpoints[each] for each in members[:: 1 + len(members) // tuning.MOST_ASKED]]
            for members in (self._pools[pool] for pool in endpoint.pools)
        )
        return probes_needed(now, endpoint, pools, self.settings.probes)

    def _answered(self, now: float, backend: Backend, endpoint: Endpoint) -> None:
        """Note an answer: a suspicion was wrong, and so was an ejection without confirmation."""
        self._reconsider(now, backend, endpoint)
        others = [each for each in self._answers if each[1] != backend]
        self._answers = ((now, backend), *others[:1])
        endpoint.answered_at = now
        endpoint.clients = ()
        endpoint.fruitless = 0
        endpoint.silent.clear()
        match endpoint.state:
            case Waiting():
                endpoint.cleared_at, endpoint.misses = now, 0
                self._enter(backend, endpoint, Healthy(now))
            case Suspect(series=series) | Presumed(series=series):
                endpoint.cleared_at = now
                endpoint.misses = max(0, series.count - series.left - 1)
                self._enter(backend, endpoint, Healthy(now))
            case Ejected(ejection=ejection) | Returning(ejection=ejection):
                if not ejection.confirmed:
                    endpoint.cleared_at = now
                    self._enter(backend, endpoint, Healthy(now))

    def _reconsider(self, now: float, backend: Backend, endpoint: Endpoint) -> None:
        """Confirm the others again that are down but in use, as no endpoint of their pools is up.

        This answer puts an end to that, so they would get no more connections from now on; but
        their ejections may be old, and they may have recovered meanwhile.
        """
        mates = {other for pool in endpoint.pools for other in self._pools[pool]} - {backend}
        for other in sorted(each for each in mates if self._endpoints[each].ejection):
            mate = self._endpoints[other]
            in_use = not any(self.ejected(pool) for pool in mate.pools)
            if in_use and isinstance(mate.state, Ejected | Returning | FailedCheck):
                self._enter(other, mate, Waiting())
                mate.returned_at = now

    # Time and probes

    @property
    def deadline(self) -> float | None:
        """When `advance` must be called next; None if nothing is under way."""
        due = [self._timers[0][0]] if self._timers else []
        if self._new:
            due.append(self._first_at)
        if self._waiting and self._has_room:
            due.append(NEVER)
        return min(due, default=None)

    @property
    def _has_room(self) -> bool:
        return self._confirming < tuning.MOST_SUSPECTS

    def advance(self, now: float) -> list[Probe]:
        """Do all that is due; return the probes to start now.

        Report each by `probed`, or by `lose`.
        """
        while self._waiting and self._has_room:
            backend = self._waiting.popleft()
            endpoint = self._endpoints.get(backend)
            if endpoint is not None and isinstance(endpoint.state, Waiting):
                count = self._probes_needed(now, endpoint) or self.settings.probes
                ends = now + count * tuning.PROBE_INTERVAL
                self._enter(backend, endpoint, Suspect(Series(now, ends, count, count, now)))
        probes: list[Probe] = []
        if self._new and now >= self._first_at:
            self._first_at = now + tuning.FIRST_INTERVAL
            for _ in range(min(tuning.FIRST_PROBES, len(self._new))):
                probes += self._probe(self._new.popleft(), tuning.FIRST_TIMEOUT)
        while self._timers and self._timers[0][0] <= now:
            _, backend = heappop(self._timers)
            endpoint = self._endpoints.get(backend)
            # A timer may be that of a state that has ended.
            if endpoint is None or (due := due_of(endpoint.state)) is None or due > now:
                continue
            match endpoint.state:
                case Suspect() | Presumed():
                    probes += self._advance_series(now, backend, endpoint, endpoint.state.series)
                case Ejected(ejection=ejection, suspected_at=since):
                    lost_at = now + tuning.RETURN_INTERVAL + tuning.PATIENCE
                    self._enter(backend, endpoint, Returning(ejection, since, lost_at))
                    probes += self._probe(backend, tuning.RETURN_INTERVAL)
                case _:
                    self._lose_all(now, backend, endpoint)
        return probes

    def _advance_series(
        self, now: float, backend: Backend, endpoint: Endpoint, series: Series
    ) -> Iterator[Probe]:
        """Start the next probe of a series, or end it."""
        self._presume(now, backend, endpoint, Observation.SILENT)
        if series.left:
            ends = series.ends + (now - series.due)  # it may be late
            if series.left == series.count:
                for witness in self._witnesses(backend, endpoint):
                    yield from self._probe(witness, ends - now)
            left = series.left - 1
            due = now + tuning.PROBE_INTERVAL if left else ends
            self._go_on(backend, endpoint, replace(series, left=left, ends=ends, due=due))
            yield from self._probe(backend, ends - now)
        elif not endpoint.probes:
            self._conclude(now, backend, endpoint, series)
        elif now < series.ends + tuning.PATIENCE:
            self._go_on(backend, endpoint, replace(series, due=series.ends + tuning.PATIENCE))
        else:
            self._lose_all(now, backend, endpoint)

    def _go_on(self, backend: Backend, endpoint: Endpoint, series: Series) -> None:
        state = endpoint.state
        assert isinstance(state, Suspect | Presumed)
        self._enter(backend, endpoint, replace(state, series=series))

    def _probe(self, backend: Backend, timeout: float) -> Iterator[Probe]:
        """Yield a probe, unless the endpoint has gone."""
        if endpoint := self._endpoints.get(backend):
            endpoint.probes += 1
            yield Probe(backend, timeout)

    def _witnesses(self, backend: Backend, endpoint: Endpoint) -> Iterator[Backend]:
        """Yield up to three others of each pool that are well, on other nodes if possible."""
        self._rotation += 1
        # Some Services have the same endpoints; more than four are not asked for.
        groups = [self._pools[pool] for pool in islice(endpoint.pools, 4)]
        if all(len(members) == 1 for members in groups):
            groups = [tuple(islice(self._endpoints, 64))]
        chosen: dict[Backend, None] = {}
        for members in groups:
            start = self._rotation % len(members)
            turned = chain(islice(members, start, None), islice(members, start))
            well = {
                other: mate.node
                for other in islice(turned, 64)
                if isinstance((mate := self._endpoints[other]).state, Healthy | Waiting)
                if other != backend and other.protocol is Protocol.TCP
            }
            # One of each other node, then any.
            first = {node: other for other, node in well.items() if node != endpoint.node}
            chosen.update(dict.fromkeys(islice(dict.fromkeys((*first.values(), *well)), 3)))
        yield from chosen

    def probed(self, now: float, backend: Backend, outcome: Observation) -> None:
        """Take the result of a probe; a UDP probe counts as answered unless it was refused."""
        endpoint = self._endpoints.get(backend)
        if endpoint is None:
            return
        endpoint.probes = max(endpoint.probes - 1, 0)
        state = endpoint.state
        if outcome is Observation.ANSWERED:
            endpoint.probed_at = now
            self._answered(now, backend, endpoint)
            if isinstance(state, Returning):
                self._return(now, backend, endpoint)
        elif isinstance(state, Returning):
            # A silent probe has already taken its time.
            again = now if outcome is Observation.SILENT else now + tuning.RETURN_INTERVAL
            if not endpoint.probes:
                self._enter(backend, endpoint, Ejected(state.ejection, state.suspected_at, again))
        elif isinstance(state, Suspect | Presumed):
            series = state.series
            if outcome is Observation.REFUSED:
                due = min(series.due, now + tuning.REFUSED_INTERVAL) if series.left else series.due
                series = replace(series, refusals=series.refusals + 1, due=due)
                self._go_on(backend, endpoint, series)
            is_over = not (series.left or endpoint.probes) and now >= series.ends
            if is_over or series.refusals >= tuning.REFUSED_PROBES:
                self._conclude(now, backend, endpoint, series)

    def lose(self, now: float, backend: Backend) -> None:
        """Take note that a probe has no result: it was cancelled, or could not be sent."""
        if endpoint := self._endpoints.get(backend):
            endpoint.probes = max(endpoint.probes - 1, 0)
            self._lost(now, backend, endpoint)

    def _lose_all(self, now: float, backend: Backend, endpoint: Endpoint) -> None:
        """Give up waiting for the probes of an endpoint that nobody has reported."""
        endpoint.probes = 0
        self._lost(now, backend, endpoint)

    def _lost(self, now: float, backend: Backend, endpoint: Endpoint) -> None:
        match endpoint.state:
            case Suspect() | Presumed():
                self._dismiss(now, backend, endpoint)
            case Returning(ejection=ejection, suspected_at=since):
                again = now + tuning.RETURN_INTERVAL
                self._enter(backend, endpoint, Ejected(ejection, since, again))
        never = endpoint.probed_at == NEVER and not endpoint.probes
        if never and not endpoint.ejection and backend.protocol is Protocol.TCP:
            self._new.append(backend)

    def _conclude(self, now: float, backend: Backend, endpoint: Endpoint, series: Series) -> None:
        """Every probe failed: eject the endpoint, unless the fault may lie elsewhere."""
        refused = series.refusals >= tuning.REFUSED_PROBES
        needed = self._probes_needed(now, endpoint)
        if needed > series.count and backend.protocol is Protocol.TCP and not refused:
            # Others have become suspect meanwhile, or lost probes: that may be why it is silent.
            left = needed - series.count
            ends = series.ends + left * tuning.PROBE_INTERVAL
            longer = replace(series, left=left, ends=ends, count=needed, due=now)
            self._go_on(backend, endpoint, longer)
            return
        works = self._others_answer(backend, endpoint, series.began) and (needed > 0 or refused)
        believed = works and self._is_believed(endpoint)
        if refused and (believed or backend.protocol is Protocol.UDP):
            reason = Observation.REFUSED
        elif backend.protocol is Protocol.TCP and believed:
            reason = Observation.SILENT
        else:
            endpoint.fruitless = min(endpoint.fruitless + 1, 10)
            self._dismiss(now, backend, endpoint)
            return
        ejection = self._ejection(now, backend, endpoint, reason)
        self._enter(backend, endpoint, Ejected(ejection, series.began, ejection.until))
        if reason is Observation.SILENT:
            self._suspect_node(now, endpoint.node)

    def _dismiss(self, now: float, backend: Backend, endpoint: Endpoint) -> None:
        """End a series that has neither confirmed the suspicion nor cleared it."""
        match endpoint.state:
            case Presumed(series=series, ejection=ejection):
                state = Ejected(ejection, series.began, ejection.until)
                self._enter(backend, endpoint, state)
            case _:
                self._enter(backend, endpoint, Healthy(now))

    def _suspect_node(self, now: float, node: str) -> None:
        """Confirm all other endpoints of a node; eject those of UDP if it is dead."""
        if not node:
            return
        backends = sorted(self._on_node[node])
        silent: set[str] = set()
        owners: set[str] = set()
        dead = True
        for backend in backends:
            endpoint = self._endpoints[backend]
            if backend.protocol is not Protocol.TCP:
                continue
            if endpoint.ejection is None:
                self._suspect(now, backend, endpoint)
                dead = False
            elif endpoint.ejection.reason is Observation.SILENT:
                silent.add(backend.ip)
                owners |= self._owners_of(endpoint)
            else:
                dead = False
        if dead and len(silent) > 1:
            for backend in backends:
                endpoint = self._endpoints[backend]
                if (
                    backend.protocol is Protocol.UDP
                    and not isinstance(endpoint.state, NodeDead)
                    and self._owners_of(endpoint) <= owners
                ):
                    what = Observation.SILENT
                    ejection = self._ejection(now, backend, endpoint, what, node=node)
                    self._enter(backend, endpoint, NodeDead(ejection))

    def _owners_of(self, endpoint: Endpoint) -> set[str]:
        return {self._owners[pool] for pool in endpoint.pools}

    def _return(self, now: float, backend: Backend, endpoint: Endpoint) -> None:
        """End an ejection by an answer; its node lives, so the UDP endpoints return, too."""
        for other in self._on_node[endpoint.node]:
            mate = self._endpoints[other]
            if other == backend or isinstance(mate.state, NodeDead):
                self._reset(other, mate)
                mate.returned_at = now

    # Checks that a Service asks for

    def fail_check(self, now: float, backend: Backend, reason: Observation) -> None:
        """Eject an endpoint whose checks fail while those of others pass (failover/checks.py)."""
        endpoint = self._endpoints.get(backend)
        if endpoint is not None and endpoint.ejection is None:
            ejection = self._ejection(now, backend, endpoint, reason)
            self._enter(backend, endpoint, FailedCheck(ejection))

    def pass_check(self, now: float, backend: Backend) -> None:
        """Take note that the checks of an endpoint pass; end its ejection by checks, if held."""
        endpoint = self._endpoints.get(backend)
        if endpoint is None:
            return
        match endpoint.state:
            case FailedCheck(ejection=ejection) if now >= ejection.until:
                self._return(now, backend, endpoint)
        self._answered(now, backend, endpoint)

    # Ejections

    def _ejection(
        self,
        now: float,
        backend: Backend,
        endpoint: Endpoint,
        reason: Observation,
        *,
        confirmed: bool = True,
        node: str = "",
    ) -> Ejection:
        """Return a new ejection: one more in a row, unless it takes the place of another one."""
        if endpoint.ejection is None:
            if now - endpoint.returned_at > tuning.FORGIVENESS:
                endpoint.strikes = 0
            endpoint.strikes += 1
        doublings = min(endpoint.strikes - 1, 20)
        hold = min(self.settings.hold * 2**doublings, self.settings.longest_hold)
        return Ejection(backend, reason, now, now + hold, endpoint.strikes, confirmed, node)

    def take_changed(self) -> list[Pool]:
        """Return the pools whose ejections may have changed since the last call; some are empty."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def ejected(self, pool: Pool) -> tuple[Ejection, ...]:
        """Return the ejections in force in a pool: confirmed ones first, then by age.

        Endpoints beyond the limits stay in the pool although they are down; so do all if every
        member is down, because then no choice is better than another.
        """
        members = [self._endpoints[each] for each in self._pools.get(pool, ())]
        down = [ejection for each in members if (ejection := each.ejection)]
        if not down or len(down) == len(members):
            return ()
        down.sort(key=lambda each: (not each.confirmed, each.since, each.backend))
        confirmed = self._limit(len(members), self.settings.confirmed_share)
        unconfirmed = self._limit(len(members), tuning.UNCONFIRMED_SHARE)
        answered = max(each.probed_at for each in members if not each.ejection)
        return tuple(
            each
            for number, each in enumerate(down)
            if number < (confirmed if each.confirmed else unconfirmed)
            and (
                each.backend.protocol is Protocol.UDP
                or suspected_at(self._endpoints[each.backend].state) <= answered
            )
        )

    @staticmethod
    def _limit(members: int, share: float) -> int:
        return min(members - 1, max(1, int(members * share))) if members > 1 else 0

    @property
    def ejections(self) -> Iterator[Ejection]:
        """All endpoints that are down, whether limits keep them in a pool or not."""
        return (each.ejection for each in self._endpoints.values() if each.ejection)
