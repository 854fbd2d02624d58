"""The clusterIPs that are known, each once however many ports it has. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from steersman.model.names import Family
from steersman.modes.diff import Diff, Ruleset
from steersman.modes.nftables.layout import CLUSTER_IP_SUFFIX, Kind

Counts: TypeAlias = dict[bytes, int]
"""Elements that make a clusterIP known, by family and address."""

_KINDS = (Kind.SERVICE_IPS, Kind.NO_ENDPOINT_SERVICES)
_SET = bytes((Kind.CLUSTER_IPS,))


def cluster_ip(key: bytes, value: bytes) -> bytes:
    """Family and address, where an element makes a clusterIP known; else b""."""
    if key[0] in _KINDS and value.endswith(CLUSTER_IP_SUFFIX):
        return key[1:-8]
    return b""


def count(objects: Ruleset, by: int, counts: Counts) -> None:
    """Add to the counts."""
    for key, value in objects.items():
        if key[0] in _KINDS and (address := cluster_ip(key, value)):
            counts[address] = counts.get(address, 0) + by


class ClusterIps:
    """How many elements make each clusterIP known, in the kernel."""

    def __init__(self) -> None:
        """Begin with none."""
        self._counts: Counts = {}

    def read(self, objects: Ruleset) -> None:
        """Count afresh."""
        self._counts = {}
        count(objects, 1, self._counts)

    def loaded(self, objects: Ruleset) -> dict[bytes, bytes]:
        """Count what is loaded into new tables; return the elements of `cluster-ips` for it."""
        counts: Counts = {}
        count(objects, 1, counts)
        self._counts.update(counts)
        return {_SET + address: b"" for address in counts}

    def after(self, change: Diff) -> Counts:
        """Counts that will differ when a Diff has been carried out."""
        by: Counts = {}
        count(change.added, 1, by)
        count(change.removed, -1, by)
        count({key: pair[1] for key, pair in change.changed.items()}, 1, by)
        count({key: pair[0] for key, pair in change.changed.items()}, -1, by)
        return {key: self._counts.get(key, 0) + delta for key, delta in by.items() if delta}

    def complete(self, change: Diff, counts: Mapping[bytes, int]) -> Diff:
        """Add the elements of `cluster-ips` that come and go with a Diff."""
        added, removed = dict(change.added), dict(change.removed)
        for address, number in counts.items():
            had = address in self._counts
            if number > 0 and not had:
                added[_SET + address] = b""
            elif number <= 0 and had:
                removed[_SET + address] = b""
        return Diff(added, removed, change.changed)

    def keep(self, counts: Mapping[bytes, int], dropped: set[Family]) -> None:
        """Take over the counts of a Diff that has been carried out, and dropped tables."""
        self._counts.update(counts)
        for key in counts:
            if self._counts[key] <= 0:
                del self._counts[key]
        if dropped:
            self._counts = {k: n for k, n in self._counts.items() if k[0] not in dropped}
