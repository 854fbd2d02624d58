"""The input of iptables-restore, written for the objects of a Diff. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from steersman.model.names import Family
from steersman.model.ruleset import Diff, Script
from steersman.netfilter.iptables.names import FILTER, MANGLE, NAT, RuleKey, command_of

_TABLES = (MANGLE, FILTER, NAT)
"""Filter before nat: a Service that loses its last endpoint is rejected before its translation
ends, and source ranges are enforced before the address leads anywhere."""


class Limits(NamedTuple):
    """When and how a Diff is cut into several runs. Numbers: modes/iptables/README.md."""

    whole: int
    """Most objects that one run takes; a larger Diff is cut."""
    run: int
    """Objects in each run of a Diff that is cut."""


LIMITS = {"nft": Limits(1200, 800), "legacy": Limits(1 << 30, 1 << 30)}
"""iptables-nft takes time quadratic in the chains of one run, iptables-legacy in the number of runs
(each reads and writes the whole table)."""


UNCUT = Limits(1 << 30, 1 << 30)
"""For people: one run per family."""


class Step(NamedTuple):
    """The lines that one object of a Diff adds to a run; they end up in different places of it."""

    phase: tuple[int, int]
    """Order among Steps. A Diff that is cut never has two phases in one run."""
    table: str
    declare: str = ""
    """A chain to create or to empty."""
    create: str = ""
    """A chain to create that must not be emptied."""
    append: str = ""
    """Rules of a declared chain, `-A` lines."""
    delete: Sequence[str] = ()
    """Rules to delete, `-A` lines."""
    insert: Sequence[str] = ()
    """Rules to put at the top of a chain in this order, `-A` lines."""
    last: Sequence[str] = ()
    """Rules to put at the end of a chain, after all other rules of the run."""
    remove: str = ""
    """A chain to remove when everything else is done."""


class Run(NamedTuple):
    """The input of one iptables-restore."""

    family: int
    text: str


def rule_lines(value: str | None) -> list[str]:
    """Return the rules of an object's value."""
    return [line for line in (value or "").split("\n") if line.startswith("-A ")]


def write_steps(
    steps: Mapping[int, list[Step]], limits: Limits, spellings: Mapping[str, str]
) -> Iterator[Run]:
    """Write Steps as input of iptables-restore, one run per family unless there are too many.

    A run is atomic per table. Within it chains are declared first, so that rules may lead to any
    of them, and removed last.

    Args:
        steps: by family; they are sorted in place.
        limits: when to cut.
        spellings: how this machine spells rules that are to be deleted, if it differs.
    """
    for family in sorted(steps):
        own = steps[family]
        own.sort(key=itemgetter(0))  # the phase
        if len(own) <= limits.whole:
            yield Run(family, _run_text(own, spellings))
            continue
        for _, group in groupby(own, key=lambda step: step.phase):
            phase = list(group)
            for start in range(0, len(phase), limits.run):
                yield Run(family, _run_text(phase[start : start + limits.run], spellings))


def _run_text(steps: list[Step], spellings: Mapping[str, str]) -> str:
    by_table: dict[str, list[Step]] = {}
    for step in steps:
        by_table.setdefault(step.table, []).append(step)
    lines: list[str] = []
    for table in _TABLES:
        if table in by_table:
            lines += (f"*{table}", *_table_lines(by_table[table], spellings), "COMMIT")
    lines.append("")
    return "\n".join(lines)


def _table_lines(steps: list[Step], spellings: Mapping[str, str]) -> list[str]:
    """Write Steps of one table.

    Chains are declared in descending order, and filled in the same order. iptables-legacy keeps
    them in a sorted list with an index that it renews at every 355th new chain: a chain that sorts
    before all others is inserted at once, any other after a search of up to 400 names. Filled in
    order, chains that are looked up one after the other are neighbours in memory. For 40,000
    chains iptables-legacy-restore takes 0.8 s of CPU instead of 1.1 s.
    """
    # One pass over the steps: a large Diff has tens of thousands.
    declared: dict[str, str] = {}
    others: list[Step] = []
    changes: list[str] = []
    for step in steps:
        _, _, chain, _, append, delete, insert, _, remove = step
        if chain:
            declared[chain] = append
        elif delete or insert:
            if delete:
                changes += [f"-D{spellings.get(rule, rule)[2:]}" for rule in delete]
            changes += [f"-I{rule[2:]}" for rule in reversed(insert)]  # each goes to the top
        if remove or not chain:
            others.append(step)
    # Declare all chains first, so that rules may lead to any of them; `:CHAIN` also empties it.
    order = sorted(declared, reverse=True)
    lines = [f":{chain} - [0:0]" for chain in order]
    lines += [f"-N {step.create}" for step in others if step.create]
    lines += filter(None, map(declared.get, order))
    lines += changes
    lines += [rule for step in others for rule in step.last]
    lines += [f"-X {step.remove}" for step in others if step.remove]
    return lines


def restore_scripts(runs: Iterable[Run], command: str) -> tuple[Script, ...]:
    """Return runs for people; `command`: the iptables to use, by its name for IPv4."""
    scripts = []
    for run in runs:
        tool = command_of("iptables-restore", run.family)
        argv = (f"{command_of(command, run.family)}-restore", "--noflush")
        scripts.append(Script(tool, argv, run.text))
    return tuple(scripts)


Rules = Counter[tuple[str, Family]]
"""Numbers of rules by table and family."""


def count_rules(objects: Iterable[tuple[RuleKey, str]]) -> Rules:
    """Count the rules of a Ruleset's items."""
    counts: Rules = Counter()
    for key, text in objects:
        counts[key[1], Family(key[0])] += text.count("\n-A ") + text.startswith("-A ")
    return counts


def count_written(change: Diff) -> tuple[Rules, Rules]:
    """Return how many rules a Diff writes, and by how many it changes the totals."""
    new = {key: value for key, (_, value) in change.changed.items()}
    old = {key: value for key, (value, _) in change.changed.items()}
    written = count_rules(change.added.items()) + count_rules(new.items())
    gone = count_rules(change.removed.items()) + count_rules(old.items())
    growth = Counter(written)
    growth.subtract(gone)
    return written, growth
