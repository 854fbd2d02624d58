"""Our objects in the kernel, read by raw dumps, in the form that rendering produces.

A marker chain without rules, `steersman-...`, is named after hashes of the texts that were loaded
and of the chains, sets and rules that the kernel made of them. A restart reads everything back,
compares, and writes nothing if nothing differs. Damage (a policy is part of a chain) and foreign
rules in the table change the digests; then the texts are loaded again.

A dump takes many system calls, between which transactions come. The kernel continues a list at the
position where it stopped, so it leaves out an object if one before it has gone. It marks lists of
chains, sets and rules (NLM_F_DUMP_INTR), not those of elements (Linux 6.18). A marked list is read
again, alone: rules a chain at a time, of the others at last what several lists have together.

So no reading beside a writer is of one moment. The process sees afterwards that another program
wrote, and reads again. A command reads beside the process, which writes 25 times a second, while
10,000 Services take it half a second: of 30,000 elements one was missing in each fortieth list, so
who finds a difference looks again before believing it.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

from steersman.host.netlink import DumpInterruptedError, Netlink, NetlinkError
from steersman.host.nlmsg import attributes, string, text
from steersman.model.errors import BusyError
from steersman.model.hashes import sha256
from steersman.model.names import Family
from steersman.modes.nftables import wire
from steersman.modes.nftables.derived import Counts, check_derived
from steersman.modes.nftables.layout import (
    SETS,
    TABLE,
    Kind,
    element_key,
    family_of,
    name_of,
    named,
    other_set,
    own_set_kind,
    prefix,
)
from steersman.modes.nftables.rules import LAZY_CHAINS, active_lazy, rule_count
from steersman.modes.nftables.skeleton import RULE_CHAINS
from steersman.netfilter.nft import wire as nft

_T = TypeVar("_T")
_ATTEMPTS, _CHAIN_ATTEMPTS = 6, 50
"""Readings at most: of long lists, and of the rules of one chain, which take some 30 us."""
_MARKER = "steersman-"
_ANONYMOUS = "__"  # sets and maps within rules; the digests of the rules cover them
_Chains: TypeAlias = Mapping[str, Mapping[int, bytes]]
"""Attributes of chains, by name."""
_SPECS = {spec.name: spec for spec in SETS.values()}


class Marker(NamedTuple):
    """The name of a marker chain: hashes of the texts, and digests of the kernel's objects."""

    foundation: str
    rules: str
    foundation_digest: str
    rules_digest: str

    @property
    def chain(self) -> str:
        """Return the name of the marker chain."""
        return _MARKER + "-".join(self)


class TableState(NamedTuple):
    """One family's table as it was read."""

    marker: Marker | None
    """None if the table is not ours, or its foundation is not as we made it."""
    intact: bool
    """True if the rules that depend on the settings are as we made them."""
    objects: dict[bytes, bytes]
    """Everything but the skeleton and derived elements."""
    counts: Counts
    """Reference counts of derived elements."""


class _TableRule(NamedTuple):
    """The parts of a rule that are compared."""

    chain: str
    expressions: bytes
    comment: str


# Tables


def text_hash(text_: str) -> str:
    """Return a short hash of a text, for the marker."""
    return sha256(text_.encode()).hexdigest()[:8]


def read_table(netlink: Netlink, family: Family, foundation: str) -> TableState | None:
    """Read one family's table; None if there is none.

    Beside a writer, objects are of different moments, and one may be missing by chance.

    Args:
        netlink: socket of NETLINK_NETFILTER.
        family: family of the table.
        foundation: hash of the foundation; a table with another one is not ours.

    Raises:
        BusyError: it changes faster than it can be read.
    """
    return _undisturbed(lambda: _read_table(netlink, family, foundation))


def read_digests(netlink: Netlink, family: Family) -> tuple[str, str]:
    """Read the digests for the marker; empty ones if there is no table.

    Raises:
        BusyError: it changes faster than it can be read.
    """

    def read() -> tuple[str, str]:
        chains = _chains(netlink, family)
        if chains is None:
            return "", ""
        return _digests(chains, set_names(netlink, family), _all_rules(netlink, family, chains))

    return _undisturbed(read)


def _undisturbed(read: Callable[[], _T], attempts: int = _ATTEMPTS) -> _T:
    """Read until no other program changes or deletes something at the same time."""
    for _ in range(attempts):
        try:
            return read()
        except DumpInterruptedError:
            continue
        except NetlinkError as error:
            if error.errno != errno.ENOENT:
                raise
    raise BusyError("nftables: the ruleset changes faster than it can be read")


