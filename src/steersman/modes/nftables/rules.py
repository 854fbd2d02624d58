"""Rules that go in by netlink: chains of ServicePorts, and lazy chains. Pure.

nft 1.0.6 cannot write these rules, so they are built from expressions of the nf_tables machine.

**Chains of a ServicePort** with session affinity. The value of such a chain in the Ruleset
describes its rules (render.py), and is the comment of its first rule, to be read back from there:

    lookup tcp mark-cluster cluster lb-4     mark; send a client with an entry on; else choose
    learn 10800 cluster local                write the client's entry in the map of each pool

**Lazy chains** are empty, or do not exist, as long as no ServicePort needs them. Every packet,
or every new connection, passes the chains of hooks, and each one costs it 0.1 us even if there is
nothing to find.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from steersman.host.nlmsg import Request, attr, be32, text
from steersman.model.names import Family, Protocol
from steersman.modes.nftables.layout import (
    LEARN_CHAIN,
    POOLS,
    Kind,
    base_name_of,
    own_set_name,
)
from steersman.modes.nftables.wire import OURS
from steersman.netfilter.nft.expressions import (
    CT_DST_IP,
    CT_PROTO_DST,
    CT_STATE,
    CT_STATUS,
    DROP,
    GOTO,
    JUMP,
    META_L4PROTO,
    REGISTER,
    RETURN,
    dnat,
    expression,
    load_ct,
    load_field,
    load_meta,
    load_original,
    lookup,
    meta_is,
    register_has,
    verdict,
    width,
)
from steersman.netfilter.nft.wire import (
    INPUT,
    OUTPUT,
    POSTROUTING,
    PREROUTING,
    delete_chain,
    flush_chain,
    new_base_chain,
    new_chain,
    new_rule,
)

_NEW, _DNAT = 0x8, 0x20  # of the state and the status of a connection
_UPDATE = 1  # NFT_DYNSET_OP_UPDATE


def chain_requests(family: Family, chain: str, value: str) -> list[Request]:
    """Return requests that create or refill a ServicePort's chain, given its value."""
    kind, *words = value.split()
    base = base_name_of(chain)
    rules: list[list[bytes]] = []
    if kind == "lookup":
        protocol, mark, pool, lb = words
        if mark != "-":
            rules.append([verdict(JUMP, mark)])
        # meta l4proto tcp dnat to ip saddr map @affinity-...; other clients go on
        rules.append(
            [
                *meta_is(META_L4PROTO, Protocol(protocol.upper()).number),
                load_field(family, "saddr"),
                lookup(
                    own_set_name(Kind.AFFINITY, base, pool == POOLS[True]), destination=REGISTER
                ),
                dnat(family, REGISTER, REGISTER + width(family)),
            ]
        )
        rules.append([verdict(GOTO, lb)])
    else:
        seconds, *pools = words
        client = REGISTER + width(family) + 1  # behind the endpoint
        timeout = attr(6, struct.pack(">Q", int(seconds) * 1000))
        for local in (pool == POOLS[True] for pool in pools):
            # ip daddr . th dport @members-...
            #     update @affinity-... { ip saddr timeout 3h : ip daddr . th dport }
            entries = own_set_name(Kind.AFFINITY, base, local)
            learn = text(1, entries), be32(3, _UPDATE), be32(4, client), be32(5, REGISTER), timeout
            rules.append(
                [
                    load_field(family, "daddr"),
                    load_field(family, "dport", REGISTER + width(family)),
                    lookup(own_set_name(Kind.MEMBERS, base, local)),
                    load_field(family, "saddr", client),
                    expression("dynset", *learn),
                ]
            )
    return [
        new_chain(OURS[family], chain),
        flush_chain(OURS[family], chain),
        *(
            new_rule(OURS[family], chain, *rule, comment="" if number else value)
            for number, rule in enumerate(rules)
        ),
    ]


def rule_count(value: str) -> int:
    """Return the number of rules in a chain with this value."""
    kind, *words = value.split()
    return 2 + (words[1] != "-") if kind == "lookup" else len(words) - 1


class BaseChain(NamedTuple):
    """A lazy chain that a hook calls."""

    name: str
    kind: str
    hook: int
    priority: int


FIREWALL_CHECK, FIREWALL = "firewall-check", "firewall"
"""Chains that find load balancer IPs with source ranges, and let allowed sources pass."""
FIREWALL_BASES = (
    BaseChain("filter-prerouting-pre-dnat", "filter", PREROUTING, -110),
    BaseChain("filter-output-pre-dnat", "filter", OUTPUT, -110),
)
"""Hooks at which source ranges are checked: before any DNAT."""
LEARN_BASES = (
    BaseChain("affinity-postrouting", "nat", POSTROUTING, 99),
    BaseChain("affinity-input", "nat", INPUT, 99),
)
"""Hooks at which affinity is learned: behind DNAT, before masquerading; once per connection."""


