"""What describes a process, for tests of its pages."""

from __future__ import annotations

from typing import Any

from steersman.config import ProxyConfig
from steersman.run.pages.node_state import NodeStates
from tests.support.modes.memory import World


def states_of(world: World, **clocks: Any) -> NodeStates:
    """Describe a process that programs a World from manifests."""
    return NodeStates(lambda: world.sync, ProxyConfig, None, lambda: True, **clocks)
