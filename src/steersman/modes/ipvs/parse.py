"""From what `ipset save`, iptables-save and /proc/net/ip_vs print to keys and values. Pure."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import NamedTuple

from steersman.model.names import Protocol
from steersman.modes.ipvs.names import (
    CHAINS,
    MemberKey,
    ServerKey,
    SetKey,
    Target,
    is_our_set,
)
from steersman.netfilter.names import BUILT_IN, JUMPS, WHOLE, RuleKey
from steersman.netfilter.rule_text import canonical, chains

_NUMBERS = {each.lower(): str(each.number) for each in Protocol}
_CREATE = 4  # words: create, name, type, family, ...


class Real(NamedTuple):
    """A real server as the kernel lists it."""

    target: Target
    weight: int
    active: int
    inactive: int


def is_drained(real: Real) -> bool:
    """Whether a real server takes no connections and has none."""
    return not (real.weight or real.active or real.inactive)


def parse_sets(text: str) -> Iterator[tuple[SetKey | MemberKey, str]]:
    """Take the output of `ipset save` apart; foreign sets are passed over."""
    for line in text.splitlines():
        words = line.split()
        if len(words) < 3 or not is_our_set(words[1]):
            continue
        if words[0] == "create" and len(words) > _CREATE:
            yield SetKey(words[1]), " ".join(words[2:5])
        elif words[0] == "add":
            yield MemberKey(words[1], _numeric(words[2])), ""


def _numeric(entry: str) -> str:
    """Spell an entry with the number of its protocol."""
    address, comma, rest = entry.partition(",")
    if not comma:
        return entry
    name, _, port = rest.partition(":")
    return f"{address},{_NUMBERS.get(name, name)}:{port}"


def parse_rules(text: str, family: int) -> dict[RuleKey, str]:
    """Take the output of iptables-save apart: our chains, and our jumps in the built-in ones."""
    found: dict[RuleKey, str] = {}
    names = {chain for _, chain in CHAINS}
    for table, chain, lines in chains(text):
        if (table, chain) in CHAINS:
            found[family, table, chain, WHOLE] = "\n".join(canonical(r, family) for r in lines)
        elif chain in BUILT_IN:
            ours = [r for r in lines if r.rpartition(" -j ")[2].split(" ")[0] in names]
            if ours:
                found[family, table, chain, JUMPS] = "\n".join(canonical(r, family) for r in ours)
    return found


def parse_servers(text: str) -> dict[ServerKey, list[Real]]:
    """Take /proc/net/ip_vs apart: real servers by virtual server; fwmark ones are passed over."""
    found: dict[ServerKey, list[Real]] = {}
    current: list[Real] | None = None
    for line in text.splitlines()[3:]:
        words = line.split()
        if words[0] == "->":
            if current is not None:
                numbers = map(int, words[3:6])
                current.append(Real(_place(words[1]), *numbers))
        elif words[0] in Protocol.__members__:
            current = found.setdefault(ServerKey(Protocol(words[0]), *_place(words[1])), [])
        else:
            current = None
    return found


def _place(text: str) -> Target:
    address, _, port = text.rpartition(":")
    if address.startswith("["):
        packed = socket.inet_pton(socket.AF_INET6, address.strip("[]"))
        return socket.inet_ntop(socket.AF_INET6, packed), int(port, 16)
    return socket.inet_ntop(socket.AF_INET, bytes.fromhex(address)), int(port, 16)
