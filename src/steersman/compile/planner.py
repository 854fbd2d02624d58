"""Plan all Services: the whole NodePlan at once, or only the part that an event affects.

`Planner` is the only implementation; `compile_all` is a new Planner with every Service dirty.
Law (tests/properties/test_compile.py): after any events both agree.

    snapshot, facts --node.py--> NodeSettings
                                      |  (a change that plans depend on dirties every Service)
    dirty Service --service.py--> ParsedService --service_plan.py--> plans of this Service alone
                                                                        |
    Services in conflict with it <--conflicts.py-- their claims --------+
                                                                        |
    touched in the log <-- stored plans <-- without the Frontends that others hold
"""

from __future__ import annotations

from collections.abc import Generator, Iterable

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
from steersman.compile.node import node_settings, zone_of
from steersman.compile.service import ParsedService, parse_steps
from steersman.compile.service_plan import plan_service, without_frontends
from steersman.model import codes
from steersman.model.addresses import is_loopback
from steersman.model.change_log import ChangeLog
from steersman.model.findings import Finding, Severity
from steersman.model.inputs import HostFacts, NodeConfig, Snapshot
from steersman.model.kube import Node, Service
from steersman.model.names import NODE, ObjectName, Owner, PlanKey
from steersman.model.plan import NodePlan, NodeSettings, Traits

_SLICE = 48
"""Services planned between two yields of `Planner.steps`, about 2 ms; a Service with many
endpoints counts as several."""
_ENDPOINTS = 16
"""Endpoints that cost as much as a Service without any."""


class _Compiled(msgspec.Struct, frozen=True, gc=False):
    """A Service planned as if it were alone."""

    before: ParsedService | None
    """The Service that its stored plans were made of."""
    parsed: ParsedService | None
    plans: Plans
    findings: tuple[Finding, ...]


def compile_all(
    snapshot: Snapshot, config: NodeConfig, facts: HostFacts, traits: Traits
) -> NodePlan:
    """Return the whole plan, conflicts between Services resolved."""
    planner = Planner(config, traits)
    planner.update(snapshot, facts)
    return planner.plan


