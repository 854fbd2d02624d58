"""Drawn figures say what the measured ones say; parts of a benchmark are chosen."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import draw, scale
from benchmarks.draw import Bar, Series, bars, lines
from benchmarks.figures import Figure, chosen

SVG = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)  # our own


def texts(svg: str, kind: str) -> list[ElementTree.Element]:
    return [each for each in parsed(svg).iter(f"{SVG}text") if each.get("class") == kind]


def test_every_drawing_has_words_and_needs_nothing_from_elsewhere() -> None:
    for text in draw.made(draw.read(draw.SOURCE)).values():
        root = parsed(text)
        for tag in ("title", "desc"):
            found = root.find(f"{SVG}{tag}")
            assert found is not None
            assert found.text
        assert not re.search(r"(?:href|url\(|@import|src=)", text)
        assert "prefers-color-scheme: dark" in text


def test_a_line_has_logarithmic_axes_and_a_name() -> None:
    points = ((10.0, 1.0), (100.0, 10.0), (1000.0, 100.0))
    svg = lines("Time", "seconds", [Series("<ours>", 0, points), Series("flat", 1, ((10.0, 1.0),))])
    (circles,) = [
        [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in group.iter(f"{SVG}circle")]
        for group in parsed(svg).iter(f"{SVG}g")
        if group.get("class") == "s0"
    ]
    (x1, y1), (x2, y2), (x3, y3) = circles
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    assert y3 < y1
    assert [each.text for each in texts(svg, "name")] == ["<ours>", "flat"]
    assert "<ours>: 1 seconds at 10, 10 seconds at 100" in (
        parsed(svg).findtext(f"{SVG}desc") or ""
    )


def test_names_of_lines_that_end_together_do_not_overlap() -> None:
    series = [Series(str(n), n, ((1.0, 1.0), (10.0, 5.0 + n / 1000))) for n in range(4)]
    heights = [float(each.get("y", "")) for each in texts(lines("T", "s", series), "name")]
    assert all(low - high >= 13 for high, low in itertools.pairwise(heights))


def test_bars_begin_where_both_are_equal() -> None:
    svg = bars("Time", "ratio", [Bar("half", 0.5), Bar("double", 2.0), Bar("equal", 1.0)])
    half, double, equal = [
        (float(r.get("x", "")), float(r.get("width", ""))) for r in parsed(svg).iter(f"{SVG}rect")
    ]
    assert half[0] + half[1] == pytest.approx(double[0], abs=0.2)
    assert half[1] == pytest.approx(double[1], abs=0.2)
    assert equal == (double[0], 1.0)


def test_figures_of_a_run_replace_those_of_the_same_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Figure(scale.COLD, "nftables", 100, 2.0, "s", 4.0, 0.5)
    after = Figure(scale.COLD, "nftables", 100, 1.0, "s", 4.0, 0.25)
    other = Figure("of no drawing", "nftables", 100, 1.0, "s")
    source, run = tmp_path / "figures.json", tmp_path / "bench.json"
    monkeypatch.setattr(draw, "SOURCE", source)
    monkeypatch.setattr(draw, "IMAGES", tmp_path)
    source.write_text("[]")
    for figures in ([before], [after, other]):
        run.write_bytes(draw.encoded(figures))
        draw.main([str(run)])
    assert draw.read(source) == [after]
    assert "1 seconds at 100" in (tmp_path / "figures-cold-start.svg").read_text()


def test_parts_of_a_benchmark_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, more = ("nftables", "ebpf"), ("ipvs",)
    monkeypatch.delenv("MODES", raising=False)
    assert chosen("MODES", usual, more) == usual
    monkeypatch.setenv("MODES", "ipvs,nftables")
    assert chosen("MODES", usual, more) == ("nftables", "ipvs")
    monkeypatch.setenv("MODES", "nftables,ebfp")
    with pytest.raises(SystemExit, match="MODES: no ebfp; there is nftables, ebpf, ipvs"):
        chosen("MODES", usual, more)


def test_only_modes_with_times_of_their_own_are_lines() -> None:
    emulated = Figure(scale.COLD, scale.EMULATED, 5000, 30.0, "s", 40.0, 0.75)
    assert set(draw.made([emulated])) == {"figures-upstream.svg"}
    ours = Figure(scale.COLD, "nftables", 5000, 1.0, "s", 4.0, 0.25)
    drawn = draw.made([emulated, ours])
    assert "ipvs" not in drawn["figures-cold-start.svg"]
    assert "cold start, ipvs (emulated): 0.75" in drawn["figures-upstream.svg"]
