"""Old defects, put back for a run: the simulation has to find each of them again.

Each function undoes the repair of one defect in this process, by replacing what the repair added.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import structs

from steersman.compile import service_plan
from steersman.compile.planner import Planner
from steersman.failover import pools
from steersman.failover.endpoint import Endpoint
from steersman.failover.policy import Policy
from steersman.failover.states import NEVER, Ejected, Healthy, Series, Suspect, Waiting
from steersman.host import linux, rtnetlink
from steersman.model.conntrack import Stale
from steersman.model.failover import Ejection, Observation
from steersman.model.kube import Node
from steersman.model.plan import NodeSettings
from steersman.model.ruleset import Diff
from steersman.modes.base import Mode
from steersman.run.observe.mode_metrics import ModeMetrics
from steersman.run.serve import connections, http
from steersman.run.sync.state import SyncReport, Written
from steersman.run.sync.sync import KernelKnowledge, Sync
from steersman.source.last_node import LastNode


def lose_failed_writes() -> None:
    """A write that fails counts as done until somebody else touches the kernel."""

    @contextmanager
    def writing(_: KernelKnowledge) -> Iterator[None]:
        yield

    write = Sync._write

    async def believing(self: Sync) -> tuple[bool, Written]:
        try:
            return await write(self)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception:
            if self.state.result is not None:
                self._ledger.mark_written()
                self._kernel.unread = False
            raise

    _replace(KernelKnowledge, "writing", writing)
    _replace(Sync, "_write", believing)


def lose_changes_after_a_check() -> None:
    """The next mode never sees what changed after its rehearsal: the old one has taken it."""
    rehearsed: set[Sync] = set()
    rehearse, run = Sync.rehearse, Sync.run

    async def rehearsing(self: Sync) -> Diff:
        rehearsed.add(self)
        return await rehearse(self)

    async def running(self: Sync) -> SyncReport | None:
        if self in rehearsed:
            rehearsed.discard(self)
            self._unplanned.move(self.store.log.revision)
        return await run(self)

    _replace(Sync, "rehearse", rehearsing)
    _replace(Sync, "run", running)


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


# Rules of failover, taken away (failover/policy.py)


def believe_every_probe() -> None:
    """Failed probes also count of an endpoint whose policy denies them."""
    _replace(Policy, "_is_believed", lambda *_: True)
    _replace(Policy, "_others_answer", lambda *_: True)
    _replace(pools, "suspected_at", lambda _: NEVER)


def eject_all() -> None:
    """No share of a Service's endpoints has to stay."""

    def everyone(self: Policy[Any], pool: Any) -> tuple[Ejection, ...]:
        found = (each.ejection for each in self._pools.members(pool))
        return tuple(each for each in found if each)

    def not_ready(states: Any, protocol: Any, ejections: Any) -> Any:
        out = {(e.backend.ip, e.backend.port) for e in ejections if e.backend.protocol is protocol}
        return tuple(
            structs.replace(each, ready=False, serving=False)
            if (each.endpoint.ip, each.endpoint.port) in out
            else each
            for each in states
        )

    _replace(Policy, "ejected", everyone)
    _replace(service_plan, "with_ejections", not_ready)


def eject_without_probes() -> None:
    """A client that fails is enough."""

    def suspect(self: Policy[Any], now: float, endpoint: Endpoint) -> None:
        if isinstance(endpoint.state, Healthy):
            ejection = self._ejection(now, endpoint, Observation.SILENT)
            self._enter(endpoint, Waiting())
            self._enter(endpoint, Suspect(Series(now, now, 1, 0, now)))
            self._enter(endpoint, Ejected(ejection, NEVER, ejection.until))

    _replace(Policy, "_suspect", suspect)


def never_return() -> None:
    """A probe that answers after the hold changes nothing."""
    _replace(Policy, "_return", lambda *_: None)


def forget_lost_probes() -> None:
    """A probe that a switch of the mode cancels is never reported."""
    _replace(Policy, "lose", lambda *_: None)
    _replace(Policy, "_lose_all", lambda *_: None)


# Servers


def accept_without_a_turn() -> None:
    """Clients that wait in the backlog are served, or sent away, without a turn of the loop."""

    async def at_once(**_: bool) -> None:
        pass

    _replace(connections, "next_turn", at_once)
    _replace(http, "next_turn", at_once)


def _replace(owner: object, name: str, value: object) -> None:
    assert hasattr(owner, name), name
    setattr(owner, name, value)


MUTATIONS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        lose_failed_writes,
        lose_changes_after_a_check,
        believe_a_missing_node,
        count_link_local_addresses,
        mix_families,
        show_every_service,
        believe_every_probe,
        eject_all,
        eject_without_probes,
        never_return,
        forget_lost_probes,
        accept_without_a_turn,
    )
}
"""By name, for `--mutation`."""