def _read_table(netlink: Netlink, family: Family, foundation: str) -> TableState | None:
    chains = _chains(netlink, family)
    if chains is None:
        return None
    foreign = TableState(None, False, {}, {})
    markers = (name.removeprefix(_MARKER) for name in chains if name.startswith(_MARKER))
    words = next(markers, "").split("-")
    if len(words) != 4 or words[0] != foundation:
        return foreign
    names = set_names(netlink, family)
    rules = _all_rules(netlink, family, chains)
    marker = Marker(*words)
    fixed, dependent = _digests(chains, names, rules)
    if fixed != marker.foundation_digest:
        return foreign

    # Chains of ServicePorts. One that lacks a rule, or has one too many, has no value.
    comments: dict[str, list[str]] = {name: [] for name in chains if "/" in name}
    for rule in rules:
        if rule.chain in comments:
            comments[rule.chain].append(rule.comment)
    objects: dict[bytes, bytes] = {}
    for name, found in comments.items():
        whole = bool(found and found[0]) and rule_count(found[0]) == len(found)
        objects[named(Kind.CHAIN, family, name)] = found[0].encode() if whole else b""

    # Elements; those without what is derived from them are not in force.
    for name in names:
        try:
            objects.update(_elements(netlink, family, name))
            if own_set_kind(name) is Kind.AFFINITY:
                objects.update(_stale_entries(netlink, family, name, names))
        except NetlinkError as error:
            if error.errno != errno.ENOENT:  # it went with its Service
                raise
    # A base chain of ours lets packets pass that it does not match.
    policies = {name: chain.get(nft.CHAIN_POLICY, nft.ACCEPT) for name, chain in chains.items()}
    accepting = [r.chain for r in rules if policies.get(r.chain, nft.ACCEPT) == nft.ACCEPT]
    objects |= {named(Kind.LAZY, family, chain): b"" for chain in active_lazy(accepting)}
    counts = check_derived(objects)
    return TableState(marker, dependent == marker.rules_digest, objects, counts)


def _digests(chains: _Chains, sets: Iterable[str], rules: Iterable[_TableRule]) -> tuple[str, str]:
    """Hash the foundation (chains, sets and rules), and the rules that depend on the settings."""
    foundation, dependent = sha256(), sha256()
    # Chains with the attributes of their hooks. A lazy base chain comes and goes.
    for name in sorted(chains):
        hook = b"".join(chains[name].get(kind, b"") for kind in nft.CHAIN_HOOK)
        if _is_fixed(name) or (name in LAZY_CHAINS and not hook):
            foundation.update(f"{name}\0{len(hook)}\0".encode() + hook)
    # Names of sets; those with a slash belong to ServicePorts.
    for name in sorted(sets):
        if "/" not in name and not name.startswith(_ANONYMOUS):
            foundation.update(f"{name}\0".encode())
    # Rules as the kernel has them, in their order.
    for rule in rules:
        if _is_fixed(rule.chain):
            hasher = dependent if rule.chain in RULE_CHAINS else foundation
            hasher.update(f"{rule.chain}\0{len(rule.expressions)}\0".encode())
            hasher.update(rule.expressions)
    return foundation.hexdigest()[:8], dependent.hexdigest()[:8]


def _is_fixed(chain: str) -> bool:
    """Return whether a chain belongs to the skeleton and is never lazy."""
    return not ("/" in chain or chain in LAZY_CHAINS or chain.startswith(_MARKER))


# Dumps


def _dump(netlink: Netlink, kind: int, family: Family, *more: bytes) -> Iterator[bytes]:
    listing = nft.about(wire.OURS[family], kind, *more)
    return (reply.payload for reply in netlink.dump(listing))


def _chains(netlink: Netlink, family: Family) -> _Chains | None:
    """Return our chains; None if there is no table of our name."""
    tables = _named(netlink, nft.GETTABLE, family, 1)
    if TABLE not in tables:
        return None
    return _named(netlink, nft.GETCHAIN, family, nft.CHAIN_NAME)


def set_names(netlink: Netlink, family: Family) -> list[str]:
    """Return the names of our sets and maps."""
    return [*_named(netlink, nft.GETSET, family, nft.SET_NAME)]


