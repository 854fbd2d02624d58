"""One spelling for a rule: that of iptables-save 1.8.9, whoever wrote or printed it.

Other versions and upstream's own text differ in the order of matches, in `--or-mark`, in blanks
and quotation. What `read` returns has to equal what rendering writes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence

from steersman.model.addresses import canonical_ip, family_of
from steersman.modes.iptables.endpoints import probability
from steersman.modes.iptables.names import BUILT_IN

_COUNTERS = re.compile(r"\s*\[\d+:\d+\]\s+")
_PLAIN = re.compile(r"[\w-]+", re.ASCII).fullmatch
_BASE = ("-s", "-d", "-i", "-o", "-p")
_LONG = {
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
"""Order of matches; those not named come between a comment and a protocol."""
_RECENT = ("--set", "--rcheck", "--seconds", "--reap", "--name", "--mask", "--rsource")
_REJECT = {"4": "icmp-port-unreachable", "6": "icmp6-port-unreachable"}

Words = list[str]


def canonical(line: str, family: int) -> str:
    """Return a rule in the one spelling; a line that is no rule comes back as it is."""
    try:
        words = shlex.split(_COUNTERS.sub("", line, count=1))
        return _write(_Rule(words), family)
    except (ValueError, IndexError):
        return line


class _Rule:
    """A rule taken apart."""

    def __init__(self, words: Words) -> None:
        self.chain = ""
        self.base: dict[str, str] = {}
        self.matches: dict[str, Words] = {}
        self.target: Words = []
        rest = [_LONG.get(word, word) for word in words]
        into: Words = []
        negated = ""
        while rest:
            word = rest.pop(0)
            if word == "!":
                negated = "! "
                continue
            if word in _BASE:
                self.base[word] = f"{negated}{word} {rest.pop(0)}"
            elif word == "-A":
                self.chain = rest.pop(0)
            elif word == "-m":
                into = self.matches.setdefault(rest.pop(0), [])
            elif word in ("-j", "-g"):
                into = self.target = [word, rest.pop(0)]
            else:
                into += [word] if not negated else ["!", word]
            negated = ""


def _write(rule: _Rule, family: int) -> str:
    words = [f"-A {rule.chain}"]
    words += [_base(rule.base[option], family) for option in _BASE if option in rule.base]
    first = ("conntrack",) if rule.chain in BUILT_IN else ()

    def rank(name: str) -> int:
        return 0 if name in first else _RANK.get(name, 2)

    for name in sorted(rule.matches, key=rank):
        change = _MATCHES.get(name)
        options = change(rule.matches[name], family) if change else rule.matches[name]
        words.append(" ".join([f"-m {name}", *options]))
    return " ".join(words + _target(rule.target, family))


def _base(text: str, family: int) -> str:
    head, _, value = text.rpartition(" ")
    if head.endswith(("-s", "-d")):
        address, _, mask = value.partition("/")
        length = "32" if family == 4 else "128"
        return f"{head} {_address(address)}/{_address(mask) if mask else length}"
    return text


def _address(text: str) -> str:
    return canonical_ip(text) or text


def _comment(options: Words, _family: int) -> Words:
    text = options[1]
    if _PLAIN(text):
        return ["--comment", text]
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return ["--comment", f'"{escaped}"']


def _hex(value: str) -> str:
    return f"{int(value, 0):#x}"


def _mark(options: Words, _family: int) -> Words:
    *head, mark = options
    value, _, mask = mark.partition("/")
    return [*head, f"{_hex(value)}/{_hex(mask)}" if mask else _hex(value)]


def _recent(options: Words, family: int) -> Words:
    full = list(options)
    if "--mask" not in full:
        full += ["--mask", "255.255.255.255" if family == 4 else ":".join(["ffff"] * 8)]
    if "--rsource" not in full and "--rdest" not in full:
        full.append("--rsource")
    groups: list[Words] = []
    for word in full:
        if word.startswith("--"):
            groups.append([word])
        else:
            groups[-1].append(word)
    groups.sort(key=lambda group: _RECENT.index(group[0]) if group[0] in _RECENT else 0)
    return [word for group in groups for word in group]


def _statistic(options: Words, _family: int) -> Words:
    if "--probability" not in options:
        return options
    at = options.index("--probability") + 1
    kept = float(options[at])
    choices = round(1 / kept) if kept else 0
    near = choices and abs(float(probability(choices)) - kept) < 1e-8
    return [*options[:at], probability(choices) if near else options[at], *options[at + 1 :]]


def _nfacct(options: Words, _family: int) -> Words:
    return [options[0], "", *options[1:]]  # 1.8.9 prints two blanks


def _bpf(options: Words, _family: int) -> Words:
    return [options[0], f'"{options[1]}"', *options[2:]]


_MATCHES: dict[str, Callable[[Words, int], Sequence[str]]] = {
    "comment": _comment,
    "mark": _mark,
    "recent": _recent,
    "statistic": _statistic,
    "nfacct": _nfacct,
    "bpf": _bpf,
}


def _target(words: Words, family: int) -> Words:
    match words:
        case [jump, "MARK", "--or-mark", mark]:
            return [f"{jump} MARK --set-xmark {_hex(mark)}/{_hex(mark)}"]
        case [jump, "MARK", "--xor-mark", mark]:
            return [f"{jump} MARK --set-xmark {_hex(mark)}/0x0"]
        case [jump, "MARK", "--set-xmark", mark]:
            return [f"{jump} MARK --set-xmark {_mark([mark], family)[0]}"]
        case [jump, "REJECT"]:
            return [f"{jump} REJECT --reject-with {_REJECT[str(family)]}"]
        case [jump, "DNAT", "--to-destination", destination]:
            return [f"{jump} DNAT --to-destination {_destination(destination)}"]
    return [" ".join(words)] if words else []


def _destination(text: str) -> str:
    host, colon, port = text.rpartition(":")
    address = canonical_ip(host.strip("[]"))
    if not colon or address is None:
        return text
    return f"[{address}]:{port}" if family_of(address) == 6 else f"{address}:{port}"
