"""Rules that go in by netlink: chains of ServicePorts, and lazy chains. Pure.

nft 1.0.6 cannot write these rules, so they are built from expressions of the nf_tables machine.
Registers are the 32-bit ones (NFT_REG32_00 = 8 and up); an IPv6 address takes four.

**Chains of a ServicePort** with session affinity. The value of such a chain in the Ruleset
describes its rules (render.py), and is the comment of its first rule, to be read back from there:

    lookup tcp mark-cluster cluster lb-4     mark; send a client with an entry on; else choose
    learn 10800 cluster local                write the client's entry in the map of each pool

**Lazy chains** stay empty, or do not exist, until the first ServicePort needs them. Every packet,
or every new connection, passes the chains of hooks, and each one costs it 0.1 us even if there is
nothing to find. Once active, they stay.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from steersman.host.nlmsg import Request, attr, be32, nested, text, u8
from steersman.model.names import Family, Protocol
from steersman.model.ruleset import Ruleset
from steersman.modes.nftables.layout import (
    LEARN_CHAIN,
    POOLS,
    Kind,
    affinity_map_name,
    base_name_of,
    family_of,
    kind_of,
    members_set_name,
)
from steersman.modes.nftables.wire import flush_chain, new_base_chain, new_chain, new_rule

_FIRST = 8
_JUMP, _GOTO, _RETURN, _DROP = -3, -4, -5, 0
_NETWORK, _TRANSPORT = 1, 2
_META_L4PROTO = 16
_CT_STATE, _CT_STATUS, _CT_PROTO_DST = 0, 2, 12
_CT_DST_IP = {Family.IPV4: 20, Family.IPV6: 22}
_NEW, _DNAT = 0x8, 0x20
_PREROUTING, _INPUT, _OUTPUT, _POSTROUTING = 0, 1, 3, 4


# -- chains of a ServicePort ----------------------------------------------------------------


def chain_requests(family: Family, chain: str, value: str) -> list[Request]:
    """Return requests that create or refill a ServicePort's chain, given its value."""
    kind, *words = value.split()
    base, width = base_name_of(chain), _width(family)
    rules: list[list[bytes]] = []
    if kind == "lookup":
        protocol, mark, pool, lb = words
        number = bytes((Protocol(protocol.upper()).number,))
        if mark != "-":
            rules.append([_verdict(_JUMP, mark)])
        # meta l4proto tcp dnat to ip saddr map @affinity-...; other clients go on
        rules.append(
            [
                _meta(_META_L4PROTO, _FIRST),
                _expression("cmp", be32(1, _FIRST), be32(2, 0), nested(3, attr(1, number))),
                _load(family, "saddr", _FIRST),
                _lookup(affinity_map_name(base, pool == POOLS[True]), _FIRST, _FIRST),
                # NFT_NAT_DNAT, family, registers; flag 2: NF_NAT_RANGE_PROTO_SPECIFIED
                _expression(
                    "nat",
                    be32(1, 1),
                    be32(2, 2 if family is Family.IPV4 else 10),
                    be32(3, _FIRST),  # the address
                    be32(5, _FIRST + width),  # the port
                    be32(7, 2),
                ),
            ]
        )
        rules.append([_verdict(_GOTO, lb)])
    else:
        seconds, *pools = words
        timeout = attr(6, struct.pack(">Q", int(seconds) * 1000))
        client = _FIRST + width + 1
        for local in (pool == POOLS[True] for pool in pools):
            # ip daddr . th dport @members-...
            #     update @affinity-... { ip saddr timeout 3h : ip daddr . th dport }
            entries = text(1, affinity_map_name(base, local))
            update = (entries, be32(3, 1), be32(4, client), be32(5, _FIRST), timeout)
            rules.append(
                [
                    _load(family, "daddr", _FIRST),
                    _load(family, "dport", _FIRST + width),
                    _lookup(members_set_name(base, local), _FIRST),
                    _load(family, "saddr", client),
                    _expression("dynset", *update),
                ]
            )
    return [
        new_chain(family, chain),
        flush_chain(family, chain),
        *(
            new_rule(family, chain, *rule, comment="" if number else value)
            for number, rule in enumerate(rules)
        ),
    ]


