"""Removing everything of ours from this machine, whichever mode and variant wrote it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from steersman.host.exec import Exec
from steersman.modes.base import Mode
from steersman.modes.diff import diff
from steersman.modes.iptables.variant import variants_in_use
from steersman.modes.registry import MODES, ModeOptions

_OTHER_PORTALS = {"userspace": ("nftables", "direct")}
"""What a mode may have beside rules of iptables."""


async def clean_up(execute: Exec, options: ModeOptions) -> dict[str, int]:
    """Remove what any mode that can run here has in the kernel; nothing else is touched.

    Returns:
        How many kernel objects went, by mode.

    Raises:
        ApplyError: the kernel refused to remove something.
        BusyError: the kernel could not be programmed now.
    """
    given = options.iptables_variant
    variants = (given,) if given else await variants_in_use(execute)
    removed: dict[str, int] = {}
    for name, make in MODES.items():
        for option in _each(name, options, variants):
            if (await make(execute, option).probe()).usable:
                gone = await _remove(make(execute, option), make(execute, option))
                removed[name] = removed.get(name, 0) + gone
    return removed


def _each(name: str, options: ModeOptions, variants: tuple[str, ...]) -> Iterator[ModeOptions]:
    for variant in variants or ("",):
        yield msgspec.structs.replace(options, iptables_variant=variant, portals="iptables")
    for portals in _OTHER_PORTALS.get(name, ()):
        yield msgspec.structs.replace(options, portals=portals)


async def _remove(mode: Mode, fresh: Mode) -> int:
    """Remove what a mode has; what is shared with kubelet stays, as `fresh` sees afterwards."""
    before = await mode.read()
    if not before:
        return 0
    await mode.apply(diff(before, {}))
    return len(before) - len(await fresh.read())
