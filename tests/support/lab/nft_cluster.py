"""A node in nftables mode with two endpoints and clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from steersman.model.plan import ServicePlan
from steersman.model.ruleset import Diff, diff
from steersman.modes.nftables.mode import NftablesMode
from tests.support.builders import nftables_plans as make
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.inside import Inside
from tests.support.lab.nft import mode_behind

NODE, OUTSIDE, POD = "192.0.2.1", "203.0.113.9", "10.244.7.7"


ENDS = tuple(f"10.244.0.{n}" for n in range(3))


class Cluster:
    """A lab with a mode in it."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.mode: NftablesMode = mode_behind(Inside(lab.node.path))
        self.have: dict[Any, Any] = {}

    def program(self, *plans: ServicePlan) -> None:
        asyncio.run(self._program(plans))

    async def _program(self, plans: tuple[ServicePlan, ...]) -> None:
        want = dict(self.mode.render_node(make.SETTINGS))
        for plan in plans:
            want.update(self.mode.render_service(plan, make.SETTINGS))
        await self.mode.worker.do(
            self.mode.apply, diff(await self.mode.worker.do(self.mode.read), want)
        )

    def change(
        self, added: Sequence[ServicePlan] = (), removed: Sequence[ServicePlan] = ()
    ) -> None:
        """Write some plans without reading before, as most syncs do."""

        def rendered(plans: Sequence[ServicePlan]) -> dict[Any, Any]:
            return {
                key: value
                for plan in plans
                for key, value in self.mode.render_service(plan, make.SETTINGS).items()
            }

        asyncio.run(self.mode.worker.do(self.mode.apply, Diff(rendered(added), rendered(removed))))

    def reached(self, source: str, address: str, port: int) -> str:
        outcome = self.lab.probe(source, address, port)
        assert outcome.kind == "answered", outcome
        return outcome.endpoint

    def remembered(self) -> str:
        """What nft says about affinity maps."""
        said = self.lab.run("nft", "list", "table", "ip", "kube-proxy")
        return "".join(block for block in said.split("map ") if block.startswith("affinity-"))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    pods = (*(Pod(address, local=n % 2 == 0) for n, address in enumerate(ENDS)), Pod(POD))
    with Lab(Layout({"eth0": (f"{NODE}/24",)}, (OUTSIDE,), pods)) as lab:
        for address in (*ENDS, NODE):
            lab.serve(address, 8080, "TCP")
        yield lab
