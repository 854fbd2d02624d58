"""Read the rules that events of a trace are about, in the words of the tool that made them.

Rules of iptables-nft have handles as all of nf_tables, but only iptables can print them all: so the
place of each handle is asked from the kernel.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from steersman.host.exec import Exec
from steersman.host.netlink import NETLINK_NETFILTER, DumpInterruptedError, Netlink
from steersman.host.nlmsg import Message, attributes, string
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
from steersman.netfilter.trace.rules import BaseChain, RuleBook, RuleId, parse_nft, parse_save

_SAVE = {"ip": "iptables", "ip6": "ip6tables"}


async def read_rule_book(execute: Exec, events: Iterable[TraceEvent]) -> RuleBook:
    """Read the tables that events come from.

    A tool that is not installed, or fails, leaves its rules without text.
    """
    tables = {(event.backend, event.family, event.table) for event in events}
    rules: dict[RuleId, str] = {}
    policies: dict[tuple[str, str, str], str] = {}
    places: dict[RuleId, int] = {}
    bases: dict[tuple[str, str, str], BaseChain] = {}
    if any(backend == "nft" for backend, *_ in tables):
        bases, places = await asyncio.to_thread(read_places, tables)
    saved = {
        (backend, family): await _save(execute, family, backend)
        for backend, family, table in tables
        if family in _SAVE and (backend == "legacy" or table in PRIORITIES)
    }
    for (backend, family), text in saved.items():
        by_place, found = parse_save(text)
        if backend == "legacy":
            for (table, chain, place), line in by_place.items():
                rules["legacy", family, table, chain, place] = line
            policies |= {(family, *where): policy for where, policy in found.items()}
            continue
        for rule_id, place in places.items():
            if rule_id[1] == family and (rule_id[2], rule_id[3], place) in by_place:
                rules[rule_id] = by_place[rule_id[2], rule_id[3], place]
    listings: dict[str, str] = {}  # by family
    for backend, family, table in sorted(tables):
        if backend == "nft" and not any(key[:3] == (backend, family, table) for key in rules):
            if family not in listings:
                listings[family] = await _output(execute, list_family(family))
            listed = parse_nft(table_of(listings[family], family, table))
            for (chain, handle), line in listed.items():
                rules["nft", family, table, chain, handle] = line
    return RuleBook(rules, bases, policies)


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


def _listed(netlink: Netlink, kind: int) -> Iterator[Message]:
    """Yield all chains or rules.

    The kernel calls a listing interrupted if anything of nf_tables changed meanwhile, an element of
    any set, too. On a busy node that is always so, and the chains and rules are there anyway.
    """
    with suppress(DumpInterruptedError):
        yield from netlink.dump(request(kind, ALL))


def read_places(
    tables: Collection[tuple[str, str, str]],
) -> tuple[dict[tuple[str, str, str], BaseChain], dict[RuleId, int]]:
    """Return the base chains of nf_tables, and the places of the rules of iptables-nft."""
    bases: dict[tuple[str, str, str], BaseChain] = {}
    places: dict[RuleId, int] = {}
    with Netlink(NETLINK_NETFILTER, buffer=1 << 20) as netlink:
        for reply in _listed(netlink, GETCHAIN):
            values = attributes(reply.payload, HEAD.size)
            family = FAMILY_NAMES.get(reply.payload[0], "")
            hook = attributes(values.get(CHAIN_HOOK[0], b""))
            number = int.from_bytes(hook.get(1, b""), "big")
            if hook and number < len(HOOKS):
                priority = int.from_bytes(hook.get(2, b""), "big", signed=True)
                name = (
                    family,
                    string(values.get(TABLE_NAME, b"")),
                    string(values.get(CHAIN_NAME, b"")),
                )
                bases[name] = BaseChain(HOOKS[number], priority)
        if not any(table in PRIORITIES for backend, _, table in tables if backend == "nft"):
            return bases, places
        counts: dict[tuple[str, str, str], int] = {}
        for reply in _listed(netlink, GETRULE):
            values = attributes(reply.payload, HEAD.size)
            family = FAMILY_NAMES.get(reply.payload[0], "")
            name = family, string(values.get(TABLE_NAME, b"")), string(values.get(RULE_CHAIN, b""))
            if ("nft", *name[:2]) in tables and name[1] in PRIORITIES:
                counts[name] = counts.get(name, 0) + 1
                places["nft", *name, int.from_bytes(values.get(RULE_HANDLE, b""), "big")] = counts[
                    name
                ]
    return bases, places
