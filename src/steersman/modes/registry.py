"""The modes by their `--proxy-mode` names: a new mode is a folder and a line here.

A mode is imported when it is made: each calls what other systems lack.
"""

# ruff: noqa: PLC0415  # for that reason

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec

from steersman.host.exec import Exec
from steersman.modes.base import Mode
from steersman.modes.ipvs.options import IpvsOptions


class ModeOptions(msgspec.Struct, frozen=True):
    """What the operator may set about modes."""

    iptables_variant: str = ""
    """`nft`, `legacy`, or "" for the one that this machine uses."""
    ipvs: IpvsOptions = IpvsOptions(load_modules=False)
    """How the ipvs mode schedules; without a word about it, no module is loaded."""
    proxy_ports: tuple[int, int] | None = None
    """First and last port that the userspace mode listens on; None for any."""
    udp_idle: float = 0.25
    """Seconds after which the userspace modes forget an idle UDP client."""
    dns_search: tuple[str, ...] = ()
    """Suffixes that the winuserspace mode tries for questions to DNS Services."""
    portals: str = ""
    """How the userspace mode is reached: by `iptables` or `nftables`, `direct` (Service addresses
    are added to this machine), `none` (only addresses that it has), or "": by iptables or else
    nftables if we are root, otherwise none."""
    guard_node_ports: bool = True
    """Whether in the ebpf mode processes of the node may not bind to a node port in use."""
    leftovers: bool = False
    """Only to remove what a mode has left behind: nothing is created by asking for it."""
    xdp_devices: tuple[str, ...] = ()
    """Devices on which the ebpf mode sends packets of known connections on early."""
    cgroup_root: str = ""
    """The cgroup2 directory whose sockets the ebpf mode balances; "" finds the root."""


_NAME = "steersman-userspace"
"""By which one process takes over from another."""
Factory: TypeAlias = Callable[[Exec, ModeOptions], Mode]


def _iptables(execute: Exec, options: ModeOptions) -> Mode:
    from steersman.modes.iptables.mode import IptablesMode, IptablesOptions

    wanted = IptablesOptions(variant=options.iptables_variant, leftovers=options.leftovers)
    return IptablesMode(execute, wanted)


def _ipvs(execute: Exec, options: ModeOptions) -> Mode:
    from steersman.modes.ipvs.mode import IpvsMode

    variant = options.iptables_variant
    return IpvsMode(execute, msgspec.structs.replace(options.ipvs, iptables_variant=variant))


def _nftables(execute: Exec, _options: ModeOptions) -> Mode:
    from steersman.modes.nftables.mode import NftablesMode
    from steersman.modes.nftables.relay import Relay

    return NftablesMode(execute, relay=Relay())


def _ebpf(execute: Exec, options: ModeOptions) -> Mode:
    from steersman.modes.ebpf.engine import EbpfOptions
    from steersman.modes.ebpf.mode import EbpfMode

    wanted = EbpfOptions(
        cgroup=Path(options.cgroup_root) if options.cgroup_root else None,
        guard_node_ports=options.guard_node_ports,
        xdp_devices=options.xdp_devices,
    )
    return EbpfMode(execute, wanted)


def _userspace(execute: Exec, options: ModeOptions) -> Mode:
    from steersman.modes.userspace.addresses import LinuxAddresses
    from steersman.modes.userspace.direct import DirectMode, DirectOptions
    from steersman.modes.userspace.mode import UserspaceMode, UserspaceOptions
    from steersman.netfilter.conntrack import delete_stale

    portals = options.portals or ("" if _is_root() else "none")
    if portals in ("direct", "none"):
        addresses = LinuxAddresses(execute) if portals == "direct" else None
        return DirectMode("userspace", addresses, DirectOptions(options.udp_idle, handover=_NAME))
    variant = options.iptables_variant
    wanted = UserspaceOptions(
        *(options.proxy_ports, options.udp_idle, variant, portals),
        leftovers=options.leftovers,
        handover=_NAME,
    )
    return UserspaceMode(execute, wanted, forget=delete_stale)


def _winuserspace(execute: Exec, options: ModeOptions) -> Mode:
    from steersman.modes.userspace.direct import DirectOptions
    from steersman.modes.winuserspace.mode import winuserspace

    return winuserspace(execute, DirectOptions(options.udp_idle, dns_search=options.dns_search))


def _is_root() -> bool:
    return not hasattr(os, "geteuid") or os.geteuid() == 0


MODES: Mapping[str, Factory] = {
    "iptables": _iptables,
    "nftables": _nftables,
    "ipvs": _ipvs,
    "ebpf": _ebpf,
    "userspace": _userspace,
    "winuserspace": _winuserspace,
}
