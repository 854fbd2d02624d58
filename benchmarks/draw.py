"""Draw figures: lines against the number of Services, bars of ratios; one SVG for light and dark.

`docs/figures.json` has the figures that the documentation draws, so that drawings can be made again
without measuring. `python -m benchmarks.draw FILE...` takes figures over from runs (each
`build/bench.json`) and draws; without a file it only draws.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks import datagrams, path, scale
from benchmarks.figures import Figure

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "docs" / "figures.json"
IMAGES = ROOT / "docs" / "images"
STYLE = """
svg { background: #fff; color: #1f2328; font: 13px/1 system-ui, sans-serif; }
text { fill: currentColor; } .title { font-weight: 650; font-size: 15px; }
.axis { stroke: #656d76; } .grid { stroke: #d0d7de; } .note { fill: #59636e; }
.s0 { --c: #0969da; } .s1 { --c: #9a4b00; } .s2 { --c: #1a7f37; } .s3 { --c: #8250df; }
.s4 { --c: #bf3989; } .s5 { --c: #0a7b83; }
.line { stroke: var(--c); fill: none; stroke-width: 2; } .line.other { stroke-dasharray: 5 4; }
.mark { fill: var(--c); } .other.mark { fill: #fff; stroke: var(--c); stroke-width: 2; }
.name { fill: var(--c); }
@media (prefers-color-scheme: dark) {
svg { background: #0d1117; color: #e6edf3; } .axis { stroke: #9198a1; } .grid { stroke: #30363d; }
.note { fill: #9198a1; } .s0 { --c: #4493f8; } .s1 { --c: #e3a05a; } .s2 { --c: #3fb950; }
.s3 { --c: #b794f6; } .s4 { --c: #f778ba; } .s5 { --c: #39c5cf; } .other.mark { fill: #0d1117; }
}
"""
_WIDTH, _HEIGHT = 720.0, 380.0
_LEFT, _TOP, _RIGHT, _BOTTOM = 64.0, 60.0, 200.0, 48.0
_BAR, _LABEL = 20.0, 310.0
_APART = 16.0  # pixels between the names of two lines


COLOURS = {mode: number for number, mode in enumerate((*scale.MODES, scale.EMULATED))}
"""By mode, the same in every drawing; the userspace mode is drawn once."""


class Bar(NamedTuple):
    """A bar of a ratio."""

    name: str
    value: float
    colour: int = 0


class Series(NamedTuple):
    """A line: points of (Services, value)."""

    name: str
    colour: int
    points: tuple[tuple[float, float], ...]
    other: bool = False
    """Dashed: what ours is compared with."""


def lines(title: str, unit: str, series: Sequence[Series]) -> str:
    """Return a drawing with logarithmic axes; each line has its name at its end."""
    points = [point for each in series for point in each.points]
    x_of = _Scale([x for x, _ in points], _LEFT, _WIDTH - _RIGHT)
    y_of = _Scale([y for _, y in points], _HEIGHT - _BOTTOM, _TOP)
    out = [_text(16, 26, title, "title"), _text(16, 46, unit, "note")]
    for value in y_of.ticks:
        y = y_of(value)
        out.append(f'<path class="grid" d="M{_LEFT:g} {y:.1f}H{_WIDTH - _RIGHT:g}"/>')
        out.append(_text(_LEFT - 8, y + 4, f"{value:,g}", end=True))
    bottom = _HEIGHT - _BOTTOM
    out.append(f'<path class="axis" d="M{_LEFT:g} {bottom:g}H{_WIDTH - _RIGHT:g}"/>')
    for size in sorted({x for x, _ in points}):
        x = x_of(size)
        out.append(f'<path class="axis" d="M{x:.1f} {bottom:g}v5"/>')
        out.append(_text(x, bottom + 20, f"{size:,g}", middle=True))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    out.append(_text(middle, _HEIGHT - 8, "Services of three endpoints", "note", middle=True))
    # The names stand in the order of the line ends, far enough apart to be read.
    at = -math.inf
    for each in sorted(series, key=lambda each: y_of(each.points[-1][1])):
        at = max(at + _APART, y_of(each.points[-1][1]) + 4)
        other = " other" if each.other else ""
        path = "L".join(f"{x_of(x):.1f} {y_of(y):.1f}" for x, y in each.points)
        out.append(f'<g class="s{each.colour}"><path class="line{other}" d="M{path}"/>')
        out += [
            f'<circle class="mark{other}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="4"/>'
            for x, y in each.points
        ]
        out += [_text(_WIDTH - _RIGHT + 12, at, each.name, "name"), "</g>"]
    told = (
        f"{each.name}: " + ", ".join(f"{y:,g} {unit} at {x:,g}" for x, y in each.points)
        for each in series
    )
    return _svg(_HEIGHT, title, "; ".join(told), out)


def bars(title: str, note: str, rows: Sequence[Bar]) -> str:
    """Return bars of ratios on a logarithmic axis that begin at 1, where both are equal."""
    height = _TOP + len(rows) * (_BAR + 8) + 36
    x_of = _Scale([*(each.value for each in rows), 1.0], _LABEL, _WIDTH - 70)
    one, bottom = x_of(1.0), height - 30
    out = [_text(16, 26, title, "title"), _text(16, 46, note, "note")]
    for value in x_of.ticks:
        x = x_of(value)
        out.append(f'<path class="grid" d="M{x:.1f} {_TOP:g}V{bottom:.1f}"/>')
        out.append(_text(x, bottom + 18, f"{value:g}", middle=True))
    for number, (name, value, colour) in enumerate(rows):
        y, x = _TOP + 6 + number * (_BAR + 8), x_of(value)
        left, wide = min(one, x), max(abs(one - x), 1.0)
        out.append(_text(_LABEL - 12, y + 14, name, end=True))
        out.append(
            f'<rect class="s{colour} mark" x="{left:.1f}" y="{y:g}" width="{wide:.1f}" '
            f'height="{_BAR:g}"/>'
        )
        out.append(_text(max(one, x) + 6, y + 14, f"{value:.3g}"))
    out.append(f'<path class="axis" d="M{one:.1f} {_TOP:g}V{bottom:.1f}"/>')
    return _svg(height, title, "; ".join(f"{each.name}: {each.value:.3g}" for each in rows), out)


class _Scale:
    """A logarithmic axis over values, whose ends are round numbers."""

    def __init__(self, values: Iterable[float], start: float, end: float) -> None:
        found = sorted(values)
        self._low, high = _round(found[0], up=False), _round(found[-1], up=True)
        self._start, self._length = start, end - start
        self._range = math.log(high / self._low) or 1.0
        first, last = math.floor(math.log10(self._low)), math.ceil(math.log10(high))
        steps = (1,) if last - first > 2 else (1, 2, 5)
        round_ones = (step * 10.0**power for power in range(first, last + 1) for step in steps)
        self.ticks = [each for each in round_ones if self._low * 0.999 <= each <= high * 1.001]

    def __call__(self, value: float) -> float:
        return self._start + math.log(value / self._low) / self._range * self._length


def _round(value: float, *, up: bool) -> float:
    """Return the next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    steps = [power * step for step in (1, 2, 5, 10)]
    if up:
        return next(step for step in steps if step >= value * 0.999)
    return next(step for step in reversed(steps) if step <= value * 1.001)


def _text(
    x: float, y: float, text: str, kind: str = "", *, end: bool = False, middle: bool = False
) -> str:
    anchor = ' text-anchor="end"' if end else ' text-anchor="middle"' if middle else ""
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}{anchor}>{escape(text)}</text>'


def _svg(height: float, title: str, told: str, body: Iterable[str]) -> str:
    size = f'width="{_WIDTH:g}" height="{height:g}" viewBox="0 0 {_WIDTH:g} {height:g}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} aria-labelledby="title text">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="text">{escape(told)}</desc>',
        f"<style>{STYLE}</style>",
    ]
    return "\n".join((*head, *body, "</svg>", ""))


_WAYS = (path.CLUSTER_IP, path.NODE_PORT, path.NODE_CLUSTER_IP)
_BARS = (
    (
        (scale.COLD, scale.CHANGE),
        "figures-upstream.svg",
        "Time beside upstream's shape at {:,} Services",
        "Ratio; less than 1 is faster",
    ),
    (
        _WAYS,
        "figures-set-up.svg",
        "A connection beside a direct one at {:,} Services",
        "Connect, ask, answer, close; ratio of the times, direct on a node without rules",
    ),
    (
        tuple(f"{datagrams.TITLE}{way}" for way in _WAYS),
        "figures-datagrams.svg",
        "Small datagrams of one core at {:,} Services",
        "Ratio of the packets in a second to those of a node without rules; less is slower",
    ),
)
"""Bars of ratios: the figures, the file, the title, and the note below it."""


def made(figures: Sequence[Figure]) -> dict[str, str]:
    """Return every drawing that there are figures for, by the name of its file."""
    out = {}
    for name, file, title in (
        (scale.COLD, "figures-cold-start.svg", "Cold start"),
        (scale.CHANGE, "figures-one-change.svg", "One endpoint replaced"),
    ):
        found = [each for each in figures if each.name == name and each.mode in scale.MODES]
        if found:
            unit = {"s": "seconds", "ms": "milliseconds"}[found[0].unit]
            out[file] = lines(title, unit, list(_series(found)))
    for names, file, title, note in _BARS:
        found = [f for f in figures if f.name in names and f.ratio and f.mode in COLOURS]
        found.sort(key=lambda each: COLOURS[each.mode])
        most = max((each.size for each in found), default=0)
        rows = [
            Bar(
                f"{each.name.partition(', from JSON')[0].removeprefix(datagrams.TITLE)}, "
                f"{each.mode}{' (emulated)' * (each.mode == scale.EMULATED)}",
                each.ratio or 0.0,
                COLOURS[each.mode],
            )
            for name in names
            for each in found
            if (each.name, each.size) == (name, most)
        ]
        if rows:
            out[file] = bars(title.format(most), note, rows)
    relayed = [
        Bar(f"{each.name} ({'more' if each.unit.endswith('/s') else 'less'} is better)", each.ratio)
        for each in figures
        if each.mode == "userspace" and not each.size and each.ratio  # no Services: haproxy
    ]
    if relayed:
        title = "The userspace mode beside haproxy with one thread"
        out["figures-userspace.svg"] = bars(title, "Ratio of the values", relayed)
    return out


def _series(figures: Sequence[Figure]) -> Iterator[Series]:
    for mode in scale.MODES:
        colour = COLOURS[mode]
        rows = sorted((each for each in figures if each.mode == mode), key=lambda each: each.size)
        ours = tuple((float(each.size), each.value) for each in rows)
        theirs = tuple((float(each.size), each.reference) for each in rows if each.reference)
        if ours:
            yield Series(mode, colour, ours)
        if theirs:
            yield Series(f"upstream, {mode}", colour, theirs, other=True)


def read(path: Path) -> list[Figure]:
    """Read the figures of a run."""
    return msgspec.json.decode(path.read_bytes(), type=list[Figure])


def encoded(figures: Sequence[Figure]) -> bytes:
    """Return figures as they are written to a file."""
    return msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n"


def main(paths: Sequence[str]) -> None:
    """Take figures over from runs, and draw."""
    kept = {(each.name, each.mode, each.size): each for each in read(SOURCE)}
    for file in paths:
        taken = [each for each in read(Path(file)) if made([each])]
        kept |= {(each.name, each.mode, each.size): each for each in taken}
    figures = list(kept.values())
    SOURCE.write_bytes(encoded(figures))
    for name, text in made(figures).items():
        (IMAGES / name).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
