"""UDP clients: the conntrack entries that they leave behind, and which of those may live.

Clients come while the program runs and keep asking, as resolvers do, so the kernel remembers where
it sent them. Entries of endpoints that no longer serve have to go; the others must stay.
"""

from __future__ import annotations

from random import Random

from steersman.compile.endpoints import build_endpoints
from steersman.model.inputs import Snapshot
from steersman.model.names import Family, PlanKey, Protocol
from steersman.model.plan import Frontend, FrontendKind, NodePlan, ServicePlan, Verdict
from tests.sim.netlink import Conntrack, Flow

_NODE = {Family.IPV4: "192.0.2.10", Family.IPV6: "2001:db8::10"}
_CLIENT = {Family.IPV4: "203.0.113.", Family.IPV6: "2001:db8:9::"}


class Clients:
    """The UDP clients of a node."""

    def __init__(self, table: Conntrack, dice: Random) -> None:
        self._table = table
        self._dice = dice
        self._keep: dict[int, Flow] = {}
        """Flows to Services that nobody changes."""

    def come(self, plan: NodePlan, canaries: frozenset[str]) -> None:
        """Have a client ask some UDP Service, as the rules are now."""
        plans = [p for p in plan.services.values() if p.key.name.protocol is Protocol.UDP]
        if not plans:
            return
        service = self._dice.choice(plans)
        frontend = self._dice.choice(service.frontends) if service.frontends else None
        if frontend is None:
            return
        family = service.key.family
        to = (frontend.address or _NODE[family], frontend.port)
        if frontend.external.verdict is Verdict.FORWARD:  # else the kernel remembers nothing
            end = self._dice.choice(service.pool(frontend.external.pool))
            flow = self._ask(family, to, (end.ip, end.port))
            name = service.key.name.object_name
            untouched = name.namespace == "probe" and family is Family.IPV6
            if str(name) in canaries or untouched:
                self._keep[flow.number] = flow

    def come_too_early(self, plan: NodePlan, number: int) -> None:
        """Have a client ask a Service that is not there yet."""
        addresses = ((f"10.96.0.{10 + number}", 53), (_NODE[Family.IPV4], 32000 + number))
        at = self._dice.choice(addresses)
        if not any(at in _destinations(service) for service in plan.services.values()):
            self._ask(Family.IPV4, at, at)

    def _ask(self, family: Family, to: tuple[str, int], via: tuple[str, int]) -> Flow:
        client = f"{_CLIENT[family]}{self._dice.randrange(1, 250)}"
        return self._table.add(client, self._dice.randrange(1024, 65535), to, via)

    def wrong(self, plan: NodePlan, snapshot: Snapshot) -> str:
        """Say which entry should not be there, or should be and is not; "" if all is well."""
        for number, flow in self._keep.items():
            if number not in self._table.flows:
                return f"the connection of a client that nothing concerned was cut: {flow}"
        served = {at: p for p in plan.services.values() for at in _destinations(p)}
        for flow in self._table.flows.values():
            service = served.get((flow.destination, flow.port))
            if service is not None:
                serving = _serving(snapshot, service.key)
                if serving and (flow.source, flow.source_port) not in serving:
                    return f"a client of {service.key} is still sent to {flow.source}: {flow}"
        return ""

    def leave(self, plan: NodePlan) -> None:
        """Have the clients of Services that are gone leave, and some others."""
        served = {at for p in plan.services.values() for at in _destinations(p)}
        for number, flow in tuple(self._table.flows.items()):
            gone = (flow.destination, flow.port) not in served
            old = gone and flow.source != flow.destination
            if number not in self._keep and (old or self._dice.random() < 0.2):
                del self._table.flows[number]


def _destinations(plan: ServicePlan) -> set[tuple[str, int]]:
    if plan.key.name.protocol is not Protocol.UDP:
        return set()
    return {_reached(plan.key.family, frontend) for frontend in plan.frontends}


def _reached(family: Family, frontend: Frontend) -> tuple[str, int]:
    at_node = frontend.kind is FrontendKind.NODE_PORT
    return (_NODE[family] if at_node else frontend.address), frontend.port


def _serving(snapshot: Snapshot, key: PlanKey) -> set[tuple[str, int]]:
    slices = snapshot.slices.get(key.name.object_name, ())
    states = build_endpoints(slices, key.family, "").get((key.name.port, Protocol.UDP), ())
    return {(state.endpoint.ip, state.endpoint.port) for state in states if state.serving}
