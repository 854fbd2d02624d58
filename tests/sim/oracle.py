"""What must be true: the rules of a fresh start, and the invariants that are looked at at rest.

The oracle knows the truth (etcd, the interfaces) and works out with the program's own pure code
what a process that starts now would write. What the running process has made of its long and
troubled life must be the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

from msgspec import structs

from steersman.compile.planner import compile_all
from steersman.config import parse_command_line
from steersman.host.facts import read_facts
from steersman.model.failover import Ejection
from steersman.model.findings import Finding
from steersman.model.inputs import HostFacts, NodeConfig
from steersman.model.kube import KubeObject
from steersman.model.names import Family, ObjectName, PlanKey
from steersman.model.plan import NodePlan
from steersman.model.ruleset import Diff, diff
from steersman.modes.nftables.mode import NftablesMode, slots_of
from steersman.run.process.startup import node_config
from steersman.source.apiserver import resources
from steersman.source.objects import decode_value
from steersman.source.store import Store
from tests.sim.clients import Clients
from tests.sim.cluster import Etcd
from tests.sim.kernel import SimMode, Violation, summary
from tests.sim.netlink import Address
from tests.sim.node import HEALTH, METRICS, NAME, Node
from tests.sim.universe import Process, Universe
from tests.support.apiserver.world import Object, Selector, key_of
from tests.support.builders.store import replace_objects

_ABSENT = object()
LONGEST_STEP = 0.025
"""Seconds that planning and rendering may hold the loop at a time."""


class Surroundings(NamedTuple):
    """What the rules of all Services depend on."""

    facts: HostFacts
    document: str
    """The configuration, without its mode."""
    cidrs: tuple[str, ...]
    node: str
    """What matters of this node's object; "" if it is not known."""


