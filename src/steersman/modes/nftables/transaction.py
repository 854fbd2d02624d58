"""From a Diff to the operations of one transaction, in an order that the kernel accepts. Pure.

An element that goes to a chain is removed before the chain and added after it. A changed element
is deleted and added. Since kernel 6.3 elements are destroyed: one that another program has deleted
already is no error.

    elements out -> chains out -> sets and chains in -> sets out -> elements in

nf_tables carries the operations out one after the other, so each one must be valid after those
before it; all of them come into force at once.

At once, but not for a packet that is on its way: it keeps the rules of the generation in which it
entered a hook, and looks each set up as it is then. If the element that it found leads to a new
chain, that chain is still empty for it; if it found an element just before a transaction, the next
one that it needs may be gone. It then leaves without translation. So a Diff that sends a
destination to another chain is carried out in three transactions (in_steps).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from steersman.host.nlmsg import Request
from steersman.model.ruleset import Diff
from steersman.modes.nftables import wire
from steersman.modes.nftables.layout import (
    ENDPOINT_KINDS,
    FRONTEND_KINDS,
    MAP_GROUPS,
    SETS,
    Form,
    Kind,
    element_key,
    family_of,
    key_behind,
    kind_of,
    name_of,
    prefix_of,
    split_element,
    without_size,
)
from steersman.modes.nftables.rules import LAZY, chain_requests, removal_of_lazy
from steersman.netfilter.nft import wire as nft

_Pairs: TypeAlias = list[tuple[bytes, Any]]
_Groups: TypeAlias = Mapping[bytes, _Pairs]
"""Objects by kind and family."""

_ELEMENTS_BY_NAME = (Kind.MEMBER, Kind.STALE_AFFINITY)
_SETS_BY_NAME = (Kind.AFFINITY, Kind.MEMBERS)
_NEW_SETS = {int(Kind.AFFINITY): wire.new_affinity_map, int(Kind.MEMBERS): wire.new_members_set}
_BY_SOURCE = tuple(kind for group in MAP_GROUPS for kind in group.by_source)
_DISPATCH = frozenset({*FRONTEND_KINDS, *_BY_SOURCE})
_NEEDED_LATER = frozenset(
    {
        *(*_BY_SOURCE, *ENDPOINT_KINDS),
        *(Kind.CHAIN, Kind.AFFINITY, Kind.MEMBERS, Kind.MEMBER, Kind.LAZY),
    }
)
"""Kinds of what a packet needs after `service-ips` or `service-nodeports`."""
_TOGETHER = 1000
"""Elements that are encoded at once: the peak of the process' memory is here."""


class Operation(NamedTuple):
    """A request of a transaction, and the objects that it writes, for error messages."""

    request: Request
    keys: tuple[bytes, ...]


def transaction(change: Diff, *, destroy: bool) -> list[Operation]:
    """Return the operations that carry out a Diff without texts.

    Args:
        change: Diff without SKELETON, RULES and RELAY.
        destroy: True if the kernel can destroy elements.
    """
    old: defaultdict[bytes, _Pairs] = defaultdict(list)
    for pair in change.removed.items():
        old[prefix_of(pair[0])].append(pair)
    gone_chains = _keys(old, (Kind.CHAIN,))
    gone_sets = dict.fromkeys(_keys(old, _SETS_BY_NAME))
    new: defaultdict[bytes, _Pairs] = defaultdict(list)
    for pair in change.added.items():
        new[prefix_of(pair[0])].append(pair)
    for key, (before, after) in change.changed.items():
        start = prefix_of(key)
        old[start].append((key, before))
        new[start].append((key, after))

    # 1. Elements: those of a verdict map release the chains that they go to.
    delete = nft.DESTROYSETELEM if destroy else nft.DELSETELEM
    operations = list(_elements(delete, old, gone_sets))
    # 2. Chains. Their rules first: these may go to other chains and look sets up.
    for key in _keys(old, (Kind.LAZY,)):
        requests = removal_of_lazy(family_of(key), name_of(key))
        operations += [Operation(request, (key,)) for request in requests]
    for key in gone_chains:
        table, name = wire.OURS[family_of(key)], name_of(key)
        operations.append(Operation(nft.flush_chain(table, name), (key,)))
        operations.append(Operation(nft.delete_chain(table, name), (key,)))
    # 3. Sets, then chains that look them up. A changed chain is refilled.
    for key in _keys(new, _SETS_BY_NAME):
        operations.append(Operation(_NEW_SETS[kind_of(key)](family_of(key), name_of(key)), (key,)))
    for start, pairs in new.items():
        for key, value in pairs if kind_of(start) == Kind.CHAIN else ():
            requests = chain_requests(family_of(key), name_of(key), value.decode())
            operations += [Operation(request, (key,)) for request in requests]
    for key in _keys(new, (Kind.LAZY,)):
        requests = LAZY[name_of(key)].rules(family_of(key))
        operations += [Operation(request, (key,)) for request in requests]
    # 4. Sets, which a refilled chain may have looked up until now.
    operations += [Operation(wire.delete_set(family_of(k), name_of(k)), (k,)) for k in gone_sets]
    # 5. Elements, which go to chains and are members of sets.
    return [*operations, *_elements(nft.NEWSETELEM, new, {})]


