"""Differences between what the kernel has and what it should have, as values.

Law: `patch(have, diff(have, want)) == want`. Cleanup, drift, retry, dry-run and restart are all
a diff applied.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeAlias

import msgspec

Key: TypeAlias = Hashable
"""Names one kernel object within a mode."""
Ruleset: TypeAlias = Mapping[Any, Any]
"""Kernel objects by key: what a mode renders, reads back and compares."""


_NOTHING = object()


class Diff(msgspec.Struct, frozen=True):
    """What to do to get from one Ruleset to another."""

    added: dict[Any, Any] = {}
    """Objects to create."""
    removed: dict[Any, Any] = {}
    """Objects to delete, with the value they have."""
    changed: dict[Any, tuple[Any, Any]] = {}
    """Objects to replace: (value they have, value wanted)."""

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def __len__(self) -> int:
        return len(self.added) + len(self.removed) + len(self.changed)

    @property
    def summary(self) -> str:
        """Counts in words, for logs."""
        return f"{len(self.added)} added, {len(self.changed)} changed, {len(self.removed)} removed"


def diff(have: Ruleset, want: Ruleset) -> Diff:
    """Return what leads from `have` to `want`."""
    added: dict[Any, Any] = {}
    removed: dict[Any, Any] = {}
    changed: dict[Any, tuple[Any, Any]] = {}
    for key, value in want.items():
        before = have.get(key, _NOTHING)
        if before is _NOTHING:
            added[key] = value
        elif before != value:
            changed[key] = (before, value)
    if len(have) + len(added) > len(want):  # else all of it is wanted
        removed = {key: value for key, value in have.items() if key not in want}
    return Diff(added, removed, changed)


def patch(have: Ruleset, change: Diff) -> dict[Any, Any]:
    """Return `have` with a Diff applied to it."""
    out = dict(have)
    for key in change.removed:
        del out[key]
    out.update(change.added)
    out.update((key, new) for key, (_, new) in change.changed.items())
    return out


def merge(parts: Iterable[Diff]) -> Diff:
    """Unite Diffs of different owners.

    A key that one owner gives up and another one takes is a change of its value.

    Raises:
        ValueError: two owners want the same key, or give up the same.
    """
    added: dict[Any, Any] = {}
    removed: dict[Any, Any] = {}
    changed: dict[Any, tuple[Any, Any]] = {}
    total = 0
    for part in parts:
        added.update(part.added)
        removed.update(part.removed)
        changed.update(part.changed)
        total += len(part)
    if len(added) + len(removed) + len(changed) != total or changed.keys() & (added | removed):
        raise ValueError("two owners claim the same kernel object")
    for key in added.keys() & removed.keys():
        changed[key] = (removed.pop(key), added.pop(key))
    return Diff(added, removed, changed)
