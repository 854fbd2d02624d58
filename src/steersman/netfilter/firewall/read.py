"""Read the rules of iptables and nft that drop or change packets, whoever wrote them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from steersman.host.exec import Exec
from steersman.model.names import Family
from steersman.netfilter.firewall.from_iptables import parse_saved
from steersman.netfilter.firewall.from_nft import parse_ruleset
from steersman.netfilter.firewall.packet_filter import FilterTable, Met
from steersman.netfilter.nft.tables import list_tables

_TOOLS = {Family.IPV4: ("iptables", "ip"), Family.IPV6: ("ip6tables", "ip6")}
"""Names of a family's commands, and of its tables in nft."""
_HELPERS = "steersman-"
"""Our tables that filter nothing: the lock of the instance, and traces."""
BRIDGE_SETTING = {
    family: f"proc/sys/net/bridge/bridge-nf-call-{tool}" for family, (tool, _) in _TOOLS.items()
}
"""The sysctl by which netfilter sees packets between ports of a bridge."""
_SAVING = 3.5
"""Seconds for iptables-save. A tool that hangs becomes a note, and what others say counts."""
_LISTING = 1.5
"""Seconds for nft, after that: a check of doctor has six in all."""


class Firewall(NamedTuple):
    """The rules that drop or change packets."""

    tables: list[FilterTable]
    notes: tuple[str, ...] = ()
    """Sentences: rules that could not be read, and why."""


async def read_firewall(
    execute: Exec,
    families: Iterable[Family],
    own: frozenset[str],
    root: Path = Path("/"),
    list_tables: Callable[[], list[tuple[str, str]]] = list_tables,
    *,
    own_jumps: tuple[str, ...] = (),
    listed_by: Mapping[tuple[str, Family], str] | None = None,
) -> Firewall:
    """Read the rules of iptables-nft, iptables-legacy and nft.

    Args:
        execute: runs programs.
        families: the families to look at.
        own: names of tables of nft to leave out; those of a mode are large.
        root: of the file system with /proc.
        list_tables: returns family and name of all tables of nft (in another namespace, in tests).
        own_jumps: beginnings of the names of a mode's chains of nat, to leave out.
        listed_by: programs to use instead of such as `iptables-nft-save`, by variant and family.
    """
    families = tuple(families)
    runs = []
    for family in families:
        prefix, name = _TOOLS[family]
        variants = ["nft"]
        # iptables-legacy-save lists the tables in use. If there are none, it need not be installed.
        with suppress(OSError):
            if (root / f"proc/net/{name}_tables_names").read_text():
                variants.append("legacy")
        for variant in variants:
            tool = f"{prefix}-{variant}"
            program = (listed_by or {}).get((variant, family), f"{tool}-save")
            runs.append(_saved(execute, family, tool, program, own_jumps))
    tables: list[FilterTable] = []
    notes: list[str] = []
    # iptables-nft keeps its rules in tables that nft lists, too, but without its extensions. A
    # table that nft made by other means is incompatible with iptables: then nft lists it.
    wanted = {_TOOLS[family][1] for family in families} | {"inet", "bridge", "netdev"}
    known = set[tuple[str, str]]()
    for saved, nft_names, note in await asyncio.gather(*runs):
        tables += saved
        known |= nft_names
        notes += note
    listed: list[tuple[str, str]] = []
    try:
        listed = await asyncio.to_thread(list_tables)
    except OSError as error:
        notes.append(f"tables of nft cannot be listed: {error.strerror}")
    foreign = [
        (of, name)
        for of, name in listed
        if of in wanted
        and name not in own
        and (of, name) not in known
        and not name.startswith(_HELPERS)
    ]
    reads = (_nft(execute, ["-j", "-a", "-nn", "list", "table", *table]) for table in foreign)
    for table, (text, note) in zip(foreign, await asyncio.gather(*reads), strict=True):
        notes += note
        try:
            document = await asyncio.to_thread(msgspec.json.decode, text or '{"nftables": []}')
        except ValueError as error:
            notes.append(f"table {' '.join(table)} was not understood: {error}")
        else:
            tables += parse_ruleset(document["nftables"])
    return Firewall(tables, tuple(dict.fromkeys(notes)))


async def _saved(
    execute: Exec, family: Family, tool: str, program: str, own_jumps: tuple[str, ...]
) -> tuple[list[FilterTable], set[tuple[str, str]], list[str]]:
    """Return the tables of an iptables, their names in nft and, if it fails, a note.

    Args:
        execute: runs programs.
        family: of the command.
        tool: the command.
        program: what lists its rules.
        own_jumps: see `read_firewall`.
    """
    try:
        result = await execute.run([program], timeout=_SAVING)
    except FileNotFoundError:
        legacy = tool.endswith("legacy")
        notes = [f"rules of {tool} were not read: it is not installed"] if legacy else []
        return [], set(), notes
    except OSError as error:  # TimeoutError, too
        return [], set(), [f"rules of {tool} were not read: {error.strerror or error}"]
    if result.returncode:
        return [], set(), [f"rules of {tool} were not read: {result.message}"]
    listed = result.stdout.decode(errors="replace")
    found = await asyncio.to_thread(parse_saved, listed, family, tool, own_jumps)
    names = {(_TOOLS[family][1], table.name.split()[1]) for table in found}
    return found, names if tool.endswith("nft") else set(), []


async def _nft(execute: Exec, words: Sequence[str]) -> tuple[str, list[str]]:
    """Run nft without elements of sets; return what it printed and, if it fails, a note."""
    try:
        result = await execute.run(["nft", "-t", *words], timeout=_LISTING)
    except FileNotFoundError:
        return "", ["rules of nft were not read: it is not installed"]
    except OSError as error:  # TimeoutError, too
        return "", [f"nft {' '.join(words)}: {error.strerror or error}"]
    if result.returncode:
        return "", [f"nft {' '.join(words)}: {result.message}"]
    return result.stdout.decode(errors="replace"), []


async def rule_text(execute: Exec, rule: Met) -> str:
    """Return a rule as its tool prints it, with its handle."""
    if rule.place.startswith("handle "):
        _, family, table = rule.table.split()
        argv = ["nft", "-t", "-a", "list", "chain", family, table, rule.chain]
        with suppress(OSError):
            result = await execute.run(argv, timeout=_LISTING)
            for line in result.stdout.decode(errors="replace").splitlines():
                if line.rstrip().endswith(f"# {rule.place}"):
                    return line.strip()
    return rule.place
