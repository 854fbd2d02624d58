"""Elements and rules that are derived from elements, with reference counts. Pure.

    service-ips or no-endpoint-services, of a clusterIP    ->  cluster-ips: its address
    service-endpoints or nodeport-endpoints, of a local    ->  hairpin-connections: the endpoint
    endpoint                                                   to itself
    affinity-ips, affinity-nodeports, firewall-ips         ->  the lazy chains that look them up

A clusterIP stays as long as a frontend has it, whichever port; an endpoint on this node as long
as a ServicePort has it (behaviour 9; elsewhere no such packet passes here). Several ServicePorts
can share a derived element, so it belongs to none of them in the Ruleset: the transaction adds it
with the first reference and removes it with the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from steersman.model.names import Family
from steersman.model.ruleset import Diff, Ruleset
from steersman.modes.nftables.layout import (
    CLUSTER_IP_SUFFIX,
    ENDPOINT_KINDS,
    LEARN_CHAIN,
    Kind,
    cluster_ip_key,
    family_number,
    family_of,
    hairpin_key,
    is_local,
    kind_of,
    named,
)
from steersman.modes.nftables.rules import FIREWALL_CHECK

Counts: TypeAlias = dict[bytes, int]
"""Reference counts of derived elements, by their keys."""

_LAZY = {
    int(Kind.AFFINITY_IPS): LEARN_CHAIN,
    int(Kind.AFFINITY_NODEPORTS): LEARN_CHAIN,
    int(Kind.FIREWALL_IPS): FIREWALL_CHECK,
}
"""The first of the lazy chains that elements need, by their kind."""
_FRONTEND_KINDS = (int(Kind.SERVICE_IPS), int(Kind.NO_ENDPOINT_SERVICES))


def derived(objects: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys of frontends and endpoints with the keys of their derived elements."""
    for key, value in objects:
        kind = kind_of(key)
        if kind in ENDPOINT_KINDS:
            if is_local(value):  # hardly any
                yield key, hairpin_key(key, value)
        elif kind in _FRONTEND_KINDS and value.endswith(CLUSTER_IP_SUFFIX):
            yield key, cluster_ip_key(key)
        elif kind in _LAZY:
            yield key, named(Kind.LAZY, family_of(key), _LAZY[kind])


def _count(objects: Iterable[tuple[bytes, bytes]], by: int, counts: Counts) -> None:
    """Add `by` to the counts for each reference by an object."""
    for _, element in derived(objects):
        counts[element] = counts.get(element, 0) + by


class DerivedElements:
    """Reference counts of derived elements in the kernel."""

    def __init__(self) -> None:
        self._counts: Counts = {}

    def reset(self, counts: Counts) -> None:
        """Start from the counts of the elements in the kernel (check_derived)."""
        self._counts = counts

    def load(self, objects: Ruleset) -> dict[bytes, bytes]:
        """Count references by objects loaded into new tables; return their derived elements."""
        counts: Counts = {}
        _count(objects.items(), 1, counts)
        self._counts.update(counts)
        return dict.fromkeys(counts, b"")

    def counts_after(self, change: Diff) -> Counts:
        """Return the counts that a Diff will change, with their new values."""
        by: Counts = {}
        _count(change.added.items(), 1, by)
        _count(change.removed.items(), -1, by)
        for key, (old, new) in change.changed.items():
            if kind_of(key) not in ENDPOINT_KINDS or is_local(old) or is_local(new):
                _count(((key, old),), -1, by)
                _count(((key, new),), 1, by)
        return {key: self._counts.get(key, 0) + delta for key, delta in by.items() if delta}

    def complete(self, change: Diff, counts: Mapping[bytes, int]) -> Diff:
        """Return a Diff with the derived elements that it adds and removes."""
        added, removed = dict(change.added), dict(change.removed)
        for key, number in counts.items():
            had = key in self._counts
            if number > 0 and not had:
                # An element without references is about to be removed: now it stays.
                if removed.pop(key, None) is None:
                    added[key] = b""
            elif number <= 0 and had:
                removed[key] = b""
        return Diff(added, removed, change.changed)

    def commit(self, counts: Mapping[bytes, int]) -> None:
        """Take over the counts of a Diff that is in force."""
        self._counts.update(counts)
        for key in counts:
            if self._counts[key] <= 0:
                del self._counts[key]

    def forget(self, families: set[Family]) -> None:
        """Forget the elements of tables that are gone."""
        self._counts = {k: n for k, n in self._counts.items() if family_number(k) not in families}


def check_derived(objects: dict[bytes, bytes]) -> Counts:
    """Take derived elements out of the objects read; return their reference counts.

    If a derived element is missing, the objects that need it are taken out too: they are not in
    force, and are written again.
    """
    counts: Counts = {}
    _count(objects.items(), 1, counts)
    missing = {element for element in counts if objects.pop(element, None) is None}
    if missing:
        for key, element in list(derived(objects.items())):
            if element in missing:
                del objects[key]
    return {element: number for element, number in counts.items() if element not in missing}
