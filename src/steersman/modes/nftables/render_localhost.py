"""Node ports on loopback: sockets instead of elements. Pure.

No rule of nftables can serve them: a packet from a loopback address never leaves the node (and for
IPv6 not even with a switch of the kernel). So a socket takes the connection (relay.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from steersman.model.names import Family, Protocol
from steersman.model.plan import Frontend, FrontendKind, NodeSettings, ServicePlan, Verdict
from steersman.model.ruleset import Diff
from steersman.modes.nftables.layout import PROTOCOLS, Kind, pack_port, prefix
from steersman.proxy.listeners import LISTENER, FrontendKey, ListenerPlan, decision_of

_RELAY = int(Kind.RELAY)  # comparing with a member costs three times as much (Python 3.11)
LOOPBACK: Mapping[Family, str] = {Family.IPV4: "127.0.0.1", Family.IPV6: "::1"}


def render_localhost(plan: ServicePlan, settings: NodeSettings) -> dict[bytes, object]:
    """Render the listeners of one ServicePort; none where nothing would be passed on."""
    if not settings.traits.relays_localhost:
        return {}
    name, family = plan.key
    if not settings.family(family).localhost_node_ports or name.protocol is Protocol.SCTP:
        return {}
    start = prefix(Kind.RELAY, family) + PROTOCOLS[name.protocol]
    return {
        start + pack_port(frontend.port): _listener(plan, frontend)
        for frontend in plan.frontends
        if frontend.kind is FrontendKind.NODE_PORT and frontend.node.verdict is Verdict.FORWARD
    }


def _listener(plan: ServicePlan, frontend: Frontend) -> ListenerPlan:
    """Clients on loopback are this node, always."""
    choice = decision_of(frontend.node, plan.pool(frontend.node.pool))
    return ListenerPlan(
        owner=plan.key,
        bind=LOOPBACK[plan.key.family],
        port=frontend.port,
        pod=choice,
        node=choice,
        external=choice,
        affinity_seconds=plan.affinity_seconds,
        least_connections=plan.least_connections,
    )


def frontend_key(listener: ListenerPlan) -> FrontendKey:
    """The key of a listener in the userspace modes' words."""
    name, family = listener.owner
    return FrontendKey(LISTENER, family, name.protocol, listener.bind, listener.port, True)


def without_listeners(change: Diff) -> tuple[Diff, Diff]:
    """Part a Diff into what is for the kernel, and the listeners."""
    parts = (change.added, change.removed, change.changed)
    listeners = [dict(_listeners(part)) for part in parts]
    if not any(listeners):
        return change, Diff()
    rest = [
        {key: value for key, value in part.items() if key not in ours}
        for part, ours in zip(parts, listeners, strict=True)
    ]
    return Diff(*rest), Diff(*listeners)


def _listeners(part: Mapping[Any, Any]) -> Iterator[tuple[bytes, Any]]:
    return ((key, value) for key, value in part.items() if key[0] == _RELAY)
