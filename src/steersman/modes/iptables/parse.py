"""Parse iptables-save into the Ruleset that rendering would have made of it. Pure.

Foreign chains are skipped. Everything in our chains is kept: unexpected rules get a key that no
rendering has, so that the diff removes them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable

import msgspec

from steersman.modes.iptables.names import (
    BUCKET,
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
from steersman.netfilter.iptables.names import BUILT_IN, FILTER, JUMPS, WHOLE, RuleKey
from steersman.netfilter.iptables.saved import canonical, chains

_JUMP_COMMENT = '--comment "kubernetes '
_NOT_LAST = "# other rules follow"
"""Added to the value of the node-port tail if it must move to the end; not a rule."""

# A rule exactly as rendering spells it; any other rule takes the slow path through canonical().
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


class SavedRules(msgspec.Struct, frozen=True):
    """Our part of the output of iptables-save."""

    ruleset: dict[RuleKey, str]
    spellings: dict[str, str]
    """How this machine spells a rule, by its canonical spelling, if the two differ."""
    referenced: frozenset[tuple[str, str]]
    """Our chains (table, name) that foreign rules lead to: they can be emptied, not removed."""


def parse(text: str, family: int) -> SavedRules:
    """Parse the output of one iptables-save, of any tables, in one pass."""
    found = _Found(family)
    for table, chain, _, lines in chains(text):
        found.add(table, chain, lines)
    ruleset = {key: "\n".join(lines) for key, lines in found.rules.items()}
    return SavedRules(ruleset, found.spellings, frozenset(found.referenced))


class _Found:
    """What is ours in the output so far; SavedRules has the result."""

    def __init__(self, family: int) -> None:
        self._family = family
        self.rules = defaultdict[RuleKey, list[str]](list)
        self.spellings: dict[str, str] = {}
        self.referenced: set[tuple[str, str]] = set()

    def add(self, table: str, chain: str, lines: list[str]) -> None:
        """Add rules of a chain; without rules it is declared."""
        ours = is_ours(table, chain)
        firewall = (table, chain) == (FILTER, KUBELET_FIREWALL)
        whole = self._family, table, chain, WHOLE
        if not lines:
            if ours or firewall:
                self.rules[whole] = []
        elif firewall:
            if LOCALNET_RULE in map(self._spell, lines):
                self.rules[self._family, table, chain, KUBELET] = [LOCALNET_RULE]
        elif not ours:
            for line in lines:
                self._add_foreign(table, chain, line)
        elif is_shared(table, chain):
            for part, group in _groups(lines, self._spell).items():
                self.rules[self._family, table, chain, part] += group
        else:
            self.rules[whole] += [
                line if _RENDERED(line) else canonical(line, self._family) for line in lines
            ]

    def _add_foreign(self, table: str, chain: str, line: str) -> None:
        """Look at a rule of a built-in or foreign chain: does it lead to one of ours?"""
        target = line.rpartition(" -j ")[2].partition(" ")[0]
        if target == KUBELET_FIREWALL and chain in BUILT_IN and table == FILTER:
            jump = f"-A {chain} -j {KUBELET_FIREWALL}"
            self.rules[self._family, table, chain, KUBELET] = [jump]
        elif not is_ours(table, target):
            return
        elif chain in BUILT_IN and _JUMP_COMMENT in line:
            self.rules[self._family, table, chain, JUMPS].append(self._spell(line))
        else:
            self.referenced.add((table, target))

    def _spell(self, raw: str) -> str:
        line = canonical(raw, self._family)
        if line != raw:
            self.spellings[line] = raw
        return line


def _groups(lines: list[str], spell: Callable[[str], str]) -> dict[str, list[str]]:
    """Group the rules of a shared chain by their parts."""
    groups = defaultdict[str, list[str]](list)
    part = ""
    for raw in lines:
        line, found = raw, _RENDERED(raw)
        if not found:
            line = spell(raw)
            found = _RENDERED(line)
        part = _part_of(found) if found else UNKNOWN
        groups[part].append(line)
    if TAIL in groups and part != TAIL:
        groups[TAIL].append(_NOT_LAST)
    return groups


def _part_of(rule: re.Match[str]) -> str:
    """Return the part of a shared chain that a rule belongs to, by its comment and protocol."""
    comment, protocol = rule["comment"], rule["protocol"]
    if comment is None:
        splits = (rule["target"] or "").startswith(BUCKET) and rule["chain"] == SERVICES
        return SPLIT if splits else UNKNOWN
    if comment.startswith("kubernetes service nodeports;"):
        return TAIL
    name = comment.partition(" ")[0]
    return f"{name} {protocol}" if protocol and "/" in name else UNKNOWN
