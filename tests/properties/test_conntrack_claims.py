"""Nobody can have entries cut of a destination that it does not hold."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from steersman.compile.planner import Planner
from steersman.model.conntrack import pack_socket
from steersman.model.kube import Annotations, Service
from steersman.model.names import Family, ObjectName
from steersman.model.plan import Frontend, ServicePlan
from steersman.source.store import Store
from tests.support.builders.objects import NODE
from tests.support.builders.strategies import BATCHES, CONFIGS, ONE_BY_ONE, TRAITS, take
from tests.support.following import StoreFollower
from tests.support.parts import examples
from tests.support.stale import stale_entries

CLOSING = Annotations(close_connections="true")


def closing(event: Any) -> Any:
    """The most that a Service can ask for."""
    if not isinstance(event, Service):
        return event
    metadata = msgspec.structs.replace(event.metadata, annotations=CLOSING)
    return msgspec.structs.replace(event, metadata=metadata)


def packed(plan: ServicePlan, frontend: Frontend) -> bytes:
    protocol = bytes((plan.key.name.protocol.number,))
    if frontend.address:
        return protocol + pack_socket(frontend.address, frontend.port)
    return protocol + frontend.port.to_bytes(2, "big")


@settings(max_examples=examples(200), deadline=None)
@given(
    BATCHES | ONE_BY_ONE,
    CONFIGS,
    TRAITS,
    st.sets(st.sampled_from("abcd")),
    st.sampled_from(Family),
)
def test_only_who_holds_a_destination_has_a_say_about_it(
    batches: Any, config: Any, traits: Any, letters: set[str], family: Family
) -> None:
    store, planner = Store(NODE), Planner(config, traits)
    follower = StoreFollower(store)
    for events, facts, _ in batches:
        for event in events:
            take(store, closing(event))
        planner.update(store.snapshot, facts, follower.take().services)
    names = {ObjectName("shop", letter) for letter in letters}
    found = stale_entries(planner.plan, store.snapshot, family, names)
    plans = [plan for plan in planner.plan.services.values() if plan.key.family is family]
    held = {
        packed(plan, frontend)
        for plan in plans
        if plan.key.name.object_name in names
        for frontend in plan.frontends
    }
    assert {*found.by_address, *found.by_node_port} <= held
    for plan in plans:
        if plan.key.name.object_name not in names:
            for frontend in plan.frontends:
                destination = packed(plan, frontend)
                address = "192.0.2.1" if family is Family.IPV4 else "2001:db8::1"
                if not frontend.address:
                    destination = destination[:1] + pack_socket(address, frontend.port)
                assert not found.contains(destination, pack_socket(address, 1))