def rule_count(value: str) -> int:
    """Return the number of rules in a chain with this value."""
    kind, *words = value.split()
    return 2 + (words[1] != "-") if kind == "lookup" else len(words) - 1


# -- lazy chains ----------------------------------------------------------------------------


class BaseChain(NamedTuple):
    """A lazy chain that a hook calls."""

    name: str
    kind: str
    hook: int
    priority: int


FIREWALL_CHECK, FIREWALL = "firewall-check", "firewall"
"""Chains that find load balancer IPs with source ranges, and let allowed sources pass."""
FIREWALL_BASES = (
    BaseChain("filter-prerouting-pre-dnat", "filter", _PREROUTING, -110),
    BaseChain("filter-output-pre-dnat", "filter", _OUTPUT, -110),
)
"""Hooks at which source ranges are checked: before any DNAT."""
LEARN_BASES = (
    BaseChain("affinity-postrouting", "nat", _POSTROUTING, 99),
    BaseChain("affinity-input", "nat", _INPUT, 99),
)
"""Hooks at which affinity is learned: behind DNAT, before masquerading; once per connection."""


def learning_rules(family: Family) -> list[Request]:
    """Return the rules that find the ServicePort that learns, by the destination before DNAT."""
    width = _width(family)
    # ct original ip daddr . meta l4proto . ct original proto-dst vmap @affinity-ips
    service = [
        _original(_CT_DST_IP[family], _FIRST),
        _meta(_META_L4PROTO, _FIRST + width),
        _original(_CT_PROTO_DST, _FIRST + width + 1),
    ]
    # meta l4proto . ct original proto-dst vmap @affinity-nodeports
    node_port = [_meta(_META_L4PROTO, _FIRST), _original(_CT_PROTO_DST, _FIRST + 1)]
    # ct status dnat jump affinity-learn
    translated = (*_has_flag(_CT_STATUS, _DNAT), _verdict(_JUMP, LEARN_CHAIN))
    return [
        flush_chain(family, LEARN_CHAIN),
        new_rule(family, LEARN_CHAIN, *service, _lookup("affinity-ips", _FIRST, 0)),
        new_rule(family, LEARN_CHAIN, *node_port, _lookup("affinity-nodeports", _FIRST, 0)),
        *_base_chains(family, LEARN_BASES, translated),
    ]


def firewall_rules(family: Family) -> list[Request]:
    """Return the rules that check the sources of packets to VIPs with source ranges.

    nft 1.0.6 swaps the bytes of the protocol for the lookup of a range, both bytes of the one that
    there is; kernels since 6.12.117 reject that.
    """
    width = _width(family)
    # ip daddr . meta l4proto . th dport, with @firewall-ips or (. ip saddr) @firewall-allowed
    service = [
        _load(family, "daddr", _FIRST),
        _meta(_META_L4PROTO, _FIRST + width),
        _load(family, "dport", _FIRST + width + 1),
    ]
    found = _lookup("firewall-ips", _FIRST)
    source = _load(family, "saddr", _FIRST + width + 2)
    allowed = _lookup("firewall-allowed", _FIRST)
    # ct state new jump firewall-check
    fresh = (*_has_flag(_CT_STATE, _NEW), _verdict(_JUMP, FIREWALL_CHECK))
    return [
        flush_chain(family, FIREWALL),
        new_rule(family, FIREWALL, *service, source, allowed, _verdict(_RETURN)),
        new_rule(family, FIREWALL, _verdict(_DROP)),
        flush_chain(family, FIREWALL_CHECK),
        new_rule(family, FIREWALL_CHECK, *service, found, _verdict(_GOTO, FIREWALL)),
        *_base_chains(family, FIREWALL_BASES, fresh),
    ]


def _base_chains(
    family: Family, bases: Iterable[BaseChain], rule: Iterable[bytes]
) -> Iterator[Request]:
    """Create or refill chains that all have the same single rule."""
    for base in bases:
        yield new_base_chain(family, *base)
        yield flush_chain(family, base.name)
        yield new_rule(family, base.name, *rule)


class LazyChains(NamedTuple):
    """Lazy chains that become active together."""

    kinds: tuple[Kind, ...]
    """Kinds of elements that need them: their rules look these up."""
    rules: Callable[[Family], list[Request]]
    """Returns the requests that make them active."""
    sizes: Mapping[str, int]
    """Number of rules in each chain when active."""


