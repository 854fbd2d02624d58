"""Leaving another mode behind: its rules go only when ours serve (make before break).

An established connection survives as long as there is never a moment without a NAT base chain and
a user of conntrack; so nothing is removed before the first sync of the new mode has succeeded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from steersman.host.exec import Exec
from steersman.modes.base import ApplyError, BusyError, Mode
from steersman.modes.diff import diff
from steersman.modes.registry import MODES, ModeOptions

_VARIANTS = {"iptables": ("nft", "legacy")}
_LEAVES: Mapping[str, tuple[str, ...]] = {
    "iptables": ("nftables", "ipvs", "ebpf"),
    "nftables": ("iptables", "ipvs", "ebpf"),
    "ipvs": ("nftables", "iptables", "ebpf"),
    "ebpf": ("nftables", "iptables", "ipvs"),
}
"""Whose leftovers a mode removes (SPEC 1.1 step 2); ours of ipvs share no name with iptables'."""


def others(current: str, execute: Exec, variant: str = "") -> Iterator[tuple[str, Mode]]:
    """Modes whose leftovers are to go when this one serves, in every variant they could have.

    Args:
        current: the mode that serves.
        execute: how to run programs.
        variant: of the iptables mode, the one that serves: the other one may have rules, too.
    """
    own = (current,) if current in _VARIANTS and variant else ()
    for name in own + _LEAVES.get(current, ()):
        for each in _VARIANTS.get(name, ("",)):
            if (name, each) != (current, variant):
                mode = MODES[name](execute, ModeOptions(iptables_variant=each))
                yield f"{name} ({each})" if each else name, mode


async def clean_leftovers(modes: Iterable[tuple[str, Mode]]) -> list[str]:
    """Remove what other modes left behind; call it after the first sync that succeeded.

    What cannot be removed stays and is said: it never stops the mode that serves.

    Returns:
        A sentence for each mode of which there was something.
    """
    said = []
    for name, mode in modes:
        try:
            if sentence := await _clean(mode):
                said.append(f"{name} mode: {sentence}")
        except (ApplyError, BusyError, OSError) as error:
            said.append(f"{name} mode: its leftovers stay: {error}")
    return said


async def _clean(mode: Mode) -> str:
    if not (await mode.probe()).usable:
        return ""
    before = await mode.read()
    if before:
        await mode.apply(diff(before, {}))
    gone = len(before) - len(await mode.read()) if before else 0  # shared with kubelet: stays
    return f"removed {gone} kernel objects that it left behind" if gone else ""
