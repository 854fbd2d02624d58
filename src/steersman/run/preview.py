"""What a sync would do, shown instead of done (`--dry-run`)."""

from __future__ import annotations

from collections.abc import Sequence

from steersman.compile.plan import Planner
from steersman.config import ProxyConfig
from steersman.host.machine import read_facts
from steersman.model.findings import Finding
from steersman.model.ruleset import Diff
from steersman.modes.base import Describing
from steersman.run.startup import load_store, make_mode, node_config
from steersman.run.sync import Sync


async def preview(config: ProxyConfig) -> tuple[str, Sequence[Finding]]:
    """Return what a sync would do now, in words, and the Findings; changes nothing."""
    mode = await make_mode(config)
    store = await load_store(config)
    planner = Planner(node_config(config), mode.traits)
    change = await Sync(store, planner, mode, await read_facts()).preview()
    words = mode.describe(change) if isinstance(mode, Describing) else format_diff(change)
    return words.rstrip(), store.findings + planner.plan.findings


def format_diff(change: Diff) -> str:
    """Write a Diff for people: a line per line of kernel text, marked `+` or `-`."""
    lines: list[str] = []
    for mark, objects in (("-", change.removed), ("+", change.added)):
        for key in sorted(objects, key=str):
            lines += [f"{mark} {text}" for text in _text(key, objects[key])]
    for key in sorted(change.changed, key=str):
        old, new = (_text(key, value) for value in change.changed[key])
        lines += [f"- {text}" for text in old if text not in new]
        lines += [f"+ {text}" for text in new if text not in old]
    return "\n".join(lines)


def _text(key: object, value: object) -> list[str]:
    parts = key if isinstance(key, tuple) else (key,)
    name = " ".join(str(part) for part in parts if part != "")
    return [f"{name}: {line}" for line in str(value).splitlines() or [""]]
