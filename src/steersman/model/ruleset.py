"""Rulesets, the kernel objects of a mode by key, and the differences between two as values.

Law: `patch(have, diff(have, want)) == want`. Cleanup, drift repair, retry, dry run and restart
all apply a Diff.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec

Ruleset: TypeAlias = Mapping[Any, Any]
"""Kernel objects by key: rendered by a mode, read back from the kernel, compared."""

_NOTHING = object()


class Diff(msgspec.Struct, frozen=True):
    """The steps that turn one Ruleset into another."""

    added: dict[Any, Any] = {}
    """Objects to create."""
    removed: dict[Any, Any] = {}
    """Objects to delete, with their present values."""
    changed: dict[Any, tuple[Any, Any]] = {}
    """Objects to replace: (present value, wanted value)."""

    def __len__(self) -> int:
        return len(self.added) + len(self.removed) + len(self.changed)

    @property
    def parts(self) -> tuple[dict[Any, Any], dict[Any, Any], dict[Any, tuple[Any, Any]]]:
        """Added, removed and changed objects."""
        return self.added, self.removed, self.changed

    def old_and_new(self) -> Iterator[tuple[Any, Any, Any]]:
        """Yield each key with the present and the wanted value; None if there is none."""
        for key, value in self.removed.items():
            yield key, value, None
        for key, value in self.added.items():
            yield key, None, value
        for key, (old, new) in self.changed.items():
            yield key, old, new

    def where(self, wanted: Callable[[Any], bool]) -> Diff:
        """Return the steps about the objects whose keys are wanted."""
        return Diff(*({k: v for k, v in part.items() if wanted(k)} for part in self.parts))

    def include(self, other: Diff) -> None:
        """Add the steps of another Diff to the parts of this one."""
        for part, more in zip(self.parts, other.parts, strict=True):
            part.update(more)


class Script(NamedTuple):
    """A part of a Diff that a program of this machine can carry out or check."""

    tool: str
    """Name of the program, such as `nft`."""
    argv: tuple[str, ...]
    """The command that carries it out, reading `text`."""
    text: str


def diff(have: Ruleset, want: Ruleset) -> Diff:
    """Return the Diff that turns `have` into `want`."""
    return diff_of_owners([(have, want)])


def diff_of_owners(pairs: Iterable[tuple[Ruleset, Ruleset]]) -> Diff:
    """Return one Diff for several owners.

    A key that one owner drops and another wants becomes a change of its value. Each pair is what
    an owner has and wants.

    Raises:
        ValueError: two owners add, change or remove the same key.
    """
    added: dict[Any, Any] = {}
    removed: dict[Any, Any] = {}
    changed: dict[Any, tuple[Any, Any]] = {}
    steps = 0
    for have, want in pairs:
        if not have:  # at the start, and after a flush: nothing is to be looked up
            added.update(want)
            steps += len(want)
            continue
        new = 0
        for key, value in want.items():
            before = have.get(key, _NOTHING)
            if before is _NOTHING:
                added[key] = value
                new += 1
            elif before != value:
                changed[key] = (before, value)
                steps += 1
        if len(have) + new > len(want):  # otherwise every present key is wanted
            for key, value in have.items():
                if key not in want:
                    removed[key] = value
                    steps += 1
        steps += new
    # A key of two owners in one dictionary shows in the sum of the sizes.
    is_twice = len(added) + len(removed) + len(changed) != steps
    if is_twice or changed.keys() & added.keys() or changed.keys() & removed.keys():
        raise ValueError("two owners claim the same kernel object")
    # One owner removes a key and another adds it: a Service took over a destination.
    for key in added.keys() & removed.keys():
        changed[key] = (removed.pop(key), added.pop(key))
    return Diff(added, removed, changed)


def patch(have: Ruleset, change: Diff) -> dict[Any, Any]:
    """Return a copy of `have` with a Diff applied."""
    out = dict(have)
    for key in change.removed:
        del out[key]
    out.update(change.added)
    for key, (_, new) in change.changed.items():
        out[key] = new
    return out
