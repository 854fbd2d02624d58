"""What the proxy serves: the keys of listeners, and what a listener does with a client. Pure."""

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
    """A listener, or the portal that leads to it, by the destination that clients use."""

    what: str
    """LISTENER or PORTAL."""
    family: Family
    protocol: Protocol
    address: str
    """"" for every address of this machine."""
    port: int
    node_port: bool = False

    def __str__(self) -> str:
        where = f"node port {self.address}" if self.node_port else self.address
        return f"{self.what} {where} {self.port}/{self.protocol}"

    def of(self, what: str) -> FrontendKey:
        """The other object of the same destination."""
        return self._replace(what=what)


class Choice(Value, frozen=True):
    """What is done with the connections of one SourceClass."""

    verdict: Verdict
    endpoints: tuple[Endpoint, ...] = ()
    """For FORWARD: where they may go, in a stable order."""

    def __str__(self) -> str:
        return ", ".join(map(str, self.endpoints)) or self.verdict.value


class Listener(Value, frozen=True):
    """A socket that clients are taken from, and what is done with them."""

    owner: PlanKey
    bind: str
    """Address to bind; "" for all."""
    port: int
    """Port to bind; 0 for a proxy port, whichever is free."""
    pod: Choice
    node: Choice
    external: Choice
    sources: SourceClassifier = SourceClassifier()
    source_ranges: tuple[str, ...] = ()
    """Canonical CIDRs that may use it, others are dropped; () means everyone."""
    affinity_seconds: int = 0
    least_connections: bool = False
    """Prefer the endpoint with the fewest connections to going round."""
    proxy_protocol: bool = False
    """Tell TCP endpoints the client's address (PROXY protocol, version 2)."""
    kept: tuple[Endpoint, ...] | None = None
    """Given: connections to endpoints that are not among these are reset."""

    def __str__(self) -> str:
        bind = f"{self.bind or 'every address'} port {self.port or '(any)'}"
        classes = {"pods": self.pod, "this node": self.node, "others": self.external}
        ways = {"all": self.external} if self.same_for_all else classes
        to = "; ".join(f"{who} to {choice}" for who, choice in ways.items())
        keeps = f"; affinity {self.affinity_seconds} s" if self.affinity_seconds else ""
        least = "; least connections" if self.least_connections else ""
        tells = "; PROXY protocol" if self.proxy_protocol else ""
        cuts = "; connections to others are reset" if self.kept is not None else ""
        return f"{bind}: {to}{only_from(self.source_ranges)}{keeps}{least}{tells}{cuts}"

    @property
    def same_for_all(self) -> bool:
        """Whether it does not matter who the client is."""
        return self.pod == self.node == self.external

    @property
    def endpoints(self) -> frozenset[Endpoint]:
        """Those that some client may be sent to."""
        return frozenset().union(*(c.endpoints for c in (self.pod, self.node, self.external)))

    def choice(self, client: str, interface: str = "") -> Choice:
        """What is done with a client, by its canonical address."""
        if self.source_ranges and not any(in_cidr(client, cidr) for cidr in self.source_ranges):
            return Choice(Verdict.DROP)
        if self.same_for_all:
            return self.external
        source = self.sources.classify(client, interface)
        return of_class(source, self.pod, self.node, self.external)


def only_from(cidrs: tuple[str, ...]) -> str:
    """Describe the only clients that are let in, for the printed form of an object."""
    return f"; only from {', '.join(cidrs)}" if cidrs else ""


def choice_of(action: Action, endpoints: tuple[Endpoint, ...]) -> Choice:
    """The Choice that an Action of a plan means."""
    if action.verdict is Verdict.FORWARD:
        return Choice(Verdict.FORWARD, endpoints)
    return Choice(action.verdict)
