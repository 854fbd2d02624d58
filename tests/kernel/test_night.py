"""The recording of an operator's night is real: the steps find and repair the fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from night import ASK, Night, record

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.kernel, pytest.mark.slow]


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Night:
    path = tmp_path_factory.mktemp("night") / "night.cast"
    night = record(path)
    header, *events = map(json.loads, path.read_text().splitlines())
    assert header["version"] == 2
    times = [at for at, _, _ in events]
    assert times == sorted(times)
    return night


def test_something_breaks_and_the_doctor_finds_it(night: Night) -> None:
    status, text = night.printed["steersman drift"]
    assert status == 1
    assert "iptables" in text


def test_the_plan_shows_the_change(night: Night) -> None:
    status, text = night.printed["steersman plan --proxy-mode nftables"]
    assert status == 1
    assert "nftables" in text


def test_the_switch_repairs_it(night: Night) -> None:
    assert night.printed["steersman switch nftables"][0] == 0
    status, text = night.printed[ASK]  # the last of three, with the agent still at work
    assert (status, text[:4]) == (0, "pod-")
    assert night.printed["steersman doctor shop/web"][0] == 0


def test_nothing_crashed(night: Night) -> None:
    assert not [line for line, (_, text) in night.printed.items() if "Traceback" in text]


def test_the_recording_in_the_documentation_is_ten_minutes_long() -> None:
    header, *events = map(json.loads, (ROOT / "docs/night.cast").read_text().splitlines())
    assert header["version"] == 2
    assert 480 <= events[-1][0] <= 780
    text = "".join(data for _, _, data in events)
    for words in ("doctor shop/web", "plan --proxy-mode nftables", "switch nftables"):
        assert words in text
