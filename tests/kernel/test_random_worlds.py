"""Random worlds with real packets: whatever trace says is what the kernel does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from steersman.model.plan import NodePlan
from tests.support.builders.flow_strategies import FACTS, flows, plans
from tests.support.builders.worlds import program
from tests.support.lab import ebpf
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.userspace import patient_dials
from tests.support.modes.flows import FlowCase, as_served, by_packets, by_trace, compare
from tests.support.modes.registry import MODES, ModeUnderTest, answered

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

CLIENTS = ("10.244.1.9", "fd00:10:244::9")
OUTSIDE = ("203.0.113.9", "203.0.113.200", "2001:db8:99::9")
ENDPOINTS = [
    Pod(head.format(host, number), local=host == 1)
    for head in ("10.244.{}.{}", "fd00:10:244:{}::{}")
    for host in (1, 2)
    for number in (5, 6, 7)
]
PORTS = ((8080, "TCP"), (5353, "UDP"), (99, "SCTP"))
FLOWS = 15
"""Flows that are looked at in each world."""
LOCAL = {a.partition("/")[0] for group in FACTS.interfaces.values() for a in group}
REMOTE = {pod.address for pod in ENDPOINTS if not pod.local}


@pytest.fixture(scope="module")
def labs() -> Iterator[dict[str, Lab]]:
    labs: dict[str, Lab] = {}
    with patient_dials():
        yield labs
    for lab in labs.values():
        lab.close()


def lab_for(labs: dict[str, Lab], use: str) -> Lab:
    """A lab whose endpoints answer and whose sentinels are gone."""
    if use not in labs:
        pods = (*map(Pod, CLIENTS), *ENDPOINTS)
        interfaces = {name: v for name, v in FACTS.interfaces.items() if name != "lo"}
        labs[use] = Lab(Layout(interfaces, OUTSIDE, pods)).__enter__()
    labs[use].silence()
    for pod in ENDPOINTS:
        for number, protocol in PORTS:
            labs[use].serve(pod.address, number, protocol)
    return labs[use]


def told(plan: NodePlan, flow: FlowCase) -> FlowCase:
    """A flow whose expected result is trace's answer."""
    answer = by_trace(plan, flow)
    names = frozenset(name for name, _ in answer.ends)
    hidden = {masq for name, masq in answer.ends if not flow.calls_itself(name)}
    sticky = any(service.affinity_seconds for service in plan.services.values())
    return replace(
        flow, kind=answer.kind, endpoints=names, masquerade=hidden == {True}, sticky=sticky
    )


def can_be_seen(flow: FlowCase) -> bool:
    """Whether the lab can show it: pods elsewhere reach each other, and sentinels, on their own."""
    if flow.source not in REMOTE:
        return True
    if flow.kind != "forward":
        return flow.address in LOCAL
    between = {name.rpartition(":")[0].strip("[]") for name in flow.endpoints}
    return flow.masquerade or not between & (REMOTE - {flow.source})


IN_FULL = ("iptables", "nftables", "ebpf", "userspace")
"""Modes of which clients, endpoints and raw SCTP sockets see what trace says, but for what their
traits declare: sources that are hidden, SCTP that is left alone."""


@pytest.mark.parametrize(
    ("mode", "variant"),
    [pytest.param(MODES[m], v, id=f"{m}-{v}") for m in IN_FULL for v in MODES[m].variants],
)
@settings(
    max_examples=6,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data(), seed=st.integers(0, 2**30))
def test_packets_go_where_trace_says(
    mode: ModeUnderTest, variant: str, labs: dict[str, Lab], data: st.DataObject, seed: int
) -> None:
    plan = data.draw(plans(mode))
    served = (as_served(told(plan, flow), mode.traits) for flow in flows(plan))
    asked = [flow for flow in answered(plan, served) if can_be_seen(flow)]
    lab = lab_for(labs, mode.name + variant)
    program(lab, plan, mode, variant)
    if mode.name == "ebpf":  # ports come again, and an association lives on between two worlds
        ebpf.forget_connections(lab.node.path)
    for flow in random.Random(seed).sample(asked, min(FLOWS, len(asked))):
        assert compare(flow, by_packets(lab, flow)) == ""
