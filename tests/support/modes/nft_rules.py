"""Walks through the chains and elements of the nftables mode, as a new connection does.

It knows the statements that our rules use and raises on any other: an evaluator that guesses proves
nothing. The rules that go in by netlink (rules.py of the mode) are written here as nft prints them.
"""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

from steersman.model.addresses import in_cidr, is_loopback, join_host_port
from steersman.model.names import Family
from steersman.model.plan import NodePlan
from steersman.model.ruleset import Ruleset
from steersman.modes.nftables.derived import derived
from steersman.modes.nftables.layout import (
    SETS,
    Form,
    Kind,
    is_local,
    name_of,
    printed_fields,
    unpack_address,
    unpack_endpoint,
)
from tests.support.modes.flows import Answer, FlowCase

_FIELD = r"(?:(?:ct original )?ip6? [sd]addr|meta l4proto|th dport)"
_FIELDS = rf"{_FIELD}(?: \. {_FIELD})*"
_SLOT = r"numgen random mod (\d+)(?: offset (\d+))?"
_STATEMENTS = {
    name: re.compile(rf"(?:{pattern})(?: |$)")
    for name, pattern in {
        "passes": r"ct state new|masquerade fully-random|meta mark set meta mark xor \S+",
        "translated": r"ct status dnat",
        "confirmed": r"ct status confirmed",
        "marked": r"meta mark & \S+ != 0",
        "mark": r"meta mark set meta mark or \S+",
        "dnat": rf"dnat ip6? to ({_FIELDS}) \. {_SLOT} map @(\S+)",
        "vmap": rf"({_FIELDS}) vmap @(\S+)",
        "in_set": rf"({_FIELDS}) @(\S+)",
        "in_cidrs": r"ip6? ([sd]addr) (!= )?(?:\{ (.*?) \}|([0-9a-f.:/]+))",
        "device": r'iifname (!= )?"([^"*]+)(\*?)"',
        "local": r"fib ([sd]addr) type local",
        "leave": r"(jump|goto) (\S+)",
        "verdict": r"(drop|reject|return)",
    }.items()
}


@cache
def _parsed(rule: str) -> tuple[tuple[str, re.Match[str]], ...]:
    """Split a rule into its statements, each with its name."""
    statements, at = [], 0
    while at < len(rule):
        known = [
            (name, found) for name, each in _STATEMENTS.items() if (found := each.match(rule, at))
        ]
        if not known:
            raise ValueError(f"unknown statement in {rule!r}: {rule[at:]!r}")
        statements.append(known[0])
        at = known[0][1].end()
    return tuple(statements)


def _own_chain(value: str) -> list[str]:
    """Return the rules of a ServicePort's chain, for a client that has no entry yet."""
    kind, *words = value.split()
    if kind == "learn":
        return []
    _, mark, _, choose = words
    return [*([] if mark == "-" else [f"jump {mark}"]), f"goto {choose}"]


def _number(address: str) -> int:
    return int(ipaddress.ip_address(address))


@dataclass
class _Packet:
    """A new connection's first packet, and what the rules have made of it."""

    flow: FlowCase
    destination: str
    port: int
    marked: bool = False
    ends: set[tuple[str, int]] = field(default_factory=set)
    """Endpoints that it may have been translated to."""
    translated: bool = False
    confirmed: ClassVar[bool] = False  # conntrack confirms a connection after the last rule


