"""From NodeSettings to sets, chains and jumps: what stands still while Services change. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from steersman.model.names import Family
from steersman.model.plan import LocalDetector, NodeSettings, SourceClass, Verdict
from steersman.modes.ipvs.names import (
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
    SetKey,
    action_set,
    all_sets,
    role_set,
)
from steersman.netfilter.names import FILTER, JUMPS, MANGLE, NAT, WHOLE
from steersman.netfilter.rule_text import masquerade_rules

_NEW = "-m conntrack --ctstate NEW "
_REJECT = {
    Family.IPV4: "REJECT --reject-with icmp-port-unreachable",
    Family.IPV6: "REJECT --reject-with icmp6-port-unreachable",
}
# Source equals destination: a connection that came back to where it was made. In classic BPF,
# loads at the offsets of the two addresses, word by word; no set has to know the endpoints.
_ITSELF = {
    Family.IPV4: "6,32 0 0 12,7 0 0 0,32 0 0 16,29 0 1 0,6 0 0 65535,6 0 0 0",
    Family.IPV6: "18,32 0 0 8,7 0 0 0,32 0 0 24,29 0 13 0,32 0 0 12,7 0 0 0,32 0 0 28,29 0 9 0,"
    "32 0 0 16,7 0 0 0,32 0 0 32,29 0 5 0,32 0 0 20,7 0 0 0,32 0 0 36,29 0 1 0,"
    "6 0 0 65535,6 0 0 0",
}


def _jump(chain: str, what: str, new: bool = True) -> str:
    return f'{_NEW if new else ""}-m comment --comment "kubernetes ipvs {what}" -j {chain}'


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
    """Render everything that belongs to the node, in every family that is served."""
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
    detector = settings.family(family).detector
    mark = f"{settings.masquerade_mark:#x}"
    masquerade = list(_by_class(family, detector, Verdict.FORWARD, MARK_MASQ))
    yield (NAT, MARK_MASQ), [f"-j MARK --set-xmark {mark}/{mark}"]
    yield (NAT, SERVICES), masquerade
    yield (NAT, POSTROUTING), list(_postrouting(mark, family, random_fully))
    yield (FILTER, FORWARD), list(_forward(mark))
    yield (MANGLE, SOURCES), [f"{_match(role_set(ALLOWED, family), 3)} -j RETURN", "-j DROP"]
    guarded = f"{_match(role_set(GUARDED, family))} -j {SOURCES}"
    yield (MANGLE, DROPS), [guarded, *_by_class(family, detector, Verdict.DROP, "DROP")]
    yield (FILTER, REJECTS), list(_by_class(family, detector, Verdict.REJECT, _REJECT[family]))
    checks = f"-p tcp -m set --match-set {role_set(HEALTH_PORTS, family)} dst -j ACCEPT"
    yield (FILTER, HEALTH), [checks]
    others = f"-m set --match-set {role_set(ADDRESSES, family)} dst -j {_REJECT[family]}"
    yield (FILTER, ACCESS), [f"{_match(role_set(PORTS, family))} -j RETURN", others]


def _match(name: str, dimensions: int = 2) -> str:
    return f"-m set --match-set {name} {'dst,dst' if dimensions == 2 else 'dst,dst,src'}"


def _by_class(
    family: Family, detector: LocalDetector, verdict: Verdict, target: str
) -> Iterator[str]:
    """Rules by class of sources; one that is both pod and node is a pod (behaviour 6)."""
    classes = (
        (SourceClass.POD, _detected(detector)),
        (SourceClass.NODE, "-m addrtype --src-type LOCAL "),
        (SourceClass.EXTERNAL, ""),
    )
    for source, match in classes:
        if source is SourceClass.POD and not match:
            continue
        yield f"{match}{_match(action_set(source, verdict, family))} -j {target}"
        if match:
            yield f"{match}-j RETURN"


def _detected(detector: LocalDetector) -> str:
    if detector.cidr:
        return f"-s {detector.cidr} "
    if detector.interface:
        return f"-i {detector.interface} "
    return f"-i {detector.interface_prefix}+ " if detector.interface_prefix else ""


def _postrouting(mark: str, family: Family, random_fully: bool) -> Iterator[str]:
    random = " --random-fully" if random_fully else ""
    yield f'! -o lo -m bpf --bytecode "{_ITSELF[family]}" -j MASQUERADE{random}'
    yield from masquerade_rules(mark, random_fully=random_fully)


def _forward(mark: str) -> Iterator[str]:
    comment = '-m comment --comment "kubernetes ipvs forwarding rules"'
    yield f"{comment} -m mark --mark {mark}/{mark} -j ACCEPT"
    yield f"{comment} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
