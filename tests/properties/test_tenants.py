"""Tenants are strangers: what one Service does never changes what another one's traffic does.

The only exception are destinations that several ask for (compile/conflicts.py).
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from steersman.compile.conflicts import claim_of
from steersman.compile.findings import PER_SERVICE
from steersman.compile.planner import Planner
from steersman.compile.service_plan import without_frontends
from steersman.model.addresses import canonical_ip
from steersman.model.kube import Annotations, EndpointSlice, KubeObject, ObjectMeta, Service
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import Frontend, FrontendKind, Traits
from steersman.source.store import Store
from tests.support.builders.objects import CONFIG, FACTS, NODE, endpoint, plan_of, service, slice_
from tests.support.builders.strategies import CONFIGS, OBJECTS, SERVICES, SLICES, TIMES, TRAITS
from tests.support.following import StoreFollower, update
from tests.support.parts import examples

NEWCOMER = "newcomer"
MORE_TRAITS = TRAITS | st.sampled_from(
    [Traits(assigns_vips=True, one_health_check_port=True), Traits(terminates_connections=True)]
)


def renamed(obj: KubeObject) -> KubeObject:
    """The newcomer, or a slice of it, made of any object."""
    meta = obj.metadata
    if isinstance(obj, EndpointSlice) and meta.labels is not None:
        labels = msgspec.structs.replace(meta.labels, service_name=NEWCOMER)
        meta = msgspec.structs.replace(meta, name=f"{NEWCOMER}-{meta.name}", labels=labels)
    else:
        meta = msgspec.structs.replace(meta, name=NEWCOMER)
    return msgspec.structs.replace(obj, metadata=meta)


def created(store: Store, key: PlanKey) -> str:
    return store.snapshot.services[key.name.object_name].metadata.creation_timestamp or ""


def may_take(store: Store, winner: PlanKey, loser: PlanKey, frontend: Frontend) -> bool:
    """The claim rules: whether a newcomer may take a destination from who has it."""
    owns = frontend.address and frontend.kind is not FrontendKind.CLUSTER_IP
    spec = store.snapshot.services[winner.name.object_name].spec
    vips = {canonical_ip(text) for text in (spec.cluster_ip or "", *(spec.cluster_ips or ()))}
    if owns and frontend.address in vips:
        return True
    return "" < created(store, winner) < created(store, loser)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(OBJECTS, min_size=1, max_size=8),
    SERVICES,
    st.lists(SLICES, max_size=2),
    CONFIGS,
    MORE_TRAITS,
)
def test_a_newcomer_changes_nothing_for_the_others_but_by_the_claim_rules(
    events: list[KubeObject], obj: Service, slices: list[EndpointSlice], config: Any, traits: Traits
) -> None:
    store, planner = Store(NODE), Planner(config, traits)
    follower = StoreFollower(store)
    for event in events:
        store.upsert(event)
    planner.update(store.snapshot, FACTS, follower.take().services)
    before, settings_before = dict(planner.plan.services), planner.plan.settings

    given_objects: list[KubeObject] = [obj, *slices]
    new = [renamed(each) for each in given_objects]
    for each in new:
        store.upsert(each)
    change = update(planner, store.snapshot, FACTS, follower.take().services)
    after = dict(planner.plan.services)
    mine = {key for key in after if key.name.service == NEWCOMER}
    taken = {claim_of(key, f): key for key in mine for f in after[key].frontends}
    assert not change.settings_changed
    assert planner.plan.settings == settings_before
    assert after.keys() - mine == before.keys()
    for key, plan in before.items():
        kept = tuple(f for f in plan.frontends if claim_of(key, f) not in taken)
        for frontend in set(plan.frontends) - set(kept):
            winner = taken[claim_of(key, frontend)]
            assert may_take(store, winner, key, frontend)
        assert after[key] == (plan if kept == plan.frontends else without_frontends(plan, kept))
    others = {f for f in planner.plan.findings if NEWCOMER not in f.object}
    assert all(f.field or "not listed" in f.reason for f in others)

    for each in new:
        store.delete(type(each).__name__, each.metadata.object_name)
    planner.update(store.snapshot, FACTS, follower.take().services)
    if all(after[key] == plan for key, plan in before.items()):
        assert planner.plan.services == before


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(SERVICES, min_size=1, max_size=8), st.lists(TIMES, min_size=8, max_size=8))
def test_every_destination_has_the_holder_that_the_rules_name(
    services: list[Service], times: list[str | None]
) -> None:
    """One by one, so that somebody holds it: no holder loses it to a Service that is not older."""
    store = Store(NODE)
    follower, planner = StoreFollower(store), Planner(CONFIG, Traits())
    holders: dict[Any, tuple[PlanKey, Frontend]] = {}
    for obj, created_at in zip(services, times, strict=False):
        meta = ObjectMeta(obj.metadata.name, "shop", creation_timestamp=created_at)
        store.upsert(msgspec.structs.replace(obj, metadata=meta))
        planner.update(store.snapshot, FACTS, follower.take().services)
        now = {
            claim_of(key, frontend): (key, frontend)
            for key, plan in planner.plan.services.items()
            for frontend in plan.frontends
        }
        for claim, (key, frontend) in holders.items():
            if key not in planner.plan.services or claim not in now:
                continue
            winner, _ = now[claim]
            changed = key.name.object_name == ObjectName("shop", obj.metadata.name)
            if winner.name.object_name != key.name.object_name and not changed:
                assert may_take(store, winner, key, frontend)
        holders = now


TEXT = st.text(max_size=40) | st.sampled_from([",", "=", "1=", ",1", "\n", "x,", "::1=2,", "none,"])
LONG = st.builds(lambda text, times: text * times, TEXT, st.sampled_from([1, 3, 5000]))


@settings(max_examples=examples(150), deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys(Annotations.__struct_fields__, LONG)), LONG, LONG)
def test_whatever_an_annotation_or_name_says_findings_are_few_and_short(
    words: dict[str, str], name: str, word: str
) -> None:
    notes = Annotations(**words)
    ports = [{"name": name, "port": 80, "protocol": word}, {"name": name, "port": 81}]
    asked = service(
        name,
        ports=[*ports, *ports],
        externalIPs=[word] * 20,
        type=word,
        sessionAffinity=word,
        loadBalancerSourceRanges=[word] * 20,
        internalTrafficPolicy=word,
        clusterIP="10.96.0.1",
    )
    asked = msgspec.structs.replace(
        asked, metadata=msgspec.structs.replace(asked.metadata, annotations=notes)
    )
    ends = slice_(endpoint(word), endpoint("10.0.0.1"), owner=name, name=name, ports=ports)
    ends = msgspec.structs.replace(
        ends, metadata=msgspec.structs.replace(ends.metadata, annotations=notes)
    )
    findings = plan_of(asked, ends).findings
    assert len(findings) <= PER_SERVICE
    for finding in findings:
        assert str(finding).isprintable()
        assert len(str(finding)) < 15_000  # of which everything may be escaped
        assert len(finding.reason) < 6_100
