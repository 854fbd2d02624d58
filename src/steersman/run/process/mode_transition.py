"""From one mode to another: remove what others left, and clean up.

An established connection survives a change of the mode as long as there is never a moment without a
NAT base chain and a user of conntrack (make before break):

    first sync         the new mode serves, beside the rules of the old one
    remove_leftovers   in the background, for each other mode and variant: let its connections
                       drain, hold the NAT hooks, remove its objects; retry until all are gone

`clean_up` is the command that removes everything of ours, whichever mode and variant wrote it. It
never claims too much: a mode that cannot be probed counts as clean only if the kernel shows none of
its objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from operator import attrgetter
from typing import NamedTuple

from steersman.host.exec import Exec
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family
from steersman.model.ruleset import Ruleset, diff
from steersman.modes.base import Mode, Support, leftovers_of, release
from steersman.modes.registry import Factory, create, may_have_left
from steersman.modes.specs import SPECS, ModeOptions, ModeSpec, spec_of

log = logging.getLogger(__name__)

_RETRY_SECONDS = 60.0
_PROBES = 3
"""Attempts to probe a mode that cannot run: it hardly left anything, but the reason may pass."""
_QUIET_SECONDS = 20.0
"""The rules of the old mode may still decide, so that a change would have no effect anyway."""
_POLL = 1.0  # seconds between two counts of open connections
_NAMED = 3  # remaining objects that a message names


class Removal(NamedTuple):
    """The result of one attempt to remove leftovers; modes are given by name."""

    messages: list[str]
    """A sentence for each mode that had left objects."""
    failed: list[tuple[str, Mode]]
    """Modes whose leftovers cannot be removed now."""
    unprobed: list[tuple[str, Mode]]
    """Modes that cannot be probed: something they need is missing."""


def other_modes(
    current: str,
    execute: Exec,
    variant: str = "",
    options: ModeOptions = ModeOptions(),  # noqa: B008 - immutable
    create: Factory = create,
    *,
    may_have_left: Callable[[str, ModeOptions], bool] = lambda *_: True,
) -> Iterator[tuple[str, Mode]]:
    """Yield the modes to remove when this one serves, in every variant that may have left objects.

    A mode that takes no part in the order of clean-up removes nothing but its own other variants.

    Args:
        variant: its variant; "none" if it changes nothing on this machine.
        options: the operator's settings, which say what belongs to other programs and stays.
        may_have_left: leaves out modes of which nothing can be there.
    """
    # Modes that take part in clean-up remove all others, in the order of their rank.
    ranked = sorted((s for s in SPECS.values() if s.cleanup_rank), key=attrgetter("cleanup_rank"))
    mine = spec_of(current)
    removes = bool(mine.cleanup_rank) and variant != "none"
    own = [mine] if any(variant == each.name for each in mine.variants) else []
    options = options.for_leftovers()
    for spec in own + [spec for spec in ranked if removes and spec is not mine]:
        for each in spec.variants:
            its_options = each.of(options)
            if (spec.name, each.name) == (current, variant):
                continue
            if may_have_left(spec.name, its_options):
                name = f"{spec.name} ({each.name})" if each.name else spec.name
                yield name, create(spec.name, execute, its_options)


async def remove_leftovers(
    modes: Iterable[tuple[str, Mode]],
    drain: float = 0.0,
    current: Mode | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    quiet: Callable[[], AbstractAsyncContextManager[object]] = contextlib.nullcontext,
) -> None:
    """Retry until every other mode's leftovers are removed: a lock may be held, a rule in use.

    The modes stay open: one may carry connections in this process. `remove_leftovers_once` has the
    other arguments.

    Args:
        sleep: waits between attempts.
        quiet: lets no sync begin. Attempts after a failed one have that for some seconds: with ten
            thousand Services iptables-nft reads for a second, and begins again if a rule changes.
    """
    left, attempts = list(modes), 0
    while left:
        async with asyncio.TaskGroup() as group:
            attempt = group.create_task(remove_leftovers_once(left, drain, current))
            async with quiet() if attempts else contextlib.nullcontext():
                await asyncio.wait({attempt}, timeout=_QUIET_SECONDS)
        removal = attempt.result()
        for sentence in removal.messages:
            log.info("%s", sentence)
        attempts += 1
        left = removal.failed + (removal.unprobed if attempts < _PROBES else [])
        if removal.failed:
            names = ", ".join(name for name, _ in removal.failed)
            log.warning("leftovers of %s remain; retrying in %gs", names, _RETRY_SECONDS)
        if left:
            await sleep(_RETRY_SECONDS)


async def remove_leftovers_once(
    modes: Iterable[tuple[str, Mode]], drain: float = 0.0, current: Mode | None = None
) -> Removal:
    """Remove the leftovers of other modes; call it after the first successful sync.

    Failures are reported and never stop the mode that serves.

    Args:
        drain: seconds that established connections get to end, in a mode that carries them; it
            accepts no new ones in that time.
        current: the mode that serves; it may have to keep connections of other modes alive.
    """
    removal = Removal([], [], [])
    for name, mode in modes:
        try:
            support = await mode.worker.do(mode.probe)
            if not support.usable:
                log.debug("%s mode: cannot be probed: %s", name, " ".join(support.missing))
                removal.unprobed.append((name, mode))
            elif before := await mode.worker.do(mode.read):
                cut = await _end_connections(mode, before, drain)
                # The rules of the old mode may be the last user of NAT: keep its connections.
                if current is not None and current.nat_hooks is not None:
                    await current.worker.do(current.nat_hooks.create)
                await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), {}))
                if gone := len(before) - len(await mode.worker.do(mode.read)):
                    text = f"{name} mode: removed {gone} kernel objects that it left behind"
                    if cut:
                        text += f"; {cut} connections were cut, --drain-period gives them more time"
                    removal.messages.append(text)
        except (ApplyError, BusyError, OSError) as error:
            removal.messages.append(f"{name} mode: its leftovers stay: {error}")
            removal.failed.append((name, mode))
    return removal


async def _end_connections(mode: Mode, have: Ruleset, drain: float) -> int:
    """Give connections that a mode carries some seconds to end; return how many are left."""
    if (carrier := mode.carrier) is None:
        return 0
    if drain > 0 and await mode.worker.do(carrier.connections) > 0:
        # The mode keeps their objects, and takes no new ones.
        fewer = carrier.without_new_connections(have)
        await mode.worker.do(mode.apply, diff(have, fewer))
        await mode.worker.do(carrier.hold_ports)
        end = time.monotonic() + drain
        while await mode.worker.do(carrier.connections) and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(min(_POLL, drain))  # the kernel reports no end
    return await mode.worker.do(carrier.connections)


# Clean up


class Cleaned(NamedTuple):
    """The result of `clean_up`."""

    removed: Mapping[str, int]
    """Number of kernel objects removed, or that would be, by mode."""
    problems: tuple[str, ...]
    """A sentence for everything that could not be probed or removed; () if nothing is left."""
    lines: tuple[str, ...] = ()
    """The objects that would be removed, in the words of each mode's tool."""


