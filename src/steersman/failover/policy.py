"""The policy of failover: observations go in, probes and ejections come out; no clock, no I/O.

The rules that the code refers to by number are in the docstring of this package; states.py has the
states, and the theory of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from typing import Generic

from msgspec.structs import replace

from steersman.failover import tuning
from steersman.failover.endpoint import Endpoint, probes_needed
from steersman.failover.pools import Pool, Pools
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
)
from steersman.model.failover import Backend, Ejection, Observation, Probe, Settings
from steersman.model.names import Protocol


class Policy(Generic[Pool]):
    """Decides which endpoints are ejected. All times are seconds of one monotonic clock."""

    def __init__(self, settings: Settings | None = None, *, counts_answers: bool = False) -> None:
        """Create a policy without endpoints.

        Args:
            counts_answers: whether observations include successes, so that an endpoint from which
                nothing comes can be ejected before it is confirmed.
        """
        self.settings = settings or Settings()
        self.counts_answers = counts_answers
        self.of_this_node = False
        """Whether this node opens the connections: then rule 3 does not apply."""
        self._pools: Pools[Pool] = Pools()
        self._endpoints = self._pools.endpoints
        self._waiting: deque[Endpoint] = deque()
        """Those that may be in the state Waiting, in order."""
        self._confirming = 0
        """Number of those that have a series."""
        self._follow_node = 0
        """Number of those that are in the state NodeDead."""
        self._new: deque[Endpoint] = deque()
        """Those that have not been probed."""
        self._first_at = NEVER
        """When the next of them are."""
        self._answers: tuple[tuple[float, Endpoint], ...] = ()
        """The last answers of two different endpoints."""
        self._timers: list[tuple[float, Backend]] = []
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
            members: the usable endpoints, and the names of their nodes ("" if not known).
            owner: whose it is: those of one owner trust each other.
        """
        served = self._pools.serve(pool, members, owner)
        self._new += [each for each in served.joined if each.backend.protocol is Protocol.TCP]
        for endpoint, node in served.left:
            if not endpoint.pools or isinstance(endpoint.state, NodeDead):
                self._reset(endpoint)
            self._release_node(node)
        if served.is_new:
            self._changed.add(pool)

    def renew(self, backend: Backend) -> None:
        """Kubernetes reports something new about an endpoint: forget its failures."""
        if endpoint := self._endpoints.get(backend):
            self._reset(endpoint)
            endpoint.strikes, endpoint.cleared_at = 0, NEVER

    # The state of an endpoint

    def _enter(self, endpoint: Endpoint, state: State) -> None:
        """Change the state of an endpoint; nothing else does."""
        before = endpoint.state
        assert type(state) in TRANSITIONS[type(before)], f"{before} -> {state}"
        endpoint.state = state
        series = (Suspect, Presumed)
        self._confirming += isinstance(state, series) - isinstance(before, series)
        self._follow_node += isinstance(state, NodeDead) - isinstance(before, NodeDead)
        if isinstance(state, Waiting):
            self._waiting.append(endpoint)
        if (due := due_of(state)) is not None:
            heappush(self._timers, (due, endpoint.backend))
        if ejection_of(before) != ejection_of(state):
            self._changed.update(endpoint.pools)
            if endpoint.ejection is None and not isinstance(before, NodeDead):
                self._release_node(endpoint.node)

    def _reset(self, endpoint: Endpoint) -> None:
        if not isinstance(endpoint.state, Healthy):
            self._enter(endpoint, Healthy())

    def _release_node(self, node: str) -> None:
        """Take the UDP endpoints of a node back if none of the others is down any more."""
        on_node = self._pools.on_node(node) if self._follow_node else []
        dead = [each for each in on_node if isinstance(each.state, NodeDead)]
        if dead and sum(each.ejection is not None for each in on_node) == len(dead):
            for endpoint in dead:
                self._enter(endpoint, Healthy())

    # Observations

    def observe(self, now: float, backend: Backend, outcome: Observation, client: str = "") -> None:
        """Take note of what happened to a client's connection.

        Args:
            backend: the endpoint; those that are not served are ignored.
            client: its address, if known.
        """
        endpoint = self._endpoints.get(backend)
        if endpoint is None:
            return
        if outcome is Observation.ANSWERED:
            self._answered(now, endpoint)
            return
        if outcome is Observation.SILENT:
            endpoint.silent.append(now)
        if client and client not in endpoint.clients:
            endpoint.clients = (*endpoint.clients[-1:], client)
        # Only a refusal says anything about UDP; SCTP is left alone.
        refused_udp = backend.protocol is Protocol.UDP and outcome is Observation.REFUSED
        if backend.protocol is Protocol.TCP or refused_udp:
            self._suspect(now, endpoint)
            self._presume(now, endpoint, outcome)

    def _suspect(self, now: float, endpoint: Endpoint) -> None:
        rest = min(tuning.REST * 2**endpoint.fruitless, tuning.LONGEST_REST)
        if isinstance(endpoint.state, Healthy) and now - endpoint.state.tried_at >= rest:
            self._enter(endpoint, Waiting())

    def _presume(self, now: float, endpoint: Endpoint, reason: Observation) -> None:
        """Eject a suspect if clients, and its first probe, show that it is down."""
        state = endpoint.state
        if (
            self.counts_answers
            and endpoint.backend.protocol is Protocol.TCP
            and isinstance(state, Suspect)
            # Several connects are reported together: not before the first probe had its time.
            and now >= state.series.began + tuning.PROBE_INTERVAL
            and len(endpoint.silent) == tuning.SILENT_CONNECTS
            and endpoint.silent[0] > now - tuning.SILENT_WINDOW
            and endpoint.answered_at <= now - tuning.QUIET
            and self._is_believed(endpoint)
            and self._others_answer(endpoint, state.series.began)
            and self._probes_needed(now, endpoint) > 0
        ):
            ejection = self._ejection(now, endpoint, reason, confirmed=False)
            self._enter(endpoint, Presumed(state.series, ejection))

    def _is_believed(self, endpoint: Endpoint) -> bool:
        """Whether failed probes of an endpoint show that it is down (rule 3)."""
        return self.of_this_node or endpoint.probed_at > NEVER or len(endpoint.clients) > 1

    def _others_answer(self, endpoint: Endpoint, since: float) -> bool:
        """Whether another endpoint of a pool, or anyone if it is alone, answered a probe since."""
        mates = self._pools.mates_of(endpoint)
        if not mates:
            return any(at >= since for at, other in self._answers if other is not endpoint)
        return any(mate.probed_at >= since for mate in mates)

    def _probes_needed(self, now: float, endpoint: Endpoint) -> int:
        pools = (
            # Of a large pool some members say as much as all of them.
            members[:: 1 + len(members) // tuning.MOST_ASKED]
            for members in map(self._pools.members, endpoint.pools)
        )
        return probes_needed(now, endpoint, pools, self.settings.probes)

    def _answered(self, now: float, endpoint: Endpoint) -> None:
        """Note an answer: a suspicion was wrong, and so was an ejection without confirmation."""
        self._reconsider(now, endpoint)
        others = [each for each in self._answers if each[1] is not endpoint]
        self._answers = ((now, endpoint), *others[:1])
        endpoint.answered_at = now
        endpoint.clients = ()
        endpoint.fruitless = 0
        endpoint.silent.clear()
        match endpoint.state:
            case Waiting():
                endpoint.cleared_at, endpoint.misses = now, 0
                self._enter(endpoint, Healthy(now))
            case Suspect(series=series) | Presumed(series=series):
                endpoint.cleared_at = now
                endpoint.misses = max(0, series.count - series.left - 1)
                self._enter(endpoint, Healthy(now))
            case Ejected(ejection=ejection) | Returning(ejection=ejection):
                if not ejection.confirmed:
                    endpoint.cleared_at = now
                    self._enter(endpoint, Healthy(now))

    def _reconsider(self, now: float, endpoint: Endpoint) -> None:
        """Confirm the others again that are down but in use, as no endpoint of their pools is up.

        This answer puts an end to that, so they would get no more connections from now on; but
        their ejections may be old, and they may have recovered meanwhile.
        """
        mates = {each.backend: each for each in self._pools.mates_of(endpoint) if each.ejection}
        for _, mate in sorted(mates.items()):
            in_use = not any(self.ejected(pool) for pool in mate.pools)
            if in_use and isinstance(mate.state, Ejected | Returning | FailedCheck):
                self._enter(mate, Waiting())
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
            suspect = self._waiting.popleft()
            if isinstance(suspect.state, Waiting):
                count = self._probes_needed(now, suspect) or self.settings.probes
                ends = now + count * tuning.PROBE_INTERVAL
                self._enter(suspect, Suspect(Series(now, ends, count, count, now)))
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
                    probes += self._advance_series(now, endpoint, endpoint.state.series)
                case Ejected(ejection=ejection, suspected_at=since):
                    lost_at = now + tuning.RETURN_INTERVAL + tuning.PATIENCE
                    self._enter(endpoint, Returning(ejection, since, lost_at))
                    probes += self._probe(endpoint, tuning.RETURN_INTERVAL)
                case _:
                    self._lose_all(now, endpoint)
        return probes

    def _advance_series(self, now: float, endpoint: Endpoint, series: Series) -> Iterator[Probe]:
        """Start the next probe of a series, or end it."""
        self._presume(now, endpoint, Observation.SILENT)
        if series.left:
            ends = series.ends + (now - series.due)  # it may be late
            if series.left == series.count:
                for witness in self._pools.witnesses_of(endpoint):
                    yield from self._probe(witness, ends - now)
            left = series.left - 1
            due = now + tuning.PROBE_INTERVAL if left else ends
            self._go_on(endpoint, replace(series, left=left, ends=ends, due=due))
            yield from self._probe(endpoint, ends - now)
        elif not endpoint.probes:
            self._conclude(now, endpoint, series)
        elif now < series.ends + tuning.PATIENCE:
            self._go_on(endpoint, replace(series, due=series.ends + tuning.PATIENCE))
        else:
            self._lose_all(now, endpoint)

    def _go_on(self, endpoint: Endpoint, series: Series) -> None:
        state = endpoint.state
        assert isinstance(state, Suspect | Presumed)
        self._enter(endpoint, replace(state, series=series))

    def _probe(self, endpoint: Endpoint, timeout: float) -> Iterator[Probe]:
        """Yield a probe, unless the endpoint has gone."""
        if endpoint.pools:
            endpoint.probes += 1
            yield Probe(endpoint.backend, timeout)

    def probed(self, now: float, backend: Backend, outcome: Observation) -> None:
        """Take the result of a probe; a UDP probe counts as answered unless it was refused."""
        endpoint = self._endpoints.get(backend)
        if endpoint is None:
            return
        endpoint.probes = max(endpoint.probes - 1, 0)
        state = endpoint.state
        if outcome is Observation.ANSWERED:
            endpoint.probed_at = now
            self._answered(now, endpoint)
            if isinstance(state, Returning):
                self._return(now, endpoint)
        elif isinstance(state, Returning):
            # A silent probe has already taken its time.
            again = now if outcome is Observation.SILENT else now + tuning.RETURN_INTERVAL
            if not endpoint.probes:
                self._enter(endpoint, Ejected(state.ejection, state.suspected_at, again))
        elif isinstance(state, Suspect | Presumed):
            series = state.series
            if outcome is Observation.REFUSED:
                due = min(series.due, now + tuning.REFUSED_INTERVAL) if series.left else series.due
                series = replace(series, refusals=series.refusals + 1, due=due)
                self._go_on(endpoint, series)
            is_over = not (series.left or endpoint.probes) and now >= series.ends
            if is_over or series.refusals >= tuning.REFUSED_PROBES:
                self._conclude(now, endpoint, series)

    def lose(self, now: float, backend: Backend) -> None:
        """Take note that a probe has no result: it was cancelled, or could not be sent."""
        if endpoint := self._endpoints.get(backend):
            endpoint.probes = max(endpoint.probes - 1, 0)
            self._lost(now, endpoint)

    def _lose_all(self, now: float, endpoint: Endpoint) -> None:
        """Give up waiting for the probes of an endpoint that nobody has reported."""
        endpoint.probes = 0
        self._lost(now, endpoint)

    def _lost(self, now: float, endpoint: Endpoint) -> None:
        match endpoint.state:
            case Suspect() | Presumed():
                self._dismiss(now, endpoint)
            case Returning(ejection=ejection, suspected_at=since):
                again = now + tuning.RETURN_INTERVAL
                self._enter(endpoint, Ejected(ejection, since, again))
        never = endpoint.probed_at == NEVER and not endpoint.probes
        if never and not endpoint.ejection and endpoint.backend.protocol is Protocol.TCP:
            self._new.append(endpoint)

    def _conclude(self, now: float, endpoint: Endpoint, series: Series) -> None:
        """Every probe failed: eject the endpoint, unless the fault may lie elsewhere."""
        is_tcp = endpoint.backend.protocol is Protocol.TCP
        refused = series.refusals >= tuning.REFUSED_PROBES
        needed = self._probes_needed(now, endpoint)
        if needed > series.count and is_tcp and not refused:
            # Others have become suspect meanwhile, or lost probes: that may be why it is silent.
            left = needed - series.count
            ends = series.ends + left * tuning.PROBE_INTERVAL
            longer = replace(series, left=left, ends=ends, count=needed, due=now)
            self._go_on(endpoint, longer)
            return
        works = self._others_answer(endpoint, series.began) and (needed > 0 or refused)
        believed = works and self._is_believed(endpoint)
        if refused and (believed or not is_tcp):
            reason = Observation.REFUSED
        elif is_tcp and believed:
            reason = Observation.SILENT
        else:
            endpoint.fruitless = min(endpoint.fruitless + 1, 10)
            self._dismiss(now, endpoint)
            return
        ejection = self._ejection(now, endpoint, reason)
        self._enter(endpoint, Ejected(ejection, series.began, ejection.until))
        if reason is Observation.SILENT:
            self._suspect_node(now, endpoint.node)

    def _dismiss(self, now: float, endpoint: Endpoint) -> None:
        """End a series that has neither confirmed the suspicion nor cleared it."""
        match endpoint.state:
            case Presumed(series=series, ejection=ejection):
                state = Ejected(ejection, series.began, ejection.until)
                self._enter(endpoint, state)
            case _:
                self._enter(endpoint, Healthy(now))

    def _suspect_node(self, now: float, node: str) -> None:
        """Confirm all other endpoints of a node; eject those of UDP if it is dead."""
        if not node:
            return
        on_node = self._pools.on_node(node)
        silent: set[str] = set()
        owners: set[str] = set()
        dead = True
        for endpoint in on_node:
            if endpoint.backend.protocol is not Protocol.TCP:
                continue
            if endpoint.ejection is None:
                self._suspect(now, endpoint)
                dead = False
            elif endpoint.ejection.reason is Observation.SILENT:
                silent.add(endpoint.backend.ip)
                owners |= self._pools.owners_of(endpoint)
            else:
                dead = False
        if not dead or len(silent) < 2:
            return
        for endpoint in on_node:
            is_udp = endpoint.backend.protocol is Protocol.UDP
            is_new = is_udp and not isinstance(endpoint.state, NodeDead)
            if is_new and self._pools.owners_of(endpoint) <= owners:
                ejection = self._ejection(now, endpoint, Observation.SILENT, node=node)
                self._enter(endpoint, NodeDead(ejection))

    def _return(self, now: float, endpoint: Endpoint) -> None:
        """End an ejection by an answer; its node lives, so the UDP endpoints return, too."""
        for mate in self._pools.on_node(endpoint.node):
            if mate is endpoint or isinstance(mate.state, NodeDead):
                self._reset(mate)
                mate.returned_at = now

    # Checks that a Service asks for

    def fail_check(self, now: float, backend: Backend, reason: Observation) -> None:
        """Eject an endpoint whose checks fail while those of others pass (failover/checks.py)."""
        endpoint = self._endpoints.get(backend)
        if endpoint is not None and endpoint.ejection is None:
            ejection = self._ejection(now, endpoint, reason)
            self._enter(endpoint, FailedCheck(ejection))

    def pass_check(self, now: float, backend: Backend) -> None:
        """Take note that the checks of an endpoint pass; end its ejection by checks, if held."""
        endpoint = self._endpoints.get(backend)
        if endpoint is None:
            return
        match endpoint.state:
            case FailedCheck(ejection=ejection) if now >= ejection.until:
                self._return(now, endpoint)
        self._answered(now, endpoint)

    # Ejections

    def _ejection(
        self,
        now: float,
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
        strikes = endpoint.strikes
        return Ejection(endpoint.backend, reason, now, now + hold, strikes, confirmed, node)

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
        return self._pools.in_force(pool, self.settings.confirmed_share)

    @property
    def ejections(self) -> Iterator[Ejection]:
        """All endpoints that are down, whether limits keep them in a pool or not."""
        return (each.ejection for each in self._endpoints.values() if each.ejection)
