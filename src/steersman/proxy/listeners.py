"""What the proxy serves: listeners, their keys, and the endpoints for each client. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from steersman.model.addresses import in_cidr
from steersman.model.names import Family, PlanKey, Protocol
from steersman.model.plan import (
    Action,
    Endpoint,
    SourceClassifier,
    Value,
    Verdict,
    of_class,
)

LISTENER: Literal["listener"] = "listener"
PORTAL: Literal["portal"] = "portal"


class FrontendKey(NamedTuple):
    """The key of a listener, or of the portal that leads to it: the destination of the clients."""

    kind: str
    """LISTENER or PORTAL."""
    family: Family
    protocol: Protocol
    address: str
    """"" for every address of this machine."""
    port: int
    node_port: bool = False

    def __str__(self) -> str:
        where = f"node port {self.address}" if self.node_port else self.address
        return f"{self.kind} {where} {self.port}/{self.protocol}"

    def of(self, kind: str) -> FrontendKey:
        """Return the key of the listener or portal of the same destination."""
        return self._replace(kind=kind)


class Decision(Value, frozen=True):
    """What happens to the connections of one SourceClass."""

    verdict: Verdict
    endpoints: tuple[Endpoint, ...] = ()
    """For FORWARD: the endpoints to choose from, in a stable order."""

    def __str__(self) -> str:
        return ", ".join(map(str, self.endpoints)) or self.verdict.value


class ListenerPlan(Value, frozen=True):
    """A listening socket, and what happens to its clients."""

    owner: PlanKey
    bind: str
    """Address to bind; "" for all."""
    port: int
    """Port to bind; 0 for any free proxy port."""
    pod: Decision
    node: Decision
    external: Decision
    sources: SourceClassifier = SourceClassifier()
    source_ranges: tuple[str, ...] = ()
    """Canonical CIDRs of the clients that are let in; () lets in all."""
    affinity_seconds: int = 0
    least_connections: bool = False
    """Prefer the endpoint with the fewest connections to round robin."""
    proxy_protocol: bool = False
    """Send TCP endpoints the client's address (PROXY protocol, version 2)."""
    kept: tuple[Endpoint, ...] | None = None
    """If given, connections to any other endpoint are reset."""

    def __str__(self) -> str:
        bind = f"{self.bind or 'every address'} port {self.port or '(any)'}"
        classes = {"pods": self.pod, "this node": self.node, "others": self.external}
        decisions = {"all": self.external} if self.same_for_all else classes
        to = "; ".join(f"{who} to {decision}" for who, decision in decisions.items())
        affinity = f"; affinity {self.affinity_seconds} s" if self.affinity_seconds else ""
        least = "; least connections" if self.least_connections else ""
        header = "; PROXY protocol" if self.proxy_protocol else ""
        resets = "; connections to others are reset" if self.kept is not None else ""
        return f"{bind}: {to}{only_from(self.source_ranges)}{affinity}{least}{header}{resets}"

    @property
    def same_for_all(self) -> bool:
        """Whether the decision does not depend on the client's SourceClass."""
        return self.pod == self.node == self.external

    @property
    def endpoints(self) -> frozenset[Endpoint]:
        """The endpoints of all decisions."""
        return frozenset().union(*(d.endpoints for d in (self.pod, self.node, self.external)))

    def decide(self, client: str, interface: str = "") -> Decision:
        """Return the decision for a client.

        Args:
            client: its canonical address.
            interface: the name of the interface that it came in by, "" if unknown.
        """
        if self.source_ranges and not any(in_cidr(client, cidr) for cidr in self.source_ranges):
            return Decision(Verdict.DROP)
        if self.same_for_all:
            return self.external
        source = self.sources.classify(client, interface)
        return of_class(source, self.pod, self.node, self.external)


def only_from(cidrs: tuple[str, ...]) -> str:
    """Return the note about source ranges in the printed form of an object."""
    return f"; only from {', '.join(cidrs)}" if cidrs else ""


def decision_of(action: Action, endpoints: tuple[Endpoint, ...]) -> Decision:
    """Return the Decision that carries out an Action of a plan."""
    if action.verdict is Verdict.FORWARD:
        return Decision(Verdict.FORWARD, endpoints)
    return Decision(action.verdict)
