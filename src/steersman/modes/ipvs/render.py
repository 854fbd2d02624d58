"""Render plans as virtual servers, set entries, sets and rules. Pure.

A Service has virtual servers and set entries. The sets, the chains that match them and the jumps to
the chains belong to the node, so the number of rules does not depend on the number of Services.

The kernel chooses among the real servers of a destination, whoever the client is. So a Frontend
that sends classes of sources to different lists gets the list for sources outside (README.md,
Differences).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from steersman.model.addresses import is_loopback
from steersman.model.names import Family
from steersman.model.plan import (
    FamilySettings,
    Frontend,
    FrontendKind,
    LocalDetector,
    NodeSettings,
    ServicePlan,
    SourceClass,
    Verdict,
)
from steersman.modes.ipvs.objects import (
    ACCESS,
    ADDRESSES,
    ALLOWED,
    DEVICE,
    DROPS,
    FORWARD,
    GUARDED,
    HEALTH,
    HEALTH_PORTS,
    MARK_MASQ,
    PORTS,
    POSTROUTING,
    REJECTS,
    SERVICES,
    SOURCES,
    DeviceKey,
    MemberKey,
    Server,
    ServerKey,
    SetKey,
    Target,
    action_set,
    all_sets,
    role_set,
)
from steersman.netfilter.iptables.names import FILTER, JUMPS, MANGLE, NAT, REJECT, WHOLE
from steersman.netfilter.iptables.saved import masquerade_rules

# Services

_PERSISTENT = 0x1
_FLAGS = {"fallback": 0x8, "port": 0x10}
"""IP_VS_SVC_F_SCHED1: choose another endpoint if the chosen one has weight 0; SCHED2: hash the
source port, too. Both exist for sh and mh."""
_DEFAULT_FLAGS = {"mh": ("mh-port",)}
"""Flags of a scheduler if none are configured (behaviour 10)."""
_ALWAYS = {"sh": _FLAGS["fallback"], "mh": _FLAGS["fallback"]}
"""Without it these two refuse the clients of an endpoint that drains or is ejected."""


def render_service(
    plan: ServicePlan, settings: NodeSettings, scheduler: str, flags: tuple[str, ...] = ()
) -> dict[tuple[Any, ...], Any]:
    """Render one ServicePort: a virtual server and its entries for every destination.

    Args:
        plan: the plan of the ServicePort.
        settings: the node's settings.
        scheduler: the scheduler of plans without one.
        flags: the flags of plans without any, as ipvsadm spells them: `sh-port` and so on, each for
            its scheduler; () for the defaults, "none" for none of them.
    """
    family = settings.family(plan.key.family)
    protocol = plan.key.name.protocol
    number = protocol.number
    scheduler = plan.scheduling.scheduler or ("lc" if plan.least_connections else scheduler)
    bits = scheduler_flags(scheduler, plan.scheduling.scheduler_flags or flags)
    if plan.affinity_seconds:
        bits |= _PERSISTENT
    weights = {(ip, port): weight for ip, port, weight in plan.scheduling.weights}
    out: dict[tuple[Any, ...], Any] = {}
    for frontend in plan.frontends:
        # One list for all clients: that for sources outside, if these are forwarded at all.
        targets: tuple[Target, ...] = ()
        for action in (frontend.external, frontend.pod, frontend.node):
            if action.verdict is Verdict.FORWARD:
                targets = tuple(sorted([(e.ip, e.port) for e in plan.pool(action.pool)]))
                break
        shares = tuple(weights.get(target, 1) for target in targets) if weights else ()
        if all(share == 1 for share in shares):
            shares = ()

        assigned = frontend.kind is not FrontendKind.NODE_PORT
        server = Server(scheduler, bits, plan.affinity_seconds, assigned, targets, shares)
        for address in (frontend.address,) if assigned else node_port_addresses(family):
            out[ServerKey(protocol, address, frontend.port)] = server
            # ipset looks up the name of a protocol in /etc/protocols for every entry, so: a number
            place = f"{address},{number}:{frontend.port}"
            for member in _members(plan.key.family, frontend, place):
                out[member] = ""
    if plan.health_check_node_port:
        health = role_set(HEALTH_PORTS, plan.key.family)
        out[MemberKey(health, str(plan.health_check_node_port))] = ""
    return out


@lru_cache
def scheduler_flags(scheduler: str, words: tuple[str, ...]) -> int:
    """Return the IP_VS_SVC_F_* bits for those words that are about a scheduler."""
    flags = _ALWAYS.get(scheduler, 0)
    for word in words or _DEFAULT_FLAGS.get(scheduler, ()):
        name, _, flag = word.partition("-")
        if name == scheduler:
            flags |= _FLAGS.get(flag, 0)
    return flags


def node_port_addresses(family: FamilySettings) -> tuple[str, ...]:
    """Return the addresses that serve node ports: each needs a virtual server of its own."""
    if family.node_port_addresses is not None:
        return family.node_port_addresses
    link_local = ("fe8", "fe9", "fea", "feb")
    return tuple(
        address
        for address in family.local_addresses
        if not (is_loopback(address) or (":" in address and address.startswith(link_local)))
    )


def _members(family: Family, frontend: Frontend, place: str) -> Iterator[MemberKey]:
    """Yield the set entries of a Frontend at an address; `place` is `address,protocol:port`."""
    assigned = frontend.kind is not FrontendKind.NODE_PORT
    if assigned:
        yield MemberKey(role_set(PORTS, family), place)
    for source, action in (
        (SourceClass.POD, frontend.pod),
        (SourceClass.NODE, frontend.node),
        (SourceClass.EXTERNAL, frontend.external),
    ):
        # A connection of the node itself to an assigned address has that address as its source.
        own = assigned and source is SourceClass.NODE
        if action.verdict is not Verdict.FORWARD or action.masquerade or own:
            yield MemberKey(action_set(source, action.verdict, family), place)
    if frontend.source_ranges:
        yield MemberKey(role_set(GUARDED, family), place)
        for cidr in frontend.source_ranges:
            # ipset prints one address without a length, and stores no network of length 0.
            address, _, length = cidr.partition("/")
            parts: tuple[str, ...] = (address,) if length == str(family.bits) else (cidr,)
            if length == "0":
                v4 = family is Family.IPV4
                parts = ("0.0.0.0/1", "128.0.0.0/1") if v4 else ("::/1", "8000::/1")
            for part in parts:
                yield MemberKey(role_set(ALLOWED, family), f"{place},{part}")


# The node

_NEW = "-m conntrack --ctstate NEW "
_HAIRPIN = {
    Family.IPV4: "6,32 0 0 12,7 0 0 0,32 0 0 16,29 0 1 0,6 0 0 65535,6 0 0 0",
    Family.IPV6: "18,32 0 0 8,7 0 0 0,32 0 0 24,29 0 13 0,32 0 0 12,7 0 0 0,32 0 0 28,29 0 9 0,"
    "32 0 0 16,7 0 0 0,32 0 0 32,29 0 5 0,32 0 0 20,7 0 0 0,32 0 0 36,29 0 1 0,"
    "6 0 0 65535,6 0 0 0",
}
"""Classic BPF that compares source and destination, word by word at their offsets in the IP header.
If they are equal, the connection returned to the endpoint that made it. So no set has to contain
the endpoints."""


def _jump(chain: str, purpose: str, new: bool = True) -> str:
    return f'{_NEW if new else ""}-m comment --comment "kubernetes ipvs {purpose}" -j {chain}'


_JUMPS = (
    (MANGLE, "PREROUTING", (_jump(DROPS, "drops"),)),
    (MANGLE, "OUTPUT", (_jump(DROPS, "drops"),)),
    (
        FILTER,
        "INPUT",
        (
            _jump(HEALTH, "health check service ports", new=False),
            _jump(REJECTS, "rejects"),
            _jump(ACCESS, "access"),
        ),
    ),
    (FILTER, "OUTPUT", (_jump(REJECTS, "rejects"),)),
    (FILTER, "FORWARD", (_jump(FORWARD, "forwarding rules", new=False),)),
    (NAT, "PREROUTING", (_jump(SERVICES, "service portals", new=False),)),
    (NAT, "OUTPUT", (_jump(SERVICES, "service portals", new=False),)),
    (NAT, "POSTROUTING", (_jump(POSTROUTING, "postrouting rules", new=False),)),
)
"""Table, built-in chain, and our jumps from the top down."""


def render_node(settings: NodeSettings, *, random_fully: bool) -> dict[tuple[Any, ...], str]:
    """Render everything that belongs to the node, in every family that is served.

    Args:
        settings: the node's settings.
        random_fully: choose the ports of masqueraded connections at random.
    """
    out: dict[tuple[Any, ...], str] = {DeviceKey(DEVICE): "dummy"}
    for family in settings.families:
        out.update((SetKey(name), kind) for name, kind in all_sets(family))
        for (table, chain), rules in _chains(settings, family, random_fully):
            out[int(family), table, chain, WHOLE] = "\n".join(f"-A {chain} {r}" for r in rules)
        for table, chain, jumps in _JUMPS:
            out[int(family), table, chain, JUMPS] = "\n".join(f"-A {chain} {j}" for j in jumps)
    return out


_Chain = tuple[tuple[str, str], list[str]]


def _chains(settings: NodeSettings, family: Family, random_fully: bool) -> Iterator[_Chain]:
    """Yield the chains of a family and their rules."""
    detector = settings.family(family).detector
    mark = f"{settings.masquerade_mark:#x}"

    # Mark connections to be masqueraded, and masquerade them; hairpins always.
    masquerade = list(_by_class(family, detector, Verdict.FORWARD, MARK_MASQ))
    yield (NAT, MARK_MASQ), [f"-j MARK --set-xmark {mark}/{mark}"]
    yield (NAT, SERVICES), masquerade
    random = " --random-fully" if random_fully else ""
    hairpin = f'! -o lo -m bpf --bytecode "{_HAIRPIN[family]}" -j MASQUERADE{random}'
    yield (NAT, POSTROUTING), [hairpin, *masquerade_rules(mark, random_fully=random_fully)]

    # Accept forwarded packets, whatever the policy of FORWARD is.
    comment = '-m comment --comment "kubernetes ipvs forwarding rules"'
    accept = [
        f"{comment} -m mark --mark {mark}/{mark} -j ACCEPT",
        f"{comment} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    ]
    yield (FILTER, FORWARD), accept

    # Source ranges, drops and rejects.
    yield (MANGLE, SOURCES), [f"{_match(role_set(ALLOWED, family), 3)} -j RETURN", "-j DROP"]
    guarded = f"{_match(role_set(GUARDED, family))} -j {SOURCES}"
    yield (MANGLE, DROPS), [guarded, *_by_class(family, detector, Verdict.DROP, "DROP")]
    yield (FILTER, REJECTS), list(_by_class(family, detector, Verdict.REJECT, REJECT[family]))

    # Assigned addresses answer on the ports of Services only, not for the node's own programs.
    checks = f"-p tcp -m set --match-set {role_set(HEALTH_PORTS, family)} dst -j ACCEPT"
    yield (FILTER, HEALTH), [checks]
    others = f"-m set --match-set {role_set(ADDRESSES, family)} dst -j {REJECT[family]}"
    yield (FILTER, ACCESS), [f"{_match(role_set(PORTS, family))} -j RETURN", others]


def _match(name: str, dimensions: int = 2) -> str:
    return f"-m set --match-set {name} {'dst,dst' if dimensions == 2 else 'dst,dst,src'}"


def _by_class(
    family: Family, detector: LocalDetector, verdict: Verdict, target: str
) -> Iterator[str]:
    """Yield rules by class of sources; a pod on an address of the node is a pod (behaviour 6)."""
    pod = ""
    if detector.cidr:
        pod = f"-s {detector.cidr} "
    elif detector:
        pod = f"-i {detector.interface or detector.interface_prefix + '+'} "
    classes = (
        (SourceClass.POD, pod),
        (SourceClass.NODE, "-m addrtype --src-type LOCAL "),
        (SourceClass.EXTERNAL, ""),
    )
    for source, match in classes:
        if source is SourceClass.POD and not match:  # pods are not told from others
            continue
        # Each class ends with RETURN, so that a packet meets the rules of one class only.
        yield f"{match}{_match(action_set(source, verdict, family))} -j {target}"
        if match:
            yield f"{match}-j RETURN"
