"""Parse iptables-save into the form of packet_filter.py. Pure.

Only what decides about the first packet of a connection is understood; every other match counts as
unknown, every other target lets the walk continue.
"""

from __future__ import annotations

import shlex

from steersman.model.addresses import canonical_cidr
from steersman.model.names import Family
from steersman.netfilter.firewall.packet_filter import (
    Chain,
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
from steersman.netfilter.iptables.names import BUILT_IN
from steersman.netfilter.iptables.saved import chains

_FATES: dict[str, Fate] = {
    "ACCEPT": "accept",
    "DROP": "drop",
    "REJECT": "reject",
    "RETURN": "return",
}
_PROTOCOLS = {"tcp": 6, "udp": 17, "sctp": 132, "icmp": 1, "ipv6-icmp": 58, "all": 0}
_PRIORITIES = {"raw": -300, "mangle": -150, "filter": 0, "security": 50}
"""Tables that filter; of nat no rule drops a packet."""
_WITHOUT_MATCH = frozenset({"-m", "--comment", "--ctproto"})
"""Options that match nothing by themselves, each with one word."""


def parse_saved(text: str, family: Family, tool: str = "iptables") -> list[FilterTable]:
    """Return the tables that iptables-save printed, without nat.

    Args:
        text: its output.
        family: of the command.
        tool: for the names of the tables, as in `filter (iptables-legacy)`.
    """
    tables: dict[str, dict[str, Chain]] = {}
    rules: dict[tuple[str, str], list[Rule]] = {}
    for table, name, policy, lines in chains(text):
        if table not in _PRIORITIES:  # nat, the largest table by far
            continue
        own = rules.setdefault((table, name), [])
        own += map(parse_rule, lines)
        if policy:
            hook = name.lower() if name in BUILT_IN else ""
            chain = Chain(own, hook, _PRIORITIES[table], _FATES.get(policy, "accept"))
            tables.setdefault(table, {})[name] = chain
    return [
        FilterTable(f"table {table} ({tool})", frozenset({family}), found)
        for table, found in tables.items()
    ]


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
