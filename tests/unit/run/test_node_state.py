"""The one description of the process: what it waits for, its source, all Findings on request."""

from __future__ import annotations

import msgspec

from steersman.config import ProxyConfig
from steersman.model.drift import Drift
from steersman.model.findings import Finding, Severity
from steersman.model.node_state import NodeState, SourceStatus
from steersman.run.pages.node_page import NodePage
from steersman.run.pages.node_state import NodeStates
from steersman.source.stats import SourceStats
from steersman.source.store import Store
from tests.support.builders import kube
from tests.support.builders.store import make
from tests.support.http import asking
from tests.support.modes.memory import World
from tests.support.node_states import states_of


def conditions(state: NodeState) -> dict[str, str]:
    return {each.type: each.status for each in state.conditions}


async def test_it_says_what_the_first_sync_waits_for() -> None:
    world, stats = World(), SourceStats()
    stats.server = "https://api:6443"
    states = NodeStates(lambda: world.sync, ProxyConfig, stats, lambda: True, clock=lambda: 107.0)
    assert states.now().waiting == "the API server https://api:6443"
    stats.kind("Service").connected = True
    assert states.now().waiting == 'node "me" to exist (--hostname-override gives its name)'
    world.store.upsert(make("Node", kube.node("me")))
    assert states.now().waiting.startswith("the addresses or PodCIDRs of this node")
    assert conditions(states.now())["Synced"] == "False"
    await world.run()
    assert states.now().waiting == ""
    assert conditions(states.now())["Synced"] == "True"


async def test_it_waits_for_lists_of_objects() -> None:
    world = World()
    world.sync.store = Store("me")
    assert states_of(world).now().waiting == "the first lists of Services and EndpointSlices"


async def test_the_source_is_described_by_its_counters() -> None:
    world, stats = World(), SourceStats()
    states = NodeStates(lambda: world.sync, ProxyConfig, stats, lambda: True, clock=lambda: 107.0)
    stats.server = "https://api:6443"
    stats.kind("Node").errors["http_403"] += 2
    stats.kind("Node").received(b"{}", 100.0)
    assert states.now().source == SourceStatus(
        "apiserver", "https://api:6443", stats.connected, 0, {"http_403": 2}, 7.0
    )
    assert states_of(world).now().source == SourceStatus()


async def test_a_failure_is_shown_until_a_sync_succeeds() -> None:
    world = World()
    states = states_of(world)
    await world.run()
    states.failed("no\nnft" + "!" * 5000)
    state = states.now()
    assert state.failure.startswith("no\nnft!")
    assert len(state.failure) == 1000
    assert conditions(state)["Synced"] == "False"
    states.failure = ""
    assert conditions(states.now())["Synced"] == "True"


async def test_drift_that_is_not_repaired_is_a_condition() -> None:
    world = World()
    states = states_of(world)
    await world.run()
    states.drift = lambda: (3, Drift(5.0, missing=1))
    state = states.now()
    assert (state.repairs, conditions(state)["KernelMatches"]) == (3, "False")
    states.drift = lambda: (4, Drift(5.0, missing=1, repaired_at=6.0))
    assert conditions(states.now())["KernelMatches"] == "True"


async def test_the_status_has_all_findings_and_the_node_the_worst() -> None:
    world = World()
    await world.run()
    many = [Finding(f"Service shop/s{n:03}", "spec", "w" * 100) for n in range(90)]
    bad = Finding("Service shop/x", "spec", "e", Severity.ERROR)
    world.sync.state = msgspec.structs.replace(world.sync.state, findings=(*many, bad))
    page = NodePage(states_of(world))
    status = msgspec.json.decode(page.serve_status(asking("/status")).content, type=NodeState)
    assert status.findings == (bad, *many)
    assert len(page.state().findings) == 50
    assert status.finding_counts == page.state().finding_counts == {"error": 1, "warning": 90}
