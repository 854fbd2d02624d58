"""From a Diff to the input of iptables-restore: what is written, in what order, in how many runs.

Pure. A run is atomic per table. Within it chains are declared first, so that rules may lead to any
of them, and removed last. A Diff too large for one run is cut into phases, such that every rule
leads to something complete and a stop between any two runs leaves rules that a diff repairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from steersman.model.ruleset import Diff
from steersman.modes.iptables.names import (
    BY_ADDRESS,
    FILTER,
    JUMPS,
    KUBELET,
    KUBELET_FIREWALL,
    MANGLE,
    NAT,
    SERVICE_PREFIXES,
    SPLIT,
    TAIL,
    WHOLE,
    RuleKey,
    is_kubelets,
    is_shared,
)

_TABLES = (MANGLE, FILTER, NAT)
"""Filter before nat: a Service that loses its last endpoint is refused before it is not
translated any more, and source ranges are enforced before the address leads anywhere."""

# The phases of a Diff that is cut into several runs.
_NODE_CHAINS, _SERVICE_CHAINS, _RULES, _TAIL, _JUMPS, _REMOVE_SERVICE, _REMOVE_NODE = range(7)


class Limits(NamedTuple):
    """When a Diff is cut into several runs, and how. Numbers: README.md, "Cold start"."""

    whole: int
    """Objects up to which one run takes all."""
    run: int
    """Objects in a run of a Diff that is cut."""


LIMITS = {"nft": Limits(1200, 800), "legacy": Limits(1 << 30, 1 << 30)}
"""iptables-nft takes time quadratic in the chains of one run, iptables-legacy in the number of runs
(each reads and writes the whole table)."""


class Step(NamedTuple):
    """What is done about one object; the parts end up in different places of a run."""

    phase: tuple[int, int]
    table: str
    declare: str = ""
    """A chain to create or to empty."""
    create: str = ""
    """A chain to create, that must not be emptied."""
    append: str = ""
    """Rules of a declared chain, `-A` lines."""
    delete: Sequence[str] = ()
    """Rules to delete, `-A` lines."""
    insert: Sequence[str] = ()
    """Rules to put at the top of a chain in this order, `-A` lines."""
    last: Sequence[str] = ()
    """Rules to put at the end of a chain."""
    remove: str = ""
    """A chain to remove when all else is done."""


class Run(NamedTuple):
    """The input of one iptables-restore."""

    family: int
    text: str


def write_runs(
    change: Diff,
    limits: Limits,
    spelled: Mapping[str, str],
    held: frozenset[tuple[int, str, str]] = frozenset(),
) -> Iterator[Run]:
    """Write a Diff as runs of iptables-restore.

    Args:
        change: the Diff; objects shared with kubelet are only ever added. In a Diff that is cut
            the chains of an owner must be in the order in which rendering gives them.
        limits: when to cut.
        spelled: how this machine spells rules that are to be deleted, where it differs.
        held: chains (family, table, name) that foreign rules lead to: emptied, not removed.
    """
    steps: dict[int, list[Step]] = {}
    gone = {key[:3] for key in change.removed if key[3] == WHOLE}
    for key, (old, new) in _changes(change):
        family, table, chain, _ = key
        if is_kubelets(key) and new is None:
            continue
        whole = not is_kubelets(key) and key[3] == WHOLE
        if whole:
            found = _chain_steps(key, new, (family, table, chain) in held)
        else:
            emptied = (family, table, chain) in gone
            found = [_rule_step(key, _rules(None if emptied else old), _rules(new))]
        steps.setdefault(family, []).extend(found)
    for family in sorted(steps):
        for part in _cut(steps[family], limits):
            yield Run(family, _write(part, spelled))


_Change = tuple[RuleKey, tuple[str | None, str | None]]


def _changes(change: Diff) -> Iterator[_Change]:
    for key, value in change.removed.items():
        yield key, (value, None)
    for key, value in change.added.items():
        yield key, (None, value)
    yield from change.changed.items()


def _rules(value: str | None) -> list[str]:
    return [line for line in (value or "").split("\n") if line.startswith("-A ")]


def _chain_steps(key: RuleKey, new: str | None, held: bool) -> list[Step]:
    """Steps for a chain and, unless it is shared, its rules; `new` is None to remove it."""
    _, table, chain, _ = key
    order = _order(chain)
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


def _order(chain: str) -> int:
    """Place among the chains of a ServicePort, which lead only to those before; -1: the node's."""
    for order, prefix in enumerate(SERVICE_PREFIXES):
        if chain.startswith(prefix) and len(chain) == len(prefix) + 16:
            return order
    return -1


def _rule_step(key: RuleKey, old: list[str], new: list[str]) -> Step:
    """Step for a part of a chain that has other parts."""
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


def _cut(steps: list[Step], limits: Limits) -> Iterator[list[Step]]:
    """Put steps in order and cut them, if need be, where a phase ends or a run is full."""
    steps.sort(key=lambda step: step.phase)
    if len(steps) <= limits.whole:
        yield steps
        return
    for _, group in groupby(steps, key=lambda step: step.phase):
        phase = list(group)
        for start in range(0, len(phase), limits.run):
            yield phase[start : start + limits.run]


def _write(steps: list[Step], spelled: Mapping[str, str]) -> str:
    lines: list[str] = []
    for table in _TABLES:
        own = [step for step in steps if step.table == table]
        if own:
            lines.append(f"*{table}")
            _table(own, spelled, lines)
            lines.append("COMMIT")
    lines.append("")
    return "\n".join(lines)


def _table(steps: list[Step], spelled: Mapping[str, str], lines: list[str]) -> None:
    declared = dict.fromkeys([step.declare for step in steps if step.declare])
    lines += [f":{chain} - [0:0]" for chain in declared]
    lines += [f"-N {step.create}" for step in steps if step.create]
    lines += [step.append for step in steps if step.append]
    for step in steps:
        lines += [f"-D{spelled.get(rule, rule)[2:]}" for rule in step.delete]
        lines += [f"-I{rule[2:]}" for rule in reversed(step.insert)]
    lines += [rule for step in steps for rule in step.last]
    lines += [f"-X {step.remove}" for step in steps if step.remove]
