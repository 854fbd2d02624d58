"""What a sync would do, shown instead of done (`--dry-run`)."""

from __future__ import annotations

from collections.abc import Sequence

from steersman.compile.plan import Planner
from steersman.config import ProxyConfig
from steersman.host.facts import read_facts
from steersman.model.findings import Finding
from steersman.run.startup import load_store, make_mode, node_config
from steersman.run.sync import Sync


async def preview(config: ProxyConfig) -> tuple[str, Sequence[Finding]]:
    """Return what a sync would do now, in words, and the Findings; changes nothing."""
    mode = await make_mode(config)
    store = await load_store(config)
    planner = Planner(node_config(config), mode.traits)
    change = await Sync(store, planner, mode, await read_facts()).preview()
    return mode.describe(change).rstrip(), store.findings + planner.plan.findings
