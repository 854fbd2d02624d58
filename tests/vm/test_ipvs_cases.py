"""The cases that the ipvs mode serves otherwise: a boot of its kernel takes minutes."""

from __future__ import annotations

from tests.support.builders import case_files
from tests.support.modes.ipvs import IPVS, as_ipvs_serves
from tests.vm.guest.ipvs import DIFFERENT


def test_the_cases_that_ipvs_serves_otherwise_are_listed() -> None:
    worlds = [case_files.world(name, IPVS.traits) for name in case_files.names()]
    different = {
        world.id
        for world in worlds
        if as_ipvs_serves(world.flows, world.plan(IPVS.traits)) != world.flows
    }
    assert different == {each for each in DIFFERENT if not each.startswith("common/")}
