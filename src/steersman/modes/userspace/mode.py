"""Build the userspace mode on Linux, with the portals that were asked for or may be changed."""

from __future__ import annotations

import os
from collections.abc import Sequence

from steersman.host.exec import Exec
from steersman.modes.specs import ModeOptions
from steersman.modes.tracer import Tracer
from steersman.modes.userspace.core import UserspaceMode
from steersman.modes.userspace.iptables_portals import IptablesPortals
from steersman.modes.userspace.nft_portals import NftPortals
from steersman.modes.userspace.portals import Portals

NAME = "userspace"
_HANDOFF_NAME = "steersman-userspace"
"""Under which processes hand over their listening sockets."""


def create(execute: Exec, options: ModeOptions) -> UserspaceMode:
    """Build the mode for registry.py."""
    portals = linux_portals(
        execute,
        options.portals or ("" if os.geteuid() == 0 else "none"),
        iptables_variant=options.iptables_variant,
        leftovers=options.leftovers,
    )

    def make_tracer() -> Tracer:
        from steersman.modes.userspace.relay_tracer import RelayTracer  # noqa: PLC0415 - rarely used

        return RelayTracer(execute)

    return UserspaceMode(NAME, portals, options, _HANDOFF_NAME, make_tracer)


def linux_portals(
    execute: Exec,
    kind: str = "",
    *,
    iptables_variant: str = "",
    leftovers: bool = False,
) -> Sequence[Portals]:
    """Return the portals to try, in this order.

    Args:
        execute: runs programs.
        kind: `iptables`, `nftables`, `direct`, `none`, or "" for the first rules that work.
        iptables_variant: `nft`, `legacy`, or "" for this machine's default.
        leftovers: only to remove leftovers: probing must create no table.
    """
    if kind in ("none", "direct"):
        from steersman.modes.userspace import direct_portals as direct  # noqa: PLC0415 - rarely used
        from steersman.modes.userspace.linux_addresses import LinuxAddresses  # noqa: PLC0415

        if kind == "none":
            return (direct.LocalPortals(),)
        return (direct.DirectPortals(LinuxAddresses()),)
    iptables = IptablesPortals(execute, iptables_variant, leftovers=leftovers)
    nft = NftPortals(execute.run_tool)
    by_kind: dict[str, tuple[Portals, ...]] = {"iptables": (iptables,), "nftables": (nft,)}
    return by_kind.get(kind, (iptables, nft))