class Leftovers(NamedTuple):
    """A mode that is built only to remove what it left in one variant."""

    spec: ModeSpec
    variant: str
    mode: Mode

    def __str__(self) -> str:
        return f"{self.spec.name} mode" + (f" ({self.variant})" if self.variant else "")


async def clean_up(
    execute: Exec,
    options: ModeOptions,
    running: Callable[[], object | None] = lambda: None,
    *,
    dry_run: bool = False,
) -> Cleaned:
    """Remove every object of every mode from the kernel, and nothing else.

    Args:
        execute: runs the modes' tools.
        options: the operator's settings.
        running: returns the instance that runs on this node, if any.
        dry_run: only list the objects.
    """
    removed: dict[str, int] = {}
    lines: list[str] = []
    problems: list[str] = []
    unprobed: list[tuple[Leftovers, tuple[Family, ...], str]] = []
    for each in leftover_modes(execute, options):
        spec, mode = each.spec, each.mode
        try:
            support = (
                await mode.worker.do(mode.probe)
                if spec.probe_before_cleanup
                else Support(usable=True)
            )
            if support.missing:
                families = (Family.IPV6,) if support.usable else tuple(Family)
                unprobed.append((each, families, " ".join(support.missing)))
            if support.usable and dry_run:
                if have := await mode.worker.do(mode.read):
                    removed[spec.name] = removed.get(spec.name, 0) + len(have)
                    lines += (f"# {each}", *mode.words.describe(diff(have, {})).splitlines())
            elif support.usable:
                removed[spec.name] = removed.get(spec.name, 0) + await _remove_all(mode)
        except OSError as error:
            unprobed.append((each, tuple(Family), f"{error.strerror or error}."))
        except (ApplyError, BusyError) as error:
            problems.append(f"{each}: {error}")
        finally:
            await release(mode)
    for each, families, why in unprobed:  # now that all others have removed theirs
        if left := await each.mode.worker.do(leftovers_of, each.mode, families):
            problems.append(f"{each}: {left}. {why}")
    if holder := await asyncio.to_thread(running):
        problems.append(
            f"an instance runs on this node ({holder}) and writes its rules again; stop it first"
        )
    return Cleaned(removed, tuple(problems), tuple(lines))


async def _remove_all(mode: Mode) -> int:
    """Remove all objects of a mode; return their number.

    Raises:
        ApplyError: the kernel refused to remove something.
        BusyError: the kernel could not be programmed now, or something is back.
    """
    before = await mode.worker.do(mode.read)
    if not before:
        return 0
    await mode.worker.do(mode.apply, diff(before, {}))
    after = await mode.worker.do(mode.read)
    if after:
        names = ", ".join(map(str, list(after)[:_NAMED]))
        raise BusyError(f"{len(after)} of {len(before)} kernel objects are left, such as {names}")
    return len(before)


def leftover_modes(execute: Exec, options: ModeOptions) -> Iterator[Leftovers]:
    """Yield every mode of this platform, in every variant that the operator did not exclude.

    Those of which nothing can be there are left out: to read the rules of a large node takes long,
    and probing may create objects.
    """
    platform = "win32" if sys.platform == "win32" else "linux"
    specs = [spec for spec in SPECS.values() if spec.platform == platform]
    for spec in sorted(specs, key=attrgetter("cleanup_rank")):
        for variant in spec.cleanup_variants or spec.variants:
            tool = variant.options.get("iptables_variant", options.iptables_variant)
            if options.iptables_variant not in ("", tool):
                continue
            its_options = variant.of(options)
            mode = create(spec.name, execute, its_options)
            if may_have_left(spec.name, its_options) or leftovers_of(mode, tuple(Family)):
                yield Leftovers(spec, variant.name, mode)
