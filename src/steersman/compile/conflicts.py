"""Decide which Service gets a destination that several claim.

The theory. Plans are made as if each Service were alone, so two plans may claim one destination:
an address and port, a node port, or a health check node port. The holder gets it; the others lose
that Frontend and nothing else. The rules, in order:

1. A clusterIP precedes external and load balancer IPs: the API server assigned it.
2. The older Service precedes, if the creation times of both are known and differ.
3. Otherwise the present holder keeps it for as long as it claims it.
4. Without a holder (at a start), a Service of known age precedes, then the first by name.

Rule 3 makes the result depend on history, so holders are state. The ClaimIndex has it:

    changed plans --add, remove, review--> ClaimIndex --decide--> Services to plan again
                                               |
    plans of one Service --resolve-------------+--> Frontends to keep, Findings

Two Services may share a health check node port; load balancers then may get the wrong answer, so
this is a Finding only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from steersman.compile.findings import FindingCollector
from steersman.compile.service_plan import FIELDS
from steersman.model import codes
from steersman.model.addresses import canonical_ip, join_host_port
from steersman.model.findings import Finding, Severity
from steersman.model.kube import Service
from steersman.model.names import ObjectName, PlanKey, Protocol
from steersman.model.plan import Frontend, FrontendKind, ServicePlan


class NodePortClaim(NamedTuple):
    """A node port in one family, on all addresses that serve node ports."""

    family: int
    port: int
    protocol: Protocol


class HealthClaim(NamedTuple):
    """A health check node port in one family (TCP); the ports of one Service share it."""

    family: int
    port: int


class AddressClaim(NamedTuple):
    """An address, port and protocol."""

    address: str
    port: int
    protocol: Protocol


Claim: TypeAlias = NodePortClaim | HealthClaim | AddressClaim
ServiceOf: TypeAlias = Callable[[ObjectName], Service]
"""Returns a Service that is planned."""
Loss: TypeAlias = tuple[tuple[Frontend, ...], tuple[Claim, ...]]
"""The Frontends that a plan keeps, and the claims that it lost."""
_YOUNGEST = "~"
"""Sorts after every timestamp: a Service of known age precedes one of unknown age."""


def claim_of(key: PlanKey, frontend: Frontend) -> Claim:
    """Return the claim of a Frontend."""
    if frontend.kind is FrontendKind.NODE_PORT:
        return NodePortClaim(int(key.family), frontend.port, key.name.protocol)
    return AddressClaim(frontend.address, frontend.port, key.name.protocol)


def claims_of(plan: ServicePlan) -> list[Claim]:
    """Return all claims of a plan."""
    claims = [claim_of(plan.key, frontend) for frontend in plan.frontends]
    if plan.health_check_node_port:
        claims.append(HealthClaim(int(plan.key.family), plan.health_check_node_port))
    return claims


def describe(key: PlanKey, frontend: Frontend) -> str:
    """Name a destination in words, as in `10.96.0.10:53/UDP` or `node port 30053/UDP`."""
    protocol = key.name.protocol
    if frontend.kind is FrontendKind.NODE_PORT:
        return f"node port {frontend.port}/{protocol}"
    return f"{join_host_port(frontend.address, frontend.port)}/{protocol}"


def precedence_fields(service: Service) -> tuple[object, ...]:
    """Return the fields of a Service that decide conflicts."""
    spec = service.spec
    return service.metadata.creation_timestamp, spec.cluster_ip, spec.cluster_ips


class ClaimIndex:
    """All claims and the plans that contend for them, and the holders of contended claims.

    Call `add`, `remove` and `review` for the plans that changed, then `decide`.
    """

    def __init__(self) -> None:
        self._contenders: dict[Claim, PlanKey | dict[PlanKey, None]] = {}
        """A single contender is stored as itself: there are many, and so they are small."""
        self.contended: dict[Claim, PlanKey] = {}
        """Holders of the claims with several contenders; most clusters have none."""
        self._before: dict[Claim, PlanKey | None] = {}
        """Former holders of the claims to decide again."""
        self._reviewed: set[Claim] = set()
        self._health: set[HealthClaim] = set()
        """Health check node ports with a change."""
        self._predecessor: ClaimIndex | None = None

    def inherit_holders(self, predecessor: ClaimIndex) -> None:
        """Start this empty index with the holders of another one."""
        # One that has not decided anything has those of its own predecessor still.
        self._predecessor = predecessor._predecessor or predecessor

    def add(self, claim: Claim, key: PlanKey) -> None:
        """Add a contender."""
        self._touch(claim)
        first = self._contenders.setdefault(claim, key)
        if isinstance(first, dict):
            first[key] = None
        elif first != key:
            self._contenders[claim] = {first: None, key: None}

    def remove(self, claim: Claim, key: PlanKey) -> None:
        """Remove a contender."""
        self._touch(claim)
        contenders = self._contenders[claim]
        if not isinstance(contenders, dict):
            del self._contenders[claim]
            return
        del contenders[key]
        if len(contenders) == 1:
            (self._contenders[claim],) = contenders

    def review(self, claim: Claim) -> None:
        """Decide a claim again: the precedence of a contender changed."""
        if claim in self.contended:
            self._touch(claim)
            self._reviewed.add(claim)

    def contenders(self, claim: Claim) -> tuple[PlanKey, ...]:
        """Return the plans that claim a destination, in no particular order."""
        found = self._contenders.get(claim, ())
        return tuple(found) if isinstance(found, dict) else (found,) if found else ()

    def holder(self, claim: Claim) -> PlanKey | None:
        """Return the holder of a destination after the last decision."""
        if claim in self._before:
            return self._before[claim]
        # Contended, or claimed by a single plan; otherwise ask the index of an earlier Planner.
        found = self.contended.get(claim) or self._contenders.get(claim)
        if found is None and self._predecessor is not None:
            return self._predecessor.holder(claim)
        return found if isinstance(found, PlanKey) else None

    def decide(self, service_of: ServiceOf) -> set[ObjectName]:
        """Choose the holders of the changed claims.

        Returns the Services whose plans or Findings may change, besides the changed ones.
        """
        # Health check ports: every contender gets a new Finding, or loses it.
        concerned = {
            key.name.object_name for claim in self._health for key in self.contenders(claim)
        }
        for claim, before in self._before.items():
            contenders = self._contenders.get(claim)
            if before is None and isinstance(contenders, PlanKey):
                continue  # almost always: new, and only one plan claims it
            now = _holder_among(claim, contenders, before, service_of) if contenders else before
            # Holders are stored only as long as a claim is contended.
            if now is not None and isinstance(contenders, dict):
                self.contended[claim] = now
            else:
                self.contended.pop(claim, None)
            if claim in self._reviewed or (before is not None and now != before):
                concerned.update(key.name.object_name for key in self.contenders(claim))
        self._before, self._reviewed, self._health = {}, set(), set()
        self._predecessor = None
        return concerned

    def _touch(self, claim: Claim) -> None:
        """Remember the holder of a claim before it changes."""
        if isinstance(claim, AddressClaim):
            if claim not in self._before:
                self._before[claim] = self.holder(claim)
        elif isinstance(claim, HealthClaim):
            self._health.add(claim)
        else:
            self._before.setdefault(claim, self.holder(claim))
            if claim.protocol is Protocol.TCP:  # a health check may have the same port
                self._health.add(HealthClaim(claim.family, claim.port))


def resolve(
    plans: Mapping[PlanKey, ServicePlan], claims: ClaimIndex, service_of: ServiceOf
) -> tuple[dict[PlanKey, Loss], tuple[Finding, ...]]:
    """Return the losses of one Service's plans to other plans, if any, and Findings about them."""
    losses: dict[PlanKey, Loss] = {}
    explained: _Explainer | None = None
    for key, plan in plans.items():
        # Almost all claims are not contended, and then absent from the mapping.
        lost = [f for f in plan.frontends if claims.contended.get(claim_of(key, f), key) != key]
        if not (lost or plan.health_check_node_port):
            continue
        if explained is None:
            explained = _Explainer(service_of(key.name.object_name), claims, service_of)
        if lost:
            gone = frozenset(lost)
            kept = tuple(f for f in plan.frontends if f not in gone)
            losses[key] = kept, tuple(claim_of(key, frontend) for frontend in lost)
            for frontend in lost:
                explained.add_loss(key, frontend)
        if plan.health_check_node_port:
            explained.add_health_conflict(key, plan.health_check_node_port)
    return losses, explained.problems.findings if explained else ()


