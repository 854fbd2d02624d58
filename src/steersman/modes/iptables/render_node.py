"""From NodeSettings to the fixed chains, rules and jumps (behaviour 8.1, 8.2). Pure."""

from __future__ import annotations

from collections.abc import Iterator

from steersman.model.addresses import is_loopback
from steersman.model.names import Family
from steersman.model.plan import FamilySettings, NodeSettings
from steersman.modes.iptables.names import (
    BY_ADDRESS,
    CANARY,
    EXTERNAL_SERVICES,
    FORWARD,
    INVALID_DROPPED,
    KUBELET,
    KUBELET_FIREWALL,
    LOCALNET_RULE,
    MARK_MASQ,
    NODE_PORTS,
    POSTROUTING,
    PROXY_FIREWALL,
    SERVICES,
    SHARED_CHAINS,
    SPLIT,
    TAIL,
    TAIL_COMMENT,
    part_chain,
)
from steersman.modes.iptables.render import Features
from steersman.netfilter.names import FILTER, JUMPS, MANGLE, NAT, WHOLE, RuleKey
from steersman.netfilter.rule_text import masquerade_rules

_NEW = "-m conntrack --ctstate NEW "


def _comment(text: str) -> str:
    return f'-m comment --comment "{text}"'


_LOAD_BALANCER = f"{_NEW}{_comment('kubernetes load balancer firewall')} -j {PROXY_FIREWALL}"
_PORTALS = f"{_comment('kubernetes service portals')} -j {SERVICES}"
_EXTERNAL = (
    f"{_NEW}{_comment('kubernetes externally-visible service portals')} -j {EXTERNAL_SERVICES}"
)
_HEALTH = f"{_comment('kubernetes health check service ports')} -j {NODE_PORTS}"
_FORWARD = f"{_comment('kubernetes forwarding rules')} -j {FORWARD}"
_POSTROUTING = f"{_comment('kubernetes postrouting rules')} -j {POSTROUTING}"

_JUMPS = (
    (FILTER, "INPUT", (_LOAD_BALANCER, _HEALTH, _EXTERNAL)),
    (FILTER, "FORWARD", (_LOAD_BALANCER, _FORWARD, f"{_NEW}{_PORTALS}", _EXTERNAL)),
    (FILTER, "OUTPUT", (_LOAD_BALANCER, f"{_NEW}{_PORTALS}")),
    (NAT, "PREROUTING", (_PORTALS,)),
    (NAT, "OUTPUT", (_PORTALS,)),
    (NAT, "POSTROUTING", (_POSTROUTING,)),
)
"""Table, built-in chain, and our jumps from the top down (upstream prepends them one by one)."""


def render_node(settings: NodeSettings, features: Features) -> dict[RuleKey, str]:
    """Render everything that belongs to the node, in every family that is served."""
    out: dict[RuleKey, str] = {}
    for family in settings.families:
        for (table, chain, part), text in _family(settings, family, features):
            out[int(family), table, chain, part] = text
    return out


_Object = tuple[tuple[str, str, str], str]


def _family(settings: NodeSettings, family: Family, features: Features) -> Iterator[_Object]:
    for table, chain in sorted(SHARED_CHAINS):
        yield (table, chain, WHOLE), ""
    for table in (MANGLE, NAT, FILTER):
        yield (table, CANARY, WHOLE), ""
    yield (FILTER, FORWARD, WHOLE), "\n".join(_forward(settings, features))
    mark = f"{settings.masquerade_mark:#x}"
    yield (NAT, MARK_MASQ, WHOLE), f"-A {MARK_MASQ} -j MARK --set-xmark {mark}/{mark}"
    masquerade = masquerade_rules(mark, random_fully=features.random_fully)
    yield (NAT, POSTROUTING, WHOLE), "\n".join(f"-A {POSTROUTING} {r}" for r in masquerade)
    if settings.split_dispatch:
        yield from _split(family)
    if tail := "\n".join(_tail(family, settings.family(family))):
        yield (NAT, SERVICES, TAIL), tail
    yield from _jumps()
    yield from _kubelet_firewall(family, settings)


def _jumps() -> Iterator[_Object]:
    for table, chain, jumps in _JUMPS:
        yield (table, chain, JUMPS), "\n".join(f"-A {chain} {jump}" for jump in jumps)


def _kubelet_firewall(family: Family, settings: NodeSettings) -> Iterator[_Object]:
    yield (FILTER, KUBELET_FIREWALL, WHOLE), ""
    if family is Family.IPV4 and settings.ipv4.localhost_node_ports:
        yield (FILTER, KUBELET_FIREWALL, KUBELET), LOCALNET_RULE
    for chain in ("INPUT", "OUTPUT"):
        yield (FILTER, chain, KUBELET), f"-A {chain} -j {KUBELET_FIREWALL}"


def _forward(settings: NodeSettings, features: Features) -> Iterator[str]:
    mark = f"{settings.masquerade_mark:#x}"
    if not features.tcp_liberal:
        counter = f" -m nfacct --nfacct-name  {INVALID_DROPPED}"
        count = counter if features.nfacct else ""
        yield f"-A {FORWARD} -m conntrack --ctstate INVALID{count} -j DROP"
    comment = _comment("kubernetes forwarding rules")
    yield f"-A {FORWARD} {comment} -m mark --mark {mark}/{mark} -j ACCEPT"
    comment = _comment("kubernetes forwarding conntrack rule")
    yield f"-A {FORWARD} {comment} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"


def _split(family: Family) -> Iterator[_Object]:
    """Split KUBE-SERVICES by the low eight bits of the address, four at a time.

    A packet to nowhere in particular passes 16 rules, one to a Service at most 32 and those of
    its 256th part of all Services, however many there are. All parts always exist: then a
    Service only ever adds and removes its own rules.
    """
    head = "0.0.0." if family is Family.IPV4 else "::"
    full = "255" if family is Family.IPV4 else "ff"
    high = "240" if family is Family.IPV4 else "f0"

    def octet(value: int) -> str:
        return str(value) if family is Family.IPV4 else (f"{value:x}" if value else "")

    def match(value: int, mask: str) -> str:
        return f"-d {head}{octet(value)}/{head}{mask}"

    jumps = [f"-A {SERVICES} {match(16 * i, high)} -j {BY_ADDRESS}{i:x}" for i in range(16)]
    yield (NAT, SERVICES, SPLIT), "\n".join(jumps)
    for i in range(16):
        chain = f"{BY_ADDRESS}{i:x}"
        values = range(16 * i, 16 * i + 16)
        for value in values:
            yield (NAT, part_chain(value), WHOLE), ""
        yield (
            (NAT, chain, WHOLE),
            "\n".join(f"-A {chain} {match(v, full)} -j {part_chain(v)}" for v in values),
        )


def _tail(family: Family, settings: FamilySettings) -> Iterator[str]:
    rest = f"{_comment(TAIL_COMMENT)} -m addrtype --dst-type LOCAL -j {NODE_PORTS}"
    if settings.node_port_addresses is None:
        but = "! -d ::1/128 "
        if family is Family.IPV4:
            but = "" if settings.localhost_node_ports else "! -d 127.0.0.0/8 "
        yield f"-A {SERVICES} {but}{rest}"
        return
    addresses = list(settings.node_port_addresses)
    if family is Family.IPV4 and settings.localhost_node_ports:
        addresses += filter(is_loopback, settings.local_addresses)
    for address in addresses:
        yield f"-A {SERVICES} -d {address}/{family.bits} {_comment(TAIL_COMMENT)} -j {NODE_PORTS}"
