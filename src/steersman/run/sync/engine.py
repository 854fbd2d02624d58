"""A mode at work: what a switch of the mode replaces as a whole, while the process goes on."""

from __future__ import annotations

import asyncio

import msgspec

from steersman.compile.planner import Planner
from steersman.config import ProxyConfig
from steersman.model.inputs import NodeConfig
from steersman.modes.base import Mode
from steersman.run.sync.in_force import InForce
from steersman.run.sync.sync import Sync
from steersman.source.store import CONFIGURATION, Store


class Engine:
    """A mode, the configuration that it runs with, and the sync loop's body on it.

    The Store, the plans in force, the servers, the Runner and the node's lock outlive it. Several
    may follow the Store side by side; one serves.
    """

    def __init__(
        self,
        mode: Mode,
        config: ProxyConfig,
        node: NodeConfig,
        store: Store,
        *,
        before: Engine | None = None,
    ) -> None:
        """Create it; nothing is read or written before its Sync runs.

        Services keep the ports and addresses that they hold in `before`, the engine until now.
        """
        planner = Planner(node, mode.traits)
        if before is not None:
            planner.inherit_holders(before.sync.planner)
        self.mode = mode
        self.config = config
        self.node = node
        revision = before.sync.state.revision if before else 0
        in_force = before.sync.in_force if before else InForce()
        self.sync: Sync = Sync(store, planner, mode, in_force, revision=revision)
        self.replaced = asyncio.Event()
        """Another engine serves: tasks that belong to this one end."""
        self.spared: frozenset[str] = frozenset()
        """Modes whose objects a switch removes itself, once their connections have ended."""

    def use(self, config: ProxyConfig, node: NodeConfig) -> None:
        """Plan everything again with another configuration at the next sync."""
        self.config, self.node = config, node
        self.sync.planner.config = node
        self.sync.store.log.touch(CONFIGURATION)


def setting_changes(old: Engine, new: Engine) -> list[str]:
    """Say which settings differ because the mode does: defaults depend on it."""

    def shown(value: object) -> str:
        return (", ".join(map(str, value)) or "all") if isinstance(value, tuple) else str(value)

    changes = []
    for field in msgspec.structs.fields(old.node):
        before, after = getattr(old.node, field.name), getattr(new.node, field.name)
        if before != after:
            words = field.name.replace("_", " ")
            text = f"{shown(after)} instead of {shown(before)}"
            changes.append(f"{words}: {text}, the default of {new.mode.name} mode")
    return changes
