"""From a Diff to the messages of one transaction, in an order that the kernel accepts. Pure.

Elements that go to a chain go before it, and come after it; a changed element is deleted and
added. What was deleted by someone else meanwhile is no error where the kernel can destroy (6.3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from steersman.host.netlink import Request
from steersman.model.names import Family
from steersman.modes.diff import Diff
from steersman.modes.nftables import expressions, wire
from steersman.modes.nftables.elements import encode
from steersman.modes.nftables.layout import SETS, Form, Kind

_Pairs = Iterable[tuple[bytes, Any]]


class Step(NamedTuple):
    """A message, and the objects it is about."""

    request: Request
    keys: tuple[bytes, ...]


def transaction(change: Diff, *, destroy: bool) -> list[Step]:
    """Return the messages that carry out a Diff, of everything but skeletons."""
    old = [*change.removed.items(), *((key, pair[0]) for key, pair in change.changed.items())]
    new = [*change.added.items(), *((key, pair[1]) for key, pair in change.changed.items())]
    delete = wire.DESTROYSETELEM if destroy else wire.DELSETELEM
    gone = {
        key[1:] for key in change.removed if key[0] in (Kind.MEMBERS, Kind.AFFINITY)
    }  # sets that take their elements with them
    left = [(k, v) for k, v in old if k[0] not in _NAMED_ELEMENTS or _set_of(k) not in gone]
    return [
        *_elements(delete, left),
        *_removed_chains(change.removed),
        *_new_objects(new),
        *_removed_sets(change.removed),  # chains that changed use them no more
        *_elements(wire.NEWSETELEM, new),
    ]


_NAMED_ELEMENTS = (Kind.MEMBER, Kind.REMEMBERED)


def _set_of(key: bytes) -> bytes:
    """Family and name of the ServicePort's set that an element is in."""
    return key[1:].split(b"\0", 1)[0]


def _elements(verb: int, pairs: _Pairs) -> Iterator[Step]:
    """Elements, a set at a time."""
    groups: defaultdict[bytes, list[tuple[bytes, bytes]]] = defaultdict(list)
    own: defaultdict[bytes, list[tuple[bytes, bytes]]] = defaultdict(list)
    for pair in pairs:
        kind = pair[0][0]
        if kind in SETS:
            groups[pair[0][:2]].append(pair)
        elif kind in _NAMED_ELEMENTS:
            own[_set_of(pair[0])].append(pair)
    for start, members in groups.items():
        spec = SETS[start[0]]
        cut = [(key[2:], value) for key, value in members]
        items = encode(spec.form, cut, keys_only=verb != wire.NEWSETELEM)
        yield from _steps(verb, start[1], spec.name, items, members)
    for where, members in own.items():
        cut = [(key.split(b"\0", 1)[1], value) for key, value in members]
        items = encode(Form.SET, cut, keys_only=verb != wire.NEWSETELEM)
        yield from _steps(verb, where[0], where[1:].decode(), items, members)


def _steps(
    verb: int,
    family: int,
    name: str,
    items: Sequence[bytes],
    members: Sequence[tuple[bytes, bytes]],
) -> Iterator[Step]:
    keys = tuple(key for key, _ in members)
    for request in wire.elements(verb, Family(family), name, items):
        yield Step(request, keys)


def _removed_chains(removed: Mapping[bytes, Any]) -> Iterator[Step]:
    for key in removed:
        if key[0] == Kind.CHAIN:
            family, name = Family(key[1]), key[2:].decode()
            yield Step(wire.flush_chain(family, name), (key,))
            yield Step(wire.delete_chain(family, name), (key,))


def _removed_sets(removed: Mapping[bytes, Any]) -> Iterator[Step]:
    for key in removed:
        if key[0] in (Kind.AFFINITY, Kind.MEMBERS):
            yield Step(wire.delete_set(Family(key[1]), key[2:].decode()), (key,))


_NEW_SETS: dict[int, Callable[[Family, str], Request]] = {
    Kind.AFFINITY: wire.new_memory,
    Kind.MEMBERS: wire.new_members,
}


def _new_objects(new: _Pairs) -> Iterator[Step]:
    chains: list[tuple[bytes, bytes]] = []
    for key, value in new:
        if key[0] in _NEW_SETS:
            make = _NEW_SETS[key[0]]
            yield Step(make(Family(key[1]), key[2:].decode()), (key,))
        elif key[0] == Kind.CHAIN:
            chains.append((key, value))
    for key, value in chains:
        family, name = Family(key[1]), key[2:]
        for request in expressions.chain_requests(family, name.decode(), value.decode()):
            yield Step(request, (key,))
