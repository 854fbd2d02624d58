"""The netlink sockets of one mode, in the network namespace that it programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from steersman.host.netlink import Netlink

T = TypeVar("T")


def here(function: Callable[[], T]) -> T:
    """Run something in the network namespace that this process is in."""
    return function()


class Sockets:
    """One socket for each netlink protocol, opened where it is first asked for."""

    def __init__(self, inside: Any = here) -> None:
        """Take what runs a function in the network namespace to program."""
        self.inside = inside
        self._open: dict[int, Netlink] = {}

    def get(self, protocol: int) -> Netlink:
        """Return the socket of a protocol (NETLINK_GENERIC and so on)."""
        if protocol not in self._open:
            self._open[protocol] = self.inside(lambda: Netlink(protocol))
        return self._open[protocol]

    def close(self) -> None:
        """Close all; the next `get` opens another one."""
        for netlink in self._open.values():
            netlink.close()
        self._open.clear()
