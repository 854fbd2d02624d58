"""The nftables objects of portals as text of nft, written and parsed. Pure.

A table of ours in each family has two maps by destination. So a packet is looked up once, however
many portals there are, and a change writes only the elements and chains that it changes:

    prerouting, output (nat)          dnat to @portals      the listener of the destination
    input, forward, output (filter)   vmap @guards          what happens to new connections

A portal that is only for some clients has a chain of its own, to which its guard goes. Comments of
rules are checksums of the rules, so that reading them back depends on no spelling of nft's.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from steersman.model.hashes import blake2b
from steersman.model.names import Family
from steersman.model.plan import Verdict
from steersman.modes.userspace import TABLE
from steersman.modes.userspace.render import Portal
from steersman.proxy.listeners import FrontendKey

PORTALS, GUARDS = "portals", "guards"
_IP = {Family.IPV4: "ip", Family.IPV6: "ip6"}
_NAME_LENGTH = 100  # bytes; nft takes comments up to 128
_NOT_BY_PORTAL = "ct status & dnat != dnat drop"
_DNAT = "dnat {ip} to {ip} daddr . meta l4proto . th dport map @portals"
_FILTER = "type filter hook {hook} priority filter; policy accept;"
_BASE = {
    # Targets of guards: refuse all, and let only clients of the portal pass.
    "refuse": ("", "reject"),
    "proxied": ("", _NOT_BY_PORTAL),
    # Every new connection is looked up once in each map.
    "firewall": ("", "{ip} daddr . meta l4proto . th dport vmap @guards"),
    # From other machines and pods; from this node.
    "container": ("type nat hook prerouting priority dstnat; policy accept;", _DNAT),
    "host": ("type nat hook output priority -100; policy accept;", _DNAT),
    **{
        hook: (_FILTER.format(hook=hook), "ct state new jump firewall")
        for hook in ("input", "forward", "output")
    },
}
"""Chains of one rule each: the hook, and the rule."""
_BLOCK = re.compile(r"^\t(chain|map) (\S+) {\n(.*?)^\t}", re.MULTILINE | re.DOTALL)
_RULE = re.compile(r'^\t\t(?!type )(?:.*comment "(.*)"|.*)$', re.MULTILINE)
_ELEMENTS = re.compile(r"elements = {(.*?)}", re.DOTALL)


class Element(NamedTuple):
    """An element of a map, as `nft -nn list` prints it."""

    map: str
    text: str
    """Key and value, with a colon between."""

    @property
    def key(self) -> str:
        """The key of the element."""
        return self.text.partition(" : ")[0]


class Chain(NamedTuple):
    """A chain. Equal comments mean equal rules, because they start with checksums of these."""

    name: str
    comments: tuple[str, ...]
    rules: tuple[str, ...] = ()
    """The rules without the comments; () if it was read."""

    # A chain that was read has no rules, so they cannot count.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self[:2] == other[:2]

    def __hash__(self) -> int:
        return hash(self[:2])


Object = Element | Chain


def table_of(family: Family) -> str:
    """Return the table of a family in nft's words."""
    return f"{_IP[family]} {TABLE}"


def remove(family: Family) -> str:
    """Return the input of nft that removes the table, whether it exists or not."""
    return f"table {table_of(family)}\ndelete table {table_of(family)}\n"


def base(family: Family) -> frozenset[Object]:
    """Return the chains that exist without any portal."""
    return frozenset(
        _chain(name, [rule.format(ip=_IP[family])]) for name, (_, rule) in _BASE.items()
    )


