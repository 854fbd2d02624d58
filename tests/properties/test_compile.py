"""Laws of compile: incremental equals full, and what every plan promises to the modes."""

from __future__ import annotations

from itertools import islice
from typing import Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from steersman.compile.conflicts import claim_of
from steersman.compile.planner import Planner, compile_all
from steersman.compile.service import parse_service
from steersman.compile.service_plan import DROP, REJECT, plan_service
from steersman.compile.trace import Flow, trace
from steersman.model.inputs import HostFacts, NodeConfig, Snapshot
from steersman.model.kube import EndpointSlice, KubeObject, Service
from steersman.model.names import NODE as NODE_PART
from steersman.model.names import Family, PlanKey, Protocol
from steersman.model.plan import NodePlan, Pool, ServicePlan, SourceClass, Traits, Verdict
from steersman.source.store import Store
from tests.support.builders.objects import (
    CONFIG,
    FACTS,
    NODE,
    settings_of,
)
from tests.support.builders.strategies import (
    ADDRESSES,
    BATCHES,
    CONFIGS,
    NUMBERS,
    OBJECTS,
    ONE_BY_ONE,
    SERVICES,
    SLICES,
    TRAITS,
    take,
)
from tests.support.following import StoreFollower


@settings(max_examples=200, deadline=None)
@given(BATCHES | ONE_BY_ONE, CONFIGS, TRAITS, st.integers(1, 4))
def test_incremental_equals_full(
    batches: list[tuple[list[Any], HostFacts, bool]],
    config: NodeConfig,
    traits: Traits,
    steps: int,
) -> None:
    """An update makes the plan that a fresh Planner makes which succeeds the one of before."""
    store, planner = Store(NODE), Planner(config, traits)
    follower, cursor = StoreFollower(store), planner.log.cursor()
    followed: dict[Any, ServicePlan] = {}  # what a mode that hears only of changes would have
    for events, facts, stops_half_way in batches:
        for event in events:
            take(store, event)
        dirty = follower.take().services
        before = planner.plan.settings if followed else None
        fresh = Planner(config, traits)
        fresh.inherit_holders(planner)
        fresh.update(store.snapshot, facts)
        full = fresh.plan
        if stops_half_way:
            with patch("steersman.compile.planner._SLICE", 0):
                stopped = planner.steps(store.snapshot, facts, dirty)
                for _ in islice(stopped, steps):
                    pass
                stopped.close()
        planner.update(store.snapshot, facts, dirty)
        assert planner.plan == full
        owners, revision = cursor.changed()
        cursor.move(revision)
        assert NODE_PART in owners or before is None or before == full.settings
        for key in owners:
            if isinstance(key, PlanKey):
                followed.pop(key, None)
                if key in planner.services:
                    followed[key] = planner.services[key]
        assert followed == full.services
    assert not len(planner.log)  # the only cursor has passed everything


def world(events: list[KubeObject]) -> Snapshot:
    store = Store(NODE)
    for event in events:
        store.upsert(event)
    return store.snapshot


@settings(max_examples=200, deadline=None)
@given(st.lists(OBJECTS, max_size=10), CONFIGS, TRAITS, st.randoms(use_true_random=False))
def test_a_plan_keeps_its_promises_and_order_does_not_matter(
    events: list[KubeObject], config: NodeConfig, traits: Traits, shuffled: Any
) -> None:
    cluster = world(events)
    plan = compile_all(cluster, config, FACTS, traits)
    claims = [
        claim_of(key, frontend)
        for key, service_plan in plan.services.items()
        for frontend in service_plan.frontends
    ]
    assert len(claims) == len(set(claims))
    for key, service_plan in plan.services.items():
        assert key == service_plan.key
        keeps_its_promises(service_plan, plan)
    # A Node keeps what it has lost: of its history, only the outcome has to be the same.
    last = [cluster.node] if cluster.node else []
    final = {(type(e), e.metadata.object_name): e for e in [*events, *last]}
    again = list(final.values())
    shuffled.shuffle(again)
    assert compile_all(world(again), config, FACTS, traits) == plan


def keeps_its_promises(plan: ServicePlan, node: NodePlan) -> None:
    for listed in (plan.cluster, plan.local, plan.reachable):
        assert list(listed) == sorted(set(listed), key=str)
        assert all((":" in endpoint.ip) is (plan.key.family is Family.IPV6) for endpoint in listed)
    assert set(plan.reachable) == {*plan.cluster, *plan.local}
    actions = [action for each in plan.frontends for action in (each.pod, each.node, each.external)]
    used = {action.pool for action in actions if action.verdict is Verdict.FORWARD}
    assert {pool for pool in Pool if plan.pool(pool)} == used
    assert all(endpoint.local for endpoint in plan.local)
    for frontend in plan.frontends:
        assert 0 < frontend.port < 65536
        for action in (frontend.pod, frontend.node, frontend.external):
            if action.verdict is Verdict.FORWARD:
                assert plan.pool(action.pool)
            else:
                assert action in (DROP, REJECT)
        if not node.settings.family(plan.key.family).detector:
            assert frontend.pod == frontend.external


@settings(max_examples=100, deadline=None)
@given(SERVICES, st.lists(SLICES, max_size=3))
def test_any_service_compiles_alone(obj: Service, slices: list[EndpointSlice]) -> None:
    parsed = parse_service(obj, settings_of().families)
    plans, findings = plan_service(parsed, slices, settings_of(), "z1")
    assert all(key == plan.key for key, plan in plans.items())
    assert all(finding.reason and finding.field for finding in findings)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(OBJECTS, max_size=8),
    TRAITS,
    st.sampled_from([*SourceClass, "10.0.0.1", "192.168.0.2", "fd00:10::1", "::1", "junk"]),
    ADDRESSES | st.sampled_from(["192.168.0.2", "127.0.0.1", "::1"]),
    NUMBERS,
    st.sampled_from(Protocol),
)
def test_every_flow_has_a_decision_with_reasons(
    events: list[KubeObject],
    traits: Traits,
    source: str,
    destination: str,
    number: int,
    protocol: Protocol,
) -> None:
    plan = compile_all(world(events), CONFIG, FACTS, traits)
    decision = trace(plan, Flow(source, destination, number, protocol))
    assert decision.reasons
    assert bool(decision.endpoints) is (decision.verdict == "forward")
    if decision.plan is not None:
        assert decision.frontend in plan.services[decision.plan].frontends
        assert set(decision.endpoints) <= set(plan.services[decision.plan].reachable)
