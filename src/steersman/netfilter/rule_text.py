"""The text of iptables-save and iptables-restore: read, spelled canonically, written. Pure.

    iptables-save --> chains() --> canonical() --> Ruleset of a mode --.
                                                                        > Diff --> Steps
    plans ---------------- rendered in the same spelling --------------'             |
                                                       iptables-restore <-- write_steps()

A Ruleset holds `-A` lines exactly as iptables-save 1.8.9 prints them. Other versions, and the text
that upstream writes, differ in the order of matches, in `--or-mark`, in blanks and in quotes. So
lines that are read back are brought to that spelling before they are compared.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from steersman.model.addresses import canonical_ip, family_of
from steersman.model.names import Family
from steersman.model.ruleset import Diff
from steersman.netfilter.names import BUILT_IN, FILTER, MANGLE, NAT, RuleKey

# What several modes render

HOST_MASK = {4: "255.255.255.255", 6: ":".join(["ffff"] * 8)}
"""The mask of a single address, by family, as `-m recent --mask` prints it."""


@lru_cache(maxsize=4096)
def probability(choices: int) -> str:
    """Return `1/choices` as iptables-save prints it: given with ten decimals, kept in 31 bits."""
    kept = int(float(f"{1 / choices:.10f}") * (1 << 31) + 0.5)
    return f"{kept / (1 << 31):.11f}"


def masquerade_rules(mark: str, *, random_fully: bool) -> tuple[str, ...]:
    """Return the rules, without `-A CHAIN`, that masquerade marked packets (behaviour 8.2).

    Args:
        mark: the mark in hexadecimal; it is removed, so that no later rule masquerades again.
        random_fully: choose the source port at random (iptables 1.6.2).
    """
    random = " --random-fully" if random_fully else ""
    comment = '-m comment --comment "kubernetes service traffic requiring SNAT"'
    return (
        f"-m mark ! --mark {mark}/{mark} -j RETURN",
        f"-j MARK --set-xmark {mark}/0x0",
        f"{comment} -j MASQUERADE{random}",
    )


# Reading

_SAVED_COUNTERS = re.compile(r"^\[\d+:\d+\] ", re.MULTILINE)


def chains(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Split the output of iptables-save into chains, those of other programs too.

    Yields (table, chain, rules): each declared chain without rules first, then those with rules.
    """
    table = chain = prefix = ""
    lines: list[str] = []
    if "\n[" in text:  # printed with counters (iptables-save -c)
        text = _SAVED_COUNTERS.sub("", text)
    for line in text.splitlines():
        if prefix and line.startswith(prefix):
            lines.append(line)
            continue
        if lines:
            yield table, chain, lines
            lines, prefix = [], ""
        first = line[:1]
        if first == "*":
            table = line[1:].strip()
        elif first == ":":
            yield table, line[1:].partition(" ")[0], []
        elif line.startswith("-A "):
            chain = line[3:].partition(" ")[0]
            prefix = f"-A {chain} "
            lines.append(line)
    if lines:
        yield table, chain, lines


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


# The canonical spelling

_LEADING_COUNTERS = re.compile(r"\s*\[\d+:\d+\]\s+")
_UNQUOTED = re.compile(r"[\w-]+", re.ASCII).fullmatch
_BASE = ("-s", "-d", "-i", "-o", "-p")
"""Options that belong to no match, in the order in which they are printed."""
_SHORT = {
    "--source": "-s",
    "--src": "-s",
    "--destination": "-d",
    "--dst": "-d",
    "--in-interface": "-i",
    "--out-interface": "-o",
    "--protocol": "-p",
    "--match": "-m",
    "--jump": "-j",
    "--append": "-A",
}
_RANK = {"comment": 1, "tcp": 3, "udp": 3, "sctp": 3, "nfacct": 4}
"""Order of matches; others come between a comment and a protocol."""
_RECENT = ("--set", "--rcheck", "--seconds", "--reap", "--name", "--mask", "--rsource")
_REJECT = {4: "icmp-port-unreachable", 6: "icmp6-port-unreachable"}


def canonical(line: str, family: int) -> str:
    """Return a rule in the spelling of iptables-save 1.8.9; other lines come back unchanged."""
    try:
        return _Rule(shlex.split(_LEADING_COUNTERS.sub("", line, count=1))).spell(family)
    except (ValueError, IndexError):
        return line


