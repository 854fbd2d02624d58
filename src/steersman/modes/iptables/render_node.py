"""Render NodeSettings as the fixed chains, rules and jumps (behaviour 8.1, 8.2)."""

from __future__ import annotations

from collections.abc import Iterable

from steersman.model.addresses import is_loopback
from steersman.model.names import Family
from steersman.model.plan import (
    FamilySettings,
    NodeSettings,
)
from steersman.modes.iptables.names import (
    BUCKET,
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
    bucket_chain,
)
from steersman.modes.iptables.render import Features
from steersman.netfilter.iptables.names import (
    FILTER,
    JUMPS,
    MANGLE,
    NAT,
    WHOLE,
    RuleKey,
)
from steersman.netfilter.iptables.saved import masquerade_rules


def _comment(text: str) -> str:
    return f'-m comment --comment "{text}"'


_NEW = "-m conntrack --ctstate NEW "
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
    mark = f"{settings.masquerade_mark:#x}"
    for family in settings.families:
        f = int(family)

        # Chains that ServicePorts fill, and the canaries: empty chains, gone after a flush.
        for table, chain in sorted(SHARED_CHAINS):
            out[f, table, chain, WHOLE] = ""
        for table in (MANGLE, NAT, FILTER):
            out[f, table, CANARY, WHOLE] = ""

        # Forwarding
        forward = []
        if not features.tcp_liberal:
            count = f" -m nfacct --nfacct-name  {INVALID_DROPPED}" if features.nfacct else ""
            forward.append(f"-m conntrack --ctstate INVALID{count} -j DROP")
        comment = _comment("kubernetes forwarding rules")
        forward.append(f"{comment} -m mark --mark {mark}/{mark} -j ACCEPT")
        comment = _comment("kubernetes forwarding conntrack rule")
        forward.append(f"{comment} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT")
        out[f, FILTER, FORWARD, WHOLE] = _lines(FORWARD, forward)

        # Masquerading
        out[f, NAT, MARK_MASQ, WHOLE] = f"-A {MARK_MASQ} -j MARK --set-xmark {mark}/{mark}"
        masquerade = masquerade_rules(mark, random_fully=features.random_fully)
        out[f, NAT, POSTROUTING, WHOLE] = _lines(POSTROUTING, masquerade)

        # From the built-in chains to Services and node ports
        if settings.split_dispatch:
            out.update(_buckets(family))
        if tail := _node_port_rules(family, settings.family(family)):
            out[f, NAT, SERVICES, TAIL] = _lines(SERVICES, tail)
        for table, chain, jumps in _JUMPS:
            out[f, table, chain, JUMPS] = _lines(chain, jumps)

        # Shared with kubelet
        out[f, FILTER, KUBELET_FIREWALL, WHOLE] = ""
        if family is Family.IPV4 and settings.ipv4.localhost_node_ports:
            out[f, FILTER, KUBELET_FIREWALL, KUBELET] = LOCALNET_RULE
        for chain in ("INPUT", "OUTPUT"):
            out[f, FILTER, chain, KUBELET] = f"-A {chain} -j {KUBELET_FIREWALL}"
    return out


def _lines(chain: str, rules: Iterable[str]) -> str:
    return "\n".join(f"-A {chain} {rule}" for rule in rules)


def _buckets(family: Family) -> dict[RuleKey, str]:
    """Split KUBE-SERVICES by the low eight bits of the address, four at a time.

    A packet to no Service passes 16 rules; one to a Service passes at most 32, and those of a 256th
    of all Services. All 272 chains always exist, so a Service only adds and removes its own rules.
    """
    head, high, full = ("0.0.0.", "240", "255") if family is Family.IPV4 else ("::", "f0", "ff")

    def match(value: int, mask: str) -> str:
        octet = str(value) if family is Family.IPV4 else (f"{value:x}" if value else "")
        return f"-d {head}{octet}/{head}{mask}"

    f = int(family)
    jumps = [f"{match(16 * i, high)} -j {BUCKET}{i:x}" for i in range(16)]
    out: dict[RuleKey, str] = {(f, NAT, SERVICES, SPLIT): _lines(SERVICES, jumps)}
    for i in range(16):
        values = range(16 * i, 16 * i + 16)
        out.update({(f, NAT, bucket_chain(value), WHOLE): "" for value in values})
        jumps = [f"{match(value, full)} -j {bucket_chain(value)}" for value in values]
        out[f, NAT, f"{BUCKET}{i:x}", WHOLE] = _lines(f"{BUCKET}{i:x}", jumps)
    return out


def _node_port_rules(family: Family, settings: FamilySettings) -> list[str]:
    """Return the last rules of nat KUBE-SERVICES, which lead to the node ports."""
    comment = _comment(TAIL_COMMENT)
    if settings.node_port_addresses is None:
        but = "! -d ::1/128 "
        if family is Family.IPV4:
            but = "" if settings.localhost_node_ports else "! -d 127.0.0.0/8 "
        return [f"{but}{comment} -m addrtype --dst-type LOCAL -j {NODE_PORTS}"]
    addresses = list(settings.node_port_addresses)
    if family is Family.IPV4 and settings.localhost_node_ports:
        addresses += filter(is_loopback, settings.local_addresses)
    return [f"-d {address}/{family.bits} {comment} -j {NODE_PORTS}" for address in addresses]
