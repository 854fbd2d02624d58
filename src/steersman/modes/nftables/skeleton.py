"""The fixed part of a table as nft text: sets, chains and rules that no Service changes. Pure.

Two texts per family. The foundation is always the same and loaded into an empty table only: nft
1.0.6 cannot refer to a map that exists already and whose type is `typeof ... th dport`. The rules
follow the node's settings; loading them refills their chains, in one transaction.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

from steersman.model.names import Family
from steersman.model.plan import FamilySettings, LocalDetector, NodeSettings
from steersman.modes.nftables.layout import SETS, SIZES, TABLE, Form, SetSpec, lb_chain

HEADER = {Family.IPV4: "ip", Family.IPV6: "ip6"}
"""Netfilter's names of the families."""
_ADDRESS = {Family.IPV4: "ipv4_addr", Family.IPV6: "ipv6_addr"}
_BASE_CHAINS = (
    ("filter-forward", "filter", "forward", 0),
    ("filter-output", "filter", "output", 0),
    ("nat-prerouting", "nat", "prerouting", -100),
    ("nat-output", "nat", "output", -100),
    ("nat-postrouting", "nat", "postrouting", 100),
    ("nat-input", "nat", "input", 100),
)
_BASE_NAMES = frozenset(name for name, *_ in _BASE_CHAINS)
_SERVICE = "{A} daddr . meta l4proto . th dport"
_NODEPORT = "meta l4proto . th dport"
_MARKINGS = {
    "masquerade-": "meta mark set meta mark or {MARK}",
    "cluster-": "{NOTPOD} meta mark set meta mark or {MARK}",
}
"""What marks, by the marking in the name of an lb chain."""


def _marking_chains() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Variants of the chains that draw which mark first."""
    for space, local, size in product(("", "np-"), (False, True), SIZES):
        for marking, mark in _MARKINGS.items():
            draw = f"goto {lb_chain(space, '', local, size)}"
            yield lb_chain(space, marking, local, size), (mark, draw)


_CLUSTER_IP = "{A} daddr @cluster-ips goto cluster-ip-refused"
_NO_ENDPOINT = f"{_SERVICE} vmap @no-endpoint-services reject"
_UNASSIGNED = "{A} daddr {CIDRS} drop"
_FOUNDATION: Mapping[str, tuple[str, ...]] = {
    "filter-forward": ("ct state new jump forward-check",),
    "filter-output": ("ct state new jump output-check",),
    # No clusterIP that we translate is still one here: another port of it, or none to send on to.
    "cluster-ip-refused": (f"{_SERVICE} vmap @no-endpoint-services", "reject"),
    "by-source-pod": (f"{_SERVICE} vmap @pod-service-ips",),
    "by-source-node": (f"{_SERVICE} vmap @node-service-ips",),
    "np-by-source-pod": (f"{_NODEPORT} vmap @pod-nodeports",),
    "np-by-source-node": (f"{_NODEPORT} vmap @node-nodeports",),
    # Empty until some ServicePort needs them: every new connection passes here (dormant.py).
    "affinity-learn": (),
    "firewall-check": (),
    "firewall": (),
}
"""Rules by chain, whatever the settings."""
_DISPATCH = (
    f"{_SERVICE} vmap @service-ips",
    f"{{NPL}} {_NODEPORT} vmap @service-nodeports",
)
_RULES: Mapping[str, tuple[str, ...]] = {
    "forward-check": (_CLUSTER_IP, _NO_ENDPOINT, _UNASSIGNED),
    "output-check": (
        _CLUSTER_IP,
        # What was said to a clusterIP has been translated by us, to where it may go.
        "ct status dnat ct original {A} daddr @cluster-ips return",
        f"{{NPL}} {_NODEPORT} vmap @no-endpoint-nodeports reject",
        _NO_ENDPOINT,
        _UNASSIGNED,
    ),
    # Of the type nat: only the first packet of a connection passes, and none from the node itself.
    "nat-input": (f"{{NP}} {_NODEPORT} vmap @no-endpoint-nodeports reject", _NO_ENDPOINT),
    "nat-prerouting": _DISPATCH,
    "nat-output": _DISPATCH,
    "nat-postrouting": (
        "meta mark & {MARK} != 0 meta mark set meta mark xor {MARK} masquerade fully-random",
        "ct status dnat {A} saddr . {A} daddr . meta l4proto . th dport @hairpin-connections"
        " masquerade fully-random",
    ),
    "by-source": (
        "{POD} goto by-source-pod",
        "fib saddr type local goto by-source-node",
        f"{_SERVICE} vmap @external-service-ips",
    ),
    "np-by-source": (
        "{POD} goto np-by-source-pod",
        "fib saddr type local goto np-by-source-node",
        f"{_NODEPORT} vmap @external-nodeports",
    ),
    "mark-masquerade": (_MARKINGS["masquerade-"],),
    "mark-cluster": (_MARKINGS["cluster-"],),
    **dict(_marking_chains()),
}
"""Rules by chain. One whose words have no meaning (no detector, no CIDRs) is left out."""
RULE_CHAINS = frozenset(_RULES)
"""Chains that follow the settings; all others without a slash in their name are the foundation."""

_DRAWS = 4
"""Draws in a try- chain, and jumps to it: sixteen draws, then those below are drawn from."""
_SPACES = (("", _SERVICE, "service-endpoints"), ("np-", _NODEPORT, "nodeport-endpoints"))


def foundation(family: Family) -> str:
    """Return the nft commands that make one family's table, for an empty one."""
    table = f"{HEADER[family]} {TABLE}"
    lines = [f'add table {table} {{ comment "rules for kube-proxy" ; }}']
    lines += [f"add {_declaration(spec, table, family)}" for spec in SETS.values()]
    lines += [
        f"add chain {table} {name} {{ type {kind} hook {hook} priority {priority} ; }}"
        for name, kind, hook, priority in _BASE_CHAINS
    ]
    lines += [f"add chain {table} {name}" for name in _RULES if name not in _BASE_NAMES]
    words = {"{A}": HEADER[family]}
    fixed = {name: _filled(each, words) for name, each in _FOUNDATION.items()}
    return "\n".join(lines) + "\n" + _chains(table, {**fixed, **dict(_lb_chains(family))})


