"""Turn a Diff into runs of iptables-restore: which lines, in which order. Pure.

A Diff that is too large for one run is cut into phases. Every rule leads to something complete, and
a stop between any two runs leaves rules that the next diff completes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from steersman.model.ruleset import Diff
from steersman.modes.iptables.names import (
    BUCKET,
    KUBELET,
    KUBELET_FIREWALL,
    SERVICE_PREFIXES,
    SPLIT,
    TAIL,
    is_kubelets,
    is_shared,
)
from steersman.netfilter.iptables.names import JUMPS, WHOLE
from steersman.netfilter.iptables.restore import (
    Limits,
    Run,
    Step,
    rule_lines,
    write_steps,
)

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
    for key, old_text, new_text in change.old_and_new():
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
