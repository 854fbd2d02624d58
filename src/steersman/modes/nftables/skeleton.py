"""The fixed part of a table as nft text: sets, chains and rules that no Service changes. Pure.

Two texts per family. The foundation is always the same, and is loaded into an empty table only: nft
1.0.6 cannot refer to an existing map if its type is `typeof ... th dport`. The rules depend on
the node's settings; loading them refills their chains, in one transaction.

    nat-prerouting, nat-output    service-ips -> [by-source ->] [marking] lb-16 -> try-16 -> dnat
    filter-forward, -output       new connections that were not translated: reject or drop
    nat-postrouting               masquerade packets with the mark, and hairpins

An lb- chain chooses a slot at random: sixteen times from the smallest size that holds all
endpoints, as some slots may be empty; then from the next smaller size, which has no empty slot
(README).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from steersman.model.names import Family
from steersman.model.plan import FamilySettings, LocalDetector, NodeSettings
from steersman.modes.nftables.layout import (
    LOCAL_SLOTS,
    MAP_GROUPS,
    SETS,
    SIZES,
    TABLE,
    Form,
    SetSpec,
    lb_chain,
)

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
"""Rules that set the mark, by the marking in the name of an lb- chain."""


_CLUSTER_IP = "{A} daddr @cluster-ips goto cluster-ip-refused"
_NO_ENDPOINT = f"{_SERVICE} vmap @no-endpoint-services reject"
_UNASSIGNED = "{A} daddr {CIDRS} drop"
_FOUNDATION: Mapping[str, tuple[str, ...]] = {
    "filter-forward": ("ct state new jump forward-check",),
    "filter-output": ("ct state new jump output-check",),
    # A clusterIP here was not translated: another port of it, or no endpoint to send it to.
    # A connection that conntrack knows already began while the rules were missing. Its client sends
    # again, until the entry is deleted (behaviour 12) and the rules translate it.
    "cluster-ip-refused": (
        f"{_SERVICE} vmap @no-endpoint-services",
        "ct status confirmed drop",
        "reject",
    ),
    # For destinations at which the classes of sources differ.
    "by-source-pod": (f"{_SERVICE} vmap @pod-service-ips",),
    "by-source-node": (f"{_SERVICE} vmap @node-service-ips",),
    "np-by-source-pod": (f"{_NODEPORT} vmap @pod-nodeports",),
    "np-by-source-node": (f"{_NODEPORT} vmap @node-nodeports",),
    # Empty until some ServicePort needs them: every new connection passes here (rules.py).
    "affinity-learn": (),
    "firewall-check": (),
    "firewall": (),
}
"""Rules by chain that are the same for all settings."""
_DISPATCH = (
    f"{_SERVICE} vmap @service-ips",
    f"{{NPL}} {_NODEPORT} vmap @service-nodeports",
)
_RULES: Mapping[str, tuple[str, ...]] = {
    # New connections to destinations of Services that were not translated.
    "forward-check": (_CLUSTER_IP, _NO_ENDPOINT, _UNASSIGNED),
    "output-check": (
        _CLUSTER_IP,
        # A packet to a clusterIP that we have translated may go to its endpoint.
        "ct status dnat ct original {A} daddr @cluster-ips return",
        f"{{NPL}} {_NODEPORT} vmap @no-endpoint-nodeports reject",
        _NO_ENDPOINT,
        _UNASSIGNED,
    ),
    # In a chain of type nat, only the first packet of a connection passes, none from the node.
    "nat-input": (f"{{NP}} {_NODEPORT} vmap @no-endpoint-nodeports reject", _NO_ENDPOINT),
    "nat-prerouting": _DISPATCH,
    "nat-output": _DISPATCH,
    # Only connections that the chains above or below have marked, and hairpins.
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
    # Variants of the lb- chains that set the mark first.
    **{
        lb_chain(group, marking, local, size): (mark, f"goto {lb_chain(group, '', local, size)}")
        for group, local, size in product(("", "np-"), (False, True), SIZES)
        for marking, mark in _MARKINGS.items()
    },
}
"""Rules by chain; a rule with a placeholder that is empty (no detector, no CIDRs) is left out."""
RULE_CHAINS = frozenset(_RULES)
"""Chains that depend on the settings; other chains without a slash in their name are the
foundation."""

_TRIES = 4
"""Rules in a try- chain, and jumps to it: sixteen choices in all."""


def table_name(family: Family) -> str:
    """Return the family and the name of our table, as nft wants them."""
    return f"{HEADER[family]} {TABLE}"


def foundation(family: Family) -> str:
    """Return the nft commands that fill one family's empty table."""
    table = table_name(family)
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
    """Return the nft commands that refill the chains that depend on the settings."""
    own = settings.family(family)
    cidrs = disjoint(own.service_cidrs)
    words = {
        "{A}": HEADER[family],
        "{MARK}": f"{settings.masquerade_mark:#x}",
        "{POD}": _from_pod(own.detector, family, ""),
        "{NOTPOD}": _from_pod(own.detector, family, "!= "),
        "{NPL}": _serves_node_ports(own, family, local="fib daddr type local"),
        "{NP}": _serves_node_ports(own, family),
        # A single CIDR needs no set, and costs every connection less.
        "{CIDRS}": f"{{ {', '.join(cidrs)} }}" if len(cidrs) > 1 else "".join(cidrs),
    }
    filled = {name: _filled(each, words) for name, each in _RULES.items()}
    return _chains(table_name(family), filled)


