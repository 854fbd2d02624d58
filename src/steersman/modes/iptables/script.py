"""Turn a Diff into runs of iptables-restore: which lines, in which order. Pure.

A Diff that is too large for one run is cut into phases. Every rule leads to something complete, and
a stop between any two runs leaves rules that the next diff completes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import msgspec

from steersman.model.ruleset import Diff
from steersman.modes.iptables.names import (
    BUCKET,
    KUBELET,
    KUBELET_FIREWALL,
    LOCALNET_RULE,
    SERVICE_PREFIXES,
    SERVICES,
    SPLIT,
    TAIL,
    UNKNOWN,
    is_kubelets,
    is_ours,
    is_shared,
)
from steersman.netfilter.iptables.names import BUILT_IN, FILTER, JUMPS, WHOLE, RuleKey
from steersman.netfilter.iptables.restore import (
    Limits,
    Run,
    Step,
    old_and_new,
    rule_lines,
    write_steps,
)
from steersman.netfilter.iptables.saved import canonical, chains

# -- From iptables-save ----------------------------------------------------------------------------
#
# Parse iptables-save into the Ruleset that rendering would have made of it.
#
# Foreign chains are skipped. Everything in our chains is kept: unexpected rules get a key that no
# rendering has, so that the diff removes them.

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


# -- To iptables-restore ---------------------------------------------------------------------------

# Additions go from endpoints to jumps, removals back: nothing leads to a chain that is incomplete.
_NODE_CHAINS, _SERVICE_CHAINS, _RULES, _TAIL, _JUMPS, _REMOVE_SERVICE, _REMOVE_NODE = range(7)
"""The phases of a Diff that is cut into several runs."""
_ORDER = {prefix: order for order, prefix in enumerate(SERVICE_PREFIXES)}
"""Chains of a ServicePort by prefix, which a hash of 16 characters follows: each leads only to
those before. Other chains are the node's."""
# Not by `_ORDER`: rendering puts chains after those that they lead to, and a run that holds all
# chains of its owners takes iptables-nft two thirds of the time.
_OF_NODE, _OF_SERVICE = (_NODE_CHAINS, 0), (_SERVICE_CHAINS, 0)


def write_runs(
    change: Diff,
    limits: Limits,
    spellings: Mapping[str, str],
    referenced: frozenset[tuple[int, str, str]] = frozenset(),
) -> Iterator[Run]:
    """Write a Diff as runs of iptables-restore.

    Args:
        change: the Diff; objects shared with kubelet are only ever added. In a Diff that is cut
            the chains of an owner must be in the order in which rendering gives them.
        limits: when to cut.
        spellings: how this machine spells rules that are to be deleted, if it differs.
        referenced: chains (family, table, name) that foreign rules lead to: emptied, not removed.
    """
    return write_steps(write_objects(change, referenced), limits, spellings)


def write_objects(
    change: Diff, referenced: frozenset[tuple[int, str, str]] = frozenset()
) -> dict[int, list[Step]]:
    """Return the Steps of each object of a Diff, by family; see `write_runs`."""
    steps: dict[int, list[Step]] = {}
    gone = {key[:3] for key in change.removed if key[3] == WHOLE}
    for key, old_text, new_text in old_and_new(change):
        family, table, chain, part = key
        if new_text is None and is_kubelets(key):
            continue
        own = steps.get(family)
        if own is None:
            own = steps[family] = []
        if part == WHOLE and chain != KUBELET_FIREWALL:
            if new_text is None:
                own += _removal_steps(table, chain, (family, table, chain) in referenced)
            else:  # most objects of a large Diff
                phase = _OF_SERVICE if chain[:-16] in _ORDER else _OF_NODE
                own.append(Step(phase, table, chain, "", new_text))
            continue
        # A part of a chain that has other parts; a chain that goes is emptied anyway.
        goes = old_text is None or (family, table, chain) in gone
        old = [] if goes else rule_lines(old_text)
        new = rule_lines(new_text)
        if chain == KUBELET_FIREWALL and part == WHOLE:
            own.append(Step((_NODE_CHAINS, 0), table, create=chain))
        elif part == TAIL:
            own.append(Step((_TAIL, 0), table, delete=old, last=new))
        elif part in (JUMPS, KUBELET):
            # kubelet's come last, so that they end up above ours (behaviour 8.1)
            phase = (_JUMPS, int(part == KUBELET)) if new else (_RULES, 0)
            own.append(Step(phase, table, delete=old, insert=new))
        else:
            phase = (_TAIL if part == SPLIT else _RULES, 0)
            own.append(Step(phase, table, "", "", "", old, new))
    return steps


def _removal_steps(table: str, chain: str, referenced: bool) -> list[Step]:
    """Return the steps that remove a chain."""
    order = _ORDER.get(chain[:-16], -1)
    remove = "" if referenced else chain
    if order >= 0:
        return [Step((_REMOVE_SERVICE, -order), table, declare=chain, remove=remove)]
    steps = [Step((_REMOVE_NODE, 0), table, declare=chain, remove=remove)]
    if is_shared(table, chain) or chain.startswith(BUCKET):
        # Empty it before the chains that it leads to are removed.
        steps.insert(0, Step((_RULES, 0), table, declare=chain))
    return steps
