"""Trace and the rendered rules agree on any world: the prediction is what the rules do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.builders.flow_strategies import flows, plans
from tests.support.modes.flows import by_trace
from tests.support.modes.registry import MODES, ModeUnderTest
from tests.support.parts import examples

EVALUATED = [pytest.param(m, id=m.name) for m in MODES.values() if m.evaluator]


@pytest.mark.parametrize("mode", EVALUATED)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_trace_agrees_with_the_rules(mode: ModeUnderTest, data: st.DataObject) -> None:
    plan = data.draw(plans(mode))
    assert mode.evaluator is not None
    ask = mode.evaluator(plan)
    for flow in flows(plan):
        told, written = by_trace(plan, flow), ask(flow)
        assert told == written, f"{flow}: trace says {told}, the rules {written}"
