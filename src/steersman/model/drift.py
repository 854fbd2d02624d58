"""Drift: kernel objects that other programs changed, and which programs these were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import msgspec

from steersman.model.findings import clipped, listed, printable
from steersman.model.ruleset import Diff, Ruleset

FIGHT_SECONDS = 600.0
"""Repairs within this time are counted together."""
FIGHT_REPAIRS = 3
"""Repairs in that time from which on another program is said to rewrite our rules."""
_LONGEST_EXAMPLE = 160  # characters


class Writer(msgspec.Struct, frozen=True):
    """A program that changed rules, as the kernel announced it."""

    program: str
    """Name of its process, at most 15 characters; that of the tool for iptables and nft."""
    pid: int
    """Process ID in the machine's first PID namespace."""
    parent: str = ""
    """Name and process ID of the program that started it; "" if it was gone too early to ask."""
    at: float = 0.0
    """When the change was announced, in seconds since 1970."""

    def __str__(self) -> str:
        started = f", started by {self.parent}" if self.parent else ""
        return f"{printable(self.program)} (pid {self.pid}{started})"


class Drift(msgspec.Struct, frozen=True):
    """The changes by other programs that one comparison found."""

    at: float
    """When they were found, in seconds since 1970."""
    missing: int = 0
    """Kernel objects that had been removed."""
    foreign: int = 0
    """Objects among ours that are not from this process."""
    changed: int = 0
    """Objects with another value."""
    examples: tuple[str, ...] = ()
    """The first of them, in the words of the mode's tool, as lines of a repair."""
    writers: tuple[Writer, ...] = ()
    """The programs that wrote since the last comparison; () if the kernel does not say."""
    repaired_at: float = 0.0
    """When they were repaired, in seconds since 1970; 0 if they are not."""

    @property
    def objects(self) -> int:
        """Number of kernel objects that differed."""
        return self.missing + self.foreign + self.changed

    @property
    def what(self) -> str:
        """The kernel objects, as in `2 kernel objects were missing and 1 was changed`."""
        counts = ((self.missing, "missing"), (self.changed, "changed"), (self.foreign, "foreign"))
        parts = [f"{number} {word}" for number, word in counts if number]
        return f"{self.objects} kernel object{'s' * (self.objects != 1)} ({', '.join(parts)})"

    @property
    def who(self) -> str:
        """The programs, for people."""
        names = list(dict.fromkeys(map(str, self.writers)))
        if not names:
            return "an unknown program"
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        return " and ".join(names[:2]) + more


def by_others(change: Diff, have: Ruleset, concerns: Callable[[Any], bool]) -> Diff:
    """Return the part of a repair that is due to other programs.

    Args:
        change: turns the kernel's objects into the wanted ones.
        have: the objects as they were written last.
        concerns: whether only other programs can make the object of a key differ.
    """
    nothing = object()
    return Diff(
        {k: v for k, v in change.added.items() if k in have and concerns(k)},
        {k: v for k, v in change.removed.items() if have.get(k, nothing) != v and concerns(k)},
        {k: v for k, v in change.changed.items() if have.get(k, nothing) != v[0] and concerns(k)},
    )


def drift_of(
    repair: Diff,
    describe: Callable[[Diff], str],
    most: int,
    at: float,
    writers: tuple[Writer, ...] = (),
) -> Drift | None:
    """Describe the changes by other programs by what repairs them; None if nothing does.

    Args:
        repair: as `by_others` returns it.
        describe: returns a Diff in the words of the mode's tool, a line for each object.
        most: number of examples.
        at: when they were found, in seconds since 1970.
        writers: the programs that wrote.
    """
    if not repair:
        return None
    some = Diff(*({k: part[k] for k in islice(part, most)} for part in repair.parts))
    lines = describe(some).splitlines()[:most]
    return Drift(
        at,
        missing=len(repair.added),
        foreign=len(repair.removed),
        changed=len(repair.changed),
        examples=tuple(clipped(printable(line), _LONGEST_EXAMPLE) for line in lines),
        writers=writers,
    )


class DriftState(msgspec.Struct, frozen=True):
    """The drift that a running process has found so far, and what differs at this moment."""

    mode: str
    at: float = 0.0
    """When the kernel was compared, in seconds since 1970."""
    started: float = 0.0
    """Since when the process has looked, in seconds since 1970."""
    objects: int = 0
    """Kernel objects in force."""
    differs: Drift | None = None
    """What differs now; None if nothing does."""
    repairs: tuple[Drift, ...] = ()
    """The last repairs, oldest first."""
    repaired: int = 0
    """Number of all repairs."""
    fight: str = ""
    """A sentence about a program that rewrites our rules again and again; "" if none does."""


def fight(repairs: Sequence[Drift], now: float) -> str:
    """Return a sentence about a program that changes our rules again and again; "" if none does.

    Args:
        repairs: what was repaired, oldest first.
    """
    recent = [each for each in repairs if now - each.at <= FIGHT_SECONDS]
    if len(recent) < FIGHT_REPAIRS:
        return ""
    period = (recent[-1].at - recent[0].at) / (len(recent) - 1)
    programs = sorted({writer.program for each in recent for writer in each.writers})
    who = listed(programs) if programs else "an unknown program"
    pace = f"every {period:.0f} s" if period >= 1 else "more than once a second"
    return (
        f"another program rewrites our rules {pace}, {len(recent)} times so far in "
        f"{FIGHT_SECONDS / 60:.0f} min: {who}, last {recent[-1].who}; they are repaired each time; "
        "stop it: two proxies on one node fight for ever"
    )
