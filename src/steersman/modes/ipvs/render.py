"""From one ServicePlan to virtual servers and set entries. Pure.

The kernel chooses among the real servers of a destination whoever asks, so a Frontend whose
classes of sources go to different lists gets the list of those outside (README.md, Differences).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec

from steersman.model.addresses import is_loopback
from steersman.model.names import Family
from steersman.model.plan import (
    FamilySettings,
    Frontend,
    FrontendKind,
    NodeSettings,
    ServicePlan,
    SourceClass,
    Verdict,
)
from steersman.modes.ipvs.names import (
    ALLOWED,
    GUARDED,
    HEALTH_PORTS,
    PORTS,
    MemberKey,
    Server,
    ServerKey,
    Target,
    action_set,
    role_set,
)

_PERSISTENT = 0x1
_FLAGS = {"fallback": 0x8, "port": 0x10}
"""IP_VS_SVC_F_SCHED1 and 2: another endpoint where the one that is due has weight 0; the port of
the source decides, too. Both are of sh and mh."""
_USUAL_FLAGS = {"mh": ("mh-port",)}
"""Those of a scheduler where nothing is said (behaviour 10)."""


class Options(msgspec.Struct, frozen=True):
    """What may be set about scheduling."""

    scheduler: str = "rr"
    flags: tuple[str, ...] = ()
    """As ipvsadm has them: `sh-port` and so on, each for its scheduler; () for the usual ones,
    "none" for none."""


def render_service(
    plan: ServicePlan, settings: NodeSettings, options: Options
) -> dict[tuple[Any, ...], Any]:
    """Render one ServicePort: a virtual server and its entries for every destination."""
    family = settings.family(plan.key.family)
    out: dict[tuple[Any, ...], Any] = {}
    for frontend in plan.frontends:
        held = frontend.kind is not FrontendKind.NODE_PORT
        server = _server(plan, frontend, options, held)
        for address in (frontend.address,) if held else node_port_addresses(family):
            out[ServerKey(plan.key.name.protocol, address, frontend.port)] = server
            # ipset would look up a protocol's name in /etc/protocols for every entry
            place = f"{address},{plan.key.name.protocol.number}:{frontend.port}"
            for member in _members(plan.key.family, frontend, place):
                out[member] = ""
    if plan.health_check_node_port:
        health = role_set(HEALTH_PORTS, plan.key.family)
        out[MemberKey(health, str(plan.health_check_node_port))] = ""
    return out


def node_port_addresses(family: FamilySettings) -> tuple[str, ...]:
    """Return the addresses that serve node ports: a virtual server needs each by name."""
    if family.node_port_addresses is not None:
        return family.node_port_addresses
    return tuple(a for a in family.local_addresses if not (is_loopback(a) or _is_link_local(a)))


def _is_link_local(address: str) -> bool:
    return ":" in address and address[:3] in ("fe8", "fe9", "fea", "feb")


def _server(plan: ServicePlan, frontend: Frontend, options: Options, held: bool) -> Server:
    seconds = plan.affinity_seconds
    default = "lc" if plan.least_connections else options.scheduler
    scheduler = plan.scheduling.scheduler or default
    flags = _flags(scheduler, plan.scheduling.scheduler_flags or options.flags)
    targets = _targets(plan, frontend)
    if seconds:
        flags |= _PERSISTENT
    return Server(scheduler, flags, seconds, held, targets, _weights(targets, plan))


@lru_cache
def _flags(scheduler: str, words: tuple[str, ...]) -> int:
    flags = 0
    for word in words or _USUAL_FLAGS.get(scheduler, ()):
        name, _, flag = word.partition("-")
        if name == scheduler:
            flags |= _FLAGS.get(flag, 0)
    return flags


def _targets(plan: ServicePlan, frontend: Frontend) -> tuple[Target, ...]:
    for action in (frontend.external, frontend.pod, frontend.node):
        if action.verdict is Verdict.FORWARD:
            return tuple(sorted([(e.ip, e.port) for e in plan.pool(action.pool)]))
    return ()


def _weights(targets: tuple[Target, ...], plan: ServicePlan) -> tuple[int, ...]:
    if not plan.scheduling.weights:
        return ()
    known = {(ip, port): weight for ip, port, weight in plan.scheduling.weights}
    weights = tuple(known.get(target, 1) for target in targets)
    return weights if any(weight != 1 for weight in weights) else ()


def _members(family: Family, frontend: Frontend, place: str) -> Iterator[MemberKey]:
    held = frontend.kind is not FrontendKind.NODE_PORT
    if held:
        yield MemberKey(role_set(PORTS, family), place)
    for source, action in (
        (SourceClass.POD, frontend.pod),
        (SourceClass.NODE, frontend.node),
        (SourceClass.EXTERNAL, frontend.external),
    ):
        # A connection of the node itself to an address that it holds comes from that address.
        own = held and source is SourceClass.NODE
        if action.verdict is not Verdict.FORWARD or action.masquerade or own:
            yield MemberKey(action_set(source, action.verdict, family), place)
    if frontend.source_ranges:
        yield MemberKey(role_set(GUARDED, family), place)
        for cidr in frontend.source_ranges:
            for part in _networks(cidr, family):
                yield MemberKey(role_set(ALLOWED, family), f"{place},{part}")


def _networks(cidr: str, family: Family) -> tuple[str, ...]:
    """Spell a network as ipset does: one address without a length, everything as two halves."""
    address, _, length = cidr.partition("/")
    if length == "0":
        return ("0.0.0.0/1", "128.0.0.0/1") if family is Family.IPV4 else ("::/1", "8000::/1")
    return (address,) if length == str(family.bits) else (cidr,)
