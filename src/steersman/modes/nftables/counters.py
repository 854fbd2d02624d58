"""Connections per frontend and per endpoint, from the counters of elements.

Elements of `service-ips`, `service-nodeports` and the endpoint maps count new connections. With
session affinity most connections choose no slot, so the elements of a `members-...` set count too:
every connection passes them when it is learned.

An element that is replaced starts at zero in the kernel, and slots change hands. ElementCounters
reads elements just before a transaction replaces them, and carries the counts over. Scrape reads
all counters beside transactions, which it does not hold up: one that meets a transaction that
replaces elements is repeated. The kernel (6.18) does not say that a list of elements changed while
it was read: one that met a new element may have another one twice, which counts once here; one
that met the growth of a hash table may lack some, which totals.py puts up with. totals.py adds
the counts up by ServicePort.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from steersman.host.netlink import DumpInterruptedError, Netlink, NetlinkError
from steersman.host.nlmsg import attributes, nested, text
from steersman.host.worker import finish
from steersman.model.errors import BusyError
from steersman.model.names import Family
from steersman.model.plan import ServicePlan
from steersman.model.ruleset import Diff
from steersman.model.stats import ConnectionStats
from steersman.modes.nftables import wire
from steersman.modes.nftables.layout import (
    ENDPOINT_KINDS,
    FRONTEND_KINDS,
    SETS,
    Form,
    Kind,
    address_and_port,
    counted_key,
    element_key,
    family_of,
    fields_of,
    is_members_set,
    kind_of,
    named,
    prefix,
    prefix_of,
)
from steersman.modes.nftables.read import set_contents, set_names
from steersman.modes.nftables.totals import ConnectionTotals
from steersman.netfilter.nft import wire as nft

_COUNTED_KINDS = (*FRONTEND_KINDS, *ENDPOINT_KINDS)
_COUNTER, _PACKETS = text(1, "counter"), 2
_HAS_COUNTED = re.compile(struct.pack("=HH", 12, _PACKETS) + rb"(?!\0{8})")
"""Found if a counter's attribute of packets is not 0; else only by chance."""
_TOGETHER = 500
"""Elements that one request reads."""
_ATTEMPTS = 3
_STEP = 2000
"""Elements that a step of a scrape reads: some milliseconds."""


class CounterReading(NamedTuple):
    """All counts at one moment, by `layout.counted_key`; those of 0 may be left out."""

    totals: Mapping[bytes, int]
    carried: Mapping[bytes, int]
    """The part that was counted by elements that have been replaced."""


class ElementCounters:
    """The counters of elements in the kernel, and the counts of elements that were replaced."""

    def __init__(self, netlink: Netlink) -> None:
        """Initialize with the socket that sends transactions."""
        self._netlink = netlink
        self._carried: dict[bytes, int] = {}
        self._moves = 0
        """Transactions that replaced elements that count."""

    @contextmanager
    def carried_over(self, change: Diff) -> Iterator[None]:
        """Carry counts over a transaction, for frontends and endpoints that stay."""
        if not change.removed and not change.changed:
            yield
            return
        self._moves += 1
        counted, gone = self._before(change)
        yield
        for name, packets in counted:
            self._carried[name] = self._carried.get(name, 0) + packets
        for name in gone:  # if it comes back it starts at zero
            self._carried.pop(name, None)

    def _before(self, change: Diff) -> tuple[list[tuple[bytes, int]], set[bytes]]:
        """Return counts to carry over, and keys to drop."""
        if not self._carried and not _may_stay(change):  # most often
            return [], set()
        # Identities of the counters that go, and of those that come.
        kinds = _COUNTED_KINDS
        names = {k: counted_key(k, v) for k, v in change.removed.items() if kind_of(k) in kinds}
        stay = {counted_key(k, v) for k, v in change.added.items() if kind_of(k) in kinds}
        for key, (old, new) in change.changed.items():
            if kind_of(key) in kinds:
                names[key] = counted_key(key, old)
                stay.add(counted_key(key, new))
        # Read the elements of frontends and endpoints that stay, a set at a time.
        moved = {key: name for key, name in names.items() if name in stay}
        by_set: dict[bytes, list[bytes]] = {}
        for key in moved:
            by_set.setdefault(prefix_of(key), []).append(fields_of(key))
        counted = [
            (moved[key], packets)
            for start, keys in by_set.items()
            for first in range(0, len(keys), _TOGETHER)
            for key, packets in self._read(start, keys[first : first + _TOGETHER])
            if packets
        ]
        return counted, set(names.values()) - stay

    def _read(self, start: bytes, keys: list[bytes]) -> Iterator[tuple[bytes, int]]:
        """Read the counters of some elements of a set; `start` begins their keys."""
        items = wire.encode(Form.SET, [(key, b"") for key in keys], keys_only=True)
        name, elements = text(nft.SET_NAME, SETS[kind_of(start)].name), nested(3, *items)
        request = nft.about(wire.OURS[family_of(start)], nft.GETSETELEM, name, elements)
        try:
            replies = self._netlink.request(request)
        except NetlinkError:  # another program deleted one: the transaction will report it
            return
        key_in, behind = wire.key_getter(len(keys[0])), wire.behind_key(len(keys[0]))
        for reply in replies:
            for content in wire.element_contents(reply.payload):
                yield start + key_in(content), _packets(content, behind)

    def totals(self, netlink: Netlink) -> Generator[None, None, CounterReading | None]:
        """Return all counts, in steps; None if a transaction moved some of them between two steps.

        Args:
            netlink: socket to read by; not that of transactions, which go on between the steps.
        """
        moves = self._moves
        totals: dict[bytes, int] = {}
        try:
            for family in Family:
                try:
                    for number, (name, packets) in enumerate(_family_counts(netlink, family)):
                        totals[name] = totals.get(name, 0) + packets
                        if number % _STEP == _STEP - 1:
                            yield
                except DumpInterruptedError:
                    raise
                except NetlinkError:  # no such table
                    continue
                yield
        except DumpInterruptedError:
            return None
        # A transaction since then may have moved counts from elements to _carried.
        if moves != self._moves:
            return None
        for name, packets in self._carried.items():
            totals[name] = totals.get(name, 0) + packets
        return CounterReading(totals, dict(self._carried))


