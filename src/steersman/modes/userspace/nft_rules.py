"""The text of portal rules for nft: two maps in a table of ours in each family. Pure.

A packet's destination is looked up once, however many portals there are: in `portals` for the
listener that it leads to, in `guards` for what happens to new connections. A portal that is for
some only has a chain of its own, to which `guards` goes.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from steersman.model.names import Family
from steersman.model.plan import LocalDetector, Verdict
from steersman.modes.userspace.names import Portal
from steersman.proxy.listeners import FrontendKey

TABLE = "kube-portals"
PORTALS, GUARDS = "portals", "guards"
_WORDS = {Family.IPV4: "ip", Family.IPV6: "ip6"}
_NAME_LENGTH = 100  # bytes; nft takes comments up to 128
_NOT_BY_PORTAL = "ct status & dnat != dnat drop"
_BASE = {
    "refuse": ("", "reject"),
    "proxied": ("", _NOT_BY_PORTAL),
    "firewall": ("", "{words} daddr . meta l4proto . th dport vmap @guards"),
    "container": (
        "type nat hook prerouting priority dstnat; policy accept;",
        "dnat {words} to {words} daddr . meta l4proto . th dport map @portals",
    ),
    "host": (
        "type nat hook output priority -100; policy accept;",
        "dnat {words} to {words} daddr . meta l4proto . th dport map @portals",
    ),
    "input": (
        "type filter hook input priority filter; policy accept;",
        "ct state new jump firewall",
    ),
    "forward": (
        "type filter hook forward priority filter; policy accept;",
        "ct state new jump firewall",
    ),
    "output": (
        "type filter hook output priority filter; policy accept;",
        "ct state new jump firewall",
    ),
}
"""Chains of one rule each: how they are hooked, and the rule."""
_BLOCK = re.compile(r"^\t(chain|map) (\S+) {\n(.*?)^\t}", re.MULTILINE | re.DOTALL)
_RULE = re.compile(r'^\t\t(?!type )(?:.*comment "(.*)"|.*)$', re.MULTILINE)
_ELEMENTS = re.compile(r"elements = {(.*?)}", re.DOTALL)


class Element(NamedTuple):
    """One of a map, as `nft -nn list` prints it."""

    map: str
    text: str
    """Key and value, with a colon between."""

    @property
    def key(self) -> str:
        """What is looked up."""
        return self.text.partition(" : ")[0]


class Chain(NamedTuple):
    """A chain, told by the comments of its rules: they hold a checksum of what the rules say."""

    name: str
    comments: tuple[str, ...]
    rules: tuple[str, ...] = ()
    """What they say, without the comments; () where it was read."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self[:2] == other[:2]

    def __hash__(self) -> int:
        return hash(self[:2])


Object = Element | Chain


def table_of(family: Family) -> str:
    """The table of a family, as nft names it."""
    return f"{_WORDS[family]} {TABLE}"


def remove(family: Family) -> str:
    """The input of nft that removes the table, there or not."""
    return f"table {table_of(family)}\ndelete table {table_of(family)}\n"


def base(family: Family) -> frozenset[Object]:
    """The chains that there are without any portal."""
    words = _WORDS[family]
    return frozenset(_chain(name, [rule.format(words=words)]) for name, (_, rule) in _BASE.items())


def objects(key: FrontendKey, portal: Portal, port: int) -> frozenset[Object]:
    """What a portal consists of.

    Args:
        key: the destination.
        portal: what happens there.
        port: the port that its listener is bound to; 0 for none.
    """
    if portal.verdict is not Verdict.FORWARD:
        verdict = "drop" if portal.verdict is Verdict.DROP else "goto refuse"
        return frozenset((_element(GUARDS, key, key.address, key.port, verdict),))
    found: set[Object] = set()
    address, at = (portal.host, port) if portal.host else (key.address, key.port)
    if portal.host:
        found.add(_element(PORTALS, key, key.address, key.port, f"{address} . {at}"))
    rules = list(_guarding(key, portal))
    if rules == [_NOT_BY_PORTAL]:
        found.add(_element(GUARDS, key, address, at, "goto proxied"))
    elif rules:
        name = f"to-{key.protocol.lower()}-{address.replace(':', '_')}-{at}"
        found.add(_chain(name, rules, portal.name))
        found.add(_element(GUARDS, key, address, at, f"goto {name}"))
    return frozenset(found)


