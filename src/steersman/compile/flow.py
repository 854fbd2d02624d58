"""A connection as a question, the answer to it, and what kind of client asks."""

from __future__ import annotations

from typing import Literal, TypeAlias

from steersman.model.addresses import (
    canonical_ip,
    family_of,
    join_host_port,
)
from steersman.model.names import PlanKey, Protocol
from steersman.model.plan import (
    Endpoint,
    Frontend,
    NodeSettings,
    SourceClass,
    Value,
)


class Flow(Value, frozen=True):
    """A new connection (or first datagram) that this node sees."""

    source: str | SourceClass
    """The client's address, or just what kind of client it is."""
    destination: str
    port: int
    protocol: Protocol = Protocol.TCP
    interface: str = ""
    """Interface it comes in by; "" for a process of this node, or where it does not matter."""

    def __str__(self) -> str:
        return f"{self.source} to {join_host_port(self.destination, self.port)}/{self.protocol}"


Outcome: TypeAlias = Literal["forward", "drop", "reject", "accept"]


class Decision(Value, frozen=True):
    """What becomes of a Flow."""

    verdict: Outcome
    """`accept` means that it is left as it is: not ours."""
    endpoints: tuple[Endpoint, ...] = ()
    """Where a forwarded Flow may go, all equally likely."""
    masquerade: bool = False
    """Whether the endpoint sees an address of this node instead of the client's. True as well
    where every endpoint is the client itself; where only some are, just those see it."""
    plan: PlanKey | None = None
    frontend: Frontend | None = None
    reasons: tuple[str, ...] = ()
    """Rule by rule, in plain words."""


def classify(settings: NodeSettings, flow: Flow) -> SourceClass:
    """Return the class of the client of a Flow."""
    if isinstance(flow.source, SourceClass):
        return flow.source
    family = settings.family(family_of(flow.destination))
    return family.sources.classify(flow.source, flow.interface)


def canonical(flow: Flow) -> Flow:
    """Spell the addresses of a Flow canonically; a source that is none is EXTERNAL."""
    source = flow.source
    if not isinstance(source, SourceClass):
        source = canonical_ip(source) or SourceClass.EXTERNAL
    destination = canonical_ip(flow.destination) or flow.destination
    return Flow(source, destination, flow.port, flow.protocol, flow.interface)
