"""From plans to listeners and portals. Pure.

Two styles. `redirect`: rules lead each Service address to a listener on an address of this node,
node ports are bound themselves, and rules drop and reject. `direct`: every destination is bound
itself, and what is not served has no socket, so that the kernel refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator

from steersman.model.addresses import is_loopback
from steersman.model.names import Family, Protocol
from steersman.model.plan import (
    FamilySettings,
    Frontend,
    FrontendKind,
    NodeSettings,
    ServicePlan,
    SourceClassifier,
    Verdict,
)
from steersman.model.ruleset import Ruleset
from steersman.modes.userspace.names import BASE, BaseKey, Key, Portal
from steersman.netfilter.names import printed_name
from steersman.proxy.listeners import (
    LISTENER,
    PORTAL,
    FrontendKey,
    ListenerPlan,
    decision_of,
)

_LOOPBACK = {Family.IPV4: "127.0.0.1", Family.IPV6: "::1"}


def render_node(settings: NodeSettings) -> Ruleset:
    """Render what redirecting needs on this node: chains, and jumps to them."""
    return {BaseKey(BASE, family): "" for family in settings.families}


def render_redirect(plan: ServicePlan, settings: NodeSettings) -> Ruleset:
    """Render one ServicePort where rules lead to the listeners."""
    family = settings.family(plan.key.family)
    host = host_address(family)
    ruleset: dict[Key, ListenerPlan | Portal] = {}
    for frontend in _served(plan):
        is_node_port = frontend.kind is FrontendKind.NODE_PORT
        forwards = _verdict(frontend) is Verdict.FORWARD
        if forwards and not host and not is_node_port:
            continue  # nobody but this node could reach it, and there is no address to lead to
        portal = _portal(plan, frontend, family, "" if is_node_port else host)
        for address in _addresses(plan, frontend, family):
            key = _key(plan, frontend, address)
            ruleset[key] = portal
            if forwards:
                bind = (address, frontend.port) if is_node_port else (host, 0)
                ruleset[key.of(LISTENER)] = _listener(plan, frontend, family, *bind)
    return ruleset


def render_direct(
    plan: ServicePlan, settings: NodeSettings, only: frozenset[str] | None = None
) -> Ruleset:
    """Render one ServicePort where sockets bind the destinations themselves.

    Args:
        plan: the ServicePort.
        settings: the node.
        only: Service addresses that this machine has; None means any, they are added to it.
    """
    family = settings.family(plan.key.family)
    ruleset: dict[Key, ListenerPlan | Portal] = {}
    for frontend in _served(plan):
        address, is_node_port = frontend.address, frontend.kind is FrontendKind.NODE_PORT
        if not is_node_port and only is not None and address not in only:
            continue
        if _verdict(frontend) is Verdict.REJECT:
            if (
                not is_node_port or plan.proxy.kept is not None
            ):  # without a socket this machine refuses
                portal = Portal(printed_name(plan.key.name), Verdict.REJECT)
                ruleset[_key(plan, frontend, address)] = portal
            continue
        everywhere = is_node_port and family.node_port_addresses is None
        for bind in ("",) if everywhere else _addresses(plan, frontend, family):
            key = _key(plan, frontend, bind).of(LISTENER)
            ruleset[key] = _listener(plan, frontend, family, bind, frontend.port)
    return ruleset


def host_address(family: FamilySettings) -> str:
    """The address of this node that listeners bind; "" where it has none but loopback ones."""
    own = [a for a in family.local_addresses if not is_loopback(a) and not _link_local(a)]
    if family.node_ip in own:
        return family.node_ip
    return own[0] if own else ""


def _served(plan: ServicePlan) -> Iterator[Frontend]:
    """The Frontends that sockets exist for."""
    if plan.key.name.protocol is not Protocol.SCTP:
        yield from plan.frontends


def _key(plan: ServicePlan, frontend: Frontend, address: str) -> FrontendKey:
    is_node_port = frontend.kind is FrontendKind.NODE_PORT
    name, family = plan.key
    return FrontendKey(PORTAL, family, name.protocol, address, frontend.port, is_node_port)


def _addresses(plan: ServicePlan, frontend: Frontend, family: FamilySettings) -> tuple[str, ...]:
    """The addresses at which a Frontend is; all that serve node ports for one of these."""
    if frontend.kind is not FrontendKind.NODE_PORT:
        return (frontend.address,)
    some = family.node_port_addresses
    usable = family.local_addresses if some is None else some
    found = [a for a in usable if not is_loopback(a) and not _link_local(a)]
    loopback = [_LOOPBACK[plan.key.family]] if family.localhost_node_ports else []
    return (*found, *loopback)


def _link_local(address: str) -> bool:
    """Whether binding it takes an interface too."""
    return address.startswith(("fe8", "fe9", "fea", "feb"))


def _verdict(frontend: Frontend) -> Verdict:
    """FORWARD where a listener is needed, otherwise what happens to everybody."""
    verdicts = {frontend.pod.verdict, frontend.node.verdict, frontend.external.verdict}
    return verdicts.pop() if len(verdicts) == 1 else Verdict.FORWARD


def _portal(plan: ServicePlan, frontend: Frontend, family: FamilySettings, host: str) -> Portal:
    name, verdict = printed_name(plan.key.name), _verdict(frontend)
    if verdict is not Verdict.FORWARD:
        return Portal(name, verdict, "", None, frontend.source_ranges)
    only_inside = frontend.external.verdict is Verdict.DROP
    insiders = family.detector if only_inside else None
    return Portal(name, verdict, host, insiders, frontend.source_ranges)


def _listener(
    plan: ServicePlan, frontend: Frontend, family: FamilySettings, bind: str, port: int
) -> ListenerPlan:
    pod, node, external = (
        decision_of(action, plan.pool(action.pool))
        for action in (frontend.pod, frontend.node, frontend.external)
    )
    told_apart = not pod == node == external
    return ListenerPlan(
        plan.key,
        bind,
        port,
        pod,
        node,
        external,
        family.sources if told_apart else SourceClassifier(),
        frontend.source_ranges,
        plan.affinity_seconds,
        plan.least_connections,
        plan.proxy.proxy_protocol,
        plan.proxy.kept,
    )
