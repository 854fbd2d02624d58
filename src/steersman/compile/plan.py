"""From a Snapshot to a NodePlan: all at once, or only what an event touches.

`Planner` is the one implementation; `compile_all` is a fresh Planner that sees everything dirty.
Law (tests/properties/test_compile.py): after any events both agree.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import TypeAlias

import msgspec

from steersman.compile.actions import without_frontends
from steersman.compile.claims import Claim, Claims, claims_of, settle, standing
from steersman.compile.node import Totals, node_settings, with_totals, zone_of
from steersman.compile.notes import FindingIndex
from steersman.compile.ports import Asked, Plans, plan_ports, read_ports
from steersman.model.addresses import is_loopback
from steersman.model.findings import Finding, Severity
from steersman.model.inputs import HostFacts, NodeConfig, Snapshot
from steersman.model.kube import EndpointSlice, Node, Service
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import NodePlan, NodeSettings, ServicePlan, Traits

_NO_SLICES: Mapping[str, EndpointSlice] = {}
_Compiled: TypeAlias = tuple[Asked | None, Plans, tuple[Finding, ...]]
_SLICE = 48
"""Services planned between two yields of `Planner.steps`, about 5 ms; a Service with many
endpoints counts as several."""
_ENDPOINTS = 16
"""Endpoints that cost as much as a Service without any."""


class PlanChange(msgspec.Struct, frozen=True):
    """What an update of a Planner changed."""

    settings_changed: bool = False
    """What rendering reads of the node-wide part differs: every plan may render differently."""
    changed: Mapping[PlanKey, ServicePlan] = {}
    """Plans that are new or differ."""
    removed: frozenset[PlanKey] = frozenset()
    """Plans that are gone."""
    failed: frozenset[ObjectName] = frozenset()
    """Services that a defect kept from being planned: their plans are as before."""


def compile_all(
    snapshot: Snapshot, config: NodeConfig, facts: HostFacts, traits: Traits
) -> NodePlan:
    """Return the whole plan, clashes between Services settled."""
    planner = Planner(config, traits)
    planner.update(snapshot, facts, (), everything=True)
    return planner.plan


class Planner:
    """Keeps a NodePlan up to date at the cost of what changed."""

    def __init__(self, config: NodeConfig, traits: Traits) -> None:
        self._config = config
        self._traits = traits
        self._settings: NodeSettings | None = None
        self._zone = ""
        self._node_input: tuple[Node | None, tuple[str, ...], HostFacts] | None = None
        self._plans: Plans = {}
        self._asked: dict[ObjectName, Asked] = {}
        self._claims = Claims()
        self._lost: dict[PlanKey, tuple[Claim, ...]] = {}
        self._node_findings: tuple[Finding, ...] = ()
        self._findings = FindingIndex()
        self._endpoints = 0

    def succeed(self, predecessor: Planner) -> None:
        """Let Services keep the destinations that they have in another Planner's plan."""
        self._claims.succeed(predecessor._claims)

    @property
    def settings(self) -> NodeSettings:
        """The node-wide part, as of the last update."""
        return self._settings or NodeSettings()

    @property
    def services(self) -> Mapping[PlanKey, ServicePlan]:
        """The plans: a live view."""
        return self._plans

    def fresh(self) -> Planner:
        """Return a Planner of the same configuration that has seen nothing, to succeed this one."""
        planner = Planner(self._config, self._traits)
        planner.succeed(self)
        return planner

    @property
    def plan(self) -> NodePlan:
        """The plan; `services` is a live view, the rest is as of the last update."""
        found = self._findings
        findings = (*self._node_findings, *found.listed)
        return NodePlan(self._settings or NodeSettings(), self._plans, findings, found.beyond)

    def update(
        self,
        snapshot: Snapshot,
        facts: HostFacts,
        dirty: Iterable[ObjectName],
        everything: bool = False,
    ) -> PlanChange:
        """Take in what changed, in one go; see `steps` for the arguments."""
        steps = self.steps(snapshot, facts, dirty, everything)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                change: PlanChange = end.value
                return change

    def steps(
        self,
        snapshot: Snapshot,
        facts: HostFacts,
        dirty: Iterable[ObjectName],
        everything: bool = False,
    ) -> Generator[None, None, PlanChange]:
        """Take in what changed, yielding every few milliseconds; return what the plan gained.

        The Snapshot may move on between two steps: what changes then must be in the `dirty` of
        the next update. A Planner whose steps were not run to the end is of no further use.

        Args:
            snapshot: the cluster as it is now.
            facts: this machine as it is now.
            dirty: Services of which the Service itself or a slice changed since the last update.
            everything: take all Services to be dirty; implied if what all depend on changed.
        """
        before = self._settings
        settings, policy_changed = self._node_part(snapshot, facts)
        names = set(dirty)
        if everything or policy_changed:
            names.update(snapshot.services, self._asked)
        if len(names) > _SLICE:  # claims are settled at the end, by the same Services
            snapshot = msgspec.structs.replace(snapshot, services=dict(snapshot.services))
        part = self._services_part(names, snapshot, settings, policy_changed)
        change = yield from part
        totals = Totals(
            len(self._plans), self._endpoints, settings.split_dispatch, settings.large_cluster
        )
        self._settings = with_totals(settings, self._config, totals)
        rendered = _rendered(self._settings) if self._settings is not before else ()
        different = before is None or (rendered != () and rendered != _rendered(before))
        return msgspec.structs.replace(change, settings_changed=different)

    # The node

    def _node_part(self, snapshot: Snapshot, facts: HostFacts) -> tuple[NodeSettings, bool]:
        """Return the settings, with the last flags, and whether plans have to be made anew."""
        before, zone_before = self._settings, self._zone
        node_input = (snapshot.node, snapshot.service_cidrs, facts)
        if before is not None and node_input == self._node_input:
            return before, False
        self._node_input = node_input
        settings, self._node_findings = node_settings(snapshot, self._config, facts, self._traits)
        self._zone = zone_of(snapshot.node)
        if before is None:
            return settings, True
        settings = msgspec.structs.replace(
            settings, split_dispatch=before.split_dispatch, large_cluster=before.large_cluster
        )
        return settings, self._zone != zone_before or _policy(settings) != _policy(before)

    # The Services

    def _services_part(
        self, names: set[ObjectName], snapshot: Snapshot, settings: NodeSettings, anew: bool
    ) -> Generator[None, None, PlanChange]:
        """Compile, claim, and settle for all who may be concerned."""
        compiled: dict[ObjectName, _Compiled] = {}
        failed: set[ObjectName] = set()
        cost = 0
        for name in names:
            try:
                asked = self._ask(name, snapshot.services.get(name), settings, anew)
                compiled[name] = (asked, *self._compile(name, asked, snapshot, settings))
            except Exception as error:  # a defect: it must not cost the other Services
                failed.add(name)
                self._note(name, (_unplanned(name, error),))
                continue
            if asked is None or asked is not self._asked.get(name):
                self._claim(name, asked, compiled[name][1])
            cost += _cost(compiled[name][1])
            if cost >= _SLICE:
                cost = 0
                yield
        for name in self._claims.decide(snapshot.services) - compiled.keys() - failed:
            asked = self._asked[name]
            compiled[name] = (asked, *self._compile(name, asked, snapshot, settings))
        changed: Plans = {}
        removed: set[PlanKey] = set()
        for index, (name, (asked, plans, findings)) in enumerate(compiled.items(), 1):
            settled, more = self._settle(plans, snapshot)
            self._note(name, findings + more)
            removed.update(self._store(name, asked, settled, changed))
            if index % (10 * _SLICE or 1) == 0:
                yield
        return PlanChange(False, changed, frozenset(removed), frozenset(failed))

    def _ask(
        self, name: ObjectName, service: Service | None, settings: NodeSettings, anew: bool
    ) -> Asked | None:
        """Read a Service, unless it is known and reading it again would give the same."""
        if service is None:
            return None
        known = self._asked.get(name)
        if known is not None and known.service is service and not anew:
            return known
        allowed = self._config.allow_service_external_ips
        return read_ports(service, settings, allow_external_ips=allowed)

    def _compile(
        self, name: ObjectName, asked: Asked | None, snapshot: Snapshot, settings: NodeSettings
    ) -> tuple[Plans, tuple[Finding, ...]]:
        if asked is None:
            return {}, ()
        slices = snapshot.slices.get(name, _NO_SLICES).values()
        return plan_ports(asked, slices, settings, self._zone)

    def _claim(self, name: ObjectName, asked: Asked | None, plans: Plans) -> None:
        """Bring the index of claims up to date for one Service.

        What is claimed follows from the Service alone, so this is only for one that changed.
        """
        claims, known = self._claims, self._asked.get(name)
        new = [(claim, key) for key, plan in plans.items() for claim in claims_of(plan)]
        old: set[tuple[Claim, PlanKey]] = set()
        if known is not None:
            old.update((claim, key) for key, _ in known.ports for claim in self._claimed(key))
            for claim, key in old.difference(new):
                claims.remove(claim, key)
        moved = known and asked and standing(known.service) != standing(asked.service)
        for claim, key in new:
            if (claim, key) not in old:
                claims.add(claim, key)
            elif moved:
                claims.review(claim)

    def _claimed(self, key: PlanKey) -> Iterable[Claim]:
        """Return what a plan asked for at the last update, lost Frontends included."""
        yield from claims_of(self._plans[key])
        yield from self._lost.get(key, ())

    def _settle(self, plans: Plans, snapshot: Snapshot) -> tuple[Plans, tuple[Finding, ...]]:
        checks = any(plan.health_check_node_port for plan in plans.values())
        if not (checks or self._claims.contended or self._lost):
            return plans, ()  # by far the most
        losses, findings = settle(plans, self._claims, snapshot.services)
        settled = dict(plans)
        for key in plans:
            self._lost.pop(key, None)
        for key, (kept, lost) in losses.items():
            settled[key], self._lost[key] = without_frontends(plans[key], kept), lost
        return settled, findings

    def _note(self, name: ObjectName, findings: tuple[Finding, ...]) -> None:
        self._findings.put(name, findings)

    def _store(
        self, name: ObjectName, asked: Asked | None, plans: Plans, changed: Plans
    ) -> list[PlanKey]:
        """Keep a Service's plans; add to `changed` what is new, and return what is gone."""
        known = self._asked.get(name)
        removed = []
        if known is not None and known is not asked:
            removed = [key for key, _ in known.ports if key not in plans]
        if asked is None:
            self._asked.pop(name, None)
        else:
            self._asked[name] = asked
        for key in removed:
            self._endpoints -= len(self._plans.pop(key).reachable)
            self._lost.pop(key, None)
        for key, plan in plans.items():
            old = self._plans.get(key)
            if old != plan:
                self._endpoints += len(plan.reachable) - (len(old.reachable) if old else 0)
                self._plans[key] = changed[key] = plan
        return removed


