"""Removing everything of ours from this machine, whichever mode and variant wrote it.

The answer is the truth about what is left: a mode that cannot be looked at counts as clean only if
the kernel shows that there is nothing of it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from steersman.host.exec import Exec
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family
from steersman.model.ruleset import diff
from steersman.modes.base import Mode, Support
from steersman.modes.iptables.names import is_ours
from steersman.modes.ipvs.names import CHAINS as OF_IPVS
from steersman.modes.ipvs.names import DEVICE as IPVS_DEVICE
from steersman.modes.registry import MODES, ModeOptions
from steersman.modes.userspace.addresses import DEFAULT_INTERFACE
from steersman.modes.userspace.nft_rules import TABLE as PORTALS
from steersman.modes.userspace.rules import ALL_CHAINS as OF_PORTALS
from steersman.run.instance import Holder

_SOME = 3  # objects that are named where some are left


class Cleaned(NamedTuple):
    """What was done."""

    removed: Mapping[str, int]
    """How many kernel objects went, by mode."""
    problems: tuple[str, ...]
    """What could not be looked at or removed, a sentence each; () if nothing is left."""


class _Place(NamedTuple):
    """Where objects of a mode can be."""

    mode: str
    options: ModeOptions
    left: Callable[[tuple[Family, ...]], str]
    """Says what of some families may be left, without the mode's help; "" if nothing is."""
    what: str = ""
    """The variant of the mode."""
    probes: bool = True
    """Whether the mode can look only where it could also serve."""

    def __str__(self) -> str:
        return f"{self.mode} mode" + (f" ({self.what})" if self.what else "")


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
    unseen: list[tuple[_Place, tuple[Family, ...], str]] = []
    for place in _places(msgspec.structs.replace(options, leftovers=True)):
        mode = MODES[place.mode](execute, place.options)
        try:
            support = await mode.probe() if place.probes else Support(usable=True)
            if support.missing:
                families = (Family.IPV6,) if support.usable else tuple(Family)
                unseen.append((place, families, " ".join(support.missing)))
            if support.usable:
                removed[place.mode] = removed.get(place.mode, 0) + await _remove(mode)
        except OSError as error:
            unseen.append((place, tuple(Family), f"{error.strerror or error}."))
        except (ApplyError, BusyError) as error:
            problems.append(f"{place}: {error}")
    for place, families, why in unseen:  # now that all others have removed theirs
        if left := await asyncio.to_thread(place.left, families):
            problems.append(f"{place}: {left}. {why}")
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


def _places(options: ModeOptions) -> Iterator[_Place]:
    if sys.platform == "win32":
        yield _Place("winuserspace", options, lambda _: "")
        return

    from steersman.modes.ebpf.engine import EbpfOptions  # noqa: PLC0415 - Windows lacks these
    from steersman.modes.nftables.layout import TABLE  # noqa: PLC0415
    from steersman.netfilter.nf_tables import (  # noqa: PLC0415
        chains_left,
        legacy_left,
        table_left,
    )

    variants = (options.iptables_variant,) if options.iptables_variant else ("nft", "legacy")
    for variant in variants:
        wanted = msgspec.structs.replace(options, iptables_variant=variant, portals="iptables")
        for mode, ours in (("iptables", is_ours), ("userspace", _is_portal)):
            chains = partial(chains_left, ours)
            look = legacy_left if variant == "legacy" else chains
            yield _Place(mode, wanted, look, variant)
        yield _Place("ipvs", wanted, _ipvs_left, variant)
    yield _Place("nftables", options, partial(table_left, TABLE), probes=False)
    yield _Place("ebpf", options, partial(_path_left, EbpfOptions().pins))
    wanted = msgspec.structs.replace(options, portals="nftables")
    yield _Place("userspace", wanted, partial(table_left, PORTALS), "nftables")
    if _interface_left(DEFAULT_INTERFACE):  # to look at it the mode would make it
        wanted = msgspec.structs.replace(options, portals="direct")
        yield _Place("userspace", wanted, partial(_interface_left, DEFAULT_INTERFACE), "direct")


def _interface_left(name: str, _families: object = ()) -> str:
    there = any(name == each for _, each in socket.if_nameindex())
    return f"the interface {name} is left" if there else ""


def _is_portal(table: str, chain: str) -> bool:
    return (table, chain) in OF_PORTALS


def _path_left(path: Path, _families: object = ()) -> str:
    try:
        os.stat(path)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path} cannot be looked at: {error.strerror}"
    return f"{path} is left"


def _ipvs_left(families: tuple[Family, ...]) -> str:
    from steersman.netfilter.nf_tables import chains_left  # noqa: PLC0415 - Windows lacks it

    return _interface_left(IPVS_DEVICE) or chains_left(
        lambda table, chain: (table, chain) in OF_IPVS, families
    )
