"""Which endpoint has which slot: stable, so that a change of one endpoint moves at most one other.

Slots are drawn at random by the data path, so they must be dense; keeping what is there and moving
the last into a hole makes an endpoint more or less cost two elements, in a Service of 3 or 1,000.
"""

from __future__ import annotations

from collections.abc import Sequence


def assign(previous: tuple[bytes, ...], wanted: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return `wanted` in the order of their slots.

    What has a slot in `previous` keeps it; newcomers take the holes, then the end; holes that
    remain are filled from the end. `wanted` must be free of duplicates.
    """
    if not previous or previous == wanted:
        return wanted
    had = set(previous)
    gone, come = had.difference(wanted), set(wanted).difference(had)
    if len(had) < len(previous):  # somebody else's doing
        previous = _once(previous)
    elif len(gone) == len(come) == 1:  # the usual change
        at = previous.index(gone.pop())
        return (*previous[:at], come.pop(), *previous[at + 1 :])
    newcomers = iter([endpoint for endpoint in wanted if endpoint in come])
    slots = [next(newcomers, None) if each in gone or not each else each for each in previous]
    slots.extend(newcomers)
    return _closed(slots)


def _once(previous: Sequence[bytes]) -> tuple[bytes, ...]:
    """The first place of each; b"" where it comes again."""
    return tuple([b"" if each in previous[:at] else each for at, each in enumerate(previous)])


def _closed(slots: list[bytes | None]) -> tuple[bytes, ...]:
    """Without holes (None): the last ones move into them."""
    holes = [slot for slot, endpoint in enumerate(slots) if endpoint is None]
    for hole in holes:
        while slots and slots[-1] is None:
            slots.pop()
        if hole < len(slots):
            slots[hole] = slots.pop()
    return tuple([endpoint for endpoint in slots if endpoint is not None])
