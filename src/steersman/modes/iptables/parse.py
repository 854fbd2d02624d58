"""From the output of iptables-save to the Ruleset that rendering would have made of it. Pure.

Everything foreign is passed over. What is in our chains is kept whatever it is, under a key that
nobody wants, so that the diff removes it.
"""

from __future__ import annotations

import re

import msgspec

from steersman.modes.iptables.names import (
    BY_ADDRESS,
    KUBELET,
    KUBELET_FIREWALL,
    LOCALNET_RULE,
    SERVICES,
    SPLIT,
    TAIL,
    UNKNOWN,
    is_ours,
    is_shared,
)
from steersman.netfilter.names import BUILT_IN, FILTER, JUMPS, WHOLE, RuleKey
from steersman.netfilter.rule_text import canonical, chains

_JUMP_COMMENT = '--comment "kubernetes '
_NOT_LAST = "# other rules follow"
"""Added to the value of the node-port tail where it has to be moved; not a rule."""

# A rule exactly as rendering spells it; anything else takes the slow way through canonical().
# Addresses that glibc prints in the mixed notation (::1.2.3.4) are excluded on purpose.
_ADDRESS = r"(?:[\d.]+|[\da-f:]+)/(?:[\d.]+|[\da-f:]+) "
_PORT = r"(?:-m (?:tcp|udp|sctp) (?:--dport \d+ )?)?"
_RENDERED = re.compile(
    rf"-A (?P<chain>\S+) (?:(?:! )?-s {_ADDRESS})?(?:(?:! )?-d {_ADDRESS})?(?:(?:! )?-i \S+ )?"
    r"(?:-p (?P<protocol>\w+) )?"
    r"(?:-m conntrack --ctstate NEW (?=-m comment))?"
    r'(?:-m comment --comment "(?P<comment>[^"\\]*)" ?)?'
    r"(?:-m addrtype --(?:src|dst)-type LOCAL |-m conntrack (?:! )?--ctstate [A-Z,]+ "
    r"|-m mark (?:! )?--mark 0x[1-9a-f][\da-f]*/0x[1-9a-f][\da-f]* "
    r"|-m recent (?:--set|--rcheck --seconds \d+ --reap) --name \S+ --mask \S+ --rsource "
    r"|-m statistic --mode random --probability \d\.\d{11} )?"
    rf"{_PORT}(?:-m nfacct --nfacct-name  \S+ )?"
    r"(?:-j (?P<target>\S+)(?: --random-fully| --(?:reject-with|to-destination) \S+"
    r"| --set-xmark 0x[1-9a-f][\da-f]*/0x(?:0|[1-9a-f][\da-f]*))?)?",
    re.ASCII,
).fullmatch


class Parsed(msgspec.Struct, frozen=True):
    """What iptables-save said of ours."""

    ruleset: dict[RuleKey, str]
    spelled: dict[str, str]
    """How this machine spells a rule, by its canonical spelling, where the two differ."""
    held: frozenset[tuple[str, str]]
    """Our chains (table, name) that foreign rules lead to: these can be emptied, not removed."""


def parse(text: str, family: int) -> Parsed:
    """Parse the output of one iptables-save, of any tables."""
    return _Parser(family).parse(text)


class _Parser:
    """Sorts rules into objects while it goes over the lines once."""

    def __init__(self, family: int) -> None:
        self._family = family
        self._bodies: dict[RuleKey, list[str]] = {}
        self._spelled: dict[str, str] = {}
        self._held: set[tuple[str, str]] = set()

    def parse(self, text: str) -> Parsed:
        for table, chain, lines in chains(text):
            if not lines:
                self._declared(table, chain)
            elif is_ours(table, chain):
                self._own(table, chain, lines)
            else:
                self._foreign(table, chain, lines)
        ruleset = {key: "\n".join(lines) for key, lines in self._bodies.items()}
        return Parsed(ruleset, self._spelled, frozenset(self._held))

    def _declared(self, table: str, chain: str) -> None:
        if is_ours(table, chain) or (table, chain) == (FILTER, KUBELET_FIREWALL):
            self._bodies[self._family, table, chain, WHOLE] = []

    def _own(self, table: str, chain: str, lines: list[str]) -> None:
        if not is_shared(table, chain):
            self._bodies.setdefault((self._family, table, chain, WHOLE), []).extend(
                line if _RENDERED(line) else canonical(line, self._family) for line in lines
            )
            return
        part = ""
        for raw in lines:
            line, part = self._part_of(raw)
            self._bodies.setdefault((self._family, table, chain, part), []).append(line)
        tail = self._bodies.get((self._family, table, chain, TAIL))
        if tail and part != TAIL:
            tail.append(_NOT_LAST)

    def _part_of(self, line: str) -> tuple[str, str]:
        """Find whose a rule of a shared chain is: by its comment and protocol."""
        found = _RENDERED(line)
        if not found:
            line = self._slow(line)
            found = _RENDERED(line)
        if not found:
            return line, UNKNOWN
        protocol, comment, target = found["protocol"], found["comment"], found["target"]
        if comment is None:
            split = target is not None and target.startswith(BY_ADDRESS)
            return line, SPLIT if split and found["chain"] == SERVICES else UNKNOWN
        if comment.startswith("kubernetes service nodeports;"):
            return line, TAIL
        name = comment.partition(" ")[0]
        return line, f"{name} {protocol}" if protocol and "/" in name else UNKNOWN

    def _foreign(self, table: str, chain: str, lines: list[str]) -> None:
        """Find our jumps in built-in chains, and foreign rules that lead to our chains."""
        if (table, chain) == (FILTER, KUBELET_FIREWALL):
            if LOCALNET_RULE in map(self._slow, lines):
                self._bodies[self._family, table, chain, KUBELET] = [LOCALNET_RULE]
            return
        for raw in lines:
            target = raw.rpartition(" -j ")[2].partition(" ")[0]
            if target == KUBELET_FIREWALL and chain in BUILT_IN and table == FILTER:
                line = f"-A {chain} -j {KUBELET_FIREWALL}"
                self._bodies[self._family, table, chain, KUBELET] = [line]
            elif is_ours(table, target):
                if chain in BUILT_IN and _JUMP_COMMENT in raw:
                    key = (self._family, table, chain, JUMPS)
                    self._bodies.setdefault(key, []).append(self._slow(raw))
                else:
                    self._held.add((table, target))

    def _slow(self, line: str) -> str:
        text = canonical(line, self._family)
        if text != line:
            self._spelled[text] = line
        return text