def in_steps(change: Diff) -> tuple[Diff, Diff, Diff]:
    """Split a Diff into additions that a switch needs, the switch, and removals that it allows.

    The first and the last one are empty if no destination that stays is sent to another chain. One
    that chooses from more or fewer slots does not count: it copes with empty slots.
    """
    if not any(
        kind_of(key) in _DISPATCH and without_size(before) != without_size(after)
        for key, (before, after) in change.changed.items()
    ):
        return Diff(), change, Diff()
    added, removed = dict(change.added), dict(change.removed)
    first = {key: added.pop(key) for key in change.added if kind_of(key) in _NEEDED_LATER}
    last = {key: removed.pop(key) for key in change.removed if kind_of(key) in _NEEDED_LATER}
    return Diff(first), Diff(added, removed, change.changed), Diff(removed=last)


def _keys(groups: _Groups, kinds: Sequence[Kind]) -> list[bytes]:
    """Return the keys of these kinds."""
    return [key for start, pairs in groups.items() if kind_of(start) in kinds for key, _ in pairs]


def _elements(verb: int, groups: _Groups, gone_sets: Collection[bytes]) -> Iterator[Operation]:
    """Yield operations for all elements, a set at a time; those of gone sets go with their set."""
    for start, pairs in groups.items():
        if spec := SETS.get(kind_of(start)):
            yield from _elements_of_set(verb, start, spec.name, spec.form, pairs)
    by_set: defaultdict[bytes, _Pairs] = defaultdict(list)
    for start, pairs in groups.items():
        for pair in pairs if kind_of(start) in _ELEMENTS_BY_NAME else ():
            by_set[split_element(pair[0])[0]].append(pair)
    for set_key, pairs in by_set.items():
        if set_key in gone_sets:
            continue
        start, name = element_key(set_key), name_of(set_key)
        if verb == nft.DELSETELEM and kind_of(set_key) == Kind.AFFINITY:
            # One that has expired cannot be deleted: add it, which does nothing if it is there.
            yield from _elements_of_set(nft.NEWSETELEM, start, name, Form.ENDPOINTS, pairs)
        yield from _elements_of_set(verb, start, name, Form.SET, pairs)


def _elements_of_set(
    verb: int, start: bytes, name: str, form: Form, pairs: _Pairs
) -> Iterator[Operation]:
    """Yield operations for elements of one set; their keys begin with `start`."""
    netfilter_key = key_behind(start)
    for first in range(0, len(pairs), _TOGETHER):
        some = pairs[first : first + _TOGETHER]
        elements = [(netfilter_key(key), value) for key, value in some]
        items = wire.encode(form, elements, keys_only=verb != nft.NEWSETELEM)
        room = wire.room(items)
        for at in range(0, len(items), room):
            request = wire.elements(verb, family_of(start), name, items[at : at + room])
            yield Operation(request, tuple([key for key, _ in some[at : at + room]]))
