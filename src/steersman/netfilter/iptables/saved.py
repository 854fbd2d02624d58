"""The output of iptables-save: read, and spelled canonically. Pure.

    iptables-save --> chains() --> canonical() --> Ruleset of a mode --.
                                                                        > Diff --> restore.py
    plans ---------------- rendered in the same spelling --------------'

A Ruleset holds `-A` lines exactly as iptables-save 1.8.9 prints them. Other versions, and the text
that upstream writes, differ in the order of matches, in `--or-mark`, in blanks and in quotes. So
lines that are read back are brought to that spelling before they are compared.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from steersman.model.addresses import canonical_ip, family_of
from steersman.model.hashes import blake2b
from steersman.model.names import Family
from steersman.netfilter.iptables.names import BUILT_IN, REJECT

_SAVED_COUNTERS = re.compile(r"^\[\d+:\d+\] ", re.MULTILINE)
_VOLATILE = re.compile(r"^#.*\n|\[\d+:\d+\]", re.MULTILINE)
"""Comments, which contain the time, and the counters of policies."""
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


class SavedChain(NamedTuple):
    """A chain as iptables-save prints it: its declaration, or its rules."""

    table: str
    name: str
    policy: str
    """`ACCEPT`, `DROP`, or `-` of a chain that others jump to; "" where its rules are."""
    rules: list[str]
    """`-A` lines; [] where it is declared."""


def chains(text: str) -> Iterator[SavedChain]:
    """Split the output of iptables-save into chains, those of other programs too.

    Each declared chain comes without rules first, then those with rules.
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
            yield SavedChain(table, chain, "", lines)
            lines, prefix = [], ""
        first = line[:1]
        if first == "*":
            table = line[1:].strip()
        elif first == ":":
            words = line[1:].split(" ", 2)
            yield SavedChain(table, words[0], words[1] if len(words) > 1 else "-", [])
        elif line.startswith("-A "):
            chain = line[3:].partition(" ")[0]
            prefix = f"-A {chain} "
            lines.append(line)
    if lines:
        yield SavedChain(table, chain, "", lines)


def digest_rules(texts: Iterable[str]) -> bytes:
    """Return a digest of the output of iptables-save, without times and counters."""
    digest = blake2b(digest_size=16)
    for listing in texts:
        digest.update(_VOLATILE.sub("", listing).encode())
    return digest.digest()


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
            return f"{jump} {REJECT[Family(family)]}"
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
