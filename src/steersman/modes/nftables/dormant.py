"""Chains that are not there, or stay empty, until some ServicePort needs them. Pure.

Every packet, or every new connection, passes the chains of hooks, so that those without anything
to find would cost everyone: a tenth of a microsecond each. Once awake, they stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from steersman.host.netlink import Request
from steersman.model.names import Family
from steersman.model.ruleset import Ruleset
from steersman.modes.nftables.affinity import LEARN_CHAIN
from steersman.modes.nftables.expressions import (
    FIREWALL,
    FIREWALL_BASES,
    FIREWALL_CHECK,
    LEARN_BASES,
    Base,
    firewall_rules,
    learning_rules,
)
from steersman.modes.nftables.layout import Kind


class Dormant(NamedTuple):
    """Chains that belong together, and what wakes them."""

    kinds: tuple[Kind, ...]
    """Elements that its rules look for."""
    rules: Callable[[Family], list[Request]]
    sizes: Mapping[str, int]
    """How many rules each chain has when it is awake."""


def _sizes(bases: Iterable[Base]) -> dict[str, int]:
    return {base.name: 1 for base in bases}


DORMANT: Mapping[str, Dormant] = {
    LEARN_CHAIN: Dormant(
        (Kind.AFFINITY_IPS, Kind.AFFINITY_NODEPORTS),
        learning_rules,
        {LEARN_CHAIN: 2, **_sizes(LEARN_BASES)},
    ),
    FIREWALL_CHECK: Dormant(
        (Kind.FIREWALL_IPS,),
        firewall_rules,
        {FIREWALL_CHECK: 1, FIREWALL: 2, **_sizes(FIREWALL_BASES)},
    ),
}
"""By the name of the first chain."""
DORMANT_CHAINS = frozenset(chain for each in DORMANT.values() for chain in each.sizes)
"""Names of all these chains."""
_CHAINS = {kind: chain for chain, each in DORMANT.items() for kind in each.kinds}


def woken(objects: Ruleset) -> set[tuple[Family, str]]:
    """Chains that these objects need."""
    return {(Family(key[1]), _CHAINS[Kind(key[0])]) for key in objects if key[0] in _CHAINS}


def awake(chains: Iterable[str]) -> set[str]:
    """Dormant chains that have all their rules, given the chains of all rules there are."""
    counts = Counter(chains)
    return {
        chain
        for chain, each in DORMANT.items()
        if all(counts[name] == size for name, size in each.sizes.items())
    }


def found_by(chains: Iterable[str], objects: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Objects but those that only chains look for that sleep: they are not in force."""
    lost = {kind for chain in DORMANT.keys() - set(chains) for kind in DORMANT[chain].kinds}
    return {key: value for key, value in objects.items() if key[0] not in lost}
