"""The texts of rules, by table, chain and number; what iptables-save and nft print. Pure.

nf_tables numbers rules by handle, iptables-legacy by place. reader.py reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import msgspec

from steersman.netfilter.iptables.names import BUILT_IN, PRIORITIES
from steersman.netfilter.iptables.saved import chains
from steersman.netfilter.trace.events import TraceEvent

RuleId: TypeAlias = tuple[str, str, str, str, int]
"""Backend, family, table, chain and number, as in a TraceEvent."""
ChainId: TypeAlias = tuple[str, str, str]
"""Family, table and chain."""
ChainPlace: TypeAlias = tuple[str, str, int]
"""Table, chain, and a number from 1."""
LEGACY = " (legacy)"
"""End of the name of a table of iptables-legacy, in `TraceStep.table`."""
_HANDLE_COMMENT = re.compile(r" # handle (\d+)$")


class BaseChain(NamedTuple):
    """Where a chain is called from."""

    hook: str
    priority: int


class RuleBook(msgspec.Struct, frozen=True):
    """The rules in the kernel, as far as they are known."""

    rules: Mapping[RuleId, str] = {}
    bases: Mapping[ChainId, BaseChain] = {}
    """Of nf_tables."""
    policies: Mapping[ChainId, str] = {}
    """Of iptables-legacy; "" for chains that others jump to."""

    def text(self, event: TraceEvent) -> str:
        """Return the text of an event's rule; "" at the end of a chain, or if it is not known."""
        if event.kind != "rule":
            return ""
        return self.rules.get(
            (event.backend, event.family, event.table, event.chain, event.number), ""
        )

    def base(self, event: TraceEvent) -> BaseChain | None:
        """Return where an event's chain is called from; None for a chain that others jump to."""
        if event.backend == "nft":
            return self.bases.get((event.family, event.table, event.chain))
        if event.chain not in BUILT_IN:
            return None
        return BaseChain(event.hook, PRIORITIES.get(event.table, 0))


def parse_save(text: str) -> tuple[dict[ChainPlace, str], dict[tuple[str, str], str]]:
    """Read iptables-save: rules by place; policies of all chains, by table and chain."""
    rules: dict[ChainPlace, str] = {}
    policies: dict[tuple[str, str], str] = {}
    for table, chain, policy, lines in chains(text):
        if policy:
            policies[table, chain] = policy.lower().strip("-")
        rules |= {(table, chain, place): line for place, line in enumerate(lines, 1)}
    return rules, policies


def parse_nft(text: str) -> dict[tuple[str, int], str]:
    """Read `nft -a list table`: rules by chain and handle."""
    rules: dict[tuple[str, int], str] = {}
    chain, pending = "", ""
    for line in text.splitlines():
        words = line.split()
        if line.startswith("\tchain "):
            chain, pending = words[1].strip('"'), ""
        elif line.startswith("\t}"):
            chain = ""
        elif chain and words and not (words[0] == "type" and "hook" in words):
            # A long rule takes several lines; the last one has the handle.
            pending = f"{pending} {line.strip()}".lstrip()
            if handle := _HANDLE_COMMENT.search(pending):
                rules[chain, int(handle[1])] = pending[: handle.start()]
                pending = ""
    return rules


def show_chain(table: str, chain: str) -> str:
    """Return the command that shows a chain, by its table as in `TraceStep.table`."""
    family, _, name = table.removesuffix(LEGACY).partition(" ")
    if name not in PRIORITIES or family not in ("ip", "ip6"):
        return f"nft -a list chain {family} {name} {chain}"
    tool = "iptables" if family == "ip" else "ip6tables"
    tool += "-legacy" if table.endswith(LEGACY) else ""
    return f"{tool} -t {name} -S {chain}"