def _named(
    netlink: Netlink, kind: int, family: Family, name: int
) -> dict[str, Mapping[int, bytes]]:
    """Return our objects of a kind, as attributes, by name; `name` is the number of that one."""
    seen: dict[str, Mapping[int, bytes]] = {}
    for _ in range(_ATTEMPTS):
        found: dict[str, Mapping[int, bytes]] = {}
        try:
            for payload in _dump(netlink, kind, family):
                each = attributes(payload, 4)
                if string(each[1]) == TABLE:
                    found[string(each[name])] = each
            return found
        except DumpInterruptedError:
            seen |= found
    return seen


def _rules(netlink: Netlink, family: Family, *chain: bytes) -> list[_TableRule]:
    """Return our rules; those of one chain if its name is given as an attribute."""
    found: list[_TableRule] = []
    for payload in _dump(netlink, nft.GETRULE, family, *chain):
        rule = attributes(payload, 4)
        if string(rule[1]) == TABLE:
            comment = nft.comment_of(rule.get(nft.RULE_USERDATA, b"")).decode(errors="replace")
            expressions = rule.get(nft.RULE_EXPRESSIONS, b"")
            found.append(_TableRule(string(rule[nft.RULE_CHAIN]), expressions, comment))
    return found


def _all_rules(netlink: Netlink, family: Family, chains: _Chains) -> list[_TableRule]:
    """Return our rules: in one list if nobody disturbs it, which takes a third of the time."""
    with suppress(DumpInterruptedError):
        return _rules(netlink, family)
    found: list[_TableRule] = []
    for chain in chains:
        name = text(nft.RULE_CHAIN, chain)
        # A chain fits into one datagram: there is hardly time for a transaction.
        found += _undisturbed(partial(_rules, netlink, family, name), _CHAIN_ATTEMPTS)
    return found


def set_contents(
    netlink: Netlink, family: Family, name: str, holding: re.Pattern[bytes] | None = None
) -> Iterator[bytes]:
    """Yield the contents of a set's elements (wire.py takes them apart).

    Args:
        netlink: socket of NETLINK_NETFILTER.
        family: family of the table.
        name: name of the set.
        holding: skip messages, of some 300 elements each, in which this is not found.
    """
    for payload in _dump(netlink, nft.GETSETELEM, family, text(2, name)):
        if holding is None or holding.search(payload):
            yield from wire.element_contents(payload)


def _elements(netlink: Netlink, family: Family, name: str) -> Iterable[tuple[bytes, bytes]]:
    """Return a set of a ServicePort with its members, or the elements of a fixed set."""
    width = family.bits // 8
    if spec := _SPECS.get(name):
        start, size = prefix(spec.kind, family), spec.key_size(family)
        key, value = wire.key_getter(size), wire.value_getter(spec.form, size, width)
        contents = set_contents(netlink, family, name)
        return ((start + key(content), value(content)) for content in contents)
    if own_set_kind(name) is Kind.MEMBERS:
        set_key, key = named(Kind.MEMBERS, family, name), wire.key_getter(width + 4)
        start, contents = element_key(set_key), set_contents(netlink, family, name)
        return [(set_key, b""), *((start + key(content), b"") for content in contents)]
    # Another program's set with a slash in its name is removed like an old affinity map.
    return [(named(Kind.AFFINITY, family, name), b"")] if "/" in name else []


def _stale_entries(
    netlink: Netlink, family: Family, name: str, names: Iterable[str]
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the entries of an affinity map for endpoints that are not members."""
    map_key = named(Kind.AFFINITY, family, name)
    entries = dict(_entries(netlink, map_key))
    members, key = name_of(other_set(map_key)), wire.key_getter(family.bits // 8 + 4)
    contents = set_contents(netlink, family, members) if entries and members in names else ()
    known = {key(content) for content in contents}
    return ((entry, endpoint) for entry, endpoint in entries.items() if endpoint not in known)


def learned_entries(
    netlink: Netlink, map_key: bytes, endpoints: Collection[bytes]
) -> dict[bytes, bytes]:
    """Return the entries of an affinity map, given by its key, that lead to some endpoints.

    If transactions of other programs disturb every list, some may be missing.
    """
    seen: dict[bytes, bytes] = {}
    for _ in range(_ATTEMPTS):
        with suppress(NetlinkError):
            for entry, endpoint in _entries(netlink, map_key):
                if endpoint in endpoints:
                    seen[entry] = endpoint
            break
    return seen


def _entries(netlink: Netlink, map_key: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the entries of an affinity map: their keys, and the endpoint of each client."""
    family, start = family_of(map_key), element_key(map_key)
    width = family.bits // 8
    client, endpoint = wire.key_getter(width), wire.data_getter(width, width + 4)
    for content in set_contents(netlink, family, name_of(map_key)):
        yield start + client(content), endpoint(content)