def _element(where: str, key: FrontendKey, address: str, port: int, value: str) -> Element:
    return Element(where, f"{address} . {key.protocol.number} . {port} : {value}")


def _chain(name: str, rules: Iterable[str], remark: str = "") -> Chain:
    rules = tuple(rules)
    sums = (hashlib.blake2b(rule.encode(), digest_size=8).hexdigest() for rule in rules)
    comments = (f"{each} {remark[:_NAME_LENGTH]}".rstrip() for each in sums)
    return Chain(name, tuple(comments), rules)


def _guarding(key: FrontendKey, portal: Portal) -> Iterator[str]:
    """Who is kept from the listener: those who come not by the portal, and those not wanted."""
    words = _WORDS[key.family]
    if portal.host:
        yield _NOT_BY_PORTAL
    if portal.insiders is not None:
        yield f"{_no_pod(words, portal.insiders)}fib saddr type != local drop"
    if portal.source_ranges:
        yield f"{words} saddr != {{ {', '.join(_united(portal.source_ranges))} }} drop"


def _no_pod(words: str, detector: LocalDetector) -> str:
    if detector.cidr:
        return f"{words} saddr != {detector.cidr} "
    if detector.interface:
        return f'iifname != "{detector.interface}" '
    return f'iifname != "{detector.interface_prefix}*" ' if detector.interface_prefix else ""


def _united(cidrs: Iterable[str]) -> Iterable[str]:
    """The same addresses without overlaps, which nft refuses."""
    networks = [ipaddress.ip_network(cidr) for cidr in cidrs]
    return map(str, ipaddress.collapse_addresses(networks))  # type: ignore[type-var]  # one family


def parse(listed: str) -> frozenset[Object]:
    """Read what `nft -nn list table` printed."""
    found: set[Object] = set()
    for kind, name, body in _BLOCK.findall(listed):
        if kind == "chain":
            found.add(Chain(name, tuple(_RULE.findall(body))))
        for elements in _ELEMENTS.findall(body):
            found.update(Element(name, " ".join(text.split())) for text in elements.split(","))
    return frozenset(found)


def change(family: Family, removed: Iterable[Object], added: Iterable[Object]) -> str:
    """The input of nft that takes objects away and puts others there, in one transaction."""
    removed, added = set(removed), set(added)
    gone, new = removed - added, added - removed
    chains = [each for each in new if isinstance(each, Chain)]
    kept = {chain.name for chain in chains}
    return "".join(
        (
            *_elements("delete", family, gone),
            *(_cleared(family, each) for each in chains),
            *_elements("add", family, new),
            *(
                f"flush chain {table_of(family)} {each.name}\n"
                f"delete chain {table_of(family)} {each.name}\n"
                for each in gone
                if isinstance(each, Chain) and each.name not in kept
            ),
        )
    )


def whole(family: Family, added: Iterable[Object]) -> str:
    """The input of nft that makes the table afresh, with these objects beside the base."""
    kind = f"{'ipv4' if family is Family.IPV4 else 'ipv6'}_addr"
    key = f"{kind} . inet_proto . inet_service"
    lines = [
        remove(family).rstrip(),
        f"table {table_of(family)} {{",
        f" map {PORTALS} {{ type {key} : {kind} . inet_service; }}",
        f" map {GUARDS} {{ type {key} : verdict; }}",
        *(f" chain {name} {{ {hook} }}" for name, (hook, _) in _BASE.items()),
        "}",
        "",
    ]
    chains = sorted(each for each in base(family) if isinstance(each, Chain))
    return "\n".join(lines) + "".join(_rules(family, c) for c in chains) + change(family, (), added)


def _elements(verb: str, family: Family, some: Iterable[Object]) -> Iterator[str]:
    by_map: dict[str, list[str]] = {}
    for each in sorted(each for each in some if isinstance(each, Element)):
        text = each.text if verb == "add" else each.key
        by_map.setdefault(each.map, []).append(text)
    for name, texts in by_map.items():
        yield f"{verb} element {table_of(family)} {name} {{ {', '.join(texts)} }}\n"


def _cleared(family: Family, chain: Chain) -> str:
    where = f"{table_of(family)} {chain.name}"
    return f"add chain {where}\nflush chain {where}\n{_rules(family, chain)}"


def _rules(family: Family, chain: Chain) -> str:
    where = f"{table_of(family)} {chain.name}"
    pairs = zip(chain.rules, chain.comments, strict=True)
    return "".join(f'add rule {where} {rule} comment "{comment}"\n' for rule, comment in pairs)
