"""What a benchmark yields, and how it is printed."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence

import msgspec


class Figure(msgspec.Struct, frozen=True):
    """A measured value beside its reference."""

    name: str
    mode: str
    size: int
    """Services, of three endpoints each."""
    value: float
    unit: str
    reference: float | None = None
    """The same job done the other way (`iptables-restore` in upstream's shape, or no rules)."""
    ratio: float | None = None
    """value / reference."""


def figure(
    name: str, mode: str, size: int, measured: tuple[float, str], reference: float | None = None
) -> Figure:
    """Round a value (given with its unit) and compare it."""
    value, unit = measured
    ratio = value / reference if reference else None
    return Figure(
        name,
        mode,
        size,
        round(value, 3),
        unit,
        None if reference is None else round(reference, 3),
        None if ratio is None else round(ratio, 3),
    )


def interleaved(runs: int, *measures: Callable[[], float]) -> list[float]:
    """Call each in turn, again and again; the median of each: noise of the machine hits all."""
    values: list[list[float]] = [[] for _ in measures]
    for _ in range(runs):
        for measure, seen in zip(measures, values, strict=True):
            seen.append(measure())
    return [statistics.median(seen) for seen in values]


def chosen(variable: str, usual: Sequence[str], more: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names in an environment variable (`MODES=ebpf,nftables`); the usual without it.

    Args:
        variable: the environment variable.
        usual: those that are measured anyway.
        more: those that have to be named.
    """
    wanted = set(filter(None, os.environ.get(variable, "").split(","))) or set(usual)
    known = (*usual, *more)
    if unknown := wanted.difference(known):
        raise SystemExit(
            f"{variable}: no {', '.join(sorted(unknown))}; there is {', '.join(known)}"
        )
    return tuple(each for each in known if each in wanted)


def chosen_sizes(usual: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of Services that SIZES names; the usual ones without it."""
    return tuple(map(int, filter(None, os.environ.get("SIZES", "").split(",")))) or tuple(usual)


def table(figures: Sequence[Figure]) -> str:
    """Lay figures out for people."""
    lines = [
        f"{'what':39} {'mode':20} {'size':>6} {'value':>10} {'unit':5} {'reference':>10} ratio"
    ]
    for each in figures:
        reference = "" if each.reference is None else f"{each.reference:.2f}"
        ratio = "" if each.ratio is None else f"{each.ratio:.3f}"
        lines.append(
            f"{each.name:39} {each.mode:20} {each.size:6} {each.value:10.2f} {each.unit:5}"
            f" {reference:>10} {ratio}"
        )
    return "\n".join(lines)