class Oracle:
    """Looks at a node."""

    def __init__(self, universe: Universe, etcd: Etcd, node: Node) -> None:
        self._universe = universe
        self._etcd = etcd
        self._node = node
        self.protected: dict[Any, list[object]] = {}
        """Kernel objects of Services that nobody changes, and the values that they may have."""
        self.canaries: frozenset[str] = frozenset()
        self.crowded = False
        """There are so many Services that dispatching is split (behaviour 8.3)."""
        self.last_node: Object | None = None
        """The last good Node that the running process was shown; None while there is none."""
        self.checks = 0
        self._configs: dict[str, NodeConfig] = {}
        self._nodes: dict[str, Object] = {}
        self._around: list[Surroundings] = []
        self._last_mode: object = None
        self._starts = 0
        self._refused: set[str] = set()
        self._canary_rules: dict[str, dict[Any, Any]] = {}
        self._protected_table = ""
        self._facts: dict[tuple[Address, ...], HostFacts] = {}
        self._reading = False
        self._unjudged: list[Diff | set[PlanKey]] = []
        """Transactions of ours during which the oracle did not know yet what may be written: what
        the mode that serves writes, and canaries that others take away."""
        self.clients = Clients(node.netlink.conntrack, universe.dice)
        node.kernel.guard = self._guard

    # The rules of a fresh start

    def facts(self) -> HostFacts:
        """Read this machine's facts with the program's own code.

        This takes time. The process may act meanwhile on a change of which the oracle takes note
        only afterwards: what it writes is judged by `protect`.
        """
        addresses = self._node.netlink.links.of_interest
        if addresses in self._facts:
            return self._facts[addresses]
        found: list[HostFacts] = []

        async def read() -> None:
            found.append(await read_facts())

        kept, self._node.netlink.faults = (
            self._node.netlink.faults,
            type(self._node.netlink.faults)(),
        )
        process = Process(self._universe, read, "oracle")
        self._reading = True
        for _ in range(100):
            if found:
                break
            self._universe.run(0.01)
        self._reading = False
        process.kill()
        self._node.netlink.faults = kept
        self._facts[addresses] = found[0]
        return found[0]

    def _objects(
        self, names: Iterable[str] | None, around: Surroundings
    ) -> dict[str, list[KubeObject]]:
        """Objects as a process would have them; of the named Services only, where given."""
        found: dict[str, list[KubeObject]] = {}
        for resource in resources(NAME):
            chosen = Selector(
                resource.selectors.get("labelSelector", ""),
                resource.selectors.get("fieldSelector", ""),
            )
            listed = list(self._etcd.objects[resource.kind].values())
            if resource.kind == "ServiceCIDR":
                spec = {"cidrs": list(around.cidrs)}
                head = {"kind": "ServiceCIDR", "metadata": {"name": "kubernetes"}}
                listed = [{**head, "spec": spec}] if around.cidrs else []
            if resource.kind == "Node":
                listed = [self._nodes[around.node]] if around.node else []
            if names is not None and resource.kind in ("Service", "EndpointSlice"):
                listed = [obj for obj in listed if _service_of(obj) in names]
            decoded = [decode_value(resource.kind, obj) for obj in listed if chosen.matches(obj)]
            found[resource.kind] = [obj for obj in decoded if not isinstance(obj, Finding)]
        return found

    def _surroundings(self) -> Surroundings:
        """What all Services' rules depend on, as it is now."""
        document = json.dumps({**self._node.document, "mode": ""})
        objects = self._etcd.objects["ServiceCIDR"].values()
        cidrs = tuple(cidr for obj in objects for cidr in obj["spec"]["cidrs"])
        node = ""
        if self.last_node is not None:
            node = json.dumps([self.last_node["status"].get("addresses"), self.last_node["spec"]])
            self._nodes[node] = self.last_node
        return Surroundings(self.facts(), document, cidrs, node)

    def _config(self, document: str) -> NodeConfig:
        """The configuration in the mode that serves: some defaults depend on it."""
        text = json.dumps({**json.loads(document), "mode": self._mode.name})
        if text not in self._configs:
            parsed = parse_command_line(["--config=x"], read=lambda _: text.encode())
            self._configs[text] = node_config(parsed.config)
        return self._configs[text]

    def plan(
        self,
        around: Surroundings,
        names: Iterable[str] | None = None,
        ejected: Mapping[ObjectName, tuple[Ejection, ...]] = MappingProxyType({}),
    ) -> NodePlan:
        """What a process that starts now would plan."""
        store = Store(NAME)
        for kind, objects in self._objects(names, around).items():
            replace_objects(store, kind, objects)
        self.snapshot = store.snapshot
        self._node.oracle_looks = True
        for service, ejections in ejected.items():
            store.eject(service, ejections)
        self._node.oracle_looks = False
        config = self._config(around.document)
        return compile_all(store.snapshot, config, around.facts, self._mode.traits)

    @property
    def _mode(self) -> SimMode:
        daemon = self._node.daemon
        if daemon is not None:
            self._last_mode = daemon.sync.mode
        assert isinstance(self._last_mode, SimMode)
        return self._last_mode

    def rules(self, plan: NodePlan) -> dict[Any, Any]:
        """What a process that starts now would write."""
        like = self._mode.like
        kernel = self._node.kernel.table(self._mode.table)
        if isinstance(like, NftablesMode):
            kept, like.slots = like.slots, slots_of(kernel)
        ruleset = dict(like.render_node(plan.settings))
        for service in plan.services.values():
            ruleset.update(like.render_service(service, plan.settings))
        if isinstance(like, NftablesMode):
            like.slots = kept
        return ruleset

    def _of_canaries(self, around: Surroundings) -> dict[Any, Any]:
        """The rules of the canaries: nothing else changes them."""
        key = repr((self._mode.name, self._mode.table, around))
        if key not in self._canary_rules:
            plan = self.plan(around, self.canaries)
            settings = structs.replace(plan.settings, split_dispatch=self.crowded)
            self._canary_rules[key] = self.rules(structs.replace(plan, settings=settings))
        return self._canary_rules[key]

    def client_comes(self) -> None:
        """Have a UDP client ask, by the rules that are in force."""
        daemon = self._node.daemon
        if daemon is not None:
            sync = daemon.sync
            self.clients.come(sync.state.plan, self.canaries)
            if self._universe.dice.random() < 0.2:
                self.clients.come_too_early(sync.state.plan, self._universe.dice.randrange(14))

    # At every transaction

    def protect(self, *, reset: bool = False) -> None:
        """Take the rules of the canaries as they should be now.

        What the process does not know yet may reach it in any order: until the next look at rest,
        every combination of old and new surroundings counts.
        """
        now = self._surroundings()
        if reset:
            self._judge()
            self._around = []
            self.protected = {}
            self._starts = self._node.starts
        if self._protected_table != self._mode.table:
            self._protect_again()
        if now not in self._around or self._node.starts != self._starts:
            self._permit(now)
        self._judge()

    def _permit(self, now: Surroundings) -> None:
        """Permit the rules of these surroundings too, and of every mixture with earlier ones."""
        first = not self._around
        self._around.append(now)
        if self._node.starts != self._starts:  # it may serve before all that is optional is read
            self._starts = self._node.starts
            self._around += (now._replace(cidrs=()), now._replace(node=""))
        for parts in product(*(_distinct(column) for column in zip(*self._around, strict=True))):
            wanted = self._of_canaries(Surroundings(*parts))
            for key in wanted.keys() | self.protected.keys():
                values = self.protected.setdefault(key, [] if first else [_ABSENT])
                value = wanted.get(key, _ABSENT)
                if value not in values:
                    values.append(value)
            first = False

    def _guard(self, table: str, change: Diff) -> None:
        """See that a transaction takes nothing from the canaries."""
        if self._around and self._node.daemon is not None:
            if table == self._mode.table:
                self._unjudged.append(change)
            elif gone := self._taken_away(table, change):
                self._unjudged.append(gone)
            if not self._reading:
                self._judge()

    def _taken_away(self, table: str, change: Diff) -> set[PlanKey]:
        """Return the canaries of which a transaction leaves nothing in another mode's table."""
        owners = self._node.kernel.owners
        removed = {owner for key in change.removed if (owner := owners.get(key)) is not None}
        gone = {each for each in removed if str(each.name.object_name) in self.canaries}
        if gone:
            stays = self._node.kernel.table(table).keys() - change.removed.keys()
            gone -= {owners.get(key) for key in stays}
        return gone

    def _judge(self) -> None:
        """See that what was written takes nothing from the canaries."""
        changes, self._unjudged = self._unjudged, []
        if changes and self._protected_table != self._mode.table:  # another mode serves now
            self._protect_again()
        for change in changes:
            if isinstance(change, Diff):
                self._judge_one(change)
            else:
                self._judge_others(change)

    def _protect_again(self) -> None:
        """Take the rules of the canaries in the mode that serves now."""
        self._protected_table = self._mode.table
        around, self._around, self.protected = self._around, [], {}
        for each in around:
            self._permit(each)

    def _judge_one(self, change: Diff) -> None:
        after = {**dict.fromkeys(change.removed, _ABSENT), **change.added}
        after.update({key: new for key, (_, new) in change.changed.items()})
        for key in after.keys() & self.protected.keys():
            if after[key] not in self.protected[key]:
                owner = self._node.kernel.owners.get(key, "the node")
                gone = "is taken away" if after[key] is _ABSENT else f"becomes {after[key]!r:.300}"
                self._node.kernel.fail(f"{owner}: {key!r} {gone}")
                return

    def _judge_others(self, gone: set[PlanKey]) -> None:
        """See that another mode's canaries go only once the mode that serves has them."""
        kernel = self._node.kernel
        serving = kernel.table(self._mode.table)
        for key, values in self.protected.items():
            owner = kernel.owners.get(key)
            if owner in gone - kernel.vandalized and serving.get(key, _ABSENT) not in values:
                kernel.fail(f"{owner} goes before {self._mode.name} mode has it: {key!r}")
                return

    # At rest

    def check(self) -> None:
        """See that all is well now that nothing has failed for long enough.

        Raises:
            Violation: it is not.
        """
        self.checks += 1
        node = self._node
        self._no_failures()
        if node.process is None or not node.process.running:
            raise Violation("no process runs")
        self._await_ejections()
        plan = self.plan(self._surroundings())
        # Health checks count the endpoints that are ejected, rules do not have them.
        self._same_rules(self.plan(self._surroundings(), ejected=self._ejected()))
        self._no_leftovers()
        self._pages(plan)
        if wrong := self.clients.wrong(plan, self.snapshot):
            raise Violation(wrong)
        self.clients.leave(plan)
        self._bounded()
        self._no_failures()

    def _ejected(self) -> Mapping[ObjectName, tuple[Ejection, ...]]:
        daemon = self._node.daemon
        assert daemon is not None
        return daemon.sync.state.snapshot.ejected

    def ejects(self) -> bool:
        """Whether an endpoint is ejected, or may return."""
        daemon = self._node.daemon
        return daemon is not None and any(daemon.failover._policy.ejections)

    def _await_ejections(self) -> None:
        """Wait until the last change of ejections is in the kernel; see that they are right.

        Raises:
            Violation: they are not.
        """
        daemon, endpoints = self._node.daemon, self._node.kernel.endpoints
        assert daemon is not None
        for _ in range(100):
            if self._universe.now > endpoints.changed_at + 5.0:
                break
            self._universe.run(1.0)
        if wrong := endpoints.overdue(daemon.failover._policy):
            raise Violation(wrong)
        ejected = self._ejected()
        if ejected and not self._node.ejects:
            raise Violation(f"{len(ejected)} Services have ejections although none are wanted")
        known = {each.backend for each in daemon.failover._policy.ejections}
        if unknown := {each.backend for some in ejected.values() for each in some} - known:
            raise Violation(f"nothing will end the ejections of {unknown}")
        if gone := ejected.keys() - daemon.sync.state.snapshot.services.keys():
            raise Violation(f"ejections of Services that are gone: {gone}")

    def costs(self) -> dict[str, int]:
        """Count the work done so far."""
        counts = self._node.kernel.counts
        done = {name: counts[name] for name in ("planned", "rendered", "written")}
        return {**done, "lines": self._node.log.lines.total()}

    def spent(self, before: dict[str, int], limits: dict[str, int], on: str) -> None:
        """See that no more work was done than was due.

        Raises:
            Violation: it was more.
        """
        for name, count in self.costs().items():
            if count - before[name] > limits[name]:
                raise Violation(f"{on} costs {count - before[name]} {name}, not {limits[name]}")

    def _no_failures(self) -> None:
        if found := self._node.kernel.failures:
            raise Violation(found[0])
        if crashed := self._node.log.crashes:
            raise Violation(f"crash: {crashed[0]}")
        if ended := self._node.unexpected_ends:
            raise Violation(f"the process ended: {ended[0]}")

    def _same_rules(self, plan: NodePlan) -> None:
        kernel = self._node.kernel
        have, want = kernel.table(self._mode.table), self.rules(plan)
        wrong = diff(have, want)
        self._refused = set()
        for part in (wrong.added, wrong.removed, wrong.changed):
            for key in [k for k in part if self._poisoned(k)]:
                if part is not wrong.removed:
                    self._refused.add(str(kernel.owners[key].name.object_name))
                del part[key]
        if self._refused:  # what they may need of an earlier process stays
            wrong.removed.clear()
        if wrong:
            shown = [*wrong.removed.items(), *wrong.added.items(), *wrong.changed.items()][:3]
            raise Violation(f"the kernel is not as after a fresh start: {summary(wrong)}: {shown}")
        kernel.vandalized.clear()
        kernel.unknown = set(kernel.poison)

    def _poisoned(self, key: Any) -> bool:
        owner = self._node.kernel.owners.get(key)
        return owner is not None and str(owner.name.object_name) in self._node.kernel.poison

    def _no_leftovers(self) -> None:
        for name, table in self._node.kernel.tables.items():
            if name != self._mode.table and table:
                raise Violation(f"{len(table)} objects of {name} are left over")

    def _pages(self, plan: NodePlan) -> None:
        from steersman.run.observe.endpoint_counts import EndpointCounts  # noqa: PLC0415
        from steersman.run.sync.in_force import InForce  # noqa: PLC0415

        good = self.last_node is not None and _stays(self.last_node)
        self.page(HEALTH, "/livez", 200)
        self.page(HEALTH, "/healthz", 200 if good else 503)
        self.page(HEALTH, "/readyz", 200)
        counts = EndpointCounts(InForce())
        for key, each in plan.services.items():
            counts.count(key, each)
        for family in plan.settings.families:
            addresses = plan.settings.family(family).node_port_addresses
            any_address = "0.0.0.0" if family is Family.IPV4 else "::"
            ports = counts.health_ports(family)
            ready = counts.ready_here(family)
            for name, port in ports.items():
                for at in (any_address,) if addresses is None else addresses:
                    body = self.page((at, port), "/", 200 if ready[name] else 503)
                    told = json.loads(body)["localEndpoints"]
                    if told != ready[name]:
                        raise Violation(f"health check of {name}: {told}, not {ready[name]}")
        self._metrics(self.page(METRICS, "/metrics", 200))

    def page(self, at: tuple[str, int], path: str, status: int) -> bytes:
        found: list[tuple[int, bytes]] = []
        self._universe.network.ask(at, path, lambda *answer: found.append(answer))
        for _ in range(600):
            if found:
                break
            self._universe.run(0.01)
        if not found or found[0][0] != status:
            raise Violation(f"{at}{path} answers {found and found[0]!r:.300}, not {status}")
        return found[0][1]

    def _metrics(self, page: bytes) -> None:
        values = {}
        for line in page.decode().splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                values[name] = float(value)
        if b'namespace="' in page:
            raise Violation("the default page of metrics has series by Service")
        objects = len(self._node.kernel.table(self._mode.table))
        told = values.get("steersman_kernel_objects")
        if told != objects:
            raise Violation(f"metric kernel_objects is {told}, the kernel has {objects}")
        for kind in ("service", "endpoint"):
            name = f"kubeproxy_sync_proxy_rules_{kind}_changes_pending"
            if values.get(name):
                raise Violation(f"metric {name} is {values[name]} at rest")
        out = sum(map(len, self._ejected().values()))
        if values.get("steersman_endpoints_ejected", 0) != out:
            raise Violation(f"{out} endpoints are ejected, and the metric tells otherwise")
        daemon = self._node.daemon
        assert daemon is not None
        told_of = {finding.object for finding in daemon.sync.state.findings}
        for name in self._refused:
            if f"Service {name}" not in told_of:
                raise Violation(f"the kernel refuses {name}, and no Finding tells")
        if self._refused and not values.get("steersman_refused_service_ports"):
            raise Violation(f"{self._refused} are refused, and no metric tells")

    def _bounded(self) -> None:
        held = self._universe.longest_step
        if held > LONGEST_STEP:
            raise Violation(f"a step held the loop for {held * 1e3:.1f} ms")
        process = self._node.process
        assert process is not None
        loop = process.loop
        limits = {
            "tasks": (process.tasks, 60),
            "timers": (len(loop._scheduled), 400),
            "connections": (len(self._universe.network.open.get(loop, ())), 30),
            "netlink sockets": (len(self._node.netlink.sockets), 8),
            "threads": (loop.threads, 8),
        }
        for name, (count, limit) in limits.items():
            if count > limit:
                raise Violation(f"{count} {name}, more than {limit}")


def _distinct(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _service_of(obj: Object) -> str:
    namespace, name = key_of(obj)
    labels: Mapping[str, str] = obj["metadata"].get("labels") or {}
    return f"{namespace}/{labels.get('kubernetes.io/service-name', name)}"


def _stays(node: Object) -> bool:
    taints = node["spec"].get("taints") or ()
    return not node["metadata"].get("deletionTimestamp") and all(
        taint["key"] != "ToBeDeletedByClusterAutoscaler" for taint in taints
    )
