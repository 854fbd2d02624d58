"""The machine that the daemon runs on, as a set of functions that a simulation replaces.

Sockets, signals, timers and threads go through the event loop, netlink through host/netlink.py
(`open_socket`), and clocks through `time`: a simulation replaces those below this module.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from steersman.config import ProxyConfig
from steersman.host.limits import raise_descriptor_limit
from steersman.host.process import set_oom_score_adjustment
from steersman.model.inputs import HostFacts, NodeConfig
from steersman.model.plan import Traits
from steersman.modes.base import Mode
from steersman.modes.registry import Factory, create, may_have_left
from steersman.modes.specs import ModeOptions
from steersman.run.process.config_reloader import file_changes
from steersman.run.process.instance import NodeLock
from steersman.run.process.memory import freeze_live_objects, tune_at_start
from steersman.run.process.startup import allow_localhost_node_ports, set_conntrack


def conntrack_usage() -> tuple[int, int]:
    """Return entries and capacity of the conntrack table.

    Raises:
        OSError: conntrack is not in use.
    """
    from steersman.netfilter.conntrack.usage import usage  # noqa: PLC0415 - it calls what Windows lacks

    return usage()


class Machine(msgspec.Struct, frozen=True):
    """Functions of the machine. The defaults are the real machine."""

    create_mode: Factory = create
    """Builds a mode."""
    may_have_left: Callable[[str, ModeOptions], bool] = may_have_left
    """Says of a mode, by its name, whether it is built to remove what it left."""
    instance: NodeLock = msgspec.field(default_factory=NodeLock)
    """The lock that lets one instance run on a node."""
    set_conntrack: Callable[[ProxyConfig, Traits], None] = set_conntrack
    allow_localhost_node_ports: Callable[[NodeConfig, Mode, HostFacts], NodeConfig] = (
        allow_localhost_node_ports
    )
    set_oom_score: Callable[[int], str] = set_oom_score_adjustment
    conntrack_usage: Callable[[], tuple[int, int]] = conntrack_usage
    file_changes: Callable[[Path], AsyncIterator[None]] = file_changes
    raise_descriptor_limit: Callable[[], int] = raise_descriptor_limit
    memory_at_start: Callable[[], None] = tune_at_start
    """Called before the cluster is first read."""
    memory_when_loaded: Callable[[], None] = freeze_live_objects
    """Called after the first sync."""