class Planner:
    """Keeps a NodePlan up to date at the cost of the changed Services."""

    def __init__(self, config: NodeConfig, traits: Traits) -> None:
        self.config = config
        """The configuration to plan by; another one plans everything again."""
        self.log: ChangeLog[Owner] = ChangeLog()
        """What changed: plans that are new, differ or are gone; NODE if the settings that rendering
        reads do, and then every plan, as it may render differently."""
        self.failed: set[ObjectName] = set()
        """Services that could not be planned because of a defect: their plans are unchanged."""
        self._traits = traits
        self._planned_by = config
        self._unfinished = False
        """Whether the last `steps` did not run to the end."""
        self.settings = NodeSettings()
        """The node-wide part, as of the last update."""
        self._zone = ""
        self._node_input: tuple[Node | None, tuple[str, ...], HostFacts] | None = None
        self.services: Plans = {}
        """The plans; only the Planner changes them."""
        self._parsed: dict[ObjectName, ParsedService] = {}
        self._claims = ClaimIndex()
        self._lost: dict[PlanKey, tuple[Claim, ...]] = {}
        """Claims of the plans that others hold."""
        self._node_findings: tuple[Finding, ...] = ()
        self._findings = FindingIndex()
        self._endpoints = 0
        """Reachable endpoints of all plans."""

    def inherit_holders(self, predecessor: Planner) -> None:
        """Let Services keep the destinations that they hold in another Planner's plan."""
        self._claims.inherit_holders(predecessor._claims)

    @property
    def plan(self) -> NodePlan:
        """The plan; `services` is a live view, the rest is as of the last update."""
        findings = (*self._node_findings, *self._findings.listed)
        return NodePlan(self.settings, self.services, findings, self._findings.unlisted)

    def update(
        self, snapshot: Snapshot, facts: HostFacts, dirty: Iterable[ObjectName] = ()
    ) -> None:
        """Update the plan in one go; see `steps` for the arguments."""
        for _ in self.steps(snapshot, facts, dirty):
            pass

    def steps(
        self, snapshot: Snapshot, facts: HostFacts, dirty: Iterable[ObjectName]
    ) -> Generator[None]:
        """Update the plan, yielding every few milliseconds.

        The Snapshot may move on between two steps: later changes belong to the `dirty` of the
        next update. If the steps do not run to the end, the next ones plan everything.

        Args:
            dirty: Services with a change since the last update, of their own or of a slice. The
                first update plans all, and so does one after a change of the settings that plans
                depend on.
        """
        if self._unfinished or self.config != self._planned_by:
            self._start_over()
        self._unfinished = True
        before = self.settings if self._node_input else None
        settings, policy_changed = self._update_node(snapshot, facts)
        names = set(dirty)
        if policy_changed:
            names.update(snapshot.services, self._parsed)
        yield from self._update_services(names, snapshot, settings, policy_changed)
        # Thresholds depend on the size of the new plan, so they come last.
        self.settings = with_thresholds(
            settings, self.config, services=len(self.services), endpoints=self._endpoints
        )
        if before is None or (
            self.settings is not before and _rendered(self.settings) != _rendered(before)
        ):
            self.log.touch(NODE)
            for key in self.services:
                self.log.touch(key)
        self._unfinished = False

    def _start_over(self) -> None:
        """Forget all plans; Services keep the destinations that they hold."""
        claims = ClaimIndex()
        claims.inherit_holders(self._claims)
        self._claims, self._planned_by = claims, self.config
        self.settings, self._node_input = NodeSettings(), None
        self._parsed, self._lost, self._endpoints = {}, {}, 0
        self._findings = FindingIndex()
        for key in self.services:
            self.log.touch(key)
        self.services.clear()

    def _update_node(self, snapshot: Snapshot, facts: HostFacts) -> tuple[NodeSettings, bool]:
        """Return the settings with the last thresholds, and whether plans depend on the change."""
        # Node status updates come every few minutes; most of them change none of the input.
        before, zone_before = self.settings, self._zone
        node_input = (snapshot.node, snapshot.service_cidrs, facts)
        if node_input == self._node_input:
            return before, False
        first, self._node_input = self._node_input is None, node_input
        settings, self._node_findings = node_settings(snapshot, self.config, facts, self._traits)
        self._zone = zone_of(snapshot.node)
        if first:
            return settings, True
        settings = msgspec.structs.replace(
            settings, split_dispatch=before.split_dispatch, large_cluster=before.large_cluster
        )
        return settings, self._zone != zone_before or _policy(settings) != _policy(before)

    def _update_services(
        self, names: set[ObjectName], snapshot: Snapshot, settings: NodeSettings, reparse: bool
    ) -> Generator[None]:
        # 1. Plan every Service as if it were alone, and update its claims.
        compiled: dict[ObjectName, _Compiled] = {}
        cost = 0
        for name in names:
            if cost >= _SLICE:
                cost = 0
                yield
            service, before = snapshot.services.get(name), self._parsed.get(name)
            try:
                # Parsing needs no endpoints: most events are about slices, and reuse the result.
                parsed = before
                if service is None:
                    parsed = None
                elif before is None or before.service is not service or reparse:
                    parsed = yield from parse_steps(
                        service,
                        settings.families,
                        allow_external_ips=self.config.allow_service_external_ips,
                        forwards_sctp=settings.traits.forwards_sctp,
                    )
                result = self._plan_alone(name, before, parsed, snapshot, settings)
            except Exception as error:  # a defect: it must not affect other Services
                self._fail(name, error)
                continue
            compiled[name] = result
            if parsed is None or parsed is not before:
                self._update_claims(before, parsed, result.plans)
                if parsed is not None:
                    self._parsed[name] = parsed
                else:
                    self._parsed.pop(name, None)
            reachable = sum([len(plan.reachable) for plan in result.plans.values()])
            cost += 1 + reachable // _ENDPOINTS
        # 2. Decide conflicts, and add the other Services that win or lose a destination.
        self.failed -= compiled.keys()
        for name in self._claims.decide(self._service) - compiled.keys() - self.failed:
            parsed = self._parsed[name]
            try:
                compiled[name] = self._plan_alone(name, parsed, parsed, snapshot, settings)
            except Exception as error:
                self._fail(name, error)
        # 3. Store the plans without the Frontends that they lost.
        for index, (name, result) in enumerate(compiled.items(), 1):
            self._store(name, result)
            if index % (10 * _SLICE or 1) == 0:
                yield

    def _service(self, name: ObjectName) -> Service:
        """Return a Service as it was planned: the Store may not have it any more."""
        return self._parsed[name].service

    def _fail(self, name: ObjectName, error: Exception) -> None:
        reason = f"cannot be planned ({type(error).__name__}: {error}): a defect of"
        reason += " steersman, please report it; its previous rules stay in force"
        self._findings.put(
            name, (Finding(f"Service {name}", "", reason, Severity.ERROR, codes.DEFECT),)
        )
        self.failed.add(name)

    def _plan_alone(
        self,
        name: ObjectName,
        before: ParsedService | None,
        parsed: ParsedService | None,
        snapshot: Snapshot,
        settings: NodeSettings,
    ) -> _Compiled:
        if parsed is None:
            return _Compiled(before, None, {}, ())
        slices, ejections = snapshot.slices.get(name, ()), snapshot.ejected.get(name, ())
        plans, findings = plan_service(parsed, slices, settings, self._zone, ejections=ejections)
        return _Compiled(before, parsed, plans, findings)

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
            old.update((claim, key) for claim in claims_of(self.services[key]))
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

    def _store(self, name: ObjectName, compiled: _Compiled) -> None:
        """Store a Service's plans without the Frontends that others hold, and its Findings."""
        # Take away what others hold.
        before, plans, findings = compiled.before, compiled.plans, compiled.findings
        checks = [plan for plan in plans.values() if plan.health_check_node_port]
        if checks or self._claims.contended or self._lost:  # almost never
            losses, more = resolve(plans, self._claims, self._service)
            findings += more
            plans = dict(plans)
            for key in plans:
                self._lost.pop(key, None)
            for key, (kept, lost) in losses.items():
                plans[key], self._lost[key] = without_frontends(plans[key], kept), lost
        self._findings.put(name, findings)
        # Store, and touch what differs.
        if before is not None and before is not compiled.parsed:
            for key in [key for key, _ in before.ports if key not in plans]:
                self._endpoints -= len(self.services.pop(key).reachable)
                self._lost.pop(key, None)
                self.log.touch(key)
        for key, plan in plans.items():
            old = self.services.get(key)
            if old != plan:
                self._endpoints += len(plan.reachable) - (len(old.reachable) if old else 0)
                self.services[key] = plan
                self.log.touch(key)


def with_thresholds(
    settings: NodeSettings, config: NodeConfig, *, services: int, endpoints: int
) -> NodeSettings:
    """Return the settings with the flags that depend on the size of the plan.

    A flag is set above its threshold and cleared at half of it, so that a cluster near the
    threshold does not switch back and forth; a threshold of 0 keeps it off. `settings` has the
    flags of the plan before, `services` and `endpoints` are numbers.
    """

    def exceeds(total: int, threshold: int, before: bool) -> bool:
        return threshold > 0 and total > (threshold // 2 if before else threshold)

    split = exceeds(services, config.split_threshold, settings.split_dispatch)
    large = exceeds(endpoints, config.large_cluster_endpoints, settings.large_cluster)
    if (split, large) == (settings.split_dispatch, settings.large_cluster):
        return settings
    return msgspec.structs.replace(settings, split_dispatch=split, large_cluster=large)


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