class NftRules:
    """The rendered objects of one family."""

    def __init__(self, ruleset: Ruleset, plan: NodePlan, family: Family) -> None:
        self._own = plan.settings.family(family).local_addresses
        self._chains: defaultdict[str, list[str]] = defaultdict(list)
        self._elements: defaultdict[str, dict[str, str]] = defaultdict(dict)
        self._slots: defaultdict[str, dict[int, tuple[str, int]]] = defaultdict(dict)
        self._elsewhere: set[str] = set()
        """Addresses of endpoints on other nodes."""
        objects = {key: value for key, value in ruleset.items() if key[1] == family}
        objects |= dict.fromkeys((element for _, element in derived(list(objects.items()))), b"")
        for key, value in objects.items():
            match Kind(key[0]):
                case Kind.SKELETON | Kind.RULES:
                    for line in value.splitlines():
                        words = line.split(" ", 5)
                        if words[:2] == ["add", "rule"]:
                            self._chains[words[4]].append(words[5])
                case Kind.CHAIN:
                    self._chains[name_of(key)] = _own_chain(value.decode())
                case kind if kind in SETS:
                    self._add_element(kind, key, value)

    def _add_element(self, kind: Kind, key: bytes, value: bytes) -> None:
        spec, fields = SETS[kind], printed_fields(key)
        match spec.form:
            case Form.ENDPOINTS:
                slots = self._slots[f"{spec.name} {' . '.join(fields[:-1])}"]
                slots[int(fields[-1])] = unpack_endpoint(value)
                if not is_local(value):
                    self._elsewhere.add(unpack_endpoint(value)[0])
            case Form.INTERVALS:
                self._elements[spec.name][" . ".join(fields)] = unpack_address(value)
            case _:
                verdict = value.partition(b"\0")[0].decode() if spec.form is Form.VERDICTS else ""
                self._elements[spec.name][" . ".join(fields)] = verdict

    def answer(self, flow: FlowCase) -> Answer:
        """Return what becomes of a connection."""
        packet = _Packet(flow, flow.address, flow.port)
        if self._is_refused_source(packet):
            return Answer("drop")
        own = flow.source in self._own and not flow.interface
        verdict = self._run("nat-output" if own else "nat-prerouting", packet)
        if packet.ends and verdict != "dnat":
            return Answer("forward", note="(some packets are not translated)")
        ends = packet.ends or {(flow.address, flow.port)}
        packet.translated = bool(packet.ends)
        kinds = set()
        for packet.destination, packet.port in ends:
            arrives = "nat-input" if self._is_local(packet.destination) else "filter-forward"
            refused = self._run("filter-output", packet) if own else ""
            if not own or (arrives == "nat-input" and not refused):
                refused = self._run(arrives, packet)
            kinds.add(refused)
        if kinds != {""}:
            return Answer("/".join(sorted(kinds)), note="(it depends)" if len(kinds) > 1 else "")
        if not packet.translated:
            return Answer("untouched", note="but masqueraded" if packet.marked else "")
        return Answer(
            "forward",
            frozenset((join_host_port(*end), self._is_masqueraded(packet, *end)) for end in ends),
        )

    def _is_masqueraded(self, packet: _Packet, address: str, port: int) -> bool:
        flow = packet.flow
        if flow.source == address and address in self._elsewhere:
            return True  # a packet that another node sends here untranslated; this is not a promise
        pair = f"{flow.source} . {address} . {flow.protocol.lower()} . {port}"
        return packet.marked or pair in self._elements["hairpin-connections"]

    def _is_refused_source(self, packet: _Packet) -> bool:
        """As the chain `firewall-check` before any translation."""
        place = self._key("ip daddr . meta l4proto . th dport", packet)
        if place not in self._elements["firewall-ips"]:
            return False
        source = _number(packet.flow.source)
        for key, last in self._elements["firewall-allowed"].items():
            destination, _, first = key.rpartition(" . ")
            if destination == place and _number(first) <= source <= _number(last):
                return False
        return True

    def _is_local(self, address: str) -> bool:
        return address in self._own or is_loopback(address)

    def _run(self, chain: str, packet: _Packet) -> str:
        """Walk through a chain; return its verdict, "" for none."""
        for rule in self._chains[chain]:
            verdict = self._apply(rule, packet)
            if verdict == "return":
                return ""
            if verdict.startswith("goto "):
                return self._run(verdict.removeprefix("goto "), packet)
            if verdict:
                return verdict
        return ""

    def _apply(self, rule: str, packet: _Packet) -> str:
        """Return the verdict of a rule; "" if it does not match, or has none."""
        for name, found in _parsed(rule):
            matches, verdict = self._statement(name, found, packet)
            if not matches or verdict:
                return verdict
        return ""

    def _statement(self, name: str, found: re.Match[str], packet: _Packet) -> tuple[bool, str]:
        """Return whether a packet passes a statement, and its verdict."""
        match name:
            case "translated" | "marked" | "confirmed":
                return bool(getattr(packet, name)), ""
            case "mark":
                packet.marked = True
            case "dnat":
                return True, self._translate(found, packet)
            case "vmap":
                target = self._elements[found[2]].get(self._key(found[1], packet))
                if target is None or target == "continue":
                    return target is not None, ""
                return True, target if target == "drop" else f"goto {target}"
            case "in_set":
                return self._key(found[1], packet) in self._elements[found[2]], ""
            case "in_cidrs":
                cidrs = (found[3] or found[4]).split(", ")
                address = self._key(f"ip {found[1]}", packet)
                inside = any(
                    in_cidr(address, each) if "/" in each else address == each for each in cidrs
                )
                return inside is not bool(found[2]), ""
            case "device":
                device = packet.flow.interface
                same = device.startswith(found[2]) if found[3] else device == found[2]
                return same is not bool(found[1]), ""
            case "local":
                return self._is_local(self._key(f"ip {found[1]}", packet)), ""
            case "leave":
                if found[1] == "goto":
                    return True, f"goto {found[2]}"
                return True, self._run(found[2], packet)
            case "verdict":
                return True, found[1]
        return True, ""

    def _translate(self, found: re.Match[str], packet: _Packet) -> str:
        """Note the endpoints that are chosen from; with an empty slot, the next rule may choose."""
        slots = self._slots[f"{found[4]} {self._key(found[1], packet)}"]
        first = int(found[3] or 0)
        chosen = [slots.get(slot) for slot in range(first, first + int(found[2]))]
        packet.ends |= {end for end in chosen if end}
        return "dnat" if all(chosen) else ""

    def _key(self, fields: str, packet: _Packet) -> str:
        """Return the fields of a packet, as elements have them."""
        words = []
        for each in fields.split(" . "):
            match each.replace("ip6", "ip"):
                case "ip daddr":
                    words.append(packet.destination)
                case "ct original ip daddr":
                    words.append(packet.flow.address)
                case "ip saddr":
                    words.append(packet.flow.source)
                case "meta l4proto":
                    words.append(packet.flow.protocol.lower())
                case _:
                    words.append(str(packet.port))
        return " . ".join(words)
