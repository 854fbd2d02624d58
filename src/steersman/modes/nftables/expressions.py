"""Rules as expressions of the nf_tables machine, for the rules that nft 1.0.6 cannot write.

Registers are the 32-bit ones (NFT_REG32_00 = 8 and up); an IPv6 address takes four.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from steersman.host.netlink import Request
from steersman.host.nlmsg import attr, be32, nested, text, u8
from steersman.model.names import Family, Protocol
from steersman.modes.nftables.affinity import LEARN_CHAIN, POOLS, base_of, members_name, memory_name
from steersman.modes.nftables.wire import flush_chain, new_base_chain, new_chain, new_rule

_FIRST = 8
_JUMP, _GOTO, _RETURN, _DROP = -3, -4, -5, 0
_NETWORK, _TRANSPORT = 1, 2
_META_L4PROTO = 16
_CT_STATE, _CT_STATUS, _CT_PROTO_DST, _CT_DST_IP, _CT_DST_IP6 = 0, 2, 12, 20, 22
_NEW, _DNAT = 0x8, 0x20
_PREROUTING, _INPUT, _OUTPUT, _POSTROUTING = 0, 1, 3, 4
_SOURCE_AT = {Family.IPV4: 12, Family.IPV6: 8}


def chain_requests(family: Family, chain: str, value: str) -> list[Request]:
    """Create or refill a ServicePort's chain from its value (affinity.py)."""
    kind, *words = value.split()
    rules = (_lookup_rules if kind == "lookup" else _learn_rules)(family, base_of(chain), words)
    return [
        new_chain(family, chain),
        flush_chain(family, chain),
        # The first rule's comment is the value, for reading back.
        *(
            new_rule(family, chain, *rule, comment="" if number else value)
            for number, rule in enumerate(rules)
        ),
    ]


def rule_count(value: str) -> int:
    """Number of rules that a value stands for."""
    kind, *words = value.split()
    return 2 + (words[1] != "-") if kind == "lookup" else len(words) - 1


def _lookup_rules(family: Family, base: str, words: Sequence[str]) -> list[list[bytes]]:
    protocol, mark, pool, draw = words
    number = bytes((Protocol(protocol.upper()).number,))
    memory = memory_name(base, pool == POOLS[True])
    width = _width(family)
    return [
        *([] if mark == "-" else [[_verdict(_JUMP, mark)]]),
        [
            _meta(_META_L4PROTO, _FIRST),
            _equal(_FIRST, number),
            _load_source(family, _FIRST),
            _lookup(memory, _FIRST, _FIRST),
            _dnat(family, _FIRST, _FIRST + width),
        ],
        [_verdict(_GOTO, draw)],
    ]


def _learn_rules(family: Family, base: str, words: Sequence[str]) -> list[list[bytes]]:
    seconds, *pools = words
    width = _width(family)
    client = _FIRST + width + 1
    return [
        [
            _load_destination(family, _FIRST),
            _load_port(_FIRST + width),
            _lookup(members_name(base, local), _FIRST),
            _load_source(family, client),
            _update(memory_name(base, local), client, _FIRST, int(seconds)),
        ]
        for local in (pool == POOLS[True] for pool in pools)
    ]


def learning_rules(family: Family) -> list[Request]:
    """The rules that find out, by the destination before DNAT, which ServicePort learns."""
    width = _width(family)
    service = [
        _original(family, _FIRST),
        _meta(_META_L4PROTO, _FIRST + width),
        _original_port(_FIRST + width + 1),
    ]
    node_port = [_meta(_META_L4PROTO, _FIRST), _original_port(_FIRST + 1)]
    translated = (*_has_flag(_CT_STATUS, _DNAT), _verdict(_JUMP, LEARN_CHAIN))
    return [
        flush_chain(family, LEARN_CHAIN),
        new_rule(family, LEARN_CHAIN, *service, _lookup("affinity-ips", _FIRST, 0)),
        new_rule(family, LEARN_CHAIN, *node_port, _lookup("affinity-nodeports", _FIRST, 0)),
        *_base_chains(family, LEARN_BASES, translated),
    ]


FIREWALL_CHECK, FIREWALL = "firewall-check", "firewall"
"""Chains in which load balancer IPs with source ranges are found, and sources let through."""


class Base(NamedTuple):
    """A chain that a hook calls, but not before some ServicePort needs it."""

    name: str
    kind: str
    hook: int
    priority: int


FIREWALL_BASES = (
    Base("filter-prerouting-pre-dnat", "filter", _PREROUTING, -110),
    Base("filter-output-pre-dnat", "filter", _OUTPUT, -110),
)
"""Where source ranges are checked: before any DNAT."""
LEARN_BASES = (
    Base("affinity-postrouting", "nat", _POSTROUTING, 99),
    Base("affinity-input", "nat", _INPUT, 99),
)
"""Where affinity is learned: behind DNAT, before masquerading; once per connection."""


