"""Walks a packet through iptables rules given as text, and says what may become of it.

Reads what `iptables-save` prints, so rules that we render, rules in a kernel and rules of another
program can be asked the same question. Knows the matches and targets that service proxies use and
raises on any other: an evaluator that guesses proves nothing.
"""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache


@dataclass(frozen=True)
class Packet:
    """The first packet of a connection, and what has happened to it so far."""

    source: str
    destination: str
    port: int
    protocol: str
    """Lower case, as in rules."""
    interface: str = ""
    """The interface it came in by; "" for one that starts here."""
    mark: int = 0
    endpoint: str = ""
    """Where DNAT has sent it, printed."""
    masquerade: bool = False


@dataclass(frozen=True)
class Rule:
    """One rule, taken apart."""

    matches: tuple[tuple[str, str, bool], ...]
    """Option, value, negated."""
    target: str
    arguments: Mapping[str, str]
    line: str


@dataclass(frozen=True)
class End:
    """One possible end of a packet's way."""

    verdict: str
    """accept, drop or reject."""
    endpoint: str
    masquerade: bool


Match = Callable[[str, Packet, frozenset[str]], bool | None]
"""None where it depends on chance or on earlier packets: both ways are walked."""


@cache
def _in_network(address: str, network: str) -> bool:
    """Whether an address lies in `network/length` or `network/mask` (masks may have holes)."""
    base, _, mask = network.partition("/")
    value, wanted = ipaddress.ip_address(address), ipaddress.ip_address(base)
    if value.version != wanted.version:
        return False
    if not mask or mask.isdigit():
        bits = value.max_prefixlen
        number = (1 << bits) - (1 << bits - int(mask or bits))
    else:
        number = int(ipaddress.ip_address(mask))
    return int(value) & number == int(wanted) & number


def _is_local(address: str, local: frozenset[str]) -> bool:
    return address in local or address.startswith("127.") or address == "::1"


def _mark(value: str, packet: Packet, _local: frozenset[str]) -> bool:
    wanted, _, mask = value.partition("/")
    return packet.mark & int(mask or "0xffffffff", 16) == int(wanted, 16)


def _ctstate(value: str, packet: Packet, _local: frozenset[str]) -> bool:
    states = {"NEW", "DNAT"} if packet.endpoint else {"NEW"}
    return not states.isdisjoint(value.split(","))


def _interface(value: str, packet: Packet, _local: frozenset[str]) -> bool:
    if value.endswith("+"):
        return packet.interface.startswith(value[:-1])
    return packet.interface == value


def _type(address: str, value: str, local: frozenset[str]) -> bool:
    if value != "LOCAL":
        raise ValueError(f"address type {value} is not known here")
    return _is_local(address, local)


def _always(_value: str, _packet: Packet, _local: frozenset[str]) -> bool:
    return True


def _either(_value: str, _packet: Packet, _local: frozenset[str]) -> None:
    return None


MATCHES: dict[str, Match] = {
    "-s": lambda value, packet, _: _in_network(packet.source, value),
    "-d": lambda value, packet, _: _in_network(packet.destination, value),
    "-i": _interface,
    "-p": lambda value, packet, _: value == packet.protocol,
    "--dport": lambda value, packet, _: int(value) == packet.port,
    "--dst-type": lambda value, packet, local: _type(packet.destination, value, local),
    "--src-type": lambda value, packet, local: _type(packet.source, value, local),
    "--mark": _mark,
    "--ctstate": _ctstate,
    "--probability": _either,
    "--rcheck": _either,
    **dict.fromkeys(("--comment", "--mode", "--set", "--name", "--seconds", "--reap"), _always),
    **dict.fromkeys(("--mask", "--rsource", "--nfacct-name", "--rdest"), _always),
}
FLAGS = {"--rcheck", "--set", "--reap", "--rsource", "--rdest", "--random-fully"}
"""Options without a value."""
MODULES = {
    *("tcp", "udp", "sctp", "comment", "conntrack", "addrtype", "mark", "statistic", "recent"),
    "nfacct",
}
ARGUMENTS = {
    *("--reject-with", "--to-destination", "--set-xmark", "--xor-mark", "--or-mark"),
    "--random-fully",
}


def parse_rule(line: str) -> tuple[str, Rule]:
    """Take an `-A CHAIN ...` line apart: the chain, and the rule.

    Raises:
        ValueError: it has something that is not known here.
    """
    words = iter(shlex.split(line)[1:])
    chain = next(words)
    matches: list[tuple[str, str, bool]] = []
    target, arguments, negated = "", {}, False
    for word in words:
        if word == "!":
            negated = True
            continue
        value = "" if word in FLAGS else next(words)
        if word == "-m":
            if value not in MODULES:
                raise ValueError(f"match {value} is not known here: {line}")
        elif word == "-j":
            target = value
        elif word in ARGUMENTS and target:
            arguments[word] = value
        elif word in MATCHES:
            matches.append((word, value, negated))
        else:
            raise ValueError(f"option {word} is not known here: {line}")
        negated = False
    return chain, Rule(tuple(matches), target, arguments, line)


Chains = Mapping[str, list[Rule]]


