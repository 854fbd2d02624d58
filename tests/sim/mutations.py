"""Old defects, put back for a run: the simulation has to find each of them again.

Each function undoes the repair of one defect in this process, by replacing what the repair added.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from steersman.compile.planner import Planner
from steersman.host import linux, rtnetlink
from steersman.model.conntrack import Stale
from steersman.model.kube import Node
from steersman.model.plan import NodeSettings
from steersman.model.ruleset import Diff
from steersman.modes.base import Mode
from steersman.run.ledger import Owed
from steersman.run.mode_metrics import ModeMetrics
from steersman.run.sync import Sync
from steersman.source.store import LastNode


def lose_failed_writes() -> None:
    """A write that fails counts as done until somebody else touches the kernel."""

    @contextmanager
    def writing(_: Owed) -> Iterator[None]:
        yield

    write = Sync._write

    async def believing(self: Sync) -> tuple[bool, Diff]:
        try:
            return await write(self)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception:
            if self.state.result is not None:
                self._ledger.mark_written()
                self._owed.unread = False
            raise

    _replace(Owed, "writing", writing)
    _replace(Sync, "_write", believing)


def believe_a_missing_node() -> None:
    """A Node that was deleted, or has lost its addresses, is taken as it is."""

    def update(self: LastNode, node: Node | None) -> None:
        self.node = node

    _replace(LastNode, "update", update)


def count_link_local_addresses() -> None:
    """The address that each veth gets is a fact, and a fact that changed plans everything."""

    _replace(rtnetlink.Address, "is_link_local", property(lambda _: False))
    update_node = Planner._update_node

    def everything(self: Planner, snapshot: Any, facts: Any) -> tuple[NodeSettings, bool]:
        before = self._node_input
        settings, again = update_node(self, snapshot, facts)
        return settings, again or before != self._node_input

    _replace(linux, "_is_relevant", lambda _message: True)
    _replace(Planner, "_update_node", everything)


def mix_families() -> None:
    """A node port is stale in both families if it is in one."""
    contains = Stale.contains

    def mixed(self: Stale, destination: bytes, source: bytes) -> bool:
        known = destination in self.by_address
        valid = self.by_node_port.get(destination[:1] + destination[-2:])
        if known or valid is None or destination in self.own:
            return contains(self, destination, source)
        return source not in valid

    _replace(Stale, "contains", mixed)


def show_every_service() -> None:
    """The default page of metrics has series for each Service and endpoint."""
    begin = ModeMetrics.__init__

    def always(self: ModeMetrics, mode: Mode, plans: Any, _per_service: object) -> None:
        begin(self, mode, plans, lambda: True)

    _replace(ModeMetrics, "__init__", always)


def _replace(owner: object, name: str, value: object) -> None:
    assert hasattr(owner, name), name
    setattr(owner, name, value)


MUTATIONS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        lose_failed_writes,
        believe_a_missing_node,
        count_link_local_addresses,
        mix_families,
        show_every_service,
    )
}
"""By name, for `--mutation`."""
