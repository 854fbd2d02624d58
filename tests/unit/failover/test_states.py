"""No state of an endpoint is a dead end, whatever is lost, at whatever moment."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steersman.failover import tuning
from steersman.failover.endpoint import Endpoint
from steersman.failover.policy import Policy
from steersman.failover.states import TRANSITIONS, Healthy, State, Suspect, Waiting, ejection_of
from steersman.model.failover import Backend, Observation, Settings
from steersman.model.names import Protocol

ANSWERED, SILENT, REFUSED = Observation.ANSWERED, Observation.SILENT, Observation.REFUSED
TCP = [Backend(f"10.0.{i % 3}.{i}", 80, Protocol.TCP) for i in range(6)]
UDP = [Backend(f"10.0.{i % 3}.{i}", 53, Protocol.UDP) for i in range(3)]
NODES = {each: f"node-{each.ip.split('.')[2]}" for each in (*TCP, *UDP)}


class World:
    """A policy to which anything happens; its probes are answered, or lost in two ways."""

    def __init__(self, dice: random.Random, *, counts_answers: bool) -> None:
        self.dice = dice
        self.policy: Policy[str] = Policy(Settings(hold=5.0), counts_answers=counts_answers)
        self.down: dict[Backend, Observation] = {}
        self.now = 0.0
        self.loses = True
        self.results: list[tuple[float, Backend, Observation | None]] = []
        self.serve_all()

    def serve_all(self) -> None:
        self.policy.serve("web", {each: NODES[each] for each in TCP})
        self.policy.serve("few", {each: NODES[each] for each in TCP[:2]})
        self.policy.serve("dns", {each: NODES[each] for each in UDP})

    def pass_time(self, seconds: float) -> None:
        """Let the policy do all that is due, and report results when they come."""
        end = self.now + seconds
        while True:
            alarms = [at for at, *_ in self.results]
            if self.policy.deadline is not None:
                alarms.append(max(self.policy.deadline, self.now))
            if not alarms or (now := min(alarms)) > end:
                break
            self.now = now
            for each in sorted(each for each in self.results if each[0] <= now):
                self.results.remove(each)
                self.report(each[1], each[2])
            for probe in self.policy.advance(now):
                outcome = self.down.get(probe.backend, ANSWERED)
                took = 0.001 if outcome is ANSWERED or outcome is REFUSED else probe.timeout
                if not self.loses or self.dice.random() < 0.8:
                    self.results.append((now + took, probe.backend, outcome))
                elif self.dice.random() < 0.5:  # else it is never reported
                    at = now + self.dice.uniform(0, probe.timeout)
                    self.results.append((at, probe.backend, None))
        self.now = end

    def report(self, backend: Backend, outcome: Observation | None) -> None:
        if outcome is None:
            self.policy.lose(self.now, backend)
        else:
            self.policy.probed(self.now, backend, outcome)

    def interrupt(self) -> None:
        """Cancel all probes, as a switch of the mode does."""
        for _, backend, _ in self.results:
            self.policy.lose(self.now, backend)
        self.results.clear()

    def act(self) -> None:
        """Let something happen."""
        dice, policy = self.dice, self.policy
        backend = dice.choice((*TCP, *UDP))
        name = f"node-{dice.randrange(3)}"
        node = [each for each in NODES if NODES[each] == name]
        client = f"10.9.0.{dice.randrange(4)}"
        actions: list[Callable[[], Any]] = [
            lambda: self.down.update({backend: dice.choice((SILENT, REFUSED))}),
            lambda: self.down.update(dict.fromkeys(node, SILENT)),
            lambda: self.kill(node),
            lambda: self.down.update(dict.fromkeys(TCP[:2], SILENT)),
            lambda: self.down.pop(backend, None),
            self.down.clear,
            self.interrupt,
            lambda: policy.renew(backend),
            lambda: policy.serve("web", {each: NODES[each] for each in dice.sample(TCP, 4)}),
            self.serve_all,
            lambda: policy.fail_check(self.now, dice.choice(TCP), SILENT),
            lambda: policy.pass_check(self.now, dice.choice(TCP)),
        ]
        dice.choice(actions)()
        for each in (*TCP, *UDP):
            for _ in range(dice.choice((0, 0, 1, 4))):
                outcome = self.down.get(each, ANSWERED)
                if each in UDP and outcome is SILENT:
                    outcome = dice.choice((SILENT, REFUSED))
                policy.observe(self.now, each, outcome, client)
        if dice.random() < 0.2:
            dice.choice(actions)()
        self.pass_time(dice.choice((0.01, 0.4, 1.0, 6.0, 30.0)))

    def kill(self, node: list[Backend]) -> None:
        """Let a node die on which nobody listens for datagrams."""
        *_, udp = node
        self.down.update(dict.fromkeys(node, SILENT))
        self.down[udp] = REFUSED
        for _ in range(20):
            self.policy.observe(self.now, udp, REFUSED)
            for each in self.dice.sample(node, 2):
                self.policy.observe(self.now, each, SILENT)
            self.pass_time(self.dice.choice((0.1, 0.1, 0.5)))

    def rest(self) -> None:
        """Lose nothing any more, and let all be as it is for long enough."""
        self.loses = False
        self.serve_all()


@settings(deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.integers(1, 60))
def test_whatever_is_lost_who_answers_returns_and_who_is_dead_leaves(
    seed: int, counts: bool, actions: int
) -> None:
    """Law: from any state, with probes lost at any moment, within bounded time."""
    world = World(random.Random(seed), counts_answers=counts)
    for _ in range(actions):
        world.act()
    world.rest()
    world.down.clear()
    for each in TCP:  # what a check has ejected, a check brings back
        world.pass_time(1)
        world.policy.pass_check(world.now, each)
    until = max((each.until for each in world.policy.ejections), default=world.now)
    world.pass_time(max(until - world.now, 0) + tuning.PATIENCE + 5)
    for each in TCP:
        world.policy.pass_check(world.now, each)
    assert not list(world.policy.ejections)
    assert {type(each.state) for each in world.policy._endpoints.values()} == {Healthy}

    dead = TCP[5]
    world.down[dead] = SILENT
    for second in range(100):
        for each in TCP:
            outcome = world.down.get(each, ANSWERED)
            world.policy.observe(world.now, each, outcome, f"10.9.0.{second % 2}")
        world.pass_time(1)
    assert dead in {each.backend for each in world.policy.ejected("web")}


def test_every_transition_happens_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[type[State], type[State]]] = set()
    enter = Policy._enter

    def note(self: Policy[Any], endpoint: Endpoint, state: State) -> None:
        seen.add((type(endpoint.state), type(state)))
        enter(self, endpoint, state)

    monkeypatch.setattr(Policy, "_enter", note)
    wanted = {(before, after) for before, some in TRANSITIONS.items() for after in some}
    for seed in range(200):
        monkeypatch.setattr(tuning, "MOST_SUSPECTS", 1 + seed % 4)
        world = World(random.Random(seed), counts_answers=seed % 2 == 0)
        for _ in range(30):
            world.act()
        if seen >= wanted:
            break
    assert seen == wanted


@pytest.mark.parametrize("state", TRANSITIONS)
def test_every_state_leads_back_to_healthy(state: type[State]) -> None:
    reached = {state}
    while more := {after for each in reached for after in TRANSITIONS[each]} - reached:
        reached |= more
    assert Healthy in reached


def test_only_states_that_get_no_connections_have_an_ejection() -> None:
    assert {each for each in TRANSITIONS if "ejection" not in each.__struct_fields__} == {
        *(Healthy, Waiting, Suspect)
    }
    assert ejection_of(Healthy()) is None