def without_comments(text: str) -> str:
    """What `iptables-save` printed, without the lines that tell the time."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))


def parse(text: str) -> dict[str, dict[str, list[Rule]]]:
    """Parse the output of `iptables-save`: rules by chain by table."""
    tables: dict[str, dict[str, list[Rule]]] = {}
    table: dict[str, list[Rule]] = {}
    for line in text.splitlines():
        if line.startswith("*"):
            table = tables.setdefault(line[1:].strip(), {})
        elif line.startswith(":"):
            table.setdefault(line[1:].split()[0], [])
        elif line.startswith("-A"):
            chain, rule = parse_rule(line)
            table.setdefault(chain, []).append(rule)
        elif line and not line.startswith("#") and line != "COMMIT":
            raise ValueError(f"not a line of iptables-save: {line}")
    return tables


@dataclass(frozen=True)
class Rules:
    """The rules of one family, and the addresses that are local where they run."""

    tables: Mapping[str, Chains]
    local: frozenset[str]

    def ends(self, packet: Packet) -> set[End]:
        """Every way that the first packet of a connection can end."""
        here = _is_local(packet.source, self.local)
        first = "OUTPUT" if here else "PREROUTING"
        ends: set[End] = set()
        for verdict, after in self._chain("nat", first, packet):
            if verdict in ("drop", "reject"):
                ends.add(End(verdict, "", False))
                continue
            for verdict2, final in self._filter(after, here):
                ends |= self._leave(verdict2, final)
        return ends

    def _filter(self, packet: Packet, here: bool) -> set[tuple[str, Packet]]:
        inward = _is_local(packet.destination, self.local)
        hooks = ["OUTPUT", "INPUT"] if here and inward else ["OUTPUT"] if here else []
        if not here:
            hooks = ["INPUT"] if inward else ["FORWARD"]
        states = {("accept", packet)}
        for hook in hooks:
            states = {
                after
                for verdict, state in states
                for after in (
                    self._chain("filter", hook, state)
                    if verdict == "accept"
                    else {(verdict, state)}
                )
            }
        return states

    def _leave(self, verdict: str, packet: Packet) -> set[End]:
        if verdict != "accept":
            return {End(verdict, "", False)}
        arrived = not _is_local(packet.source, self.local)
        if arrived and _is_local(packet.destination, self.local):
            return {End("accept", packet.endpoint, False)}
        return {
            End("accept", after.endpoint, after.masquerade)
            for _, after in self._chain("nat", "POSTROUTING", packet)
        }

    def _chain(self, table: str, name: str, packet: Packet) -> set[tuple[str, Packet]]:
        """Walk a built-in chain, whose policy is to accept."""
        return {
            ("accept" if verdict in ("next", "return") else verdict, after)
            for verdict, after in self._walk(table, name, packet)
        }

    def _walk(self, table: str, name: str, packet: Packet) -> set[tuple[str, Packet]]:
        chains = self.tables.get(table, {})
        if name not in chains:
            if name in ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"):
                return {("next", packet)}
            raise ValueError(f"{table}: a rule jumps to {name}, which does not exist")
        done: set[tuple[str, Packet]] = set()
        states = {packet}
        for rule in chains[name]:
            passing: set[Packet] = set()
            for state in states:
                matched = self._matches(rule, state)
                if matched is not True:
                    passing.add(state)
                if matched is not False:
                    for verdict, after in self._target(table, rule, state):
                        if verdict in ("next", "return"):
                            passing.add(after)
                        else:
                            done.add((verdict if verdict != "leave" else "return", after))
            states = passing
        return done | {("next", state) for state in states}

    def _matches(self, rule: Rule, packet: Packet) -> bool | None:
        result: bool | None = True
        for option, value, negated in rule.matches:
            matched = MATCHES[option](value, packet, self.local)
            if matched is None:
                result = None
            elif matched == negated:
                return False
        return result

    def _target(self, table: str, rule: Rule, packet: Packet) -> Iterable[tuple[str, Packet]]:
        """What a target makes of a packet; `leave` ends the chain, `next` goes on in it."""
        match rule.target:
            case "":
                return {("next", packet)}
            case "RETURN":
                return {("leave", packet)}
            case "ACCEPT" | "DROP" | "REJECT":
                return {(rule.target.lower(), packet)}
            case "MARK":
                return {("next", replace(packet, mark=_marked(packet.mark, rule)))}
            case "MASQUERADE":
                return {("accept", replace(packet, masquerade=True))}
            case "DNAT":
                return {("accept", _sent(packet, rule.arguments["--to-destination"]))}
            case _:
                return self._walk(table, rule.target, packet)


def _sent(packet: Packet, endpoint: str) -> Packet:
    host, _, port = endpoint.rpartition(":")
    return replace(packet, destination=host.strip("[]"), port=int(port), endpoint=endpoint)


def _marked(mark: int, rule: Rule) -> int:
    """The mark after a MARK target; `--set-xmark V/M` clears the bits of M, then flips V's."""
    ((option, value),) = rule.arguments.items()
    number, _, mask = value.partition("/")
    if option == "--or-mark":
        return mark | int(number, 16)
    if option == "--xor-mark":
        return mark ^ int(number, 16)
    return (mark & ~int(mask or "0xffffffff", 16)) ^ int(number, 16)