def rules(settings: NodeSettings, family: Family) -> str:
    """Return the nft commands that refill the chains that follow the settings."""
    own = settings.family(family)
    words = {
        "{A}": HEADER[family],
        "{MARK}": f"{settings.masquerade_mark:#x}",
        "{POD}": _from_pod(own.detector, family, ""),
        "{NOTPOD}": _from_pod(own.detector, family, "!= "),
        "{NPL}": _serves_node_ports(own, family, local="fib daddr type local"),
        "{NP}": _serves_node_ports(own, family),
        "{CIDRS}": _one_of(disjoint(own.service_cidrs)),
    }
    filled = {name: _filled(each, words) for name, each in _RULES.items()}
    return _chains(f"{HEADER[family]} {TABLE}", filled)


def _chains(table: str, chains: Mapping[str, Iterable[str]]) -> str:
    lines = [f"add chain {table} {name}" for name in chains if name not in _BASE_NAMES]
    lines += [f"flush chain {table} {name}" for name in chains]
    lines += [f"add rule {table} {name} {rule}" for name, each in chains.items() for rule in each]
    return "\n".join(lines) + "\n"


def _declaration(spec: SetSpec, table: str, family: Family) -> str:
    """A set or map: the slot's type only exists as `typeof` an expression."""
    header, address = HEADER[family], _ADDRESS[family]
    if spec.form is Form.ENDPOINTS:
        key = " . ".join(
            {"a": f"{header} daddr", "p": "meta l4proto", "t": "th dport"}.get(
                field, "numgen random mod 2"
            )
            for field in spec.fields
        )
        what = f"typeof {key} : {header} daddr . th dport ;"
    else:
        fields = {"a": address, "p": "inet_proto", "t": "inet_service"}
        what = "type " + " . ".join(fields[field] for field in spec.fields)
        what += " : verdict ;" if spec.form is Form.VERDICTS else " ;"
    what += " flags interval ;" if spec.form is Form.INTERVALS else ""
    what += " counter ;" if spec.counter else ""
    noun = "map" if spec.form in (Form.VERDICTS, Form.ENDPOINTS) else "set"
    return f'{noun} {table} {spec.name} {{ {what} comment "{spec.comment}" ; }}'


def _filled(templates: Iterable[str], words: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(rule for rule in (_fill(each, words) for each in templates) if rule)


def _fill(rule: str, words: Mapping[str, str]) -> str:
    """Put words in; "" where one of them has no meaning on this node."""
    for word, text in words.items():
        if word in rule:
            if not text:
                return ""
            rule = rule.replace(word, text)
    return rule


def _from_pod(detector: LocalDetector, family: Family, negation: str) -> str:
    """Match of packets from local pods; "" where they cannot be told."""
    if detector.cidr:
        return f"{HEADER[family]} saddr {negation}{detector.cidr}"
    if detector.interface:
        return f'iifname {negation}"{detector.interface}"'
    if detector.interface_prefix:
        return f'iifname {negation}"{detector.interface_prefix}*"'
    return ""


def _serves_node_ports(own: FamilySettings, family: Family, local: str = "") -> str:
    if own.node_port_addresses is not None:
        return f"{HEADER[family]} daddr @nodeport-ips"
    elsewhere = "ip daddr != 127.0.0.0/8" if family is Family.IPV4 else "ip6 daddr != ::1"
    return f"{elsewhere} {local}".rstrip()


def _one_of(words: Sequence[str]) -> str:
    """Match of any of these; a single one needs no set, which costs every connection less."""
    return f"{{ {', '.join(words)} }}" if len(words) > 1 else "".join(words)


def disjoint(cidrs: Iterable[str]) -> list[str]:
    """Return CIDRs of one family without overlaps, which interval sets refuse."""
    networks = [ipaddress.ip_network(cidr) for cidr in cidrs]
    return [str(network) for network in ipaddress.collapse_addresses(networks)]  # type: ignore[type-var]


def _lb_chains(family: Family) -> Iterator[tuple[str, tuple[str, ...]]]:
    for space, key, endpoints in _SPACES:
        for local in (False, True):
            for size in SIZES:
                draw = (
                    f"dnat {HEADER[family]} to {key.replace('{A}', HEADER[family])} . "
                    f"numgen random mod {size}{' offset 65536' if local else ''} map @{endpoints}"
                )
                yield from _lb_of_size(space, local, size, draw)


def _lb_of_size(
    space: str, local: bool, size: int, draw: str
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Chains that draw from so many slots."""
    name = lb_chain(space, "", local, size)
    if size == 1:
        yield name, (draw,)
    else:
        attempts = lb_chain(space, "try-", local, size)
        yield attempts, (draw,) * _DRAWS
        below = lb_chain(space, "", local, SIZES[SIZES.index(size) - 1])
        yield name, (f"jump {attempts}",) * _DRAWS + (f"goto {below}",)