def learning_rules(family: Family) -> list[Request]:
    """Return the rules that find the ServicePort that learns, by the destination before DNAT."""
    table, behind = OURS[family], REGISTER + width(family)
    # ct original ip daddr . meta l4proto . ct original proto-dst vmap @affinity-ips
    service = [
        load_original(CT_DST_IP[family]),
        load_meta(META_L4PROTO, behind),
        load_original(CT_PROTO_DST, behind + 1),
    ]
    # meta l4proto . ct original proto-dst vmap @affinity-nodeports
    node_port = [load_meta(META_L4PROTO), load_original(CT_PROTO_DST, REGISTER + 1)]
    # ct status dnat jump affinity-learn
    translated = (load_ct(CT_STATUS), *register_has(_DNAT), verdict(JUMP, LEARN_CHAIN))
    return [
        flush_chain(table, LEARN_CHAIN),
        new_rule(table, LEARN_CHAIN, *service, lookup("affinity-ips", destination=0)),
        new_rule(table, LEARN_CHAIN, *node_port, lookup("affinity-nodeports", destination=0)),
        *_base_chains(family, LEARN_BASES, translated),
    ]


def firewall_rules(family: Family) -> list[Request]:
    """Return the rules that check the sources of packets to VIPs with source ranges.

    nft 1.0.6 swaps the bytes of the protocol for the lookup of a range, both bytes of the one that
    there is; kernels since 6.12.117 reject that.
    """
    table, behind = OURS[family], REGISTER + width(family)
    # ip daddr . meta l4proto . th dport, with @firewall-ips or (. ip saddr) @firewall-allowed
    service = [
        load_field(family, "daddr"),
        load_meta(META_L4PROTO, behind),
        load_field(family, "dport", behind + 1),
    ]
    found = lookup("firewall-ips")
    source = load_field(family, "saddr", behind + 2)
    allowed = lookup("firewall-allowed")
    # ct state new jump firewall-check
    fresh = (load_ct(CT_STATE), *register_has(_NEW), verdict(JUMP, FIREWALL_CHECK))
    return [
        flush_chain(table, FIREWALL),
        new_rule(table, FIREWALL, *service, source, allowed, verdict(RETURN)),
        new_rule(table, FIREWALL, verdict(DROP)),
        flush_chain(table, FIREWALL_CHECK),
        new_rule(table, FIREWALL_CHECK, *service, found, verdict(GOTO, FIREWALL)),
        *_base_chains(family, FIREWALL_BASES, fresh),
    ]


def _base_chains(
    family: Family, bases: Iterable[BaseChain], rule: Iterable[bytes]
) -> Iterator[Request]:
    """Create or refill chains that all have the same single rule."""
    for base in bases:
        yield new_base_chain(OURS[family], *base)
        yield flush_chain(OURS[family], base.name)
        yield new_rule(OURS[family], base.name, *rule)


class LazyChains(NamedTuple):
    """Lazy chains that become active together."""

    rules: Callable[[Family], list[Request]]
    """Returns the requests that make them active."""
    sizes: Mapping[str, int]
    """Number of rules in each chain when active."""
    bases: tuple[BaseChain, ...]
    """Those of the chains that exist only then."""


LAZY: Mapping[str, LazyChains] = {
    LEARN_CHAIN: LazyChains(
        learning_rules, {LEARN_CHAIN: 2, **{base.name: 1 for base in LEARN_BASES}}, LEARN_BASES
    ),
    FIREWALL_CHECK: LazyChains(
        firewall_rules,
        {FIREWALL_CHECK: 1, FIREWALL: 2, **{base.name: 1 for base in FIREWALL_BASES}},
        FIREWALL_BASES,
    ),
}
"""By the name of the first chain."""
LAZY_CHAINS = frozenset(chain for lazy in LAZY.values() for chain in lazy.sizes)
"""Names of all these chains."""


def removal_of_lazy(family: Family, first: str) -> list[Request]:
    """Return the requests that make lazy chains inactive, given the first one."""
    table, lazy = OURS[family], LAZY[first]
    return [
        *(flush_chain(table, chain) for chain in lazy.sizes),
        *(delete_chain(table, base.name) for base in lazy.bases),
    ]


def active_lazy(chains: Iterable[str]) -> set[str]:
    """Return the lazy chains that have all their rules, given the chain of every rule."""
    counts = Counter(chains)
    return {
        chain
        for chain, lazy in LAZY.items()
        if all(counts[name] == size for name, size in lazy.sizes.items())
    }