class _Explainer:
    """Collects Findings about the conflicts of one Service; looks up each thing only once."""

    def __init__(self, service: Service, claims: ClaimIndex, service_of: ServiceOf) -> None:
        self.problems = FindingCollector("Service", codes.DESTINATION_HELD, service.metadata)
        self._name = service.metadata.object_name
        self._claims = claims
        self._service_of = service_of
        ports = enumerate(service.spec.ports or ())
        self._ports = {(port.name or "", port.node_port): index for index, port in ports}
        self._health: dict[HealthClaim, str] = {}
        """Reasons; "" without a conflict."""

    def add_loss(self, key: PlanKey, frontend: Frontend) -> None:
        """Explain the loss of a destination."""
        claim = claim_of(key, frontend)
        what, holder = describe(key, frontend), self._claims.contended[claim]
        # The reason is the rule that decided, see the top of this module.
        name = holder.name
        if name.object_name == self._name:
            reason = f"{what} belongs to port {name.port!r}"
        elif _is_older(holder, key, self._service_of):
            reason = f"{what} belongs to the older Service {name}"
        elif (
            isinstance(claim, AddressClaim)
            and frontend.kind is not FrontendKind.CLUSTER_IP
            and _is_cluster_ip(claim, holder, self._service_of)
        ):
            reason = f"{what} is the clusterIP of Service {name}"
        else:
            unknown = "their creation times do not tell which is older, so it stays where it is"
            reason = f"{what} is held by Service {name} ({unknown})"
        reason += f"; {key.name} is not served there until one of the two gives it up"
        if frontend.kind is FrontendKind.NODE_PORT:
            field = f"spec.ports[{self._ports[key.name.port, frontend.port]}].nodePort"
        else:
            field = FIELDS[frontend.kind]
        self.problems.add(field, reason, Severity.ERROR)

    def add_health_conflict(self, key: PlanKey, port: int) -> None:
        """Warn if others have the health check node port, or a TCP node port of its number."""
        health = HealthClaim(int(key.family), port)
        reason = self._health.get(health)
        if reason is None:
            node_port = NodePortClaim(health.family, port, Protocol.TCP)
            names = {other.name for other in self._claims.contenders(node_port)}
            checks = self._claims.contenders(health)
            names |= {other.name for other in checks if other.name.object_name != self._name}
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            reason = f"{port} is also a node port or health check port of {{}}{others}: load"
            reason += " balancers may get the wrong answer; give one of them another port"
            reason = self._health[health] = reason.format(min(names)) if names else ""
        if reason:
            self.problems.add("spec.healthCheckNodePort", reason, code=codes.HEALTH_CHECK_PORT)


