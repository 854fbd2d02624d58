"""The State as JSON."""

from __future__ import annotations

import json

import msgspec
import pytest

from steersman.model.node_state import NodeState
from steersman.model.plan import NodePlan, NodeSettings
from steersman.run.pages import state_page
from steersman.run.pages.state_page import state_json
from steersman.run.sync.state import State
from tests.support.builders.plans import plan


@pytest.mark.parametrize("count", [0, 1, 100, 250])
def test_every_plan_is_said_however_many_there_are(count: int) -> None:
    plans = {each.key: each for each in (plan(f"shop/cart-{n}:http") for n in range(count))}
    shown = State(mode="ipvs", plan=NodePlan(NodeSettings(), plans), slices=3)
    said = json.loads(b"".join(state_json(NodeState(now=2.5, started=1.0), shown)))
    assert [each["key"]["service"] for each in said["servicePlans"]] == [
        f"cart-{number}" for number in range(count)
    ]
    assert said["objects"]["servicePorts"] == count
    assert said["objects"]["endpointSlices"] == 3
    assert (said["mode"], said["uptimeSeconds"]) == ("ipvs", 1.5)


@pytest.mark.parametrize(("native", "word"), [(True, "C"), (False, "none")])
def test_it_says_which_decoder_runs(
    native: bool, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_page, "NATIVE", native)
    assert json.loads(b"".join(state_json(NodeState(), State())))["protobufDecoder"] == word


def test_it_says_what_was_when_it_was_asked() -> None:
    plans = {each.key: each for each in (plan(f"shop/cart-{n}:http") for n in range(300))}
    pieces = state_json(NodeState(), State(plan=NodePlan(NodeSettings(), plans)))
    first = next(pieces)
    plans.clear()
    assert len(msgspec.json.decode(first + b"".join(pieces))["servicePlans"]) == 300


def test_the_keys_of_a_plan_stay_as_they_are() -> None:
    """Whatever structs the program has: tools of operators read them."""
    only = plan("shop/cart-1:http")
    said = json.loads(
        b"".join(state_json(NodeState(), State(plan=NodePlan(NodeSettings(), {only.key: only}))))
    )
    (shown,) = said["servicePlans"]
    assert sorted(shown) == [
        "affinity_seconds",
        "cluster",
        "draining",
        "frontends",
        "health_check_node_port",
        "kept",
        "key",
        "least_connections",
        "local",
        "maglev",
        "metrics",
        "proxy_protocol",
        "reachable",
        "ready_here",
        "scheduler",
        "scheduler_flags",
        "weights",
    ]
