"""Parse `nft -j -nn list ...` into the form of packet_filter.py (libnftables-json(5)). Pure.

Only what decides about the first packet of a connection is understood, and what changes it;
everything else counts as unknown. Elements of sets by name are not looked up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias, cast

from steersman.model.addresses import canonical_cidr
from steersman.model.names import Family, Protocol
from steersman.netfilter.firewall.packet_filter import (
    Chain,
    Effect,
    Fate,
    FilterTable,
    Match,
    Rule,
    either,
    in_network,
    negated,
    of_protocol,
    on_interface,
    to_ports,
    translated,
    unknown_match,
    with_mark,
)

Json: TypeAlias = Any
_FAMILIES = {
    "ip": frozenset({Family.IPV4}),
    "ip6": frozenset({Family.IPV6}),
    "inet": frozenset(Family),
    "bridge": frozenset(Family),
    "netdev": frozenset(Family),
}
"""Families whose chains see packets of IP."""
_DEVICE_HOOKS = {
    "bridge": {
        **dict.fromkeys(("prerouting", "input", "forward"), "ingress"),
        **dict.fromkeys(("output", "postrouting"), "egress"),
    },
}
"""By family: the hooks that are not those of routed packets, as packet_filter.py calls them."""
_EFFECTS = {
    "dnat": Effect("destination"),
    "redirect": Effect("destination"),
    "snat": Effect("source"),
    "masquerade": Effect("source"),
    "notrack": Effect("untracked"),
    "tproxy": Effect("program"),
    "queue": Effect("program"),
}
_ALL_BITS = 0xFFFFFFFF
_FATES: tuple[Fate, ...] = ("accept", "drop", "reject", "return", "jump", "goto")
_IPS_DST_NAT = 32  # linux/netfilter/nf_conntrack_common.h
_ESTABLISHED, _NEW = 2, 8  # of `ct state`, as numbers
_NFPROTO = {Family.IPV4: 2, Family.IPV6: 10}
_SILENT = frozenset({"counter", "log", "comment", "mangle", "ct helper", "nflog"})
"""Statements that match everything."""


def parse_ruleset(objects: Iterable[Mapping[str, Json]]) -> list[FilterTable]:
    """Return the tables of a listing.

    Args:
        objects: the list under `nftables`.
    """
    chains: dict[tuple[str, str], dict[str, Chain]] = {}
    rules: dict[tuple[str, str, str], list[Rule]] = {}
    devices: dict[tuple[str, str, str], Match] = {}
    for entry in objects:
        for kind, value in entry.items():
            if kind not in ("chain", "rule") or value.get("family") not in _FAMILIES:
                continue
            family, table = value["family"], value["table"]
            if kind == "rule":
                where = family, table, value["chain"]
                of_device = (devices[where],) if where in devices else ()
                rules.setdefault(where, []).extend(
                    rule._replace(matches=(*of_device, *rule.matches)) for rule in parse_rule(value)
                )
            else:
                name = value["name"]
                hook = value.get("hook", "")
                if family == "netdev" and hook:
                    devices[family, table, name] = _device(value.get("dev"), hook)
                chains.setdefault((family, table), {})[name] = Chain(
                    rules.setdefault((family, table, name), []),
                    _DEVICE_HOOKS.get(family, {}).get(hook, hook),
                    value.get("prio", 0) if isinstance(value.get("prio", 0), int) else 0,
                    "drop" if value.get("policy") == "drop" else "accept",
                    value.get("type") == "nat",
                )
    return [
        FilterTable(f"table {family} {table}", _FAMILIES[family], of_table)
        for (family, table), of_table in chains.items()
    ]


def _device(names: Json, hook: str) -> Match:
    """Match the devices of a chain; versions of nft before 1.0.7 do not always print them."""
    names = names if isinstance(names, list) else [names] if names else []
    if not names:
        return unknown_match
    return either([on_interface(name, out=hook == "egress") for name in names])


def parse_rule(value: Mapping[str, Json]) -> Iterator[Rule]:
    """Yield a rule; a verdict map is one for each element."""
    place = f"handle {value.get('handle', '?')}"
    matches: list[Match] = []
    for statement in value.get("expr", ()):
        ((kind, what),) = statement.items()
        if kind == "fwd":  # it leaves at once, by another device
            kind = "drop"
        if effect := _EFFECTS.get(kind) or (_mangled(what) if kind == "mangle" else None):
            nat = effect.kind in ("destination", "source")
            yield Rule(tuple(matches), "accept" if nat else "", place, effect=effect)
            continue
        if kind in _FATES:
            target = what["target"] if kind in ("jump", "goto") else ""
            yield Rule(tuple(matches), cast(Fate, kind), place, target)
            return
        if kind == "vmap":
            yield from _verdict_map(what, tuple(matches), place)
        elif kind == "match":
            matches.append(_match(what))
        elif kind not in _SILENT:
            matches.append(unknown_match)


def _mangled(what: Json) -> Effect | None:
    """Return what a statement sets; None if it does not matter here."""
    match what:
        case {"key": {"meta": {"key": "mark"}}, "value": int(value)}:
            return Effect("mark", 0, value)
        case {"key": {"meta": {"key": "mark"}}, "value": {"&": [{"meta": _}, int(keep)]}}:
            return Effect("mark", keep)
        case {"key": {"meta": {"key": "mark"}}, "value": {"|": [{"meta": _}, int(bits)]}}:
            return Effect("mark", _ALL_BITS & ~bits, bits)
        case {"key": {"meta": {"key": "mark"}}, "value": {"^": [{"meta": _}, int(bits)]}}:
            return Effect("mark", _ALL_BITS, bits)
        case {"key": {"meta": {"key": "mark"}}}:  # the mark of the connection, or out of a map
            return Effect("mark")
        case {"key": {"ct": {"key": "zone"}}}:
            return Effect("zone")
        case {"key": {"payload": {"field": "ttl" | "hoplimit"}}}:
            return Effect("hops")
        case _:
            return None


def _verdict_map(what: Json, matches: tuple[Match, ...], place: str) -> Iterator[Rule]:
    data = what["data"]
    elements = data.get("set", ()) if isinstance(data, dict) else ()
    for key, verdict in elements:
        ((kind, more),) = verdict.items()
        target = more["target"] if kind in ("jump", "goto") else ""
        same = _match({"left": what["key"], "op": "==", "right": key})
        yield Rule((*matches, same), cast(Fate, kind), place, target)
    if not elements:  # a map by name: any of its verdicts may be a drop
        yield Rule((*matches, unknown_match), "", place)


def _match(what: Json) -> Match:
    """Return the match of a relation."""
    operation, left, right = what["op"], what["left"], what["right"]
    if operation not in ("==", "!=", "in") or not isinstance(left, dict):
        return unknown_match
    ((kind, key),) = left.items()
    mask = _ALL_BITS
    if kind == "&" and isinstance(key[0], dict) and isinstance(key[1], int):
        mask, ((kind, key),) = key[1], key[0].items()
    values = right["set"] if isinstance(right, dict) and "set" in right else right
    values = values if isinstance(values, list) else [values]
    found = either([_is(kind, key, value, mask) for value in values])
    found = negated(found) if operation == "!=" else found
    # `tcp dport != 80` does not match UDP either: the protocol is a match of its own.
    has_header = _has_header(kind, key)
    return lambda packet: has_header(packet) and found(packet)


def _is(kind: str, key: Json, value: Json, mask: int) -> Match:
    """Match a property of the packet, or of its connection, with one value."""
    match kind, key:
        case "payload", {"protocol": "ip" | "ip6", "field": "saddr" | "daddr" as field}:
            return _address(value, source=field == "saddr")
        case "payload", {"protocol": "tcp" | "udp" | "sctp" | "th", "field": "dport"}:
            return _port(value)
        case "payload", {"field": "protocol" | "nexthdr"} if isinstance(value, int):
            return of_protocol(value)
        case "meta", {"key": "l4proto"} if isinstance(value, int):
            return of_protocol(value)
        case "meta", {"key": "iifname" | "oifname" | "iif" | "oif" as name} if isinstance(
            value, str
        ):
            return on_interface(value, out=name.startswith("o"))
        case "meta", {"key": "nfproto"}:
            return lambda packet: _NFPROTO[packet.family] == value
        case "meta", {"key": "mark"} if isinstance(value, int):
            return with_mark(value, mask)
        case "ct", {"key": "state"} if isinstance(value, int):
            return lambda packet: bool(value & (_ESTABLISHED if packet.answer else _NEW))
        case "ct", {"key": "status"} if value == _IPS_DST_NAT:
            return translated
        case _:
            return unknown_match


def _has_header(kind: str, key: Json) -> Match:
    """Match packets that have the header whose field is compared."""
    match kind, key:
        case "payload", {"protocol": "ip" | "ip6" as name}:
            family = Family.IPV4 if name == "ip" else Family.IPV6
            return lambda packet: packet.family is family
        case "payload", {"protocol": "tcp" | "udp" | "sctp" as name}:
            return of_protocol(Protocol(name.upper()).number)
        case _:
            return lambda _: True


def _port(value: Json) -> Match:
    if isinstance(value, dict) and "range" in value:
        first, last = value["range"]
        return to_ports(first, last)
    return to_ports(value, value) if isinstance(value, int) else unknown_match


def _address(value: Json, *, source: bool) -> Match:
    """Match an address, a prefix or a range."""
    if isinstance(value, dict) and "prefix" in value:
        value = f"{value['prefix']['addr']}/{value['prefix']['len']}"
    elif isinstance(value, str) and not value.startswith("@"):
        value = f"{value}/{128 if ':' in value else 32}"
    cidr = canonical_cidr(value) if isinstance(value, str) else None
    return in_network(cidr, source=source) if cidr else unknown_match
