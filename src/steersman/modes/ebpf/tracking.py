"""The connections that packets carry: which are over, which are stale, and what was counted."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from steersman.model.conntrack import Stale
from steersman.model.stats import NodeTotals
from steersman.modes.ebpf import flows
from steersman.modes.ebpf.counts import Counts, Flows, Reading
from steersman.modes.ebpf.loader import LoadedObject
from steersman.modes.ebpf.maps import HashMap
from steersman.modes.ebpf.peers import Peer, known, stale_sockets
from steersman.modes.ebpf.tables import Tables


class Found(NamedTuple):
    """Connections that were stale when they were looked at."""

    peers: tuple[Peer, ...]
    """Sockets."""
    flows: tuple[bytes, ...]
    """Keys of the map `flows`."""

    def __bool__(self) -> bool:
        return bool(self.peers or self.flows)


class Expired(NamedTuple):
    """What came of forgetting connections that are over."""

    made: int
    """Connections that had been made before."""
    looked: flows.Looked


class Tracking:
    """What programs have learned and counted, in the maps of one object."""

    def __init__(self, loaded: LoadedObject, tables: Tables) -> None:
        """Take maps that stay with their owner."""
        self._tables = tables
        self._counts = Counts(loaded.maps)
        self._flows = HashMap(loaded.maps["flows"])
        self._maps = loaded.maps
        self._seen = Flows()

    def expiring(self) -> Callable[[], Expired]:
        """Return what forgets the connections that are over.

        That may take a second where there are many. It has a descriptor of its own, so that syncs
        go on meanwhile, and the mode may be closed.
        """
        made, copy = self._counts.event("flows_made"), HashMap(os.dup(self._flows.fd))

        def expire() -> Expired:
            try:
                return Expired(made, flows.collect(copy, flows.read_timeouts()))
            finally:
                copy.close()

        return expire

    def collect(self, expired: Expired) -> None:
        """Count connections that were forgotten; forget counts of what is gone."""
        self._counts.add_expired(expired.looked.expired)
        self._seen = self._counts.looked(expired.looked.entries, expired.made, self._seen)
        self._counts.sweep(self._tables)
        self._tables.marks.renew(lambda: flows.clients(self._flows))

    def mark(self) -> None:
        """Have programs rely on marks: each writes them now."""
        self._tables.marks.trust(flows.clients(self._flows), self._tables.served())

    def reading(self) -> Reading:
        """Begin to read what was counted by frontend and endpoint."""
        return Reading(self._maps, self._tables)

    def totals(self) -> NodeTotals:
        """Return what was counted for the whole node."""
        return self._counts.totals(self._seen)

    def connections(self) -> int:
        """How many connections there are now."""
        return flows.count_open(self._flows, flows.read_timeouts())

    def find(self, stale: Stale) -> Found:
        """Find the connections that are stale."""
        peers = tuple(stale_sockets(known(self._maps), stale))
        return Found(peers, flows.find_stale(self._flows, stale))

    def forget(self, found: Found, stale: Stale) -> tuple[int, set[tuple[int, bytes]]]:
        """Cut what was found and is still stale; how many, and the sockets (sockets.py) to end."""
        sockets = {(peer.cookie, peer.endpoint) for peer in stale_sockets(found.peers, stale)}
        removed = flows.forget(self._flows, found.flows, stale)
        self._counts.add_expired(removed.entries)
        return removed.connections, sockets
