"""Some time of everything going wrong at once ends in the rules of a fresh start: the ipvs mode."""

from __future__ import annotations

from tests.support.lab.namespace import in_namespace
from tests.support.modes.chaos import run_chaos


def test_chaos_ends_in_the_rules_of_a_fresh_start() -> None:
    in_namespace(lambda: run_chaos("ipvs"))
