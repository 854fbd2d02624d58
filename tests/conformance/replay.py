"""The history of a case, replayed step by step as events of a running proxy."""

from __future__ import annotations

from typing import Any

import msgspec

from steersman.compile.planner import Planner
from steersman.model.kube import KINDS, Node
from steersman.model.plan import NodePlan, Traits
from steersman.source.store import Store
from tests.conformance.world import Case, read, world
from tests.support.builders.store import replace_objects
from tests.support.following import StoreFollower


def replay(case: Case, traits: Traits) -> NodePlan:
    """The plan that a Planner has after the steps of a case, updated at each `sync`."""
    _, config, facts = world(case)
    store, planner = Store(config.node_name), Planner(config, traits)
    follower = StoreFollower(store)
    replace_objects(store, "Node", [read(Node, node) for node in case.get("nodes") or ()])
    for step in case["steps"]:
        if step["op"] in ("sync", "apply"):
            planner.update(store.snapshot, facts, follower.take().services)
        else:
            _event(store, step["op"], step["object"])
    planner.update(store.snapshot, facts, follower.take().services)
    return planner.plan


def _event(store: Store, what: str, value: dict[str, Any]) -> None:
    verb = next(verb for verb in ("add", "update", "delete") if what.startswith(verb))
    kind = what.removeprefix(verb)
    obj = msgspec.convert(value, KINDS[kind])
    if verb == "delete":
        store.delete(kind, obj.metadata.object_name)
    else:
        store.upsert(obj)
