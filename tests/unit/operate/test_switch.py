"""The answer of `steersman switch`: what people read of the steps and the outcome."""

from __future__ import annotations

from typing import Any

import pytest

from steersman.model.switch import SwitchResult, SwitchStep
from steersman.operate.answer import Line
from steersman.operate.switch import Switched


def lines(outcome: Any = "switched", **fields: Any) -> list[tuple[str, str]]:
    result = SwitchResult(outcome, "ebpf", "nftables", "ebpf mode serves", seconds=2.25, **fields)
    step = SwitchStep("serve", "both serve", "note", at=1.5)
    blocks = Switched(source="test", result=result, steps=(step,)).blocks(wide=False)
    return [(each.text, each.style) for each in blocks if isinstance(each, Line)]


def test_steps_come_first_and_the_outcome_last() -> None:
    assert lines() == [
        ("   1.50 s  serve    both serve", "warn"),
        ("ebpf mode serves (2.2 s)", "good"),
    ]


@pytest.mark.parametrize(("failed", "style"), [(0, ""), (2, "warn")])
def test_connections_that_were_tried_meanwhile_are_counted(failed: int, style: str) -> None:
    text = f"9 new connections tried meanwhile, {failed} failed"
    assert lines(dials=9, failed_dials=failed)[1] == (text, style)


@pytest.mark.parametrize(
    ("outcome", "code"),
    [("switched", 0), ("checked", 0), ("unchanged", 0), ("back", 1), ("refused", 1)],
)
def test_only_a_switch_that_does_what_was_asked_is_a_success(outcome: Any, code: int) -> None:
    result = SwitchResult(outcome, "ebpf", "nftables", "")
    assert Switched(source="test", result=result).exit_code == code
    assert lines(outcome)[-1][1] == ("bad" if code else "good")