class _Rule:
    """A rule, split into its base options, matches and target."""

    def __init__(self, words: list[str]) -> None:
        self.chain = ""
        self.base: dict[str, str] = {}
        self.matches: dict[str, list[str]] = {}
        self.target: list[str] = []
        # -A CHAIN [base options] [-m MATCH options]... [-j TARGET options], in any order
        rest = [_SHORT.get(word, word) for word in words]
        options: list[str] = []  # those of the match or target at hand
        negation = ""
        while rest:
            word = rest.pop(0)
            if word == "!":
                negation = "! "
                continue
            if word in _BASE:
                self.base[word] = f"{negation}{word} {rest.pop(0)}"
            elif word == "-A":
                self.chain = rest.pop(0)
            elif word == "-m":
                options = self.matches.setdefault(rest.pop(0), [])
            elif word in ("-j", "-g"):
                options = self.target = [word, rest.pop(0)]
            else:
                options += ["!", word] if negation else [word]
            negation = ""

    def spell(self, family: int) -> str:
        words = [f"-A {self.chain}"]
        for option in _BASE:
            if text := self.base.get(option):
                if option in ("-s", "-d"):
                    head, _, value = text.rpartition(" ")
                    address, _, mask = value.partition("/")
                    mask = canonical_ip(mask) or mask or ("32" if family == 4 else "128")
                    text = f"{head} {canonical_ip(address) or address}/{mask}"
                words.append(text)

        def rank(name: str) -> int:
            first = name == "conntrack" and self.chain in BUILT_IN  # as our jumps are written
            return 0 if first else _RANK.get(name, 2)

        for name in sorted(self.matches, key=rank):
            words.append(" ".join([f"-m {name}", *_match(name, self.matches[name], family)]))
        if self.target:
            words.append(_target(self.target, family))
        return " ".join(words)


def _match(name: str, options: list[str], family: int) -> Sequence[str]:
    """Spell the options of a match."""
    match name:
        case "comment":
            text = options[1]
            if not _UNQUOTED(text):
                text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
            return ["--comment", text]
        case "mark":
            return [*options[:-1], _mark(options[-1])]
        case "recent":
            return _recent(options, family)
        case "statistic" if "--probability" in options:
            at = options.index("--probability") + 1
            given = float(options[at])
            # Versions print other decimals of the same 31 bits; a share of 1/n is meant.
            choices = round(1 / given) if given else 0
            near = choices and abs(float(probability(choices)) - given) < 1e-8
            return [
                *options[:at],
                probability(choices) if near else options[at],
                *options[at + 1 :],
            ]
        case "nfacct":
            return [options[0], "", *options[1:]]  # 1.8.9 prints two blanks
        case "bpf":
            return [options[0], f'"{options[1]}"', *options[2:]]
    return options


def _recent(options: list[str], family: int) -> list[str]:
    """Spell the options of `-m recent` in order, with the defaults that older versions omit."""
    full = list(options)
    if "--mask" not in full:
        full += ["--mask", HOST_MASK[family]]
    if "--rsource" not in full and "--rdest" not in full:
        full.append("--rsource")
    groups: list[list[str]] = []  # an option with its value
    for word in full:
        if word.startswith("--"):
            groups.append([word])
        else:
            groups[-1].append(word)
    groups.sort(key=lambda group: _RECENT.index(group[0]) if group[0] in _RECENT else 0)
    return [word for group in groups for word in group]


def _target(words: list[str], family: int) -> str:
    """Spell a target: `-j` or `-g`, its name and options."""
    match words:
        case [jump, "MARK", "--or-mark", mark]:
            return f"{jump} MARK --set-xmark {int(mark, 0):#x}/{int(mark, 0):#x}"
        case [jump, "MARK", "--xor-mark", mark]:
            return f"{jump} MARK --set-xmark {int(mark, 0):#x}/0x0"
        case [jump, "MARK", "--set-xmark", mark]:
            return f"{jump} MARK --set-xmark {_mark(mark)}"
        case [jump, "REJECT"]:
            return f"{jump} REJECT --reject-with {_REJECT[family]}"
        case [jump, "DNAT", "--to-destination", destination]:
            host, colon, port = destination.rpartition(":")
            address = canonical_ip(host.strip("[]"))
            if colon and address is not None:
                host = f"[{address}]" if family_of(address) == 6 else address
                destination = f"{host}:{port}"
            return f"{jump} DNAT --to-destination {destination}"
    return " ".join(words)


def _mark(text: str) -> str:
    """Spell a mark, with or without a mask, in hexadecimal."""
    return "/".join(f"{int(number, 0):#x}" for number in text.split("/"))


# Writing

_TABLES = (MANGLE, FILTER, NAT)
"""Filter before nat: a Service that loses its last endpoint is rejected before its translation
ends, and source ranges are enforced before the address leads anywhere."""


class Limits(NamedTuple):
    """When and how a Diff is cut into several runs. Numbers: README.md, "Cold start"."""

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


def old_and_new(change: Diff) -> Iterator[tuple[RuleKey, str | None, str | None]]:
    """Yield each object of a Diff with its present and its wanted value; None if there is none."""
    for key, value in change.removed.items():
        yield key, value, None
    for key, value in change.added.items():
        yield key, None, value
    for key, (old, new) in change.changed.items():
        yield key, old, new


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
    lines += [declared[chain] for chain in order if declared[chain]]
    lines += changes
    lines += [rule for step in others for rule in step.last]
    lines += [f"-X {step.remove}" for step in others if step.remove]
    return lines
