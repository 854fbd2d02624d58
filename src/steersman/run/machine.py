"""The doors through which the daemon touches its machine; a simulation replaces them.

Sockets, signals, timers and threads go through the event loop, netlink through host/netlink.py
(`open_socket`), and clocks through `time`: those are replaced below this module.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from steersman.config import ProxyConfig, to_mode_options
from steersman.host.exec import SubprocessExec
from steersman.host.process import raise_descriptor_limit, set_oom_score_adjustment
from steersman.model.inputs import HostFacts, NodeConfig
from steersman.model.plan import Traits
from steersman.modes.base import Mode
from steersman.modes.registry import Factory, create
from steersman.run.collector import collect_seldom, keep_what_is_there, one_heap
from steersman.run.fallback import Chosen
from steersman.run.instance import Instance
from steersman.run.reload import file_changes
from steersman.run.startup import (
    allow_localhost_node_ports,
    choose_mode,
    set_conntrack,
)
from steersman.run.switch import others

_SWITCH = 0.001
"""Seconds after which a thread that computes lets the event loop run; Python's default is 0.005."""


def conntrack_usage() -> tuple[int, int]:
    """Return entries and capacity of the conntrack table.

    Raises:
        OSError: conntrack is not in use.
    """
    from steersman.netfilter.conntrack import usage  # noqa: PLC0415 - it calls what Windows lacks

    return usage()


def memory_at_start() -> None:
    """Set the interpreter and the C library up for reading a cluster."""
    one_heap()
    collect_seldom()
    sys.setswitchinterval(_SWITCH)


@dataclass(frozen=True)
class Machine:
    """What the daemon asks of the machine it runs on. The defaults are the real machine."""

    create_mode: Factory = create
    """Builds a mode."""
    instance: Instance | None = None
    """The lock that lets one instance run on a node; None for no lock."""
    set_conntrack: Callable[[ProxyConfig, Traits], None] = set_conntrack
    allow_localhost_node_ports: Callable[[NodeConfig, Mode, HostFacts], NodeConfig] = (
        allow_localhost_node_ports
    )
    set_oom_score: Callable[[int], str] = set_oom_score_adjustment
    conntrack_usage: Callable[[], tuple[int, int]] = conntrack_usage
    file_changes: Callable[[Path], AsyncIterator[None]] = file_changes
    raise_descriptor_limit: Callable[[], int] = raise_descriptor_limit
    memory_at_start: Callable[[], None] = memory_at_start
    """Called before the cluster is first read."""
    memory_when_loaded: Callable[[], None] = keep_what_is_there
    """Called after the first sync."""

    async def choose_mode(self, config: ProxyConfig) -> Chosen:
        """Return the mode to run, or what stands in for it.

        Raises:
            StartError: something is missing.
        """
        return await choose_mode(config, self.create_mode)

    def leftovers(self, mode: Mode, config: ProxyConfig) -> Iterable[tuple[str, Mode]]:
        """Return the other modes whose leftovers go once this one serves, by name."""
        options = to_mode_options(config)
        return others(mode.name, SubprocessExec(), mode.variant, options, self.create_mode)
