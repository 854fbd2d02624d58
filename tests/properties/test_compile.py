"""Laws of compile: incremental equals full, and what every plan promises to the modes."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from steersman.compile.conflicts import claim_of
from steersman.compile.planner import Planner, compile_all
from steersman.compile.service import parse_service
from steersman.compile.service_plan import DROP, REJECT, plan_service, with_new_endpoints
from steersman.compile.trace import Flow, trace
from steersman.model.inputs import HostFacts, NodeConfig, Snapshot
from steersman.model.kube import EndpointSlice, KubeObject, Service
from steersman.model.names import Family, Protocol
from steersman.model.plan import EndpointChange, NodePlan, ServicePlan, SourceClass, Traits, Verdict
from steersman.source.packed import trimmed_slice
from steersman.source.store import Store
from tests.support.builders.objects import (
    CONFIG,
    FACTS,
    NODE,
    endpoint,
    port,
    service,
    settings_of,
    slice_,
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


@settings(max_examples=200, deadline=None)
@given(BATCHES | ONE_BY_ONE, CONFIGS, TRAITS)
def test_incremental_equals_full(
    batches: list[tuple[list[Any], HostFacts, bool]], config: NodeConfig, traits: Traits
) -> None:
    """An update makes the plan that a fresh Planner makes which succeeds the one of before."""
    store, planner = Store(NODE), Planner(config, traits)
    followed: dict[Any, ServicePlan] = {}  # what a mode that hears only of changes would have
    for events, facts, everything in batches:
        for event in events:
            take(store, event)
        dirty = store.take().services
        before = planner.plan.settings if followed else None
        fresh = Planner(config, traits)
        fresh.inherit_holders(planner)
        fresh.update(store.snapshot, facts, (), everything=True)
        full = fresh.plan
        change = planner.update(store.snapshot, facts, dirty, everything)
        assert planner.plan == full
        assert change.settings_changed or before is None or before == full.settings
        assert not change.removed & change.changed.keys()
        for key, lists in change.relisted.items():
            assert_relisted(followed[key], change.changed[key], lists)
        for key in change.removed:
            del followed[key]
        followed |= change.changed
        assert followed == full.services


def assert_relisted(old: ServicePlan, new: ServicePlan, lists: EndpointChange) -> None:
    assert new == replace(old, cluster=new.cluster, reachable=new.cluster)
    assert {*lists.gone} == {*old.cluster} - {*new.cluster}
    assert {*lists.came} == {*new.cluster} - {*old.cluster}
    assert (len(lists.gone), len(lists.came)) == (len({*lists.gone}), len({*lists.came}))
    assert old.cluster
    assert new.cluster
    assert not old.local


POD = st.builds(
    endpoint,
    st.sampled_from(
        [*("10.1.0.1", "10.1.0.2", "10.1.0.3", "10.1.0.10") * 3, "127.0.0.1", "fd00::7"]
    ),
    st.sampled_from([NODE, "other", None]),
    ready=st.sampled_from([*[None] * 9, False]),
    serving=st.none(),
    terminating=st.sampled_from([*[None] * 9, True]),
    zones=st.sampled_from([*[None] * 9, ["z1"], ["z2"]]),
)
SLICE = st.builds(
    lambda pods, *more: trimmed_slice(slice_(*pods, name=more[0], family=more[1], ports=more[2])),
    st.lists(POD, min_size=1, max_size=3),
    st.sampled_from(["cart-1", "cart-1", "cart-1", "cart-2"]),
    st.sampled_from([*["IPv4"] * 9, "IPv6", "FQDN"]),
    st.sampled_from(
        [*[[port(number=8080)]] * 9, [port(number=0)], [port(), port("more", 8081)], [port("more")]]
    ),
)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(
        [
            {},
            {},
            {"ports": [port(), port("more", 81)]},
            {"type": "NodePort", "ports": [port(nodePort=30080)]},
            {"internalTrafficPolicy": "Local"},
            {
                "type": "NodePort",
                "externalTrafficPolicy": "Local",
                "ports": [port(nodePort=30080)],
            },
            {"sessionAffinity": "ClientIP", "externalIPs": ["192.0.2.7"]},
            {"clusterIPs": ["10.96.0.10", "fd00:96::1"], "ipFamilies": ["IPv4", "IPv6"]},
        ]
    ),
    st.lists(SLICE, min_size=1, max_size=2, unique_by=lambda one: one.metadata.name),
    st.lists(SLICE, max_size=2, unique_by=lambda one: one.metadata.name),
    st.lists(st.lists(st.sampled_from(["fd00::7", "fd00::8"]), unique=True), max_size=2),
    TRAITS,
)
def test_new_endpoints_alone_are_planned_as_the_whole_is(
    spec: dict[str, Any],
    old: list[EndpointSlice],
    new: list[EndpointSlice],
    dual: list[list[str]],
    traits: Traits,
) -> None:
    for some, addresses in zip((old, new), dual, strict=False):
        some.append(slice_(*map(endpoint, addresses), name="cart-6", family="IPv6"))
    node = settings_of(traits=traits)
    parsed = parse_service(service(**spec), node.families)
    plans, findings = plan_service(parsed, old, node, "z1")
    if findings:  # then the Planner does not ask
        return
    lists = with_new_endpoints(parsed, plans, new, node, "z1")
    if lists is None:
        return
    after = plans | {plan.key: plan for plan, _ in lists}
    assert (after, ()) == plan_service(parsed, new, node, "z1")
    for plan, change in lists:
        assert plan != plans[plan.key]
        assert_relisted(plans[plan.key], plan, change)


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
    assert bool(plan.cluster) is plan.uses_cluster
    assert bool(plan.local) is plan.uses_local
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
