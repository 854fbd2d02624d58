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
from steersman.model.ruleset import Diff
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
    changed = change.changed.items()
    old = _groups((change.removed.items(), ((key, pair[0]) for key, pair in changed)))
    new = _groups((change.added.items(), ((key, pair[1]) for key, pair in changed)))
    removed = _groups((change.removed.items(),)) if old else {}
    delete = wire.DESTROYSETELEM if destroy else wire.DELSETELEM
    gone = {
        key[1:] for key in _of_kinds(removed, _SETS_OF_THEIR_OWN)
    }  # sets that take their elements with them
    return [
        *_elements(delete, old, gone),
        *_removed_chains(removed),
        *_new_objects(new),
        *_removed_sets(removed),  # chains that changed use them no more
        *_elements(wire.NEWSETELEM, new, set()),
    ]


_Groups = Mapping[bytes, list[tuple[bytes, Any]]]
"""Objects by kind and family."""
_NAMED_ELEMENTS = (Kind.MEMBER, Kind.REMEMBERED)
_SETS_OF_THEIR_OWN = (Kind.AFFINITY, Kind.MEMBERS)
_TOGETHER = 1000
"""Elements that are encoded at once: a message holds as many."""


def _groups(parts: Iterable[_Pairs]) -> _Groups:
    groups: defaultdict[bytes, list[tuple[bytes, Any]]] = defaultdict(list)
    for part in parts:
        for pair in part:
            groups[pair[0][:2]].append(pair)
    return groups


def _of_kinds(groups: _Groups, kinds: Sequence[Kind]) -> Iterator[bytes]:
    """Keys of these kinds."""
    for start, pairs in groups.items():
        if start[0] in kinds:
            yield from (key for key, _ in pairs)


def _elements(verb: int, groups: _Groups, gone: set[bytes]) -> Iterator[Step]:
    """Elements, a set at a time; but for those of sets that are gone."""
    for start, pairs in groups.items():
        if start[0] in SETS:
            spec = SETS[start[0]]
            yield from _steps(verb, start[1], spec.name, spec.form, pairs)
    own: defaultdict[bytes, list[tuple[bytes, bytes]]] = defaultdict(list)
    for start, pairs in groups.items():
        for pair in pairs if start[0] in _NAMED_ELEMENTS else ():
            own[_set_of(pair[0])].append(pair)
    for where, pairs in own.items():
        if where not in gone:
            yield from _steps(verb, where[0], where[1:].decode(), Form.SET, pairs)


def _set_of(key: bytes) -> bytes:
    """Family and name of the ServicePort's set that an element is in."""
    return key[1:].split(b"\0", 1)[0]


def _steps(
    verb: int, family: int, name: str, form: Form, pairs: Sequence[tuple[bytes, Any]]
) -> Iterator[Step]:
    """Elements of one set; encoded some at a time, as the peak of the process' memory is here."""
    cut = len(name.encode()) + 3 if pairs[0][0][0] in _NAMED_ELEMENTS else 2
    for first in range(0, len(pairs), _TOGETHER):
        some = pairs[first : first + _TOGETHER]
        elements = [(key[cut:], value) for key, value in some]
        items = encode(form, elements, keys_only=verb != wire.NEWSETELEM)
        room = wire.room(items)
        for at in range(0, len(items), room):
            request = wire.elements(verb, Family(family), name, items[at : at + room])
            yield Step(request, tuple([key for key, _ in some[at : at + room]]))


def _removed_chains(removed: _Groups) -> Iterator[Step]:
    for key in _of_kinds(removed, (Kind.CHAIN,)):
        family, name = Family(key[1]), key[2:].decode()
        yield Step(wire.flush_chain(family, name), (key,))
        yield Step(wire.delete_chain(family, name), (key,))


def _removed_sets(removed: _Groups) -> Iterator[Step]:
    for key in _of_kinds(removed, _SETS_OF_THEIR_OWN):
        yield Step(wire.delete_set(Family(key[1]), key[2:].decode()), (key,))


_NEW_SETS: dict[int, Callable[[Family, str], Request]] = {
    Kind.AFFINITY: wire.new_memory,
    Kind.MEMBERS: wire.new_members,
}


def _new_objects(new: _Groups) -> Iterator[Step]:
    for key in _of_kinds(new, _SETS_OF_THEIR_OWN):
        yield Step(_NEW_SETS[key[0]](Family(key[1]), key[2:].decode()), (key,))
    for start, pairs in new.items():
        for key, value in pairs if start[0] == Kind.CHAIN else ():
            family, name = Family(key[1]), key[2:].decode()
            for request in expressions.chain_requests(family, name, value.decode()):
                yield Step(request, (key,))