def _base_chains(family: Family, bases: Iterable[Base], rule: Sequence[bytes]) -> Iterator[Request]:
    """Create or refill chains that have one rule, the same in each."""
    for base in bases:
        yield new_base_chain(family, *base)
        yield flush_chain(family, base.name)
        yield new_rule(family, base.name, *rule)


def firewall_rules(family: Family) -> list[Request]:
    """The rules that find what is for a load balancer IP with source ranges, and let some through.

    nft 1.0.6 swaps the bytes of the protocol for the lookup of a range, all two of the one that
    there is, which kernels refuse since 6.12.117.
    """
    width = _width(family)
    service = [
        _load_destination(family, _FIRST),
        _meta(_META_L4PROTO, _FIRST + width),
        _load_port(_FIRST + width + 1),
    ]
    found = _lookup("firewall-ips", _FIRST)
    source = _load_source(family, _FIRST + width + 2)
    allowed = _lookup("firewall-allowed", _FIRST)
    fresh = (*_has_flag(_CT_STATE, _NEW), _verdict(_JUMP, FIREWALL_CHECK))
    return [
        flush_chain(family, FIREWALL),
        new_rule(family, FIREWALL, *service, source, allowed, _verdict(_RETURN)),
        new_rule(family, FIREWALL, _verdict(_DROP)),
        flush_chain(family, FIREWALL_CHECK),
        new_rule(family, FIREWALL_CHECK, *service, found, _verdict(_GOTO, FIREWALL)),
        *_base_chains(family, FIREWALL_BASES, fresh),
    ]


def _width(family: Family) -> int:
    """Registers that an address takes."""
    return family.bits // 32


def _expression(name: str, *attributes: bytes) -> bytes:
    return nested(1, text(1, name), nested(2, *attributes))


def _payload(register: int, base: int, offset: int, size: int) -> bytes:
    return _expression("payload", be32(1, register), be32(2, base), be32(3, offset), be32(4, size))


def _load_source(family: Family, register: int) -> bytes:
    return _payload(register, _NETWORK, _SOURCE_AT[family], family.bits // 8)


def _load_destination(family: Family, register: int) -> bytes:
    size = family.bits // 8
    return _payload(register, _NETWORK, _SOURCE_AT[family] + size, size)


def _load_port(register: int) -> bytes:
    return _payload(register, _TRANSPORT, 2, 2)


def _meta(key: int, register: int) -> bytes:
    return _expression("meta", be32(2, key), be32(1, register))


def _equal(register: int, value: bytes) -> bytes:
    return _expression("cmp", be32(1, register), be32(2, 0), nested(3, attr(1, value)))


def _has_flag(key: int, flag: int) -> tuple[bytes, ...]:
    """Match connections by a flag of their state or status."""
    mask, zero = struct.pack("=I", flag), bytes(4)
    masked = (be32(1, _FIRST), be32(2, _FIRST), be32(3, 4), nested(4, attr(1, mask)))
    return (
        _expression("ct", be32(1, _FIRST), be32(2, key)),
        _expression("bitwise", *masked, nested(5, attr(1, zero))),
        _expression("cmp", be32(1, _FIRST), be32(2, 1), nested(3, attr(1, zero))),
    )


def _original(family: Family, register: int) -> bytes:
    """The destination that the client used."""
    key = _CT_DST_IP if family is Family.IPV4 else _CT_DST_IP6
    return _expression("ct", be32(1, register), be32(2, key), u8(3, 0))


def _original_port(register: int) -> bytes:
    return _expression("ct", be32(1, register), be32(2, _CT_PROTO_DST), u8(3, 0))


def _lookup(name: str, source: int, destination: int | None = None) -> bytes:
    into = () if destination is None else (be32(3, destination),)
    return _expression("lookup", text(1, name), be32(2, source), *into)


def _verdict(code: int, chain: str = "") -> bytes:
    verdict = nested(2, attr(1, struct.pack(">i", code)), text(2, chain) if chain else b"")
    return _expression("immediate", be32(1, 0), nested(2, verdict))


def _dnat(family: Family, address: int, port: int) -> bytes:
    number = 2 if family is Family.IPV4 else 10
    return _expression(
        "nat", be32(1, 1), be32(2, number), be32(3, address), be32(5, port), be32(7, 2)
    )


def _update(name: str, key: int, data: int, seconds: int) -> bytes:
    timeout = attr(6, struct.pack(">Q", seconds * 1000))
    return _expression("dynset", text(1, name), be32(3, 1), be32(4, key), be32(5, data), timeout)
