"""Which endpoint has which slot: stable, so that a change of one endpoint moves at most one other.

Slots are drawn at random by the data path, so they must be dense; keeping what is there and moving
the last into a hole makes an endpoint more or less cost two elements, in a Service of 3 or 1,000.
"""

from __future__ import annotations

from collections.abc import Sequence


def assign(previous: Sequence[bytes], wanted: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return `wanted` in the order of their slots.

    What has a slot in `previous` keeps it; newcomers take the holes, then the end; holes that
    remain are filled from the end. `wanted` must be free of duplicates.
    """
    if not previous or tuple(previous) == tuple(wanted):
        return tuple(wanted)
    missing = dict.fromkeys(wanted)
    slots: list[bytes | None] = []
    for endpoint in previous:
        known = endpoint in missing
        slots.append(endpoint if known else None)
        if known:
            del missing[endpoint]
    holes = [slot for slot, endpoint in enumerate(slots) if endpoint is None]
    newcomers = list(missing)
    filled = list(zip(holes, newcomers, strict=False))
    for slot, endpoint in filled:
        slots[slot] = endpoint
    slots.extend(newcomers[len(filled) :])
    return _close(slots, holes[len(filled) :])


def _close(slots: list[bytes | None], holes: Sequence[int]) -> tuple[bytes, ...]:
    for hole in holes:
        while slots and slots[-1] is None:
            slots.pop()
        if hole < len(slots):
            slots[hole] = slots.pop()
    return tuple(endpoint for endpoint in slots if endpoint is not None)
