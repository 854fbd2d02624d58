"""A mode whose kernel is a dictionary, and a sync loop on it."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain
from typing import Any

from steersman.compile.planner import Planner
from steersman.host.worker import KernelWorker
from steersman.model.errors import ApplyError, BusyError
from steersman.model.inputs import HostFacts, NodeConfig
from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan, Traits
from steersman.model.ruleset import Diff, Ruleset, patch
from steersman.modes.base import Mode, Support
from steersman.run.sync.state import SyncResult
from steersman.run.sync.sync import Sync
from steersman.source.store import CONFIGURATION, Store
from tests.support.builders.store import replace_objects, service, slice_
from tests.support.modes.inline import Inline

FACTS = HostFacts("me", {"lo": ("127.0.0.1/8",), "eth0": ("192.0.2.1/24",)}, ipv6=False)


class MemoryMode(Mode):
    """A mode whose kernel is a dict; a batch with a `poison` value is refused whole."""

    name = "memory"
    traits = Traits()
    worker: KernelWorker = Inline()

    def __init__(self) -> None:
        self.kernel: dict[Any, Any] = {}
        self.poison: set[str] = set()
        self.busy = False
        self.applied: list[Diff] = []
        self.reads = 0

    def probe(self) -> Support:
        return Support(usable=True)

    def render_node(self, settings: NodeSettings) -> Ruleset:
        return {"node": settings.node_name or "-", "masq": settings.masquerade_all}

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        out = {f"{f.kind} {f.address}:{f.port}": str(plan.key) for f in plan.frontends}
        out |= {f"{plan.key} {endpoint}": str(plan.key) for endpoint in plan.reachable}
        return out

    def read(self) -> Ruleset:
        self.reads += 1
        return dict(self.kernel)

    def fingerprint(self) -> Hashable | None:
        return tuple(sorted(self.kernel.items()))

    def apply(self, change: Diff) -> None:
        if self.busy:
            raise BusyError("somebody holds the lock")
        new = [*change.added.values(), *(value for _, value in change.changed.values())]
        if bad := [value for value in new if str(value) in self.poison]:
            raise ApplyError(f"refused: {bad[0]}")
        self.kernel = patch(self.kernel, change)
        self.applied.append(change)


class World:
    """A Store, a mode and the Sync between them."""

    def __init__(self, services: int = 4) -> None:
        self.store = Store("me", facts=FACTS)
        self.mode = MemoryMode()
        self.start()
        replace_objects(
            self.store,
            "Service",
            [service(f"s{i}", clusterIP=f"10.96.0.{i}") for i in range(1, services + 1)],
        )
        replace_objects(
            self.store,
            "EndpointSlice",
            [slice_(f"s{i}-x", f"s{i}", (f"10.1.0.{i}",)) for i in range(1, services + 1)],
        )

    def start(self) -> None:
        config = NodeConfig(node_name="me", families=(Family.IPV4,))
        self.sync = Sync(self.store, Planner(config, self.mode.traits), self.mode)

    def use(self, config: NodeConfig) -> None:
        """Plan by another configuration, as after a reload."""
        self.sync.planner.config = config
        self.store.log.touch(CONFIGURATION)

    async def run(self) -> SyncResult | None:
        report = await self.sync.run()
        return report.result if report else None

    async def check(self) -> SyncResult | None:
        self.sync.suspect()
        return await self.run()

    def fresh(self) -> Ruleset:
        """What a fresh start would write for the same world."""
        other = World(0)
        replace_objects(other.store, "Service", self.store.snapshot.services.values())
        slices = chain.from_iterable(self.store.snapshot.slices.values())
        replace_objects(other.store, "EndpointSlice", slices)
        planner = Planner(NodeConfig(node_name="me", families=(Family.IPV4,)), Traits())
        planner.update(other.store.snapshot, FACTS)
        want = dict(self.mode.render_node(planner.plan.settings))
        for plan in planner.plan.services.values():
            want.update(self.mode.render_service(plan, planner.plan.settings))
        return want