def _policy(settings: NodeSettings) -> tuple[object, ...]:
    """Return what of the settings plans are made from."""
    families = (settings.ipv4, settings.ipv6)
    own = [f.local_addresses for f in families] if settings.traits.assigns_vips else []
    return (
        settings.node_name,
        frozenset(settings.families),
        settings.masquerade_all,
        settings.falls_back,
        settings.traits.filters_without_endpoints,
        [(bool(family.detector), family.node_ip) for family in families],
        own,
    )


def _rendered(settings: NodeSettings) -> NodeSettings:
    """Return what of the settings rendering reads: addresses that no rule is made of are left out.

    Otherwise every address that a pod's interface brings would render all Services again.
    """
    if settings.traits.reads_addresses:
        return settings
    ipv4, ipv6 = (
        msgspec.structs.replace(
            family, local_addresses=tuple(filter(is_loopback, family.local_addresses))
        )
        for family in (settings.ipv4, settings.ipv6)
    )
    return msgspec.structs.replace(settings, ipv4=ipv4, ipv6=ipv6)


def _cost(plans: Plans) -> int:
    """Return how long a Service took to plan, in Services without endpoints."""
    return 1 + sum(len(plan.reachable) for plan in plans.values()) // _ENDPOINTS


def _unplanned(name: ObjectName, error: Exception) -> Finding:
    reason = f"cannot be planned ({type(error).__name__}: {error})"
    text = f"{reason}: a defect of steersman, please report it; its previous rules stay in force"
    return Finding(f"Service {name}", "", text, Severity.ERROR)