def objects(key: FrontendKey, portal: Portal, port: int) -> frozenset[Object]:
    """Return the objects of a portal.

    Args:
        key: the destination.
        portal: what happens there.
        port: the port that its listener is bound to; 0 if it has none.
    """
    if portal.verdict is not Verdict.FORWARD:
        verdict = "drop" if portal.verdict is Verdict.DROP else "goto refuse"
        return frozenset((_element(GUARDS, key, key.address, key.port, verdict),))
    found: set[Object] = set()
    ip, address, at = _IP[key.family], key.address, key.port
    rules: list[str] = []
    if portal.host:
        # Lead clients to the listener, and keep those away that did not come by the portal.
        found.add(_element(PORTALS, key, address, at, f"{portal.host} . {port}"))
        address, at = portal.host, port
        rules.append(_NOT_BY_PORTAL)
    if portal.internal_only is not None:
        detector, not_a_pod = portal.internal_only, ""
        if detector.cidr:
            not_a_pod = f"{ip} saddr != {detector.cidr} "
        elif detector.interface:
            not_a_pod = f'iifname != "{detector.interface}" '
        elif detector.interface_prefix:
            not_a_pod = f'iifname != "{detector.interface_prefix}*" '
        rules.append(f"{not_a_pod}fib saddr type != local drop")
    if portal.source_ranges:
        networks = [ipaddress.ip_network(cidr) for cidr in portal.source_ranges]
        merged = ipaddress.collapse_addresses(networks)  # type: ignore[type-var]  # one family
        # nft refuses overlapping ranges.
        rules.append(f"{ip} saddr != {{ {', '.join(map(str, merged))} }} drop")
    # Most portals need no chain of their own: `proxied` has their only rule.
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
    sums = (blake2b(rule.encode(), digest_size=8).hexdigest() for rule in rules)
    comments = (f"{each} {remark[:_NAME_LENGTH]}".rstrip() for each in sums)
    return Chain(name, tuple(comments), rules)


def parse(listed: str) -> frozenset[Object]:
    """Read the output of `nft -nn list table`."""
    found: set[Object] = set()
    for kind, name, body in _BLOCK.findall(listed):
        if kind == "chain":
            found.add(Chain(name, tuple(_RULE.findall(body))))
        for elements in _ELEMENTS.findall(body):
            found.update(Element(name, " ".join(text.split())) for text in elements.split(","))
    return frozenset(found)


def change(family: Family, removed: Iterable[Object], added: Iterable[Object]) -> str:
    """Return the input of nft that removes objects and adds others, in one transaction."""
    removed, added = set(removed), set(added)
    gone, new = removed - added, added - removed
    chains = [each for each in new if isinstance(each, Chain)]
    kept = {chain.name for chain in chains}
    table = table_of(family)
    # Elements refer to chains: they go first and come last.
    return "".join(
        (
            *_elements("delete", family, gone),
            *(
                f"add chain {table} {each.name}\nflush chain {table} {each.name}\n"
                f"{_rules(family, each)}"
                for each in chains
            ),
            *_elements("add", family, new),
            *(
                f"flush chain {table} {each.name}\ndelete chain {table} {each.name}\n"
                for each in gone
                if isinstance(each, Chain) and each.name not in kept
            ),
        )
    )


def whole(family: Family, added: Iterable[Object]) -> str:
    """Return the input of nft that creates the table again, with the base and these objects."""
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
    # One transaction: clients never see an empty table.
    chains = sorted(each for each in base(family) if isinstance(each, Chain))
    return "\n".join(lines) + "".join(_rules(family, c) for c in chains) + change(family, (), added)


def _elements(verb: str, family: Family, some: Iterable[Object]) -> Iterator[str]:
    by_map: dict[str, list[str]] = {}
    for each in sorted(each for each in some if isinstance(each, Element)):
        text = each.text if verb == "add" else each.key
        by_map.setdefault(each.map, []).append(text)
    for name, texts in by_map.items():
        yield f"{verb} element {table_of(family)} {name} {{ {', '.join(texts)} }}\n"


def _rules(family: Family, chain: Chain) -> str:
    where = f"{table_of(family)} {chain.name}"
    pairs = zip(chain.rules, chain.comments, strict=True)
    return "".join(f'add rule {where} {rule} comment "{comment}"\n' for rule, comment in pairs)
