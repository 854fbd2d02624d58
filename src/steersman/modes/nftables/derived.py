"""Elements that follow from others, each once however many those are. Pure.

A clusterIP is known as long as a frontend has it, whichever port; an endpoint on this node can
reach itself as long as a ServicePort has it (behaviour 9; elsewhere no such packet passes here). So
they belong to nobody in the Ruleset, and are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from steersman.model.names import Family
from steersman.model.ruleset import Diff, Ruleset
from steersman.modes.nftables.layout import CLUSTER_IP_SUFFIX, Kind, bare, is_local, prefix

Counts: TypeAlias = dict[bytes, int]
"""Elements that others follow from, by the key of what follows."""

_FRONTENDS = (Kind.SERVICE_IPS, Kind.NO_ENDPOINT_SERVICES)
_ENDPOINTS = frozenset((Kind.SERVICE_ENDPOINTS, Kind.NODEPORT_ENDPOINTS))
_SOURCES = frozenset((*_FRONTENDS, *_ENDPOINTS))


_CLUSTER_IPS, _HAIRPINS = (
    {int(family): prefix(kind, family) for family in Family}
    for kind in (Kind.CLUSTER_IPS, Kind.HAIRPIN_CONNECTIONS)
)


def derived(key: bytes, value: bytes) -> bytes:
    """Key of what follows from an element of a frontend or endpoint; b"" where nothing does."""
    if key[0] in _ENDPOINTS:
        if not is_local(value):
            return b""
        return _HAIRPINS[key[1]] + value[:-4] * 2 + key[-12:-8] + bare(value)[-4:]
    if value.endswith(CLUSTER_IP_SUFFIX):
        return _CLUSTER_IPS[key[1]] + key[2:-8]
    return b""


def count(objects: Iterable[tuple[bytes, bytes]], by: int, counts: Counts) -> None:
    """Add to the counts."""
    for key, value in objects:
        if key[0] in _ENDPOINTS and not is_local(value):
            continue  # nearly all of them
        if key[0] in _SOURCES and (follows := derived(key, value)):
            counts[follows] = counts.get(follows, 0) + by


class Derived:
    """How many elements each that follows from others follows from, in the kernel."""

    def __init__(self) -> None:
        """Begin with none."""
        self._counts: Counts = {}

    def read(self, counts: Counts) -> None:
        """Begin with what is in the kernel (check_derived)."""
        self._counts = counts

    def loaded(self, objects: Ruleset) -> dict[bytes, bytes]:
        """Count what is loaded into new tables; return what follows from it."""
        counts: Counts = {}
        count(objects.items(), 1, counts)
        self._counts.update(counts)
        return dict.fromkeys(counts, b"")

    def after(self, change: Diff) -> Counts:
        """Counts that will differ when a Diff has been carried out."""
        by: Counts = {}
        count(change.added.items(), 1, by)
        count(change.removed.items(), -1, by)
        count(((key, new) for key, (_, new) in change.changed.items()), 1, by)
        count(((key, old) for key, (old, _) in change.changed.items()), -1, by)
        return {key: self._counts.get(key, 0) + delta for key, delta in by.items() if delta}

    def complete(self, change: Diff, counts: Mapping[bytes, int]) -> Diff:
        """Add the elements that come and go with a Diff."""
        added, removed = dict(change.added), dict(change.removed)
        for key, number in counts.items():
            had = key in self._counts
            if number > 0 and not had:
                if removed.pop(key, None) is None:  # else it was nobody's until now
                    added[key] = b""
            elif number <= 0 and had:
                removed[key] = b""
        return Diff(added, removed, change.changed)

    def keep(self, counts: Mapping[bytes, int], dropped: set[Family]) -> None:
        """Take over the counts of a Diff that has been carried out, and dropped tables."""
        self._counts.update(counts)
        for key in counts:
            if self._counts[key] <= 0:
                del self._counts[key]
        if dropped:
            self._counts = {k: n for k, n in self._counts.items() if k[1] not in dropped}


def check_derived(objects: dict[bytes, bytes]) -> Counts:
    """Leave out of `objects` what follows from others, and whatever lacks what follows from it.

    Returns how many elements each that follows from others follows from.
    """
    counts: Counts = {}
    count(objects.items(), 1, counts)
    lost = {follows for follows in counts if objects.pop(follows, None) is None}
    if lost:
        found = [(key, value) for key, value in objects.items() if key[0] in _SOURCES]
        for key, value in found:
            if derived(key, value) in lost:
                del objects[key]
    return {follows: number for follows, number in counts.items() if follows not in lost}
