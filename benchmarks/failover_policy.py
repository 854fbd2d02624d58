"""The policy of failover in a simulated network, with other parameters beside the chosen ones.

    python -m benchmarks.failover_policy --seeds 4

Nothing of it touches the network: the tables in docs/failover.md are made of virtual seconds
(tests/support/failover.py), so they need no quiet machine and are the same each time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple
from unittest.mock import patch

from steersman.failover import tuning
from steersman.failover.endpoint import Endpoint
from steersman.failover.policy import Policy
from steersman.failover.states import Presumed, Suspect
from steersman.model.failover import Backend, Ejection, Observation, Settings
from tests.support.failover import Fault, Network, endpoints, on_node

BEGINS = 20.0
EVER = 1e9
REFUSED = Observation.REFUSED


class Outcome(NamedTuple):
    """What happened in a run, from the first fault on."""

    failed: float
    """Share of the connections, in per cent."""
    slow: float
    """Share that took a second or more, in per cent."""
    wrong: int
    """Ejections of endpoints that had no fault."""
    idle: float
    """Seconds that endpoints without a fault were out, summed up."""


class Case(NamedTuple):
    """A network, and what goes wrong in it."""

    name: str
    members: Mapping[Backend, str]
    faults: tuple[Fault, ...]
    rate: float = 50.0
    seconds: float = 80.0
    capacity: float = 0.0
    """Connections that an endpoint accepts in a second; 0 for no limit."""


class Choice(NamedTuple):
    """A policy to compare."""

    name: str
    kind: type[Policy[str]] = Policy
    settings: Settings = Settings()
    tuning: Mapping[str, Any] = {}
    """Other values for constants of failover/tuning.py."""


def run(case: Case, choice: Choice, seed: int) -> Outcome:
    """Simulate a case once."""
    with patch.multiple(tuning, **choice.tuning):
        return _run(case, choice, seed)


def _run(case: Case, choice: Choice, seed: int) -> Outcome:
    network = Network(
        case.members,
        seed=seed,
        faults=case.faults,
        policy=choice.kind(choice.settings),
        capacity=case.capacity,
    )
    network.run(case.seconds, case.rate)
    began = min(fault.begins for fault in case.faults)
    seen = [each for each in network.connections if each.began >= began]
    counts = {word: sum(each.outcome == word for each in seen) for word in ("failed", "slow")}

    def is_well(backend: Backend, at: float) -> bool:
        faults = (each for each in case.faults if backend in each.backends)
        return not any(each.begins <= at < each.ends + 0.05 for each in faults)

    wrong = sum(is_well(backend, at) for at, backend in network.ejections)
    idle = sum(
        0.25 for at, out in _samples(network, case.seconds) for each in out if is_well(each, at)
    )
    return Outcome(
        100 * counts["failed"] / len(seen), 100 * counts["slow"] / len(seen), wrong, idle
    )


def _samples(network: Network, seconds: float) -> Iterator[tuple[float, frozenset[Backend]]]:
    """Yield who is out, four times a second."""
    changes = sorted(
        [(at, True, each) for at, each in network.ejections]
        + [(at, False, each) for at, each in network.returns]
    )
    out: set[Backend] = set()
    for tick in range(int(seconds * 4)):
        while changes and changes[0][0] <= tick / 4:
            _, is_out, backend = changes.pop(0)
            out.add(backend) if is_out else out.discard(backend)
        yield tick / 4, frozenset(out)


def table(title: str, cases: Sequence[Case], choices: Sequence[Choice], seeds: int) -> None:
    """Print a table in Markdown: a row for each choice, a column for each case."""
    print(f"{title}\n")
    print("| |", " | ".join(case.name for case in cases), "|")
    print("| --- " * (len(cases) + 1) + "|")
    for choice in choices:
        cells = []
        for case in cases:
            found = [run(case, choice, seed) for seed in range(seeds)]
            failed, slow, wrong, idle = (fmean(each) for each in zip(*found, strict=True))
            cells.append(f"{failed:.1f} / {slow:.1f}, {wrong:.1f}, {idle:.0f}")
        print(f"| {choice.name} |", " | ".join(cells), "|", flush=True)
    print()


# Policies to compare with


class Blind(Policy[str]):
    """Sees nothing."""

    def observe(self, now: float, backend: Backend, outcome: Observation, client: str = "") -> None:
        pass


class NoRule(Policy[str]):
    """Ejects whatever fails three probes."""

    def _others_answer(self, endpoint: Endpoint, since: float) -> bool:  # noqa: ARG002
        return True


class SpanRule(Policy[str]):
    """Ejects nothing while each node has an endpoint that is suspect or out."""

    def _others_answer(self, endpoint: Endpoint, since: float) -> bool:  # noqa: ARG002
        return any(
            all(
                not (each.ejection or isinstance(each.state, Suspect | Presumed))
                for each in on.values()
            )
            for node, on in self._pools._on_node.items()
            if on and node != endpoint.node
        )


class Panic(Policy[str]):
    """Ejects nobody from a pool of which a share is down."""

    share: float

    def ejected(self, pool: str) -> tuple[Ejection, ...]:
        members = self._pools.members(pool)
        down = sum(each.ejection is not None for each in members)
        return () if down >= self.share * len(members) else super().ejected(pool)


class Panic50(Panic):
    share = 0.5


class Panic70(Panic):
    share = 0.7


class Panic90(Panic):
    share = 0.9


def shares(seeds: int) -> None:
    """Compare limits and panic shares, if the endpoints that are left have room or have not."""
    members = endpoints(10, nodes=10)
    cases = []
    for dead, load in ((0, 1.3), (3, 0.5), (6, 0.3), (6, 0.6), (8, 0.15), (8, 0.6)):
        gone = on_node(members, *(f"node-{number}" for number in range(dead)))
        name = f"{dead} of 10 die, load {load:.0%}"
        fault = Fault(gone, BEGINS, EVER)
        cases.append(Case(name, members, (fault,), rate=200 * load, capacity=20))
    choices = [
        Choice("nothing ejected", Blind),
        Choice("limit 50 %", settings=Settings(confirmed_share=0.5)),
        Choice("limit 90 %, panic from 50 %", Panic50),
        Choice("limit 90 %, panic from 70 %", Panic70),
        Choice("limit 90 %, panic from 90 %", Panic90),
        Choice("**limit 90 %, panic from 100 %**"),
    ]
    table("Limit and panic share", cases, choices, seeds)


def own_link(seeds: int) -> None:
    """Compare rules that tell a fault of this node from one of the endpoints."""
    members = endpoints(9)
    everything = frozenset(members)
    first = list(members)[:3]  # one on each node
    bursts = tuple(
        Fault(everything, BEGINS + 10 * index, BEGINS + 10 * index + 1.5) for index in range(6)
    )
    cases = [
        Case("own link down 30 s", members, (Fault(everything, BEGINS, BEGINS + 30),)),
        Case(
            "the same, 3 endpoints here",
            members,
            (Fault(on_node(members, "node-1", "node-2"), BEGINS, BEGINS + 30),),
        ),
        Case("everything lost for 1.5 s, each 10 s", members, bursts),
        Case("half of all packets lost", members, (Fault(everything, BEGINS, EVER, share=0.5),)),
        Case(
            "2 of 3 nodes die",
            members,
            (Fault(on_node(members, "node-0", "node-1"), BEGINS, EVER),),
        ),
        Case("one endpoint of each node hangs", members, (Fault(frozenset(first), BEGINS, EVER),)),
    ]
    choices = [
        Choice("no rule", NoRule),
        Choice("nothing if suspects span all nodes", SpanRule),
        Choice("**another endpoint must answer**"),
    ]
    table("Whose fault it is", cases, choices, seeds)


def refusals(seeds: int) -> None:
    """Compare how often, and how far apart, an endpoint must refuse."""
    members = endpoints(3)
    gone = frozenset(list(members)[:1])

    def restarts(seconds: float) -> tuple[Fault, ...]:
        return tuple(
            Fault(gone, BEGINS + 60 * index, BEGINS + 60 * index + seconds, REFUSED)
            for index in range(5)
        )

    cases = [
        Case("stops", members, (Fault(gone, BEGINS, EVER, REFUSED),)),
        Case("restarts in 0.15 s, each 60 s", members, restarts(0.15), seconds=320),
        Case("restarts in 1 s, each 60 s", members, restarts(1), seconds=320),
        Case("refuses every tenth", members, (Fault(gone, BEGINS, EVER, REFUSED, share=0.1),)),
        Case("refuses half", members, (Fault(gone, BEGINS, EVER, REFUSED, share=0.5),)),
    ]
    choices = [
        Choice(
            f"{number} within {interval:g} s",
            tuning={"REFUSED_PROBES": number, "REFUSED_INTERVAL": interval},
        )
        for number, interval in ((1, 0.1), (2, 0.05), (2, 0.1), (2, 0.3), (3, 0.1), (3, 0.3))
    ]
    table("Refusals", cases, choices, seeds)


def forgiveness(seeds: int) -> None:
    """Compare the time after which an ejection is the first again."""
    members = endpoints(3)
    gone = frozenset(list(members)[:1])

    def flaps(down: float, period: float, times: int) -> tuple[Fault, ...]:
        return tuple(
            Fault(gone, BEGINS + period * index, BEGINS + period * index + down)
            for index in range(times)
        )

    cases = [
        Case("silent 20 s each minute", members, flaps(20, 60, 20), rate=10, seconds=1300),
        Case("silent 20 s each 2 min", members, flaps(20, 120, 10), rate=10, seconds=1300),
        Case("silent 5 s each 4 min", members, flaps(5, 240, 8), rate=10, seconds=2000),
        Case("silent 30 s each 10 min", members, flaps(30, 600, 6), rate=10, seconds=3800),
    ]
    choices = [
        Choice(name, tuning={"FORGIVENESS": value})
        for name, value in (
            ("at once", 0.0),
            ("60 s", 60.0),
            ("120 s", 120.0),
            ("300 s", 300.0),
            ("never", EVER),
        )
    ]
    table("Forgiveness", cases, choices, seeds)


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=4, help="runs of each cell")
    seeds = parser.parse_args().seeds
    print("Cells: failed / slow connections in %, wrong ejections, seconds out though well.\n")
    for compare in (shares, own_link, refusals, forgiveness):
        compare(seeds)


if __name__ == "__main__":
    main()
