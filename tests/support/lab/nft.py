"""The nftables mode in another network namespace than the test's own."""

from __future__ import annotations

from collections.abc import Callable

from steersman.host.exec import Exec, SubprocessExec
from steersman.host.netlink import Netlink
from steersman.modes.nftables.mode import NftablesMode, open_netlink
from tests.support.lab.sockets import Netns


def mode_behind(execute: Exec) -> NftablesMode:
    """The mode, in the namespace that an Exec's prefix enters (`nsenter --net=PATH`)."""
    for word in execute.prefix if isinstance(execute, SubprocessExec) else ():
        if word.startswith("--net="):
            return NftablesMode(execute, connect_in(word.removeprefix("--net=")))
    return NftablesMode(execute)


def connect_in(path: str) -> Callable[[], Netlink]:
    """From the path of a namespace to what opens a netlink socket in it."""

    def connect() -> Netlink:
        netns = Netns(path)
        try:
            return netns.call(open_netlink)
        finally:
            netns.close()

    return connect
