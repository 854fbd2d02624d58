"""Parse iptables-save into the Ruleset that rendering would have made of it. Pure.

Foreign chains are skipped. Everything in our chains is kept: unexpected rules get a key that no
rendering has, so that the diff removes them.
"""

from __future__ import annotations

import re
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


def parse(text: str, family: int) -> SavedRules:  # noqa: PLR0912 - one for each kind of chain
    """Parse the output of one iptables-save, of any tables, in one pass."""
    rules: dict[RuleKey, list[str]] = {}
    spellings: dict[str, str] = {}
    referenced: set[tuple[str, str]] = set()

    def spell(raw: str) -> str:
        line = canonical(raw, family)
        if line != raw:
            spellings[line] = raw
        return line

    for table, chain, _, lines in chains(text):
        ours = is_ours(table, chain)
        firewall = (table, chain) == (FILTER, KUBELET_FIREWALL)
        if not lines:  # a declaration
            if ours or firewall:
                rules[family, table, chain, WHOLE] = []
        elif ours and not is_shared(table, chain):
            rules.setdefault((family, table, chain, WHOLE), []).extend(
                line if _RENDERED(line) else canonical(line, family) for line in lines
            )
        elif ours:
            for part, group in _groups(lines, spell).items():
                rules.setdefault((family, table, chain, part), []).extend(group)
        elif firewall:
            if LOCALNET_RULE in map(spell, lines):
                rules[family, table, chain, KUBELET] = [LOCALNET_RULE]
        else:
            # A built-in or foreign chain: our jumps, and rules that lead to our chains.
            for raw in lines:
                target = raw.rpartition(" -j ")[2].partition(" ")[0]
                if target == KUBELET_FIREWALL and chain in BUILT_IN and table == FILTER:
                    line = f"-A {chain} -j {KUBELET_FIREWALL}"
                    rules[family, table, chain, KUBELET] = [line]
                elif is_ours(table, target):
                    if chain in BUILT_IN and _JUMP_COMMENT in raw:
                        rules.setdefault((family, table, chain, JUMPS), []).append(spell(raw))
                    else:
                        referenced.add((table, target))
    ruleset = {key: "\n".join(lines) for key, lines in rules.items()}
    return SavedRules(ruleset, spellings, frozenset(referenced))


def _groups(lines: list[str], spell: Callable[[str], str]) -> dict[str, list[str]]:
    """Group the rules of a shared chain by their parts, each told by its comment and protocol."""
    groups: dict[str, list[str]] = {}
    part = ""
    for raw in lines:
        line, found = raw, _RENDERED(raw)
        if not found:
            line = spell(raw)
            found = _RENDERED(line)
        part = UNKNOWN
        if found:
            protocol, comment, target = found["protocol"], found["comment"], found["target"]
            if comment is None:
                if target and target.startswith(BUCKET) and found["chain"] == SERVICES:
                    part = SPLIT
            elif comment.startswith("kubernetes service nodeports;"):
                part = TAIL
            else:
                name = comment.partition(" ")[0]
                if protocol and "/" in name:
                    part = f"{name} {protocol}"
        groups.setdefault(part, []).append(line)
    if TAIL in groups and part != TAIL:
        groups[TAIL].append(_NOT_LAST)
    return groups
