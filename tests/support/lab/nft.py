"""The nftables mode in another network namespace than the test's own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from typing import Any

from steersman.host.exec import Exec
from steersman.host.worker import KernelWorker
from steersman.model.plan import NodeSettings, ServicePlan
from steersman.model.ruleset import diff
from steersman.modes.nftables.mode import NftablesMode
from tests.support.builders import nftables_plans as make
from tests.support.lab.inside import Inside
from tests.support.lab.namespace import sh


def mode_behind(execute: Exec) -> NftablesMode:
    """The mode, in the namespace in which an Exec runs programs."""
    mode = NftablesMode(execute)
    if isinstance(execute, Inside):
        mode.worker = KernelWorker(execute.netns)
    return mode


def render(
    mode: NftablesMode, plans: Iterable[ServicePlan], of: NodeSettings = make.SETTINGS
) -> dict[Any, Any]:
    out = dict(mode.render_node(of))
    for plan in plans:
        out.update(mode.render_service(plan, of))
    return out


async def program(
    mode: NftablesMode, plans: Iterable[ServicePlan], of: NodeSettings = make.SETTINGS
) -> dict[Any, Any]:
    assert (await mode.worker.do(mode.probe)).usable
    want = render(mode, plans, of)
    await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), want))
    assert await mode.worker.do(mode.read) == want
    return want


def nft(script: str) -> None:
    """What some other program does."""
    subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True)


def listing() -> str:
    return sh("nft list ruleset")


def elements(name: str, family: str = "ip") -> list[Any]:
    """What nft itself says is in a set."""
    said = json.loads(sh(f"nft -j list set {family} kube-proxy {name}"))
    found: list[Any] = said["nftables"][1]["set"].get("elem", [])
    return found