def _may_stay(change: Diff) -> bool:
    """Return whether a frontend is replaced, or an endpoint moves from one slot to another."""
    if any(kind_of(key) in FRONTEND_KINDS for key in change.changed):
        return True
    gone = {address_and_port(old) for old, _ in change.changed.values()}
    gone |= {address_and_port(old) for old in change.removed.values()}
    come = {address_and_port(new) for _, new in change.changed.values()}
    come |= {address_and_port(new) for new in change.added.values()}
    return not gone.isdisjoint(come)


def _family_counts(netlink: Netlink, family: Family) -> Iterator[tuple[bytes, int]]:
    """Yield the counts of one family's elements. Members are listed even if their count is 0.

    Each element is yielded once, even if the kernel lists it twice.
    """
    width = family.bits // 8
    for kind in _COUNTED_KINDS:
        start, size = prefix(kind, family), SETS[kind].key_size(family)
        key_in, endpoint_in = wire.key_getter(size), wire.data_getter(size, width + 4)
        behind = wire.behind_key(size)
        seen = {}
        for content in set_contents(netlink, family, SETS[kind].name, _HAS_COUNTED):
            if packets := _packets(content, behind):
                key = key_in(content)
                seen[key] = counted_key(start + key, endpoint_in(content)), packets
        yield from seen.values()
    key_in, behind = wire.key_getter(width + 4), wire.behind_key(width + 4)
    for name in set_names(netlink, family):
        if is_members_set(name):
            start = element_key(named(Kind.MEMBERS, family, name))
            contents = set_contents(netlink, family, name)
            yield from {start + key_in(each): _packets(each, behind) for each in contents}.items()


def _packets(content: bytes, behind: int) -> int:
    """Return the packets of an element's counter: searched for, as most have counted nothing."""
    at = content.find(_COUNTER, behind) if _HAS_COUNTED.search(content, behind) else -1
    if at < 0:
        return 0
    values = attributes(content, at + len(_COUNTER) + 4)
    return int.from_bytes(values.get(_PACKETS, b""), "big")


class Scrape:
    """Connections so far by ServicePort; one scrape at a time."""

    def __init__(self, connect: Callable[[], Netlink]) -> None:
        """Initialize at zero; `connect` opens a socket for each scrape."""
        self._connect = connect
        self._running = False
        self._totals = ConnectionTotals()

    def steps(
        self, counters: ElementCounters, relayed: Mapping[bytes, int], plans: Sequence[ServicePlan]
    ) -> Generator[None, None, ConnectionStats]:
        """Return the connections that elements and listeners on loopback counted for plans.

        Args:
            counters: read in steps, between which transactions are sent.
            relayed: the counts of listeners on loopback.
            plans: all plans that are in force.

        Raises:
            BusyError: other programs change the ruleset all the time.
        """
        while self._running:  # counts would seem to fall
            yield
        self._running = True
        try:
            with self._connect() as netlink:
                for _ in range(_ATTEMPTS):
                    if reading := (yield from counters.totals(netlink)):
                        break
                else:  # too many transactions: hold them up
                    reading = finish(counters.totals(netlink))
            if reading is None:
                raise BusyError("nftables: the ruleset changes faster than it can be read")
            counts = {**reading.totals, **relayed}
            return self._totals.update(counts, plans, reading.carried)
        finally:
            self._running = False
