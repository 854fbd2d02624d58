"""Connections per frontend and per endpoint, from the counters of elements.

Elements of `service-ips`, `service-nodeports` and the endpoint maps count new connections. With
session affinity most connections choose no slot, so the elements of a `members-...` set count too:
every connection passes them when it is learned.

Scrape reads all counters beside transactions, which it does not hold up. An element that is
replaced starts at zero in the kernel, and slots change hands: totals.py compares each element with
itself, and does without what the old one has counted since the last scrape.
The kernel (6.18) does not say that a list of elements changed while it was read: one that met a new
element may have another one twice, which counts once here; one that met the growth of a hash table
may lack some, which totals.py puts up with. totals.py adds the counts up by ServicePort.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Generator, Iterator, Mapping, Sequence

from steersman.host.netlink import DumpInterruptedError, Netlink, NetlinkError
from steersman.host.nlmsg import attributes, text
from steersman.model.errors import BusyError
from steersman.model.names import Family
from steersman.model.plan import ServicePlan
from steersman.model.stats import ConnectionStats
from steersman.modes.nftables import wire
from steersman.modes.nftables.layout import (
    ENDPOINT_KINDS,
    FRONTEND_KINDS,
    SETS,
    Kind,
    counted_key,
    element_key,
    named,
    own_set_kind,
    prefix,
)
from steersman.modes.nftables.read import set_contents, set_names
from steersman.modes.nftables.sender import open_netlink
from steersman.modes.nftables.totals import ConnectionTotals, Count

_COUNTED_KINDS = (*FRONTEND_KINDS, *ENDPOINT_KINDS)
_COUNTER, _PACKETS = text(1, "counter"), 2
_HAS_COUNTED = re.compile(struct.pack("=HH", 12, _PACKETS) + rb"(?!\0{8})")
"""Found if a counter's attribute of packets is not 0; else only by chance."""
_ATTEMPTS = 3
_STEP = 2000
"""Elements that a step of a scrape reads: some milliseconds."""


def read_counts(netlink: Netlink) -> Generator[None, None, dict[bytes, Count]]:
    """Return the counts of all elements by their keys, in steps; those of 0 may be left out.

    Raises:
        DumpInterruptedError: other programs changed the ruleset meanwhile.
    """
    counts: dict[bytes, Count] = {}
    for family in Family:
        try:
            for number, (key, count) in enumerate(_family_counts(netlink, family)):
                counts[key] = count
                if number % _STEP == _STEP - 1:
                    yield
        except DumpInterruptedError:
            raise
        except NetlinkError:  # no such table
            continue
        yield
    return counts


def _family_counts(netlink: Netlink, family: Family) -> Iterator[tuple[bytes, Count]]:
    """Yield the counts of one family's elements. Members are listed even if their count is 0."""
    width = family.bits // 8
    for kind in _COUNTED_KINDS:
        start, size = prefix(kind, family), SETS[kind].key_size(family)
        key_in, endpoint_in = wire.key_getter(size), wire.data_getter(size, width + 4)
        behind = wire.behind_key(size)
        for content in set_contents(netlink, family, SETS[kind].name, _HAS_COUNTED):
            if packets := _packets(content, behind):
                key = start + key_in(content)
                yield key, (counted_key(key, endpoint_in(content)), packets)
    key_in, behind = wire.key_getter(width + 4), wire.behind_key(width + 4)
    for name in set_names(netlink, family):
        if own_set_kind(name) is Kind.MEMBERS:
            start = element_key(named(Kind.MEMBERS, family, name))
            for content in set_contents(netlink, family, name):
                key = start + key_in(content)
                yield key, (key, _packets(content, behind))


def _packets(content: bytes, behind: int) -> int:
    """Return the packets of an element's counter: searched for, as most have counted nothing."""
    at = content.find(_COUNTER, behind) if _HAS_COUNTED.search(content, behind) else -1
    if at < 0:
        return 0
    values = attributes(content, at + len(_COUNTER) + 4)
    return int.from_bytes(values.get(_PACKETS, b""), "big")


class Scrape:
    """Connections so far by ServicePort; one scrape at a time."""

    def __init__(self) -> None:
        """Start at zero."""
        self._running = False
        self._totals = ConnectionTotals()

    def steps(
        self, relayed: Mapping[bytes, int], plans: Sequence[ServicePlan]
    ) -> Generator[None, None, ConnectionStats]:
        """Return the connections that elements and listeners on loopback counted for plans.

        Args:
            relayed: the counts of listeners on loopback.
            plans: all plans that are in force.

        Raises:
            BusyError: other programs change the ruleset all the time.
        """
        while self._running:  # counts would seem to fall
            yield
        self._running = True
        try:
            with open_netlink() as netlink:
                for _ in range(_ATTEMPTS):
                    try:
                        counts = yield from read_counts(netlink)
                        break
                    except DumpInterruptedError:
                        continue
                else:
                    raise BusyError("nftables: the ruleset changes faster than it can be read")
            counts |= {key: (key, count) for key, count in relayed.items()}
            return self._totals.update(counts, plans)
        finally:
            self._running = False
