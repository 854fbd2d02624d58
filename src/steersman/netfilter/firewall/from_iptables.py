"""Parse iptables-save into the form of packet_filter.py. Pure.

Only what decides about the first packet of a connection is understood, and what changes it; every
other match counts as unknown, every other target lets the walk continue.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from steersman.model.addresses import canonical_cidr
from steersman.model.names import Family
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
from steersman.netfilter.iptables.names import BUILT_IN, PRIORITIES
from steersman.netfilter.iptables.saved import chains

_FATES: dict[str, Fate] = {
    "ACCEPT": "accept",
    "DROP": "drop",
    "REJECT": "reject",
    "RETURN": "return",
}
_PROTOCOLS = {"tcp": 6, "udp": 17, "sctp": 132, "icmp": 1, "ipv6-icmp": 58, "all": 0}
_SOURCE_NAT = 100
"""The priority of nat where it changes sources."""
_ALL_BITS = 0xFFFFFFFF
_WITHOUT_MATCH = frozenset({"-m", "--comment", "--ctproto"})
"""Options that match nothing by themselves, each with one word."""


def parse_saved(
    text: str, family: Family, tool: str = "iptables", own_jumps: tuple[str, ...] = ()
) -> list[FilterTable]:
    """Return the tables that iptables-save printed.

    Args:
        text: its output.
        family: of the command.
        tool: for the names of the tables, as in `filter (iptables-legacy)`.
        own_jumps: beginnings of the names of a mode's own chains of nat, which are left out. What
            follows after a jump to them in a base chain of destinations is left out, too: it does
            not see packets to Services.
    """
    tables: dict[str, dict[str, Chain]] = {}
    rules: dict[tuple[str, str], list[Rule]] = {}
    for table, name, policy, lines in chains(text):
        nat = table == "nat"
        if table not in PRIORITIES or (nat and own_jumps and name.startswith(own_jumps)):
            continue
        own = rules.setdefault((table, name), [])
        parsed = map(parse_rule, lines)
        if nat and own_jumps and name in ("PREROUTING", "OUTPUT"):
            own += _before(parsed, own_jumps)
        else:
            own += parsed
        if policy:
            hook = name.lower() if name in BUILT_IN else ""
            priority = PRIORITIES[table]
            if nat and name in ("POSTROUTING", "INPUT"):
                priority = _SOURCE_NAT
            fate = _FATES.get(policy, "accept")
            tables.setdefault(table, {})[name] = Chain(own, hook, priority, fate, nat)
    return [
        FilterTable(f"table {table} ({tool})", frozenset({family}), found)
        for table, found in tables.items()
    ]


def _before(rules: Iterable[Rule], own_jumps: tuple[str, ...]) -> Iterator[Rule]:
    """Yield the rules before the first jump to a chain of ours.

    There, a packet that a rule accepts keeps the destination that it has.
    """
    for rule in rules:
        if rule.target.startswith(own_jumps):
            return
        accepts = rule.fate == "accept" and rule.effect is None
        yield rule._replace(effect=Effect("destination")) if accepts else rule


def parse_rule(line: str) -> Rule:
    """Parse a line of iptables-save that begins with -A."""
    try:
        words = shlex.split(line)[2:]
    except ValueError:  # a comment with an odd quotation
        return Rule((unknown_match,), "", line)
    matches: list[Match] = []
    place = 0
    while place < len(words):
        word = words[place]
        inverted = word == "!"
        place += inverted
        if place >= len(words):
            break
        option, place = words[place], place + 1
        # The values of an option are the words up to the next one, which may be inverted.
        end = place
        while end < len(words) and words[end] != "!" and not words[end].startswith("-"):
            end += 1
        values, place = words[place:end], end
        if option in ("-j", "-g"):
            target = values[0] if values else ""
            if fate := _FATES.get(target):
                return Rule(tuple(matches), fate, line)
            if effect := _effect(target, words[place:]):
                nat = effect.kind in ("destination", "source")
                return Rule(tuple(matches), "accept" if nat else "", line, effect=effect)
            if not target or target in _CONTINUING:
                return Rule(tuple(matches), "", line)
            return Rule(tuple(matches), "goto" if option == "-g" else "jump", line, target)
        if option in _WITHOUT_MATCH:
            continue
        match = _match(option, values)
        matches.append(negated(match) if inverted else match)
    return Rule(tuple(matches), "", line)


_CONTINUING = frozenset(
    {
        *("LOG", "NFLOG", "ULOG", "TRACE", "AUDIT", "LED", "RATEEST", "IDLETIMER"),
        *("MARK", "CONNMARK", "SECMARK", "CONNSECMARK", "CT", "NOTRACK", "SET", "CLASSIFY"),
        *("DSCP", "TOS", "TTL", "HL", "TCPMSS", "CHECKSUM", "TEE", "TPROXY", "SYNPROXY"),
        *("QUEUE", "NFQUEUE"),
    }
)
"""Extensions that iptables calls targets; anything else is a chain."""


def _effect(target: str, words: Sequence[str]) -> Effect | None:
    """Return what an extension does to a packet, by the words after its name."""
    options = dict(zip(words, [*words[1:], ""], strict=False))
    match target:
        case "DNAT" | "REDIRECT":
            return Effect("destination")
        case "SNAT" | "MASQUERADE" | "NETMAP":
            return Effect("source")
        case "NOTRACK":
            return Effect("untracked")
        case "CT" if "--notrack" in options:
            return Effect("untracked")
        case "CT" if {"--zone", "--zone-orig", "--zone-reply"} & options.keys():
            return Effect("zone")
        case "TTL" | "HL":
            return Effect("hops")
        case "TPROXY" | "NFQUEUE" | "QUEUE":
            return Effect("program")
        case "MARK" if "--set-xmark" in options:
            value, _, mask = options["--set-xmark"].partition("/")
            return Effect("mark", _ALL_BITS & ~int(mask or "0xffffffff", 0), int(value, 0))
        case _:
            return None


def _match(option: str, values: list[str]) -> Match:
    """Return the match of one option with its values."""
    value = values[0] if values else ""
    match option:
        case "-s" | "-d":
            cidr = canonical_cidr(value) if "/" in value else None
            return in_network(cidr, source=option == "-s") if cidr else unknown_match
        case "-i" | "-o":
            return on_interface(value, out=option == "-o")
        case "-p":
            number = _PROTOCOLS.get(value, int(value) if value.isdigit() else -1)
            return of_protocol(number)
        case "--dport" | "--dports":
            return either(list(map(_ports, value.split(","))))
        case "--ctstate" | "--state":
            # The first packet is NEW, the answer ESTABLISHED; both are DNAT if it was translated.
            states = value.split(",")
            return either(
                [
                    lambda packet: ("ESTABLISHED" if packet.answer else "NEW") in states,
                    *([translated] if "DNAT" in states else []),
                ]
            )
        case "--mark":
            wanted, _, mask = value.partition("/")
            return with_mark(int(wanted, 0), int(mask or "0xffffffff", 0))
        case _:
            return unknown_match


def _ports(text: str) -> Match:
    first, colon, last = text.partition(":")
    if not (first or "0").isdigit() or not (last or "0").isdigit():
        return unknown_match
    low = int(first or 0)
    return to_ports(low, int(last or 65535) if colon else low)
