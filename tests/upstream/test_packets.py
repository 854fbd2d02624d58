"""A sample of the recorded flows, with real packets in a small cluster."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from steersman.model.addresses import split_host_port
from tests.support.builders.worlds import LabPool, program
from tests.support.lab.cluster import Lab
from tests.support.modes.flows import FlowCase, by_packets, compare
from tests.support.modes.registry import MODES
from tests.upstream.worlds import RECORDINGS, Record, Recording

pytestmark = pytest.mark.kernel
_KINDS = {
    "answered": "forward",
    "refused by ICMP": "reject",
    "no answer": "drop",
    "not translated": "untouched",
}
_SAMPLE = 16


@pytest.fixture(scope="module")
def pool() -> Iterator[LabPool]:
    pool = LabPool()
    yield pool
    pool.close()


def expected(recording: Recording, record: Record) -> FlowCase | None:
    """Return a record as a question with its answer; None if this cluster cannot ask it so."""
    own = {end for end, _ in record.seen if recording.is_of_node(split_host_port(end)[0])}
    if record.affinity or own or recording.is_of_node(record.address):
        return None
    if record.client == "rpod":  # endpoints elsewhere would answer it past the node
        return None
    flow, kind = recording.flow(record), _KINDS[record.outcome]
    masquerade = any(source == "node" and not flow.calls_itself(end) for end, source in record.seen)
    ends = frozenset(end for end, _ in record.seen)
    return replace(flow, kind=kind, endpoints=ends, masquerade=masquerade)


def sample(recording: Recording, mode: str, step: int) -> list[FlowCase]:
    """Return flows of one step that differ as much as possible."""
    records = [record for record in recording.records(mode) if record.step == step]
    random.Random(recording.name).shuffle(records)
    chosen: dict[object, FlowCase] = {}
    for record in records:
        if flow := expected(recording, record):
            chosen.setdefault((record.frontend, record.client, record.outcome), flow)
    return list(chosen.values())[:_SAMPLE]


def difference(lab: Lab, flow: FlowCase) -> str:
    """Return the flows that differ from upstream's; send a datagram that got lost again."""
    answer = by_packets(lab, flow)
    if flow.protocol == "UDP" and answer.kind == "drop" and flow.kind != "drop":
        answer = by_packets(lab, flow)
    return compare(flow, answer)


@pytest.mark.slow(seconds=20)
@pytest.mark.parametrize("recording", RECORDINGS, ids=repr)
@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_packets(recording: Recording, mode: str, pool: LabPool) -> None:
    under_test = MODES[mode]
    worlds = recording.worlds(mode)
    step = RECORDINGS.index(recording) % len(worlds)
    flows = sample(recording, mode, step)
    assert len({flow.kind for flow in flows}) >= 3
    world = replace(worlds[step], flows=tuple(flows))
    lab = pool.lab(world, mode)
    program(lab, world.plan(under_test.traits), under_test, under_test.variants[0])
    assert not [wrong for flow in flows if (wrong := difference(lab, flow))]
