"""The chain_names suite: names and numbers that other programs may rely on (behaviour 8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from steersman.netfilter.iptables.saved import probability

Case = Mapping[str, Any]


def not_here(suite: str, case: Case) -> str:
    """Why a case of the suite cannot be checked yet; "" where it can."""
    mode = case["id"].partition("/")[0]
    if suite == "chain_names" and case["sourceTest"] not in TESTS:
        return f"{case['sourceTest']}: mode {mode} has no such names here"
    return ""


def _compute_probability(case: Case) -> None:
    """A probability reads back as the number that upstream writes.

    iptables-save prints the 31 bits that the kernel keeps; ours are in that spelling.
    """
    kept, written = float(probability(case["key"])), float(case["case"])
    assert abs(kept - written) <= 1 / (1 << 31), f"1/{case['key']} is written {kept}, not {written}"


TESTS: Mapping[str, Callable[[Case], None]] = {"TestComputeProbability": _compute_probability}
"""What the suite's source tests check."""


def chain_names(case: Case) -> None:
    """Check one name or number."""
    TESTS[case["sourceTest"]](case)


SUITES: Mapping[str, Callable[[Case], None]] = {"chain_names": chain_names}