LAZY: Mapping[str, LazyChains] = {
    LEARN_CHAIN: LazyChains(
        (Kind.AFFINITY_IPS, Kind.AFFINITY_NODEPORTS),
        learning_rules,
        {LEARN_CHAIN: 2, **{base.name: 1 for base in LEARN_BASES}},
    ),
    FIREWALL_CHECK: LazyChains(
        (Kind.FIREWALL_IPS,),
        firewall_rules,
        {FIREWALL_CHECK: 1, FIREWALL: 2, **{base.name: 1 for base in FIREWALL_BASES}},
    ),
}
"""By the name of the first chain."""
LAZY_CHAINS = frozenset(chain for lazy in LAZY.values() for chain in lazy.sizes)
"""Names of all these chains."""
_NEEDED_BY = {int(kind): chain for chain, lazy in LAZY.items() for kind in lazy.kinds}


def needed_lazy(objects: Ruleset) -> set[tuple[Family, str]]:
    """Return the lazy chains that these objects need, by family and first chain."""
    kinds = _NEEDED_BY
    return {(family_of(key), kinds[kind]) for key in objects if (kind := kind_of(key)) in kinds}


def active_lazy(chains: Iterable[str]) -> set[str]:
    """Return the lazy chains that have all their rules, given the chain of every rule."""
    counts = Counter(chains)
    return {
        chain
        for chain, lazy in LAZY.items()
        if all(counts[name] == size for name, size in lazy.sizes.items())
    }


def in_force(objects: dict[bytes, bytes], active: Iterable[str]) -> dict[bytes, bytes]:
    """Return the objects without those that only inactive chains look up."""
    inactive = {kind for chain in LAZY.keys() - set(active) for kind in LAZY[chain].kinds}
    return {key: value for key, value in objects.items() if kind_of(key) not in inactive}


# -- expressions ----------------------------------------------------------------------------

# An expression has a name and a nest of attributes, NFTA_PAYLOAD_..., NFTA_META_... and so on in
# linux/netfilter/nf_tables.h. It reads and writes registers.


def _width(family: Family) -> int:
    """Return the number of registers that an address takes."""
    return family.bits // 32


def _expression(name: str, *attributes: bytes) -> bytes:
    return nested(1, text(1, name), nested(2, *attributes))


def _load(family: Family, field: str, register: int) -> bytes:
    """Load a field of the packet, as nft spells it: saddr, daddr or dport."""
    size = family.bits // 8
    source = 12 if family is Family.IPV4 else 8  # offset in the IP header; the destination follows
    base, offset, size = {
        "saddr": (_NETWORK, source, size),
        "daddr": (_NETWORK, source + size, size),
        "dport": (_TRANSPORT, 2, 2),
    }[field]
    return _expression("payload", be32(1, register), be32(2, base), be32(3, offset), be32(4, size))


def _meta(key: int, register: int) -> bytes:
    return _expression("meta", be32(2, key), be32(1, register))


def _has_flag(key: int, flag: int) -> tuple[bytes, ...]:
    """Return expressions that match connections by a flag of their state or status."""
    # The numbers are NFTA_BITWISE_... and NFTA_CMP_...: (register & mask) ^ 0 != 0.
    mask, zero = struct.pack("=I", flag), bytes(4)
    masked = (be32(1, _FIRST), be32(2, _FIRST), be32(3, 4), nested(4, attr(1, mask)))
    return (
        _expression("ct", be32(1, _FIRST), be32(2, key)),
        _expression("bitwise", *masked, nested(5, attr(1, zero))),
        _expression("cmp", be32(1, _FIRST), be32(2, 1), nested(3, attr(1, zero))),
    )


def _original(key: int, register: int) -> bytes:
    """Load a field of the packet as it was before DNAT."""
    return _expression("ct", be32(1, register), be32(2, key), u8(3, 0))


def _lookup(name: str, source: int, destination: int | None = None) -> bytes:
    into = () if destination is None else (be32(3, destination),)
    return _expression("lookup", text(1, name), be32(2, source), *into)


def _verdict(code: int, chain: str = "") -> bytes:
    verdict = nested(2, attr(1, struct.pack(">i", code)), text(2, chain) if chain else b"")
    return _expression("immediate", be32(1, 0), nested(2, verdict))  # 0: NFT_REG_VERDICT
