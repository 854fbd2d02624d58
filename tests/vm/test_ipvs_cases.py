"""The list of cases that the ipvs mode serves differently, checked without its kernel."""

from __future__ import annotations

from tests.support.builders import case_files
from tests.support.modes.ipvs import IPVS, as_ipvs_serves
from tests.vm.guest.ipvs import DIFFERENT


def test_the_cases_that_ipvs_serves_differently_are_listed() -> None:
    worlds = [case_files.world(name, IPVS.traits) for name in case_files.names()]
    different = {
        world.id
        for world in worlds
        if as_ipvs_serves(world.flows, world.plan(IPVS.traits)) != world.flows
    }
    assert different == {each for each in DIFFERENT if not each.startswith("common/")}
