"""Plan all Services: the whole NodePlan at once, or only the part that an event affects.

`Planner` is the only implementation; `compile_all` is a new Planner with every Service dirty.
Law (tests/properties/test_compile.py): after any events both agree.

    snapshot, facts --node.py--> NodeSettings
                                      |  (a change that plans depend on dirties every Service)
    dirty Service --service.py--> ParsedService --service_plan.py--> plans of this Service alone
                                                                        |
    Services in conflict with it <--conflicts.py-- their claims --------+
                                                                        |
    PlanChange <-- stored plans <-- without the Frontends that others hold
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import TypeAlias

import msgspec

from steersman.compile.annotations import Plans
from steersman.compile.conflicts import (
    Claim,
    ClaimIndex,
    claims_of,
    precedence_fields,
    resolve,
)
from steersman.compile.findings import FindingIndex
from steersman.compile.node import PlanSize, node_settings, with_thresholds, zone_of
from steersman.compile.service import ParsedService, parse_steps
from steersman.compile.service_plan import (
    Relisted,
    plan_service,
    with_new_endpoints,
    without_frontends,
)
from steersman.model.addresses import is_loopback
from steersman.model.findings import Finding, Severity
from steersman.model.inputs import HostFacts, NodeConfig, Snapshot
from steersman.model.kube import EndpointSlice, Node
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import EndpointChange, NodePlan, NodeSettings, ServicePlan, Traits

_NO_SLICES: Mapping[str, EndpointSlice] = {}
_Compiled: TypeAlias = tuple[ParsedService | None, Plans, tuple[Finding, ...]]
_SLICE = 48
"""Services planned between two yields of `Planner.steps`, about 5 ms; a Service with many
endpoints counts as several."""
_ENDPOINTS = 16
"""Endpoints that cost as much as a Service without any."""


class PlanChange(msgspec.Struct, frozen=True):
    """The result of an update of a Planner."""

    settings_changed: bool = False
    """The node-wide part that rendering reads differs: every plan may render differently."""
    changed: Mapping[PlanKey, ServicePlan] = {}
    """Plans that are new or differ."""
    removed: frozenset[PlanKey] = frozenset()
    """Keys of removed plans."""
    relisted: Mapping[PlanKey, EndpointChange] = {}
    """For those of `changed` that differ in `cluster` and `reachable` alone: how."""
    failed: frozenset[ObjectName] = frozenset()
    """Services that could not be planned because of a defect: their plans are unchanged."""

    def then(self, other: PlanChange) -> PlanChange:
        """Return this change and one that follows it as one, but for `relisted` and `failed`."""
        if not (self.changed or self.removed or self.settings_changed):
            return other
        changed = {key: plan for key, plan in self.changed.items() if key not in other.removed}
        removed = self.removed.difference(other.changed)
        return PlanChange(
            self.settings_changed or other.settings_changed,
            {**changed, **other.changed},
            removed | other.removed,
        )


def compile_all(
    snapshot: Snapshot, config: NodeConfig, facts: HostFacts, traits: Traits
) -> NodePlan:
    """Return the whole plan, conflicts between Services resolved."""
    planner = Planner(config, traits)
    planner.update(snapshot, facts, (), everything=True)
    return planner.plan


class Planner:
    """Keeps a NodePlan up to date at the cost of the changed Services."""

    def __init__(self, config: NodeConfig, traits: Traits) -> None:
        self._config = config
        self._traits = traits
        self._settings: NodeSettings | None = None
        self._zone = ""
        self._node_input: tuple[Node | None, tuple[str, ...], HostFacts] | None = None
        self._plans: Plans = {}
        self._parsed: dict[ObjectName, ParsedService] = {}
        self._claims = ClaimIndex()
        self._lost: dict[PlanKey, tuple[Claim, ...]] = {}
        """Claims of the plans that others hold."""
        self._node_findings: tuple[Finding, ...] = ()
        self._findings = FindingIndex()
        self._endpoints = 0
        """Reachable endpoints of all plans."""

    @property
    def config(self) -> NodeConfig:
        """The configuration that it plans by."""
        return self._config

    def inherit_holders(self, predecessor: Planner) -> None:
        """Let Services keep the destinations that they hold in another Planner's plan."""
        self._claims.inherit_holders(predecessor._claims)

    def fresh(self) -> Planner:
        """Return an empty Planner of the same configuration that inherits the holders."""
        planner = Planner(self._config, self._traits)
        planner.inherit_holders(self)
        return planner

    @property
    def settings(self) -> NodeSettings:
        """The node-wide part, as of the last update."""
        return self._settings or NodeSettings()

    @property
    def services(self) -> Mapping[PlanKey, ServicePlan]:
        """The plans: a live view."""
        return self._plans

    @property
    def plan(self) -> NodePlan:
        """The plan; `services` is a live view, the rest is as of the last update."""
        findings = (*self._node_findings, *self._findings.listed)
        return NodePlan(self.settings, self._plans, findings, self._findings.unlisted)

    def update(
        self,
        snapshot: Snapshot,
        facts: HostFacts,
        dirty: Iterable[ObjectName],
        everything: bool = False,
    ) -> PlanChange:
        """Update the plan in one go; see `steps` for the arguments."""
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
        """Update the plan, yielding every few milliseconds.

        The Snapshot may move on between two steps: later changes belong to the `dirty` of the
        next update. Discard a Planner if its steps do not run to the end.

        Args:
            snapshot: the present cluster.
            facts: the present machine.
            dirty: Services with a change since the last update, of their own or of a slice.
            everything: plan all Services; implied if the settings that plans depend on changed.
        """
        before = self._settings
        settings, policy_changed = self._update_node(snapshot, facts)
        names = set(dirty)
        if everything or policy_changed:
            names.update(snapshot.services, self._parsed)
        if len(names) > _SLICE:  # conflicts are decided at the end, for the same Services
            snapshot = msgspec.structs.replace(snapshot, services=dict(snapshot.services))
        change = yield from self._update_services(names, snapshot, settings, policy_changed)
        # Thresholds depend on the size of the new plan, so they come last.
        size = PlanSize(
            len(self._plans), self._endpoints, settings.split_dispatch, settings.large_cluster
        )
        self._settings = with_thresholds(settings, self._config, size)
        rendered = _rendered(self._settings) if self._settings is not before else ()
        different = before is None or (rendered != () and rendered != _rendered(before))
        return msgspec.structs.replace(change, settings_changed=different)

    def _update_node(self, snapshot: Snapshot, facts: HostFacts) -> tuple[NodeSettings, bool]:
        """Return the settings with the last thresholds, and whether plans depend on the change."""
        # Node status updates come every few minutes; most of them change none of the input.
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

    def _update_services(
        self, names: set[ObjectName], snapshot: Snapshot, settings: NodeSettings, reparse: bool
    ) -> Generator[None, None, PlanChange]:
        # 1. Plan every Service as if it were alone, and update its claims.
        compiled: dict[ObjectName, _Compiled] = {}
        changed: Plans = {}
        relisted: dict[PlanKey, EndpointChange] = {}
        failed: set[ObjectName] = set()
        cost = 0
        for name in names:
            if cost >= _SLICE:
                cost = 0
                yield
            service, known = snapshot.services.get(name), self._parsed.get(name)
            parsed: ParsedService | None = None
            try:
                # Parsing needs no endpoints: most events are about slices, and reuse the result.
                if known is not None and known.service is service and not reparse:
                    parsed = known
                    lists = self._with_new_endpoints(name, known, snapshot, settings)
                    if lists is not None:
                        for plan, change in lists:
                            self._endpoints += len(change.came) - len(change.gone)
                            changed[plan.key], relisted[plan.key] = plan, change
                        cost += _cost([plan for plan, _ in lists])
                        continue
                elif service is not None:
                    parsed = yield from parse_steps(
                        service,
                        settings.families,
                        allow_external_ips=self._config.allow_service_external_ips,
                        forwards_sctp=settings.traits.forwards_sctp,
                    )
                plans, findings = self._plan_alone(name, parsed, snapshot, settings)
            except Exception as error:  # a defect: it must not affect other Services
                reason = f"cannot be planned ({type(error).__name__}: {error}): a defect of"
                reason += " steersman, please report it; its previous rules stay in force"
                self._findings.put(name, (Finding(f"Service {name}", "", reason, Severity.ERROR),))
                failed.add(name)
                continue
            compiled[name] = (parsed, plans, findings)
            if parsed is None or parsed is not known:
                self._update_claims(known, parsed, plans)
            cost += _cost(plans.values())
        self._plans.update(changed)
        # 2. Decide conflicts, and add the other Services that win or lose a destination.
        for name in self._claims.decide(snapshot.services) - compiled.keys() - failed:
            parsed = self._parsed[name]
            compiled[name] = (parsed, *self._plan_alone(name, parsed, snapshot, settings))
            for key, _ in parsed.ports:
                relisted.pop(key, None)
        # 3. Store the plans without the Frontends that they lost.
        removed: set[PlanKey] = set()
        for index, (name, result) in enumerate(compiled.items(), 1):
            self._store(name, snapshot, result, changed, removed)
            if index % (10 * _SLICE or 1) == 0:
                yield
        return PlanChange(False, changed, frozenset(removed), relisted, frozenset(failed))

    def _with_new_endpoints(
        self,
        name: ObjectName,
        parsed: ParsedService,
        snapshot: Snapshot,
        settings: NodeSettings,
    ) -> Relisted | None:
        """Return what a change of its slices alone does to a Service; None to plan it as a whole.

        That is done for the few Services with Findings or ejections, and if any has a conflict.
        """
        if (
            self._claims.contended
            or self._lost
            or name in self._findings
            or (snapshot.ejected and name in snapshot.ejected)
        ):
            return None
        slices = snapshot.slices.get(name, _NO_SLICES).values()
        return with_new_endpoints(parsed, self._plans, slices, settings, self._zone)

    def _plan_alone(
        self,
        name: ObjectName,
        parsed: ParsedService | None,
        snapshot: Snapshot,
        settings: NodeSettings,
    ) -> tuple[Plans, tuple[Finding, ...]]:
        if parsed is None:
            return {}, ()
        slices = snapshot.slices.get(name, _NO_SLICES).values()
        ejections = snapshot.ejected.get(name, ())
        return plan_service(parsed, slices, settings, self._zone, ejections=ejections)

    def _update_claims(
        self, known: ParsedService | None, parsed: ParsedService | None, plans: Plans
    ) -> None:
        """Update the index of claims for a Service that changed: claims do not need endpoints."""
        claims = self._claims
        # The plans are not reduced yet, so `new` has all claims of the Service.
        new = [(claim, key) for key, plan in plans.items() for claim in claims_of(plan)]
        old: set[tuple[Claim, PlanKey]] = set()
        for key, _ in known.ports if known is not None else ():
            # claims at the last update: those in force, and those that were lost
            old.update((claim, key) for claim in claims_of(self._plans[key]))
            old.update((claim, key) for claim in self._lost.get(key, ()))
        for claim, key in old.difference(new):
            claims.remove(claim, key)
        # A contender whose precedence changed may now win a claim, or lose it.
        reordered = (
            known is not None
            and parsed is not None
            and precedence_fields(known.service) != precedence_fields(parsed.service)
        )
        for claim, key in new:
            if (claim, key) not in old:
                claims.add(claim, key)
            elif reordered:
                claims.review(claim)

    def _store(
        self,
        name: ObjectName,
        snapshot: Snapshot,
        compiled: _Compiled,
        changed: Plans,
        removed: set[PlanKey],
    ) -> None:
        """Store a Service's plans without the Frontends that others hold, and its Findings.

        Args:
            name: the Service.
            snapshot: the present cluster.
            compiled: its plans as if it were alone.
            changed: gets the plans that are new or differ.
            removed: gets the keys of removed plans.
        """
        # Take away what others hold.
        parsed, plans, findings = compiled
        checks = any(plan.health_check_node_port for plan in plans.values())
        if checks or self._claims.contended or self._lost:  # almost never
            losses, more = resolve(plans, self._claims, snapshot.services)
            findings += more
            plans = dict(plans)
            for key in plans:
                self._lost.pop(key, None)
            for key, (kept, lost) in losses.items():
                plans[key], self._lost[key] = without_frontends(plans[key], kept), lost
        self._findings.put(name, findings)
        # Store, and note the differences.
        known = self._parsed.get(name)
        if parsed is None:
            self._parsed.pop(name, None)
        else:
            self._parsed[name] = parsed
        if known is not None and known is not parsed:
            for key in [key for key, _ in known.ports if key not in plans]:
                self._endpoints -= len(self._plans.pop(key).reachable)
                self._lost.pop(key, None)
                removed.add(key)
        for key, plan in plans.items():
            old = self._plans.get(key)
            if old != plan:
                self._endpoints += len(plan.reachable) - (len(old.reachable) if old else 0)
                self._plans[key] = changed[key] = plan


def _cost(plans: Iterable[ServicePlan]) -> int:
    """Return how many Services without endpoints take as long as a Service of these plans."""
    return 1 + sum([len(plan.reachable) for plan in plans]) // _ENDPOINTS


def _policy(settings: NodeSettings) -> tuple[object, ...]:
    """Return the settings that plans depend on."""
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
    """Return the settings that rendering reads: addresses only if the mode makes rules of them.

    Otherwise each address of a pod's interface would render all Services again.
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
