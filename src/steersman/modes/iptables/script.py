"""The order in which a Diff is written: its objects as Steps of iptables-restore. Pure.

A Diff too large for one run is cut into phases, such that every rule leads to something complete
and a stop between any two runs leaves rules that a diff repairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from steersman.model.ruleset import Diff
from steersman.modes.iptables.names import (
    BY_ADDRESS,
    KUBELET,
    KUBELET_FIREWALL,
    SERVICE_PREFIXES,
    SPLIT,
    TAIL,
    is_kubelets,
    is_shared,
)
from steersman.netfilter.names import JUMPS, WHOLE, RuleKey
from steersman.netfilter.rule_text import Limits, Run, Step, old_and_new, rule_lines, write_steps

# The phases of a Diff that is cut into several runs.
_NODE_CHAINS, _SERVICE_CHAINS, _RULES, _TAIL, _JUMPS, _REMOVE_SERVICE, _REMOVE_NODE = range(7)


def write_runs(
    change: Diff,
    limits: Limits,
    spellings: Mapping[str, str],
    held: frozenset[tuple[int, str, str]] = frozenset(),
) -> Iterator[Run]:
    """Write a Diff as runs of iptables-restore.

    Args:
        change: the Diff; objects shared with kubelet are only ever added. In a Diff that is cut
            the chains of an owner must be in the order in which rendering gives them.
        limits: when to cut.
        spellings: how this machine spells rules that are to be deleted, if it differs.
        held: chains (family, table, name) that foreign rules lead to: emptied, not removed.
    """
    steps: dict[int, list[Step]] = {}
    gone = {key[:3] for key in change.removed if key[3] == WHOLE}
    for key, old, new in old_and_new(change):
        family, table, chain, part = key
        if new is None and is_kubelets(key):
            continue
        if part == WHOLE and not is_kubelets(key):
            found = _chain_steps(key, new, (family, table, chain) in held)
        else:
            emptied = (family, table, chain) in gone
            found = [_rule_step(key, rule_lines(None if emptied else old), rule_lines(new))]
        steps.setdefault(family, []).extend(found)
    return write_steps(steps, limits, spellings)


def _chain_steps(key: RuleKey, new: str | None, held: bool) -> list[Step]:
    """Return the steps for a chain and, unless it is shared, its rules; no `new` removes it."""
    _, table, chain, _ = key
    # Place among the chains of a ServicePort, which lead only to those before; -1: the node's.
    order = -1
    for place, prefix in enumerate(SERVICE_PREFIXES):
        if chain.startswith(prefix) and len(chain) == len(prefix) + 16:
            order = place
            break
    of_node = order < 0
    if new is not None:
        # Not by `order`: rendering puts chains after those that they lead to, and a run that holds
        # all chains of its owners takes iptables-nft two thirds of the time.
        phase = (_NODE_CHAINS if of_node else _SERVICE_CHAINS, 0)
        return [Step(phase, table, chain, "", new)]
    remove = "" if held else chain
    if not of_node:
        return [Step((_REMOVE_SERVICE, -order), table, declare=chain, remove=remove)]
    leads_on = is_shared(table, chain) or chain.startswith(BY_ADDRESS)
    empty = [Step((_RULES, 0), table, declare=chain)] if leads_on else []
    return [*empty, Step((_REMOVE_NODE, 0), table, declare=chain, remove=remove)]


def _rule_step(key: RuleKey, old: list[str], new: list[str]) -> Step:
    """Return the step for a part of a chain that has other parts."""
    _, table, chain, part = key
    if chain == KUBELET_FIREWALL and part == WHOLE:
        return Step((_NODE_CHAINS, 0), table, create=chain)
    if part == TAIL:
        return Step((_TAIL, 0), table, delete=old, last=new)
    if part in (JUMPS, KUBELET):
        # kubelet's come last, so that they end up above ours (behaviour 8.1)
        phase = (_RULES, 0) if not new else (_JUMPS, int(part == KUBELET))
        return Step(phase, table, delete=old, insert=new)
    return Step((_TAIL if part == SPLIT else _RULES, 0), table, delete=old, insert=new)