def _holder_among(
    claim: Claim,
    contenders: PlanKey | Iterable[PlanKey],
    holder: PlanKey | None,
    service_of: ServiceOf,
) -> PlanKey:
    """Return the plan that gets a destination, by the rules at the top of this module."""
    if isinstance(contenders, PlanKey):
        return contenders
    if isinstance(claim, AddressClaim):  # rule 1
        contenders = [
            key for key in contenders if _is_cluster_ip(claim, key, service_of)
        ] or contenders
    # Prefer the present holder, or another port of its Service.
    same = [key for key in contenders if holder and key.name.object_name == holder.name.object_name]
    if holder is not None and same:
        holder = holder if holder in same else min(same)  # its port may have another name now
        older = [key for key in contenders if _is_older(key, holder, service_of)]
        if not older:
            return holder  # rule 3
        contenders = older  # rule 2
    return min(contenders, key=lambda key: (_created(key, service_of) or _YOUNGEST, key))


def _is_cluster_ip(claim: AddressClaim, key: PlanKey, service_of: ServiceOf) -> bool:
    spec = service_of(key.name.object_name).spec
    return claim.address in map(canonical_ip, [spec.cluster_ip or "", *(spec.cluster_ips or ())])


def _is_older(key: PlanKey, other: PlanKey, service_of: ServiceOf) -> bool:
    """Whether the creation times of two Services are known and the first is the older one."""
    return "" < _created(key, service_of) < _created(other, service_of)


def _created(key: PlanKey, service_of: ServiceOf) -> str:
    return service_of(key.name.object_name).metadata.creation_timestamp or ""
