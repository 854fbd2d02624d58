"""Filters of the templates."""

from __future__ import annotations

import json

import pytest

from steersman.operate.answer import Chart, Series
from steersman.ui import filters


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.00005, "50 us"),
        (0.012, "12 ms"),
        (3.21, "3.2 s"),
        (59, "59 s"),
        (600, "10 min"),
        (10800, "3 h"),
        (864000, "10 d"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert filters.duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(512, "512 B"), (1500, "1.5 kB"), (49e6, "49 MB"), (3e12, "3000 GB")],
)
def test_sizes(number: float, text: str) -> None:
    assert filters.size(number) == text


def test_shares() -> None:
    assert filters.percent(0.0123) == "1.2 %"
    assert filters.percent(None) == "-"


def test_moments_say_the_time_zone_until_the_browser_knows_better() -> None:
    html = filters.moment(1_700_000_000.0)
    assert 'datetime="2023-11-14T22:13:20+00:00"' in html
    assert "2023-11-14 22:13:20 UTC" in html
    assert filters.moment(0) == "never"


def test_commands_between_backticks_are_code() -> None:
    html = filters.with_code("See `steersman explain <b>` first.")
    assert (
        html
        == "<bdi>See </bdi><code><bdi>steersman explain &lt;b&gt;</bdi></code><bdi> first.</bdi>"
    )
    assert filters.with_code("no command") == "<bdi>no command</bdi>"


def test_long_names_are_cut_in_the_middle_and_whole_in_the_title() -> None:
    name = "head" + "<" * 253 + "tail"
    html = filters.cut(name, 20)
    assert html.count("&lt;") > 253
    assert html.endswith("tail</bdi>")
    assert "<<" not in html
    assert filters.cut("short") == "<bdi>short</bdi>"


def test_the_attributes_of_a_live_block() -> None:
    assert filters.live("nodes").startswith('id="live_nodes" sse-swap="live_nodes"')


def test_structs_become_json_for_attributes() -> None:
    chart = Chart([1.5], [Series("a<b", [None])], "/s")
    assert json.loads(filters.json(chart))["series"] == [{"label": "a<b", "values": [None]}]


def test_addresses_keep_what_is_not_changed() -> None:
    query = {"q": "a&b <x>", "mode": "m", "page": "3"}
    assert filters.address(query) == "?q=a%26b+%3Cx%3E&mode=m"
    assert filters.address(query, mode="", page=2) == "?q=a%26b+%3Cx%3E&page=2"
