"""Connections per frontend and per endpoint: the elements' own counters, kept across replacement.

An element that is replaced starts at zero in the kernel, and slots change hands; what was counted
is read just before and added to what comes after. Connections of ServicePorts with session affinity
are counted where the data path learns them, too: those that affinity sends on draw no endpoint.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

from steersman.host.netlink import DumpInterruptedError, Netlink, NetlinkError
from steersman.host.nlmsg import attributes, nested, text
from steersman.model.names import Family
from steersman.model.ruleset import Diff
from steersman.modes.nftables import wire
from steersman.modes.nftables.elements import encode
from steersman.modes.nftables.layout import (
    SETS,
    TABLE,
    Form,
    Kind,
    bare,
    first_slot,
    named,
    prefix,
)
from steersman.modes.nftables.read import is_members, set_elements, set_names

_FRONTENDS = (Kind.SERVICE_IPS, Kind.SERVICE_NODEPORTS)
_ENDPOINTS = (Kind.SERVICE_ENDPOINTS, Kind.NODEPORT_ENDPOINTS)
_COUNTED = frozenset((*_FRONTENDS, *_ENDPOINTS))
_COUNTER, _PACKETS = text(1, "counter"), 2
_HAS_COUNTED = re.compile(struct.pack("=HH", 12, _PACKETS) + rb"(?!\0{8})")
"""Found where a counter's attribute of packets is not 0; elsewhere by chance only."""
_TOGETHER = 500
"""Elements that are asked for at once."""


class Counted(NamedTuple):
    """What was counted."""

    totals: Mapping[bytes, int]
    before: Mapping[bytes, int]
    """How much of it by elements that were replaced."""


class Counters:
    """What elements had counted when they were replaced."""

    def __init__(self, netlink: Netlink) -> None:
        """Take the socket that transactions are sent by."""
        self._netlink = netlink
        self._before: dict[bytes, int] = {}
        self._moves = 0
        """Odd while a transaction moves what is counted."""

    @contextmanager
    def kept(self, change: Diff) -> Iterator[None]:
        """Keep what elements have counted across the transaction that replaces them."""
        if not change.removed and not change.changed:
            yield
            return
        self._moves += 1
        try:
            counted, gone = self._counted(change)
            yield
            for name, packets in counted:
                self._before[name] = self._before.get(name, 0) + packets
            for name in gone:  # who comes later starts anew
                self._before.pop(name, None)
        finally:
            self._moves += 1

    def _counted(self, change: Diff) -> tuple[list[tuple[bytes, int]], set[bytes]]:
        """What elements that go have counted for what stays; for what nobody counts any more."""
        if not self._before and not _may_stay(change):  # most often: no need for names
            return [], set()
        names = {
            key: _name(key, value) for key, value in change.removed.items() if key[0] in _COUNTED
        }
        stay = {_name(key, value) for key, value in change.added.items() if key[0] in _COUNTED}
        for key, (old, new) in change.changed.items():
            if key[0] in _COUNTED:
                names[key] = _name(key, old)
                stay.add(_name(key, new))
        moved = {key: name for key, name in names.items() if name in stay}
        counted = [(moved[key], packets) for key, packets in self._read(moved) if packets]
        return counted, set(names.values()) - stay

    def totals(self, netlink: Netlink) -> Counted | None:
        """Connections so far, by the key of the frontend's element, or by that of the endpoint's
        with the first slot of its pool, then the endpoint.

        What has counted nothing is left out, but for members of sets. None where a transaction
        moved what is counted meanwhile.

        Args:
            netlink: the socket to ask by: not that of transactions, which need not wait.
        """
        moves = self._moves
        try:
            totals = self._listed(netlink)
        except DumpInterruptedError:
            return None
        before = dict(self._before)
        if moves % 2 or moves != self._moves:
            return None
        for name, packets in before.items():
            totals[name] = totals.get(name, 0) + packets
        return Counted(totals, before)

    @staticmethod
    def _listed(netlink: Netlink) -> dict[bytes, int]:
        totals: dict[bytes, int] = {}
        for family in Family:
            try:
                for name, packets in chain(_fixed(netlink, family), _members(netlink, family)):
                    totals[name] = totals.get(name, 0) + packets
            except DumpInterruptedError:
                raise
            except NetlinkError:  # no such table
                continue
        return totals

    def _read(self, keys: dict[bytes, bytes]) -> Iterator[tuple[bytes, int]]:
        groups: dict[bytes, list[bytes]] = {}
        for key in keys:
            groups.setdefault(key[:2], []).append(key[2:])
        for start, group in groups.items():
            for at in range(0, len(group), _TOGETHER):
                yield from self._some(start, group[at : at + _TOGETHER])

    def _some(self, start: bytes, keys: list[bytes]) -> Iterator[tuple[bytes, int]]:
        """Ask for some elements of one set."""
        items = encode(Form.SET, [(key, b"") for key in keys], keys_only=True)
        table, name = text(1, TABLE), text(2, SETS[start[0]].name)
        request = wire.request(wire.GETSETELEM, Family(start[1]), table, name, nested(3, *items))
        try:
            replies = self._netlink.request(request)
        except NetlinkError:  # someone else deleted one: the transaction will say so
            return
        end = 8 + len(keys[0])
        for reply in replies:
            for content in wire.element_lists(reply.payload):
                yield start + content[8:end], _packets(content, end)


def _may_stay(change: Diff) -> bool:
    """Whether a frontend is replaced, or an endpoint goes from one place to another."""
    if any(key[0] in _FRONTENDS for key in change.changed):
        return True
    gone = {old[:-1] for old, _ in change.changed.values()}  # without the word where they run
    gone |= {old[:-1] for old in change.removed.values()}
    come = {new[:-1] for _, new in change.changed.values()}
    return not gone.isdisjoint(come | {new[:-1] for new in change.added.values()})


def _fixed(netlink: Netlink, family: Family) -> Iterator[tuple[bytes, int]]:
    """What elements of the fixed maps have counted."""
    size = family.bits // 8 + 4
    for kind in (*_FRONTENDS, *_ENDPOINTS):
        end = 8 + SETS[kind].key_size(family)
        start = prefix(kind, family)
        for content in set_elements(netlink, family, SETS[kind].name, _HAS_COUNTED):
            if packets := _packets(content, end):
                value = content[end + 8 : end + 8 + size]
                yield _name(start + content[8:end], value), packets


def _name(key: bytes, value: bytes) -> bytes:
    """What an element counts for: slots of a pool change hands, and endpoints can move here."""
    return key[:-4] + first_slot(key[-4:]) + bare(value) if key[0] in _ENDPOINTS else key


def _members(netlink: Netlink, family: Family) -> Iterator[tuple[bytes, int]]:
    """What the sets of members have counted, by the keys of their elements."""
    end = 8 + family.bits // 8 + 4
    for name in set_names(netlink, family):
        if is_members(name):
            start = named(Kind.MEMBER, family, name) + b"\0"
            for content in set_elements(netlink, family, name):
                yield start + content[8:end], _packets(content, end)


def _packets(content: bytes, end: int) -> int:
    """Read an element's counter: found rather than parsed, and most have counted nothing."""
    name = content.find(_COUNTER, end) if _HAS_COUNTED.search(content, end) else -1
    if name < 0:
        return 0
    values = attributes(content, name + len(_COUNTER) + 4)
    return int.from_bytes(values.get(_PACKETS, b""), "big")
