"""Who asks for which destination, and who gets it if several do.

One Service gets a destination; the others lose that Frontend and nothing else:

1. a clusterIP goes before external and load balancer IPs: it is the API server's gift;
2. the older Service gets it, if the creation times of both are known and differ;
3. otherwise the Service that has it keeps it while it asks for it;
4. if nobody has it yet (at a start), a Service of known age gets it, then the first by name.

The index answers whose plans a change may touch, so that a clash costs only those who clash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

from steersman.compile.notes import Notes
from steersman.model.addresses import canonical_ip
from steersman.model.findings import Finding, Severity
from steersman.model.kube import Service
from steersman.model.names import ObjectName, PlanKey, Protocol
from steersman.model.plan import Frontend, FrontendKind, ServicePlan


class NodePortClaim(NamedTuple):
    """A node port in one family, on whatever addresses serve it."""

    family: int
    port: int
    protocol: Protocol


class HealthClaim(NamedTuple):
    """A health check node port in one family (TCP); ports of one Service share it."""

    family: int
    port: int


class AddressClaim(NamedTuple):
    """An address, port and protocol."""

    address: str
    port: int
    protocol: Protocol


Claim: TypeAlias = NodePortClaim | HealthClaim | AddressClaim
_YOUNGEST = "~"
"""Sorts after every timestamp: a Service of unknown age gives way to one of known age."""


def claim_of(key: PlanKey, frontend: Frontend) -> Claim:
    """Return what a Frontend of a plan asks for."""
    if frontend.kind is FrontendKind.NODE_PORT:
        return NodePortClaim(int(key.family), frontend.port, key.name.protocol)
    return AddressClaim(frontend.address, frontend.port, key.name.protocol)


def claims_of(plan: ServicePlan) -> list[Claim]:
    """Return everything that a plan asks for."""
    claims = [claim_of(plan.key, frontend) for frontend in plan.frontends]
    if plan.health_check_node_port:
        claims.append(HealthClaim(int(plan.key.family), plan.health_check_node_port))
    return claims


class Claims:
    """The index of all claims, and who has what: a sole asker is stored as itself, to be small.

    After each round of `add`, `remove` and `review`, `decide` says who gets what.
    """

    def __init__(self) -> None:
        self._askers: dict[Claim, PlanKey | dict[PlanKey, None]] = {}
        self._holders: dict[Claim, PlanKey] = {}
        """Of contended claims; a sole asker has what it asks for."""
        self._before: dict[Claim, PlanKey | None] = {}
        """Who had the claims that are to be decided again."""
        self._reviewed: set[Claim] = set()
        self._checks: set[HealthClaim] = set()
        """Health check ports on which something changed."""
        self._predecessor: Claims | None = None

    @property
    def contended(self) -> Mapping[Claim, PlanKey]:
        """What more than one plan asks for, and who has it; most clusters have none."""
        return self._holders

    def succeed(self, predecessor: Claims) -> None:
        """Let those who have something in another index keep it in this one, which is empty."""
        self._predecessor = predecessor

    def add(self, claim: Claim, key: PlanKey) -> None:
        """Note that a plan asks for a destination."""
        self._touch(claim)
        first = self._askers.setdefault(claim, key)
        if isinstance(first, dict):
            first[key] = None
        elif first != key:
            self._askers[claim] = {first: None, key: None}

    def remove(self, claim: Claim, key: PlanKey) -> None:
        """Note that a plan no longer asks for a destination."""
        self._touch(claim)
        askers = self._askers[claim]
        if not isinstance(askers, dict):
            del self._askers[claim]
            return
        del askers[key]
        if len(askers) == 1:
            (self._askers[claim],) = askers

    def review(self, claim: Claim) -> None:
        """Note that an asker is older or younger than before, or asks as another kind."""
        if claim in self._holders:
            self._touch(claim)
            self._reviewed.add(claim)

    def askers(self, claim: Claim) -> tuple[PlanKey, ...]:
        """Return who asks for a destination, in no particular order."""
        found = self._askers.get(claim, ())
        return tuple(found) if isinstance(found, dict) else (found,) if found else ()

    def holder(self, claim: Claim) -> PlanKey | None:
        """Return who had a destination after the last decision."""
        if claim in self._before:
            return self._before[claim]
        found = self._holders.get(claim) or self._askers.get(claim)
        if found is None and self._predecessor is not None:
            return self._predecessor.holder(claim)
        return found if isinstance(found, PlanKey) else None

    def decide(self, services: Mapping[ObjectName, Service]) -> set[ObjectName]:
        """Decide what changed; return the Services, besides those that changed, it may concern."""
        concerned = {key.name.object_name for check in self._checks for key in self.askers(check)}
        for claim, before in self._before.items():
            askers = self._askers.get(claim)
            if before is None and isinstance(askers, PlanKey):
                continue  # by far the most
            now = _entitled(claim, askers, before, services) if askers else before
            if now is not None and isinstance(askers, dict):
                self._holders[claim] = now
            else:
                self._holders.pop(claim, None)
            if claim in self._reviewed or (before is not None and now != before):
                concerned.update(key.name.object_name for key in self.askers(claim))
        self._before, self._reviewed, self._checks = {}, set(), set()
        self._predecessor = None
        return concerned

    def _touch(self, claim: Claim) -> None:
        if isinstance(claim, AddressClaim):
            if claim not in self._before:
                self._before[claim] = self.holder(claim)
        elif isinstance(claim, HealthClaim):
            self._checks.add(claim)
        else:
            self._before.setdefault(claim, self.holder(claim))
            if claim.protocol is Protocol.TCP:
                self._checks.add(HealthClaim(claim.family, claim.port))


def _entitled(
    claim: Claim,
    askers: PlanKey | Iterable[PlanKey],
    holder: PlanKey | None,
    services: Mapping[ObjectName, Service],
) -> PlanKey:
    """Return who gets a destination."""
    if isinstance(askers, PlanKey):
        return askers
    if isinstance(claim, AddressClaim):
        askers = [key for key in askers if _is_cluster_ip(claim, key, services)] or askers
    mine = [key for key in askers if holder and key.name.object_name == holder.name.object_name]
    if holder is not None and mine:
        holder = holder if holder in mine else min(mine)  # its port may have another name now
        older = [key for key in askers if is_older(key, holder, services)]
        if not older:
            return holder
        askers = older
    return min(askers, key=lambda key: (_created(key, services) or _YOUNGEST, key))


def _is_cluster_ip(
    claim: AddressClaim, key: PlanKey, services: Mapping[ObjectName, Service]
) -> bool:
    spec = services[key.name.object_name].spec
    return claim.address in map(canonical_ip, [spec.cluster_ip or "", *(spec.cluster_ips or ())])


def _created(key: PlanKey, services: Mapping[ObjectName, Service]) -> str:
    return services[key.name.object_name].metadata.creation_timestamp or ""


def standing(service: Service) -> tuple[object, ...]:
    """Return what of a Service decides who gets a contended destination."""
    spec = service.spec
    return service.metadata.creation_timestamp, spec.cluster_ip, spec.cluster_ips


def is_older(key: PlanKey, other: PlanKey, services: Mapping[ObjectName, Service]) -> bool:
    """Whether the creation times of two Services are known and the first is the older one."""
    return "" < _created(key, services) < _created(other, services)


Loss: TypeAlias = tuple[tuple[Frontend, ...], tuple[Claim, ...]]
"""The Frontends that a plan keeps, and what it lost."""


def settle(
    plans: Mapping[PlanKey, ServicePlan], claims: Claims, services: Mapping[ObjectName, Service]
) -> tuple[dict[PlanKey, Loss], tuple[Finding, ...]]:
    """Return what the plans of one Service lose to other plans, if any, and why."""
    losses: dict[PlanKey, Loss] = {}
    notes: Notes | None = None
    why: _Why | None = None
    for key, plan in plans.items():
        lost = [f for f in plan.frontends if claims.contended.get(claim_of(key, f), key) != key]
        if not (lost or plan.health_check_node_port):
            continue
        if notes is None or why is None:
            service = services[key.name.object_name]
            notes, why = Notes("Service", service.metadata), _Why(service, claims, services)
        for frontend in lost:
            notes.add(*why.lost(key, frontend), Severity.ERROR)
        if lost:
            gone = frozenset(lost)
            kept = tuple(f for f in plan.frontends if f not in gone)
            losses[key] = kept, tuple(claim_of(key, frontend) for frontend in lost)
        if reason := why.health_clash(key, plan.health_check_node_port):
            notes.add("spec.healthCheckNodePort", reason)
    return losses, notes.findings if notes else ()


class _Why:
    """Says why a Service does not get a destination; what it looks up is looked up once."""

    def __init__(
        self, service: Service, claims: Claims, services: Mapping[ObjectName, Service]
    ) -> None:
        self._name = service.metadata.object_name
        self._claims = claims
        self._services = services
        ports = enumerate(service.spec.ports or ())
        self._ports = {(port.name or "", port.node_port): index for index, port in ports}
        self._clashes: dict[tuple[int, int], str] = {}

    def lost(self, key: PlanKey, frontend: Frontend) -> tuple[str, str]:
        """Return the field that asks for a lost destination, and why it is lost."""
        claim = claim_of(key, frontend)
        what, holder = describe(key, frontend), self._claims.contended[claim]
        name = holder.name
        if name.object_name == self._name:
            reason = f"{what} belongs to port {name.port!r}"
        elif is_older(holder, key, self._services):
            reason = f"{what} belongs to the older Service {name}"
        elif (
            isinstance(claim, AddressClaim)
            and frontend.kind is not FrontendKind.CLUSTER_IP
            and _is_cluster_ip(claim, holder, self._services)
        ):
            reason = f"{what} is the clusterIP of Service {name}"
        else:
            unknown = "their creation times do not tell which is older, so it stays where it is"
            reason = f"{what} is held by Service {name} ({unknown})"
        reason += f"; {key.name} is not served there until one of the two gives it up"
        return self._field(key, frontend), reason

    def _field(self, key: PlanKey, frontend: Frontend) -> str:
        match frontend.kind:
            case FrontendKind.CLUSTER_IP:
                return "spec.clusterIP"
            case FrontendKind.EXTERNAL_IP:
                return "spec.externalIPs"
            case FrontendKind.LOAD_BALANCER_IP:
                return "status.loadBalancer.ingress"
            case _:
                return f"spec.ports[{self._ports[key.name.port, frontend.port]}].nodePort"

    def health_clash(self, key: PlanKey, port: int) -> str:
        """Return what is wrong with a health check node port; "" for nothing."""
        family = int(key.family)
        if port and (family, port) not in self._clashes:
            node_port = NodePortClaim(family, port, Protocol.TCP)
            names = {other.name for other in self._claims.askers(node_port)}
            checks = self._claims.askers(HealthClaim(family, port))
            names |= {other.name for other in checks if other.name.object_name != self._name}
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            reason = f"{port} is also a node port or health check port of {{}}{others}: load"
            reason += " balancers may get the wrong answer; give one of them another port"
            self._clashes[family, port] = reason.format(min(names)) if names else ""
        return self._clashes.get((family, port), "")


def describe(key: PlanKey, frontend: Frontend) -> str:
    """Name a destination in words, as in `10.96.0.10:53/UDP` or `node port 30053/UDP`."""
    protocol = key.name.protocol
    if frontend.kind is FrontendKind.NODE_PORT:
        return f"node port {frontend.port}/{protocol}"
    address = f"[{frontend.address}]" if ":" in frontend.address else frontend.address
    return f"{address}:{frontend.port}/{protocol}"
