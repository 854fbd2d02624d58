"""Render plans as listeners and portals, in two styles; take a Diff of them apart. Pure.

A portal leads clients of a destination to its listener, or drops or rejects them.

redirect  Rules lead each Service address to a listener on an address of this node. Node ports are
          bound themselves. Rules drop and reject.
direct    Every destination is bound itself. A destination that is not served has no socket, so that
          the kernel refuses its clients.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from steersman.model.addresses import is_loopback
from steersman.model.names import Family, Protocol
from steersman.model.plan import (
    FamilySettings,
    Frontend,
    FrontendKind,
    LocalDetector,
    NodeSettings,
    ServicePlan,
    SourceClassifier,
    Value,
    Verdict,
)
from steersman.model.ruleset import Diff, Ruleset
from steersman.netfilter.iptables.names import printed_name
from steersman.proxy.listeners import (
    LISTENER,
    PORTAL,
    FrontendKey,
    ListenerPlan,
    decision_of,
    only_from,
)

BASE: Literal["base"] = "base"
STRAY: Literal["stray"] = "stray"
ADDRESS: Literal["address"] = "address"
_LOOPBACK = {Family.IPV4: "127.0.0.1", Family.IPV6: "::1"}


class StrayKey(NamedTuple):
    """An object that an earlier process of ours left."""

    kind: str
    """STRAY for a rule, ADDRESS for an address of an interface."""
    family: Family
    where: str
    """Table of a rule, interface of an address."""
    text: str


class BaseKey(NamedTuple):
    """The chains and jumps of a family."""

    kind: str
    family: Family


Key: TypeAlias = FrontendKey | StrayKey | BaseKey


class Portal(Value, frozen=True):
    """What the kernel does with packets to a destination before a listener receives them."""

    name: str
    """Printed name of the ServicePort."""
    verdict: Verdict
    """FORWARD leads to the listener, or for a node port lets pass."""
    host: str = ""
    """Address of this node that the listener is bound to; "" if it is the destination itself."""
    internal_only: LocalDetector | None = None
    """If given, only pods that it detects and this node pass; other clients are dropped."""
    source_ranges: tuple[str, ...] = ()

    def __str__(self) -> str:
        to = f" to {self.host}" if self.host else ""
        internal = "; only from pods and this node" if self.internal_only is not None else ""
        return f"{self.name}: {self.verdict}{to}{internal}{only_from(self.source_ranges)}"


def listeners_of(change: Diff) -> dict[FrontendKey, ListenerPlan]:
    """Return the listeners that a Diff adds or changes."""
    return {key: value for key, value in _new(change) if isinstance(value, ListenerPlan)}


def portals_of(change: Diff) -> dict[FrontendKey, Portal]:
    """Return the portals that a Diff adds or changes."""
    return {key: value for key, value in _new(change) if isinstance(value, Portal)}


def _new(change: Diff) -> list[tuple[FrontendKey, ListenerPlan | Portal | str]]:
    return [*change.added.items(), *((key, new) for key, (_, new) in change.changed.items())]


def part_of(change: Diff, family: Family) -> Diff:
    """Return the part of a Diff that concerns one family."""
    return change.where(lambda key: key.family is family)


def removed_listeners(change: Diff) -> set[FrontendKey]:
    """Return the listeners that a Diff removes and does not replace."""
    gone = {key for key in change.removed if key[0] == LISTENER}
    return gone - listeners_of(change).keys()


def left_without_endpoints(change: Diff) -> set[FrontendKey]:
    """Return the listeners that a Diff removes because no endpoint is left."""
    portals = portals_of(change).items()
    refusing = {key for key, portal in portals if portal.verdict is not Verdict.FORWARD}
    gone = {key for key in change.removed if key[0] == LISTENER}
    return {key for key in gone if key.of(PORTAL) in refusing}


def render_node(settings: NodeSettings) -> Ruleset:
    """Render the chains of portals, and the jumps to them, for the redirect style."""
    return {BaseKey(BASE, family): "" for family in settings.families}


def render_redirect(plan: ServicePlan, settings: NodeSettings) -> Ruleset:
    """Render one ServicePort in the redirect style."""
    family = settings.family(plan.key.family)
    host = host_address(family)
    name = printed_name(plan.key.name)
    ruleset: dict[Key, ListenerPlan | Portal] = {}
    for frontend in _served_frontends(plan):
        is_node_port = frontend.kind is FrontendKind.NODE_PORT
        verdict = _verdict(frontend)
        # No listener: rules drop or reject.
        if verdict is not Verdict.FORWARD:
            portal = Portal(name, verdict, source_ranges=frontend.source_ranges)
        elif is_node_port or host:
            portal = Portal(
                name,
                verdict,
                host="" if is_node_port else host,
                internal_only=(
                    family.detector if frontend.external.verdict is Verdict.DROP else None
                ),
                source_ranges=frontend.source_ranges,
            )
        else:
            continue  # this node has no address that a rule could lead to
        for address in _addresses(plan, frontend, family):
            key = _key(plan, frontend, address)
            ruleset[key] = portal
            if verdict is Verdict.FORWARD:
                bind = (address, frontend.port) if is_node_port else (host, 0)
                ruleset[key.of(LISTENER)] = _listener(plan, frontend, family, *bind)
    return ruleset


def render_direct(
    plan: ServicePlan, settings: NodeSettings, only: frozenset[str] | None = None
) -> Ruleset:
    """Render one ServicePort in the direct style.

    Args:
        plan: the ServicePort.
        settings: the node.
        only: the Service addresses that this machine has, if no others can be added.
    """
    family = settings.family(plan.key.family)
    ruleset: dict[Key, ListenerPlan | Portal] = {}
    for frontend in _served_frontends(plan):
        address, is_node_port = frontend.address, frontend.kind is FrontendKind.NODE_PORT
        if not is_node_port and only is not None and address not in only:
            continue
        if _verdict(frontend) is Verdict.REJECT:
            if (
                not is_node_port or plan.proxy.kept is not None
            ):  # without a socket the kernel rejects
                portal = Portal(printed_name(plan.key.name), Verdict.REJECT)
                ruleset[_key(plan, frontend, address)] = portal
            continue
        # One socket for all addresses, unless node ports are only at some of them.
        everywhere = is_node_port and family.node_port_addresses is None
        for bind in ("",) if everywhere else _addresses(plan, frontend, family):
            key = _key(plan, frontend, bind).of(LISTENER)
            ruleset[key] = _listener(plan, frontend, family, bind, frontend.port)
    return ruleset


def host_address(family: FamilySettings) -> str:
    """Return the address of this node that listeners bind; "" if it has only loopback ones."""
    own = _bindable(family.local_addresses)
    if family.node_ip in own:
        return family.node_ip
    return own[0] if own else ""


def _served_frontends(plan: ServicePlan) -> tuple[Frontend, ...]:
    return plan.frontends if plan.key.name.protocol is not Protocol.SCTP else ()


def _key(plan: ServicePlan, frontend: Frontend, address: str) -> FrontendKey:
    is_node_port = frontend.kind is FrontendKind.NODE_PORT
    name, family = plan.key
    return FrontendKey(PORTAL, family, name.protocol, address, frontend.port, is_node_port)


def _addresses(plan: ServicePlan, frontend: Frontend, family: FamilySettings) -> tuple[str, ...]:
    """Return the destination addresses of a Frontend; for a node port all that serve it."""
    if frontend.kind is not FrontendKind.NODE_PORT:
        return (frontend.address,)
    some = family.node_port_addresses
    found = _bindable(family.local_addresses if some is None else some)
    loopback = [_LOOPBACK[plan.key.family]] if family.localhost_node_ports else []
    return (*found, *loopback)


def _bindable(addresses: tuple[str, ...]) -> list[str]:
    """Leave out loopback and IPv6 link-local addresses; the latter need an interface to bind."""
    link_local = ("fe8", "fe9", "fea", "feb")
    return [a for a in addresses if not is_loopback(a) and not a.startswith(link_local)]


def _verdict(frontend: Frontend) -> Verdict:
    """Return FORWARD if any client needs a listener, otherwise what happens to all of them."""
    verdicts = {frontend.pod.verdict, frontend.node.verdict, frontend.external.verdict}
    return verdicts.pop() if len(verdicts) == 1 else Verdict.FORWARD


def _listener(
    plan: ServicePlan, frontend: Frontend, family: FamilySettings, bind: str, port: int
) -> ListenerPlan:
    pod, node, external = (
        decision_of(action, plan.pool(action.pool))
        for action in (frontend.pod, frontend.node, frontend.external)
    )
    same_for_all = pod == node == external
    return ListenerPlan(
        owner=plan.key,
        bind=bind,
        port=port,
        pod=pod,
        node=node,
        external=external,
        sources=SourceClassifier() if same_for_all else family.sources,
        source_ranges=frontend.source_ranges,
        affinity_seconds=plan.affinity_seconds,
        least_connections=plan.least_connections,
        proxy_protocol=plan.proxy.proxy_protocol,
        kept=plan.proxy.kept,
    )