def _chains(table: str, chains: Mapping[str, Iterable[str]]) -> str:
    lines = [f"add chain {table} {name}" for name in chains if name not in _BASE_NAMES]
    lines += [f"flush chain {table} {name}" for name in chains]
    lines += [f"add rule {table} {name} {rule}" for name, each in chains.items() for rule in each]
    return "\n".join(lines) + "\n"


def _declaration(spec: SetSpec, table: str, family: Family) -> str:
    """Declare a set or map. A slot has no type of its own, only `typeof` an expression."""
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


def _filled(templates: Iterable[str], words: Mapping[str, str]) -> list[str]:
    """Replace placeholders in rules; leave out a rule with an empty one."""
    rules = []
    for template in templates:
        rule, used = template, [word for word in words if word in template]
        if all(words[word] for word in used):
            for word in used:
                rule = rule.replace(word, words[word])
            rules.append(rule)
    return rules


def _from_pod(detector: LocalDetector, family: Family, negation: str) -> str:
    """Return the match of packets from local pods; "" without a detector."""
    if detector.cidr:
        return f"{HEADER[family]} saddr {negation}{detector.cidr}"
    if detector.interface:
        return f'iifname {negation}"{detector.interface}"'
    if detector.interface_prefix:
        return f'iifname {negation}"{detector.interface_prefix}*"'
    return ""


def _serves_node_ports(own: FamilySettings, family: Family, local: str = "") -> str:
    """Return the match of addresses that serve node ports."""
    if own.node_port_addresses is not None:
        return f"{HEADER[family]} daddr @nodeport-ips"
    elsewhere = "ip daddr != 127.0.0.0/8" if family is Family.IPV4 else "ip6 daddr != ::1"
    return f"{elsewhere} {local}".rstrip()


def disjoint(cidrs: Iterable[str]) -> list[str]:
    """Return CIDRs of one family without overlaps, which interval sets reject."""
    networks = [ipaddress.ip_network(cidr) for cidr in cidrs]
    return [str(network) for network in ipaddress.collapse_addresses(networks)]  # type: ignore[type-var]


def _lb_chains(family: Family) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the chains that choose an endpoint, with their rules."""
    header = HEADER[family]
    for group, local in product(MAP_GROUPS, (False, True)):
        key, endpoints, below = _NODEPORT if group.name else _SERVICE, SETS[group.endpoints], ""
        for size in SIZES:
            name = lb_chain(group.name, "", local, size)
            slot = f"numgen random mod {size}{f' offset {LOCAL_SLOTS}' if local else ''}"
            choose = f"dnat {header} to {key.replace('{A}', header)} . {slot} map @{endpoints.name}"
            if size == 1:
                yield name, (choose,)
            else:
                tries = lb_chain(group.name, "try-", local, size)
                yield tries, (choose,) * _TRIES
                yield name, (f"jump {tries}",) * _TRIES + (f"goto {below}",)
            below = name
