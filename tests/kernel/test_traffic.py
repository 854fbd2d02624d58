"""Traffic while rules change: nobody who has an endpoint throughout may notice."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import pytest

from steersman.compile.planner import Planner
from steersman.model.inputs import HostFacts, NodeConfig
from steersman.model.names import ObjectName
from steersman.run.sync.sync import Sync
from steersman.source.store import Store
from tests.support.builders.objects import endpoint, port, service, slice_
from tests.support.builders.store import replace_objects
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.inside import Inside
from tests.support.lab.sockets import Outcome
from tests.support.lab.switches import Stalls
from tests.support.modes.registry import MODES, ModeUnderTest, render

pytestmark = pytest.mark.kernel

NODE = "node-a"
NODE_IP, OUTSIDE, CLIENT = "192.168.0.2", "203.0.113.9", "10.244.1.100"
INTERFACES = {"lo": ("127.0.0.1/8",), "eth0": (f"{NODE_IP}/24",)}
FACTS = HostFacts(NODE, INTERFACES)
CONFIG = NodeConfig(node_name=NODE, cluster_cidrs=("10.244.0.0/16",), split_threshold=12)
"""So low a threshold that lists are split and joined again while the traffic runs."""
STEADY = range(4)
"""Numbers of the Services that always have their first endpoint; others come and go."""
LOCAL = tuple(f"10.244.1.{n}" for n in range(10, 18))
REMOTE = tuple(f"10.244.2.{n}" for n in range(10, 14))
CONTESTED = "198.51.100.200"
"""An external IP that several Services claim now and then."""
CHANGES = 200
BY_VARIANT = [pytest.param(m, v, id=f"{m.name}-{v}") for m in MODES.values() for v in m.variants]


def address(number: int) -> str:
    return f"10.96.0.{10 + number}"


def external_ip(number: int) -> str:
    return f"198.51.100.{10 + number}"


@dataclass
class Cluster:
    """A Store that is changed at random; whatever happens, the steady Services keep working."""

    store: Store
    rng: random.Random
    others: set[int] = field(default_factory=set)

    def start(self) -> None:
        replace_objects(self.store, "Service", ())
        replace_objects(self.store, "EndpointSlice", ())
        for number in STEADY:
            self.change_service(number)
            self.change_endpoints(number)

    def change(self) -> None:
        """One random change."""
        number = self.rng.choice(STEADY)
        what = self.rng.randrange(5)
        if what == 0:
            self.change_service(number)
        elif what <= 2:
            self.change_endpoints(number)
        else:
            self.change_other(self.rng.randrange(100, 120))

    def change_service(self, number: int) -> None:
        pick = self.rng.choice
        self.store.upsert(
            service(
                f"s{number}",
                type="NodePort",
                clusterIP=address(number),
                ports=[port(nodePort=30080 + number), port("more", 81)][: pick((1, 2))],
                externalIPs=[external_ip(number), CONTESTED][: pick((1, 2))],
                externalTrafficPolicy=pick(("Local", "Cluster")),
                internalTrafficPolicy=pick(("Local", "Cluster")),
                sessionAffinity=pick(("None", "ClientIP")),
            )
        )

    def change_endpoints(self, number: int) -> None:
        """Other endpoints come and go; the first one is always ready, and on this node."""
        others = self.rng.sample(LOCAL[len(STEADY) :] + REMOTE, self.rng.randrange(6))
        first = endpoint(LOCAL[number], NODE)
        more = [
            endpoint(a, NODE if a in LOCAL else "node-b", ready=self.rng.random() < 0.7)
            for a in others
        ]
        self.store.upsert(slice_(first, *more, name=f"s{number}-1", owner=f"s{number}"))

    def change_other(self, number: int) -> None:
        """Add a Service that nobody watches, or remove it."""
        name = f"s{number}"
        if number in self.others:
            self.others.remove(number)
            self.store.delete("Service", ObjectName("shop", name))
            self.store.delete("EndpointSlice", ObjectName("shop", f"{name}-1"))
            return
        self.others.add(number)
        self.store.upsert(service(name, clusterIP=address(number)))
        some = self.rng.sample(REMOTE, self.rng.randrange(3))
        self.store.upsert(
            slice_(*(endpoint(a, "node-b") for a in some), name=f"{name}-1", owner=name)
        )


class Traffic:
    """Clients that connect without pause until told to stop, and note what went wrong."""

    def __init__(self, lab: Lab, seeds: Sequence[int]) -> None:
        self._lab = lab
        self._stop = threading.Event()
        self._stalls = Stalls()
        self.failed: list[tuple[str, str, int, Outcome]] = []
        self.answered: Counter[tuple[str, str, int]] = Counter()
        self._threads = [threading.Thread(target=self._run, args=(s,)) for s in seeds]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._stalls.close()

    def _run(self, seed: int) -> None:
        ways = [
            way
            for number in STEADY
            for way in (
                (CLIENT, address(number), 80),
                (CLIENT, external_ip(number), 80),
                (OUTSIDE, NODE_IP, 30080 + number),
                (OUTSIDE, external_ip(number), 80),
                (NODE_IP, address(number), 80),
                (LOCAL[number], address(number), 80),
            )
        ]
        random.Random(seed).shuffle(ways)
        for source, target, target_port in cycle(ways):
            if self._stop.is_set():
                return
            began = time.monotonic()
            outcome = self._lab.probe(source, target, target_port, timeout=60, at_once=True)
            if outcome.kind == "answered":
                self.answered[source, target, target_port] += 1
            elif not (outcome.kind == "timeout" and self._stalls.since(began)):
                self.failed.append((source, target, target_port, outcome))


@pytest.fixture
def lab() -> Iterator[Lab]:
    pods = (Pod(CLIENT), *(Pod(a) for a in LOCAL), *(Pod(a, local=False) for a in REMOTE))
    with Lab(Layout(INTERFACES, (OUTSIDE,), pods)) as lab:
        for pod in pods[1:]:
            lab.serve(pod.address, 8080, "TCP")
        yield lab


@pytest.mark.parametrize(("mode", "variant"), BY_VARIANT)
async def test_changes_break_no_connection(lab: Lab, mode: ModeUnderTest, variant: str) -> None:
    made = mode.make(Inside(lab.node.path), variant)
    assert (await made.worker.do(made.probe)).usable
    store = Store(NODE, facts=FACTS)
    cluster = Cluster(store, random.Random(20260))
    sync = Sync(store, Planner(CONFIG, made.traits), made)
    cluster.start()
    report = await sync.run()
    assert report
    assert report.result
    split = set()
    with Traffic(lab, (1, 2)) as traffic:
        for number in range(50 * CHANGES):  # on until every way in was tried at least once
            if number >= CHANGES and len(traffic.answered) == 6 * len(STEADY):
                break
            cluster.change()
            await sync.run()
            split.add(sync.planner.plan.settings.split_dispatch)
            await asyncio.sleep(0)
    assert traffic.failed == []
    assert split == {False, True}, "the lists were never split, or always"
    assert len(traffic.answered) == 6 * len(STEADY), "some way in was never tried"
    assert all(CONTESTED in str(finding) for finding in sync.state.findings)
    plan, fresh = sync.planner.plan, Planner(CONFIG, made.traits)
    fresh.inherit_holders(sync.planner)
    fresh.update(store.snapshot, FACTS)
    assert dict(plan.services) == dict(fresh.services)
    assert dict(await made.worker.do(made.read)) == dict(render(plan, made))
