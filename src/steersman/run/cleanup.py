"""Removing everything of ours from this machine, whichever mode and variant wrote it.

The answer is the truth about what is left: a mode that cannot be looked at counts as clean only if
the kernel shows that there is nothing of it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

from steersman.host.exec import Exec
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family
from steersman.model.ruleset import diff
from steersman.modes.base import Mode, Support
from steersman.modes.registry import create
from steersman.modes.specs import SPECS, ModeOptions, ModeSpec
from steersman.run.instance import Holder

_SOME = 3  # objects that are named where some are left


class Cleaned(NamedTuple):
    """What was done."""

    removed: Mapping[str, int]
    """How many kernel objects went, by mode."""
    problems: tuple[str, ...]
    """What could not be looked at or removed, a sentence each; () if nothing is left."""


class _Leftovers(NamedTuple):
    """A mode that is built only to remove what it left in one variant."""

    spec: ModeSpec
    variant: str
    mode: Mode

    def __str__(self) -> str:
        return f"{self.spec.name} mode" + (f" ({self.variant})" if self.variant else "")


async def clean_up(
    execute: Exec, options: ModeOptions, running: Callable[[], Holder | None] = lambda: None
) -> Cleaned:
    """Remove what any mode has in the kernel; nothing else is touched.

    Args:
        execute: runs programs.
        options: what the operator set about modes.
        running: returns the instance that runs on this node.
    """
    removed: dict[str, int] = {}
    problems: list[str] = []
    unseen: list[tuple[_Leftovers, tuple[Family, ...], str]] = []
    for each in _leftovers(execute, options):
        spec, mode = each.spec, each.mode
        try:
            support = await mode.probe() if spec.probe_before_cleanup else Support(usable=True)
            if support.missing:
                families = (Family.IPV6,) if support.usable else tuple(Family)
                unseen.append((each, families, " ".join(support.missing)))
            if support.usable:
                removed[spec.name] = removed.get(spec.name, 0) + await _remove(mode)
        except OSError as error:
            unseen.append((each, tuple(Family), f"{error.strerror or error}."))
        except (ApplyError, BusyError) as error:
            problems.append(f"{each}: {error}")
    for each, families, why in unseen:  # now that all others have removed theirs
        if left := await asyncio.to_thread(each.mode.find_leftovers, families):
            problems.append(f"{each}: {left}. {why}")
    if holder := await asyncio.to_thread(running):
        problems.append(
            f"an instance runs on this node ({holder}) and writes its rules again; stop it first"
        )
    return Cleaned(removed, tuple(problems))


async def _remove(mode: Mode) -> int:
    """Remove what a mode has; return how much went.

    Raises:
        ApplyError: the kernel refused to remove something.
        BusyError: the kernel could not be programmed now, or something is back.
    """
    before = await mode.read()
    if not before:
        return 0
    await mode.apply(diff(before, {}))
    after = await mode.read()
    if after:
        names = ", ".join(map(str, list(after)[:_SOME]))
        raise BusyError(f"{len(after)} of {len(before)} kernel objects are left, such as {names}")
    return len(before)


def _leftovers(execute: Exec, options: ModeOptions) -> Iterator[_Leftovers]:
    """Yield every mode of this platform, in every variant that the operator did not exclude."""
    platform = "win32" if sys.platform == "win32" else "linux"
    specs = [spec for spec in SPECS.values() if spec.platform == platform]
    for spec in sorted(specs, key=attrgetter("cleanup_rank")):
        for variant in spec.cleanup_variants or spec.variants:
            tool = variant.options.get("iptables_variant", options.iptables_variant)
            if options.iptables_variant not in ("", tool):
                continue
            mode = create(spec.name, execute, variant.of(options))
            if not variant.only_if_left or mode.find_leftovers(tuple(Family)):
                yield _Leftovers(spec, variant.name, mode)
