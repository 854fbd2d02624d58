"""The policy in a simulated network: how many connections fail, and who is ejected wrongly."""

from __future__ import annotations

from typing import Any

import pytest

from steersman.model.failover import Observation
from tests.support.failover import Fault, Network, endpoints, network, on_node

DEATH = 20.0
EVER = 1e9
SEEDS = range(2)
RATE = 50


@pytest.mark.parametrize("sees_answers", [False, True])
@pytest.mark.parametrize(
    ("number", "dead", "seed"), [(3, 1, 0), (3, 1, 1), (9, 1, 0), (9, 2, 0), (9, 2, 1), (30, 1, 0)]
)
def test_a_dead_node_costs_two_seconds(
    number: int, dead: int, seed: int, sees_answers: bool
) -> None:
    members = endpoints(number)
    gone = on_node(members, *(f"node-{index}" for index in range(dead)))
    faults = (Fault(gone, DEATH, EVER),)
    ours = network(members, seed=seed, faults=faults, sees_answers=sees_answers)
    ours.run(60, RATE)
    assert {backend for _, backend in ours.ejections} == gone
    assert max(at for at, _ in ours.ejections) < DEATH + 3
    assert ours.last_failure == 0, "a connection that waits moves to another endpoint"
    slow = [each for each in ours.connections if each.outcome == "slow"]
    assert max(each.began for each in slow) < DEATH + 3
    without = Network(members, seed=seed, faults=faults)
    without.run(60, RATE)
    assert without.last_failure > 59


@pytest.mark.parametrize("sees_answers", [False, True])
@pytest.mark.parametrize("loss", [0.01, 0.05, 0.1])
@pytest.mark.parametrize("seed", SEEDS)
def test_lost_packets_eject_nobody(loss: float, seed: int, sees_answers: bool) -> None:
    ours = network(endpoints(3), seed=seed, loss=loss, sees_answers=sees_answers)
    ours.run(60, RATE)
    assert ours.ejections == []


@pytest.mark.parametrize("sees_answers", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_if_all_are_dead_the_fault_may_be_ours(seed: int, sees_answers: bool) -> None:
    members = endpoints(9)
    faults = (Fault(frozenset(members), DEATH, EVER),)
    ours = network(members, seed=seed, faults=faults, sees_answers=sees_answers)
    ours.run(60, RATE)
    assert ours.ejections == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_process_that_stops_costs_a_fraction_of_a_second(seed: int) -> None:
    members = endpoints(3)
    gone = next(iter(members))
    faults = (Fault(frozenset({gone}), DEATH, EVER, Observation.REFUSED),)
    ours = network(members, seed=seed, faults=faults)
    ours.run(60, RATE)
    assert [backend for _, backend in ours.ejections] == [gone]
    assert DEATH < ours.last_failure < DEATH + 0.5


@pytest.mark.parametrize("seed", SEEDS)
def test_an_endpoint_returns_within_seconds_of_its_recovery(seed: int) -> None:
    members = endpoints(3)
    faults = (Fault(on_node(members, "node-0"), DEATH, DEATH + 15),)
    ours = network(members, seed=seed, faults=faults)
    ours.run(60, RATE)
    [(at, _)] = ours.returns
    assert DEATH + 15 < at < DEATH + 17


@pytest.mark.parametrize("probes_dropped", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_one_client_cannot_have_an_endpoint_ejected(seed: int, probes_dropped: bool) -> None:
    members = endpoints(3)
    attacker = frozenset({"client-0", ""} if probes_dropped else {"client-0"})
    faults = (Fault(frozenset(members), 0, EVER, clients=attacker),)
    ours = network(members, seed=seed, faults=faults)
    ours.run(60, RATE)
    assert ours.ejections == []


@pytest.mark.parametrize("seed", SEEDS)
def test_flapping_is_held_longer_each_time(seed: int) -> None:
    members = endpoints(3)
    faults = tuple(
        Fault(on_node(members, "node-0"), DEATH + 20 * index, DEATH + 20 * index + 12)
        for index in range(5)
    )
    ours = network(members, seed=seed, faults=faults)
    ours.run(120, RATE)
    assert {backend for _, backend in ours.ejections} == on_node(members, "node-0")
    assert len(ours.ejections) <= 3
    assert ours.last_failure == 0


@pytest.mark.parametrize("sees_answers", [False, True])
@pytest.mark.parametrize(("dead", "seed"), [(0, 0), (6, 1)])
def test_too_much_load_does_not_spread(dead: int, seed: int, sees_answers: bool) -> None:
    members = endpoints(10, nodes=10)
    gone = on_node(members, *(f"node-{index}" for index in range(dead)))
    load = 260 if dead == 0 else 120  # the capacity of all is 200
    faults = (Fault(gone, DEATH, EVER),)
    more: dict[str, Any] = {"seed": seed, "faults": faults, "capacity": 20}
    ours = network(members, sees_answers=sees_answers, **more)
    without = Network(members, **more)
    for each in (ours, without):
        each.run(60, load)
    wrong = {backend for _, backend in ours.ejections} - gone
    assert len(wrong) <= 3, "before others are known to lose probes, too"
    share = ours.failed / len(ours.connections)
    assert share < without.failed / len(without.connections) + 0.1
