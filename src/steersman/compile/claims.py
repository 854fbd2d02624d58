"""Who asks for which destination, and who gets it when several do.

The oldest Service keeps a destination; the others lose that Frontend and nothing else. The index
answers whose plans a change may touch, so that a clash costs only those who clash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

from steersman.model.kube import Service
from steersman.model.names import ObjectName, PlanKey, Protocol
from steersman.model.plan import Finding, Frontend, FrontendKind, ServicePlan, Severity


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
Rank: TypeAlias = tuple[str, PlanKey]
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
    """The index of all claims: a sole holder is stored as itself, to be small."""

    def __init__(self) -> None:
        self._holders: dict[Claim, PlanKey | tuple[PlanKey, ...]] = {}
        self.contended: set[Claim] = set()
        """What more than one plan asks for; most clusters have none."""

    def add(self, claim: Claim, key: PlanKey) -> None:
        """Note that a plan asks for a destination."""
        first = self._holders.setdefault(claim, key)
        if first is not key:
            self.contended.add(claim)
            self._holders[claim] = (*self.holders(claim), key)

    def remove(self, claim: Claim, key: PlanKey) -> None:
        """Note that a plan no longer asks for a destination."""
        left = tuple(holder for holder in self.holders(claim) if holder != key)
        if len(left) > 1:
            self._holders[claim] = left
            return
        self.contended.discard(claim)
        if left:
            self._holders[claim] = left[0]
        else:
            del self._holders[claim]

    def holders(self, claim: Claim) -> tuple[PlanKey, ...]:
        """Return who asks for a destination, in no particular order."""
        found = self._holders.get(claim, ())
        return (found,) if isinstance(found, PlanKey) else found

    def rivals(self, claim: Claim, key: PlanKey) -> list[ObjectName]:
        """Return the Services whose plans a change of this claim by `key` may touch."""
        if isinstance(claim, AddressClaim) and self._holders.get(claim) == key:
            return []  # by far the most
        return [holder.name.object_name for rel in _related(claim) for holder in self.holders(rel)]


def _related(claim: Claim) -> tuple[Claim, ...]:
    """A health check port and a TCP node port of one number concern each other."""
    match claim:
        case HealthClaim(family, port):
            return claim, NodePortClaim(family, port, Protocol.TCP)
        case NodePortClaim(family, port, Protocol.TCP):
            return claim, HealthClaim(family, port)
        case _:
            return (claim,)


def winner(keys: Iterable[PlanKey], services: Mapping[ObjectName, Service]) -> PlanKey:
    """Return who keeps a contended destination: the oldest Service, then by name."""
    return min(keys, key=lambda key: _rank(key, services))


def _rank(key: PlanKey, services: Mapping[ObjectName, Service]) -> Rank:
    created = services[key.name.object_name].metadata.creation_timestamp
    return created or _YOUNGEST, key


def settle(
    plan: ServicePlan, claims: Claims, services: Mapping[ObjectName, Service]
) -> tuple[tuple[Frontend, ...], tuple[Frontend, ...], tuple[Finding, ...]]:
    """Divide a plan's Frontends into those it keeps and those it loses, and say why."""
    kept, lost, findings = [], [], []
    for frontend in plan.frontends:
        claim = claim_of(plan.key, frontend)
        if claim not in claims.contended:
            kept.append(frontend)
            continue
        first = winner(claims.holders(claim), services)
        if first == plan.key:
            kept.append(frontend)
        else:
            lost.append(frontend)
            findings.append(_lost(plan.key, frontend, first, services))
    return tuple(kept), tuple(lost), (*findings, *_health_clash(plan, claims))


def _lost(
    key: PlanKey, frontend: Frontend, first: PlanKey, services: Mapping[ObjectName, Service]
) -> Finding:
    same = first.name.object_name == key.name.object_name
    holder = f"port {first.name.port!r}" if same else f"the older Service {first.name}"
    what = f"{describe(key, frontend)} belongs to {holder}"
    reason = f"{what}; {key.name} is not served there until one of the two gives it up"
    field = _field(services[key.name.object_name], key, frontend)
    return Finding(f"Service {key.name.object_name}", field, reason, Severity.ERROR)


def describe(key: PlanKey, frontend: Frontend) -> str:
    """Name a destination in words, as in `10.96.0.10:53/UDP` or `node port 30053/UDP`."""
    protocol = key.name.protocol
    if frontend.kind is FrontendKind.NODE_PORT:
        return f"node port {frontend.port}/{protocol}"
    address = f"[{frontend.address}]" if ":" in frontend.address else frontend.address
    return f"{address}:{frontend.port}/{protocol}"


def _field(service: Service, key: PlanKey, frontend: Frontend) -> str:
    match frontend.kind:
        case FrontendKind.CLUSTER_IP:
            return "spec.clusterIP"
        case FrontendKind.EXTERNAL_IP:
            return "spec.externalIPs"
        case FrontendKind.LOAD_BALANCER_IP:
            return "status.loadBalancer.ingress"
        case _:
            ports = [(port.name or "", port.node_port) for port in service.spec.ports or ()]
            return f"spec.ports[{ports.index((key.name.port, frontend.port))}].nodePort"


def _health_clash(plan: ServicePlan, claims: Claims) -> list[Finding]:
    port, family, me = plan.health_check_node_port, int(plan.key.family), plan.key.name.object_name
    if not port:
        return []
    names = {key.name for key in claims.holders(NodePortClaim(family, port, Protocol.TCP))}
    checks = claims.holders(HealthClaim(family, port))
    names |= {key.name for key in checks if key.name.object_name != me}
    return [
        Finding(
            f"Service {me}",
            "spec.healthCheckNodePort",
            f"{port} is also a node port or health check port of {name}: load balancers may get"
            " the wrong answer; give one of the two another port",
        )
        for name in sorted(names)
    ]
