"""Leaving another mode behind: its rules go only when ours serve (make before break).

An established connection survives as long as there is never a moment without a NAT base chain and
a user of conntrack; so nothing is removed before the first sync of the new mode has succeeded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from operator import attrgetter

from steersman.host.exec import Exec
from steersman.model.errors import ApplyError, BusyError
from steersman.model.ruleset import Ruleset, diff
from steersman.modes.base import Mode
from steersman.modes.registry import Factory, create
from steersman.modes.specs import SPECS, ModeOptions, spec_of

log = logging.getLogger(__name__)

_AGAIN = 60.0  # seconds until what could not be removed is tried again
_LOOKS = 3
"""At a mode that cannot be looked at: nearly always there is nothing of it, but it may have been a
moment's trouble."""
_POLL = 1.0  # seconds between two looks at what is still connected


def others(
    current: str,
    execute: Exec,
    variant: str = "",
    options: ModeOptions = ModeOptions(),  # noqa: B008 - immutable
    create: Factory = create,
) -> Iterator[tuple[str, Mode]]:
    """Yield the modes to remove when this one serves, in every variant that may have left objects.

    A mode that takes no part in the order of clean-up removes nothing but its own other variants.

    Args:
        current: the mode that serves.
        execute: runs programs.
        variant: of the mode that serves; "none" if it changes nothing on this machine.
        options: the operator's settings; what belongs to other programs by them stays.
        create: builds a mode.
    """
    ranked = sorted((s for s in SPECS.values() if s.cleanup_rank), key=attrgetter("cleanup_rank"))
    mine = spec_of(current)
    removes = bool(mine.cleanup_rank) and variant != "none"
    own = [mine] if any(variant == each.name for each in mine.variants) else []
    options = options.for_leftovers()
    for spec in own + [spec for spec in ranked if removes and spec is not mine]:
        for each in spec.variants:
            if (spec.name, each.name) != (current, variant):
                name = f"{spec.name} ({each.name})" if each.name else spec.name
                yield name, create(spec.name, execute, each.of(options))


async def leave(
    modes: Iterable[tuple[str, Mode]],
    patience: float = 0.0,
    current: Mode | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Do what `clean_leftovers` does, until all are left: a lock may be held, a rule in use."""
    left, looks = list(modes), 0
    while left:
        stay: list[tuple[str, Mode]] = []
        unseen: list[tuple[str, Mode]] = []
        for sentence in await clean_leftovers(left, patience, current, stay.append, unseen.append):
            log.info("%s", sentence)
        looks += 1
        left = stay + unseen if looks < _LOOKS else stay
        if stay:
            names = ", ".join(name for name, _ in stay)
            log.warning("not left yet: %s; next try in %g s", names, _AGAIN)
        if left:
            await sleep(_AGAIN)


async def clean_leftovers(
    modes: Iterable[tuple[str, Mode]],
    patience: float = 0.0,
    current: Mode | None = None,
    stays: Callable[[tuple[str, Mode]], None] = lambda _: None,
    unseen: Callable[[tuple[str, Mode]], None] = lambda _: None,
) -> list[str]:
    """Remove what other modes left behind; call it after the first sync that succeeded.

    What cannot be removed stays and is said: it never stops the mode that serves.

    Args:
        modes: those to leave, by name.
        patience: seconds that established connections get to end, in a mode that carries them;
            it takes no new ones meanwhile.
        current: the mode that serves, which may have to keep connections of others going.
        stays: told of each mode whose leftovers cannot be removed now.
        unseen: told of each mode that cannot be looked at: what it needs is missing.

    Returns:
        A sentence for each mode of which there was something.
    """
    said = []
    for name, mode in modes:
        try:
            support = await mode.probe()
            if not support.usable:
                log.debug("%s mode: not looked at: %s", name, " ".join(support.missing))
                unseen((name, mode))
            elif sentence := await _clean(mode, patience, current):
                said.append(f"{name} mode: {sentence}")
        except (ApplyError, BusyError, OSError) as error:
            said.append(f"{name} mode: its leftovers stay: {error}")
            stays((name, mode))
    return said


async def _clean(mode: Mode, patience: float, current: Mode | None) -> str:
    before = await mode.read()
    cut = await _drain(mode, before, patience) if before else 0
    if before:
        if current is not None:
            await current.hold_nat_hooks()
        await mode.apply(diff(await mode.read(), {}))
    gone = len(before) - len(await mode.read()) if before else 0
    if not gone:
        return ""
    lost = f"; {cut} connections were cut, --drain-period gives them more time" if cut else ""
    return f"removed {gone} kernel objects that it left behind{lost}"


async def _drain(mode: Mode, before: Ruleset, patience: float) -> int:
    """Wait until nothing is connected by way of a mode that was left; how much still is."""
    if patience > 0 and await mode.connections():
        await mode.apply(diff(before, mode.without_new_connections(before)))
        end = time.monotonic() + patience
        while await mode.connections() and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(min(_POLL, patience))  # the kernel tells of no end
    return await mode.connections()
