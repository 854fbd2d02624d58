"""What the programs count, by Service and endpoint, and what becomes of it in metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from steersman.model.names import Protocol, ServicePortName
from steersman.model.plan import NodePlan
from steersman.model.stats import ConnectionStats, NodeTotals
from steersman.modes.ebpf import counts as counts_of_maps
from steersman.modes.ebpf import flows
from steersman.modes.ebpf.bpf import HashMap
from steersman.run.observe.mode_metrics import ModeMetrics
from tests.support.builders.ebpf_node_plan import (
    CLIENT,
    ENDPOINTS,
    LOOKER,
    NODE,
    NODE_PORT,
    POD,
    VIP,
    bring,
    node_plan,
)
from tests.support.lab.cluster import Lab
from tests.support.lab.ebpf_node import MARKS, Node, programmed, serving

pytestmark = MARKS
ONE = node_plan(ENDPOINTS[:1])
TCP = ServicePortName("shop", "web", "", Protocol.TCP)
UDP = ServicePortName("shop", "web", "", Protocol.UDP)
END = f"{POD}:8080"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with serving("TCP", "UDP") as made:
        yield made


@pytest.fixture
def node(lab: Lab) -> Iterator[Node]:
    with programmed(lab, ONE) as made:
        yield made


def counts(node: Node, plan: NodePlan = ONE) -> ConnectionStats:
    mode = node.modes[-1]
    return asyncio.run(mode.worker.do_slowly(mode.stats(tuple(plan.services.values()))))


def totals(node: Node) -> NodeTotals:
    mode = node.modes[-1]
    return asyncio.run(mode.worker.do(mode.totals))


def look(node: Node) -> None:
    tracking = node.modes[0].datapath.tracking
    assert tracking
    asyncio.run(node.modes[0].worker.do_slowly(tracking.expire()))


def test_connections_are_counted_by_destination_and_by_endpoint(node: Node) -> None:
    assert counts(node) == ConnectionStats({}, {})
    for source, address, port in ((LOOKER, VIP, 80), (NODE, VIP, 80), (CLIENT, NODE, NODE_PORT)):
        assert node.lab.probe(source, address, port).kind == "answered"
    with node.socket(VIP, "UDP") as sock:
        for _ in range(3):
            sock.sendto(b"?", (VIP, 80))
            assert sock.recv(100)
    made = counts(node)
    assert made.frontends[TCP, f"{VIP}:80"] == 2
    assert made.frontends[TCP, f"nodePort:{NODE_PORT}"] == 1
    assert made.endpoints[TCP, END] == 3
    assert made.endpoints[UDP, END] == made.frontends[UDP, f"{VIP}:80"] == 1, "a socket is one"
    moved = made.traffic_by_endpoint[TCP, END]
    assert min(moved) > 0, "of the connection from outside"
    assert moved.bytes_in >= 40 * moved.packets_in
    assert totals(node).events["socket_forwarded"] == 3 + 2
    assert totals(node).events["packet_forwarded"] == 1


def test_counts_go_with_what_they_are_of(node: Node) -> None:
    assert node.lab.probe(LOOKER, VIP, 80).kind == "answered"
    look(node)
    assert counts(node).endpoints[TCP, END] == 1
    asyncio.run(bring(node.modes[0], node_plan(ENDPOINTS[1:])))
    look(node)
    asyncio.run(bring(node.modes[0], ONE))
    assert (TCP, END) not in counts(node).endpoints
    assert counts(node).frontends[TCP, f"{VIP}:80"] == 1


def test_every_entry_of_the_flows_is_accounted_for(node: Node) -> None:
    for _ in range(3):  # TCP would repeat its last packets once their flows are deleted
        assert node.lab.probe(CLIENT, NODE, NODE_PORT, "UDP").kind == "answered"
    look(node)
    made = totals(node)
    entries, capacity = made.tables["flows"]
    assert (entries, made.events["flows_evicted"]) == (12, 0)
    assert made.events["flows_made"] - made.events["flows_ended"] == 12
    known = HashMap.pinned(node.pins / "maps/flows")
    assert known.delete_all([key for key, _ in known.items()][:2]) == 2  # as LRU does
    look(node)
    assert totals(node).events["flows_evicted"] == 2
    assert totals(node).tables["flows"] == (10, capacity)
    asyncio.run(bring(node.modes[0], node_plan(ENDPOINTS[1:])))
    look(node)
    assert totals(node).events["flows_evicted"] == 2, "what was evicted stays so"


def test_what_begins_during_a_look_is_not_missed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look takes long where there are many; what was made meanwhile was not evicted."""
    collect = flows.collect

    def slowly(*given: Any) -> Generator[None, None, flows.Collected]:
        looked = yield from collect(*given)
        assert node.lab.probe(CLIENT, NODE, NODE_PORT).kind == "answered"
        return looked

    monkeypatch.setattr(counts_of_maps, "collect", slowly)
    look(node)
    assert totals(node).events["flows_made"] == 4
    assert totals(node).events["flows_evicted"] == 0
    look(node)
    assert totals(node).events["flows_evicted"] == 0


async def test_they_are_metrics(node: Node) -> None:
    await bring(node.modes[0], ONE)
    await asyncio.to_thread(node.lab.probe, LOOKER, VIP, 80)
    metrics = ModeMetrics(node.modes[0], ONE.services.values, lambda: True)
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for m in await metrics.default()
        for sample in m.samples
    }
    assert values["steersman_connections_total", "shop", "web", "", "TCP", END] == 1
    assert values["steersman_mode_events_total", "socket_forwarded"] == 1
    assert values["steersman_mode_events_total", "dropped_by_ranges"] == 0
    assert values["steersman_mode_table_entries", "flows"] == 0
    assert values["steersman_mode_table_capacity", "flows"] > 0
