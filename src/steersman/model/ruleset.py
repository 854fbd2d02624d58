"""Rulesets, the kernel objects of a mode by key, and the differences between two as values.

Law: `patch(have, diff(have, want)) == want`. Cleanup, drift repair, retry, dry run and restart
all apply a Diff.
"""

from __future__ import annotations

import marshal
import zlib
from collections.abc import Iterable, Mapping
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

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def __len__(self) -> int:
        return len(self.added) + len(self.removed) + len(self.changed)

    @property
    def parts(self) -> tuple[dict[Any, Any], dict[Any, Any], dict[Any, tuple[Any, Any]]]:
        """Added, removed and changed objects."""
        return self.added, self.removed, self.changed

    def include(self, other: Diff) -> int:
        """Add the steps of another Diff to the parts of this one; return their number."""
        added, removed, changed = other.added, other.removed, other.changed
        self.changed.update(changed)
        if added or removed:
            self.added.update(added)
            self.removed.update(removed)
        return len(added) + len(removed) + len(changed)


class Script(NamedTuple):
    """A part of a Diff that a program of this machine can carry out or check."""

    tool: str
    """Name of the program, such as `nft`."""
    argv: tuple[str, ...]
    """The command that carries it out, reading `text`."""
    text: str


def diff(have: Ruleset, want: Ruleset) -> Diff:
    """Return the Diff that turns `have` into `want`."""
    change = Diff({}, {}, {})
    _add_differences(have, want, *change.parts)
    return change


def _add_differences(
    have: Ruleset,
    want: Ruleset,
    added: dict[Any, Any],
    removed: dict[Any, Any],
    changed: dict[Any, tuple[Any, Any]],
) -> int:
    """Add the steps from `have` to `want` to the parts of a Diff; return their number."""
    if not have:  # at the start, and after a flush: nothing is to be looked up
        added.update(want)
        return len(want)
    new = other = 0
    for key, value in want.items():
        before = have.get(key, _NOTHING)
        if before is _NOTHING:
            added[key] = value
            new += 1
        elif before != value:
            changed[key] = (before, value)
            other += 1
    if len(have) + new > len(want):  # otherwise every present key is wanted
        for key, value in have.items():
            if key not in want:
                removed[key] = value
                other += 1
    return new + other


def patch(have: Ruleset, change: Diff) -> dict[Any, Any]:
    """Return a copy of `have` with a Diff applied."""
    out = dict(have)
    for key in change.removed:
        del out[key]
    out.update(change.added)
    for key, (_, new) in change.changed.items():
        out[key] = new
    return out


def diff_of_owners(pairs: Iterable[tuple[Ruleset, Ruleset]], known: Diff | None = None) -> Diff:
    """Return one Diff for several owners.

    A key that one owner drops and another wants becomes a change of its value.

    Args:
        pairs: what each owner has and wants.
        known: the Diff of other owners.

    Raises:
        ValueError: two owners add, change or remove the same key.
    """
    change = Diff({}, {}, {})
    added, removed, changed = parts = change.parts
    total = change.include(known) if known else 0
    for have, want in pairs:
        total += _add_differences(have, want, *parts)
    # A key of two owners in one dictionary shows in the sum of the sizes.
    twice = len(added) + len(removed) + len(changed) != total
    if twice or not (changed.keys().isdisjoint(added) and changed.keys().isdisjoint(removed)):
        raise ValueError("two owners claim the same kernel object")
    # One owner removes a key and another adds it: a Service took over a destination.
    for key in added.keys() & removed.keys():
        changed[key] = (removed.pop(key), added.pop(key))
    return change


# Rulesets at rest

_WORTH_COMPRESSING = 512
"""Bytes: the text of iptables' rules has some 1,200 for a ServicePort, and shrinks to 200."""
_COUNT = 4  # bytes
_LEVEL, _RAW, _MEMORY = 6, -11, 5  # wbits and memLevel of zlib: a window of 2 kB, no checksum
_WINDOW = 1 << 11


class Packer:
    """Packs the parts of a Ruleset that are rarely read.

    A node has 10,000 parts that are looked at once a day. As a dictionary the part of a ServicePort
    with three endpoints takes 820 bytes (nftables) or 2,300 (iptables), packed 190 or 220; that
    takes 0.5 us (nftables) or 14 us (iptables), and unpacking it 0.5 or 7 us.
    """

    def __init__(self) -> None:
        """Start without a sample: parts have much in common with the first one of their size.

        The node's own part is none: of its 6 kB the window has the end, which is like no other.
        """
        self._sample = b""

    def pack(self, part: Ruleset) -> Ruleset | bytes:
        """Return a part packed, or as it is if it has values of other than built-in types."""
        try:
            # Exact about types: it refuses an enumeration instead of making it a number. Version 2
            # has no references, whose number depends on who else holds the strings.
            packed = marshal.dumps(part if isinstance(part, dict) else dict(part), 2)
        except ValueError:
            return part
        count = len(part).to_bytes(_COUNT)
        if len(packed) < _WORTH_COMPRESSING:
            return b"\0" + count + packed
        if not self._sample and len(packed) <= _WINDOW:
            self._sample = packed  # what was packed before does not refer to it
        deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW, _MEMORY, zdict=self._sample)
        return b"\1" + count + deflate.compress(packed) + deflate.flush()

    def unpack(self, part: Ruleset | bytes) -> Ruleset:
        """Return a part that `pack` returned; others as they are."""
        if not isinstance(part, bytes):
            return part
        packed = part[1 + _COUNT :]
        if part[0]:
            packed = zlib.decompressobj(_RAW, zdict=self._sample).decompress(packed)
        unpacked: Ruleset = marshal.loads(packed)
        return unpacked

    @staticmethod
    def size(part: Ruleset | bytes) -> int:
        """Return the number of objects of a part, packed or not."""
        return int.from_bytes(part[1 : 1 + _COUNT]) if isinstance(part, bytes) else len(part)


def format_diff(change: Diff) -> str:
    """Write a Diff for people: a line per line of kernel text, marked `+` or `-`."""
    lines: list[str] = []
    for mark, objects in (("-", change.removed), ("+", change.added)):
        for key in sorted(objects, key=str):
            lines += [f"{mark} {text}" for text in _text(key, objects[key])]
    for key in sorted(change.changed, key=str):
        old, new = (_text(key, value) for value in change.changed[key])
        lines += [f"- {text}" for text in old if text not in new]
        lines += [f"+ {text}" for text in new if text not in old]
    return "\n".join(lines)


def _text(key: object, value: object) -> list[str]:
    parts = key if isinstance(key, tuple) else (key,)
    name = " ".join(str(part) for part in parts if part != "")
    return [f"{name}: {line}" for line in str(value).splitlines() or [""]]
