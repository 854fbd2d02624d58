"""The modes by their `--proxy-mode` names: a new mode is a folder and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec

from steersman.host.exec import Exec
from steersman.modes.base import Mode
from steersman.modes.iptables.mode import IptablesMode, IptablesOptions
from steersman.modes.nftables.mode import NftablesMode


class ModeOptions(msgspec.Struct, frozen=True):
    """What the operator may set about modes."""

    iptables_variant: str = ""
    """`nft`, `legacy`, or "" for the one that this machine uses."""


Factory: TypeAlias = Callable[[Exec, ModeOptions], Mode]


def _iptables(execute: Exec, options: ModeOptions) -> Mode:
    return IptablesMode(execute, IptablesOptions(variant=options.iptables_variant))


def _nftables(execute: Exec, _options: ModeOptions) -> Mode:
    return NftablesMode(execute)


MODES: Mapping[str, Factory] = {"iptables": _iptables, "nftables": _nftables}
