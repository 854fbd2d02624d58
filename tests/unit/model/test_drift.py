"""The text about drift, and when two programs are said to fight."""

from __future__ import annotations

import msgspec
import pytest

from steersman.model.drift import Drift, Writer, fight

FOREIGN = Writer("iptables-restor", 1234, "kube-proxy, pid 999")


@pytest.mark.parametrize(
    ("drift", "what"),
    [
        (Drift(0, missing=1), "1 kernel object (1 missing)"),
        (Drift(0, missing=2, changed=1), "3 kernel objects (2 missing, 1 changed)"),
        (Drift(0, foreign=4), "4 kernel objects (4 foreign)"),
    ],
)
def test_what_differed_is_counted(drift: Drift, what: str) -> None:
    assert drift.what == what


def test_the_programs_are_named_as_far_as_they_are_known() -> None:
    assert Drift(0).who == "an unknown program"
    named = "iptables-restor (pid 1234, started by kube-proxy, pid 999)"
    assert Drift(0, writers=(FOREIGN, FOREIGN)).who == named
    others = tuple(Writer("nft", pid) for pid in range(4))
    assert Drift(0, writers=others).who == "nft (pid 0) and nft (pid 1) and 2 more"


def test_control_characters_in_the_name_of_a_program_are_escaped() -> None:
    assert str(Writer("a\nb", 1)) == "a\\nb (pid 1)"


def repairs(*times: float) -> list[Drift]:
    return [Drift(at, missing=1, writers=(FOREIGN,)) for at in times]


def test_three_repairs_in_ten_minutes_are_a_fight() -> None:
    assert not fight(repairs(0, 30), 40)
    text = fight(repairs(0, 30, 60), 70)
    assert "every 30 s, 3 times" in text
    assert "'iptables-restor'" in text
    assert "(pid 1234, started by kube-proxy, pid 999)" in text
    assert not fight(repairs(0, 30, 60), 601)


def test_a_fast_or_unknown_program_is_said_to_be_one() -> None:
    unknown = [msgspec.structs.replace(each, writers=()) for each in repairs(0, 0.1, 0.2, 0.3)]
    text = fight(unknown, 1)
    assert "more than once a second, 4 times" in text
    assert "an unknown program, last an unknown program" in text
