"""From a Diff to the messages of one transaction, in an order that the kernel accepts. Pure.

Elements that go to a chain go before it, and come after it; a changed element is deleted and
added. What was deleted by someone else meanwhile is no error where the kernel can destroy (6.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from steersman.host.netlink import Request
from steersman.model.names import Family
from steersman.modes.diff import Diff
from steersman.modes.nftables import expressions, wire
from steersman.modes.nftables.layout import SETS, Form, Kind

_Pairs = Iterable[tuple[bytes, Any]]
_ELEMENTS = frozenset({*SETS, Kind.MEMBER, Kind.REMEMBERED})


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
        *_removed_objects(change.removed),
        *_new_objects(new),
        *_elements(wire.NEWSETELEM, new),
    ]


_NAMED_ELEMENTS = (Kind.MEMBER, Kind.REMEMBERED)


def _set_of(key: bytes) -> bytes:
    """Family and name of the ServicePort's set that an element is in."""
    return key[1:].split(b"\0", 1)[0]


def _elements(verb: int, pairs: _Pairs) -> Iterator[Step]:
    groups: dict[tuple[int, str], list[tuple[bytes, bytes]]] = {}
    for key, value in pairs:
        if key[0] in _ELEMENTS:
            spec = SETS.get(key[0])
            name = spec.name if spec else _set_of(key)[1:].decode()
            groups.setdefault((key[1], name), []).append((key, value))
    for (family, name), members in groups.items():
        form = SETS[members[0][0][0]].form if members[0][0][0] in SETS else Form.SET
        items = [_element(form, key, value, verb) for key, value in members]
        keys = tuple(key for key, _ in members)
        for request in wire.elements(verb, Family(family), name, items):
            yield Step(request, keys)


def _element(form: Form, key: bytes, value: bytes, verb: int) -> bytes:
    own = key[2:] if key[0] in SETS else key.split(b"\0", 1)[1]
    if form is Form.INTERVALS:
        return wire.interval(own, own[: -len(value)] + value)
    if verb != wire.NEWSETELEM:
        return wire.element(own)
    if form is Form.ENDPOINTS:
        return wire.data_element(own, value)
    if form is Form.VERDICTS:
        chain, _, comment = value.partition(b"\0")
        return wire.verdict_element(own, chain, comment)
    return wire.commented(own, value)


def _removed_objects(removed: Mapping[bytes, Any]) -> Iterator[Step]:
    for key in removed:
        if key[0] == Kind.CHAIN:
            family, name = Family(key[1]), key[2:].decode()
            yield Step(wire.flush_chain(family, name), (key,))
            yield Step(wire.delete_chain(family, name), (key,))
    for key in removed:
        if key[0] in (Kind.AFFINITY, Kind.MEMBERS):
            yield Step(wire.delete_set(Family(key[1]), key[2:].decode()), (key,))


def _new_objects(new: _Pairs) -> Iterator[Step]:
    chains: list[tuple[bytes, bytes]] = []
    for key, value in new:
        family, name = Family(key[1]), key[2:]
        if key[0] == Kind.AFFINITY:
            yield Step(wire.new_memory(family, name.decode()), (key,))
        elif key[0] == Kind.MEMBERS:
            yield Step(wire.new_members(family, name.decode()), (key,))
        elif key[0] == Kind.CHAIN:
            chains.append((key, value))
    for key, value in chains:
        family, name = Family(key[1]), key[2:]
        for request in expressions.chain_requests(family, name.decode(), value.decode()):
            yield Step(request, (key,))
