"""Read the rules that events of a trace are about, in the words of the tool that made them.

Rules of iptables-nft have handles as all of nf_tables, but only iptables can print them all: so the
place of each handle is asked from the kernel.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import TypeAlias

from steersman.host.exec import Exec
from steersman.host.netlink import NETLINK_NETFILTER, DumpInterruptedError, Netlink
from steersman.host.nlmsg import attributes, string
from steersman.netfilter.iptables.names import PRIORITIES
from steersman.netfilter.nft.wire import (
    ALL,
    CHAIN_HOOK,
    CHAIN_NAME,
    FAMILY_NAMES,
    GETCHAIN,
    GETRULE,
    HEAD,
    HOOKS,
    RULE_CHAIN,
    RULE_HANDLE,
    TABLE_NAME,
    request,
)
from steersman.netfilter.trace.events import TraceEvent
from steersman.netfilter.trace.rules import (
    BaseChain,
    ChainId,
    ChainPlace,
    RuleBook,
    RuleId,
    parse_nft,
    parse_save,
)

TableId: TypeAlias = tuple[str, str, str]
"""Backend, family and table."""
_SAVE = {"ip": "iptables", "ip6": "ip6tables"}


async def read_rule_book(execute: Exec, events: Iterable[TraceEvent]) -> RuleBook:
    """Read the tables that events come from.

    A tool that is not installed, or fails, leaves its rules without text.
    """
    tables = {(event.backend, event.family, event.table) for event in events}
    rules: dict[RuleId, str] = {}
    policies: dict[ChainId, str] = {}
    bases: dict[ChainId, BaseChain] = {}
    places: dict[RuleId, ChainPlace] = {}
    if any(backend == "nft" for backend, *_ in tables):
        bases, places = await asyncio.to_thread(read_places, tables)
    for backend, family in {each[:2] for each in tables if _is_saved(*each)}:
        lines, found = parse_save(await _save(execute, family, backend))
        if backend == "legacy":
            rules |= {(backend, family, *place): line for place, line in lines.items()}
            policies |= {(family, *chain): policy for chain, policy in found.items()}
        else:
            numbered = {rule: place for rule, place in places.items() if rule[1] == family}
            rules |= {rule: lines[place] for rule, place in numbered.items() if place in lines}
    missing = {each for each in tables if each[0] == "nft"} - {rule[:3] for rule in rules}
    for family in {family for _, family, _ in missing}:
        listing = await _output(execute, list_family(family))
        for table in (table for _, of, table in missing if of == family):
            listed = parse_nft(table_of(listing, family, table))
            rules |= {("nft", family, table, *rule): line for rule, line in listed.items()}
    return RuleBook(rules, bases, policies)


def _is_saved(backend: str, family: str, table: str) -> bool:
    """Whether iptables-save of a variant may print a table."""
    return family in _SAVE and (backend == "legacy" or table in PRIORITIES)


def list_family(family: str) -> list[str]:
    """Return the command that lists all tables of a family, with the handles of rules.

    To list one table or one chain, nft 1.0.6 reads every element of its sets, also with --terse,
    and begins again if anything has changed meanwhile: on a node with 10,000 Services, of which
    twenty change in a second, it never ends. This command takes 0.2 s there.
    """
    return ["nft", "--terse", "-a", "list", "ruleset", family]


def table_of(listing: str, family: str, name: str) -> str:
    """Return a table as `list_family` prints it; "" if it is not there."""
    begin = re.search(rf'^table {family} "?{re.escape(name)}"? {{', listing, re.MULTILINE)
    return listing[begin.start() :].partition("\n}")[0] if begin else ""


async def _save(execute: Exec, family: str, backend: str) -> str:
    """Return what iptables-save of a variant prints; "" if it is not installed."""
    name = _SAVE[family]
    text = await _output(execute, [f"{name}-{backend}-save"])
    if text:
        return text
    text = await _output(execute, [f"{name}-save"])
    wanted = backend == "nft"
    return text if ("(nf_tables)" in text.partition("\n")[0]) is wanted else ""


async def _output(execute: Exec, argv: list[str]) -> str:
    """Return what a program prints; "" if it fails."""
    try:
        result = await execute.run(argv, timeout=20.0)
    except OSError:
        return ""
    return "" if result.returncode else result.stdout.decode(errors="replace")


def read_places(
    tables: Collection[TableId],
) -> tuple[dict[ChainId, BaseChain], dict[RuleId, ChainPlace]]:
    """Return the base chains of nf_tables, and the places of the rules of iptables-nft."""
    bases: dict[ChainId, BaseChain] = {}
    places: dict[RuleId, ChainPlace] = {}
    with Netlink(NETLINK_NETFILTER, buffer=1 << 20) as netlink:
        for chain, values in _listed(netlink, GETCHAIN, CHAIN_NAME):
            hook = attributes(values.get(CHAIN_HOOK[0], b""))
            number = _number(hook.get(1, b""))
            if hook and number < len(HOOKS):
                priority = int.from_bytes(hook.get(2, b""), "big", signed=True)
                bases[chain] = BaseChain(HOOKS[number], priority)
        wanted = {each[1:] for each in tables if each[0] == "nft" and each[2] in PRIORITIES}
        counts = Counter[ChainId]()
        for chain, values in _listed(netlink, GETRULE, RULE_CHAIN) if wanted else ():
            if chain[:2] in wanted:
                counts[chain] += 1
                rule = "nft", *chain, _number(values.get(RULE_HANDLE, b""))
                places[rule] = *chain[1:], counts[chain]
    return bases, places


def _listed(netlink: Netlink, kind: int, name: int) -> Iterator[tuple[ChainId, dict[int, bytes]]]:
    """Yield all chains or rules: the chain, whose name is the attribute `name`, and attributes.

    The kernel calls a listing interrupted if anything of nf_tables changed meanwhile, an element of
    any set, too. On a busy node that is always so, and the chains and rules are there anyway.
    """
    with suppress(DumpInterruptedError):
        for reply in netlink.dump(request(kind, ALL)):
            values = attributes(reply.payload, HEAD.size)
            table, chain = (string(values.get(each, b"")) for each in (TABLE_NAME, name))
            yield (FAMILY_NAMES.get(reply.payload[0], ""), table, chain), values


def _number(value: bytes) -> int:
    return int.from_bytes(value, "big")
