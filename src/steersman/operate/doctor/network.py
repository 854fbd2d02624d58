"""The interfaces and routes of the node, as the checks of doctor ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from steersman.host.link_state import Link, list_links
from steersman.model.names import Family
from steersman.operate.trace_lookups import look_up
from steersman.operate.trace_loss import Hop


class Network(Protocol):
    """What checks ask about interfaces and routes."""

    async def links(self) -> Mapping[str, Link]:
        """Return all interfaces by name."""
        ...

    async def hop(self, address: str) -> Hop:
        """Return where packets to an address go next."""
        ...


class KernelNetwork:
    """The network namespace of this process."""

    async def links(self) -> Mapping[str, Link]:
        """Return all interfaces by name."""
        return await asyncio.to_thread(list_links)

    async def hop(self, address: str) -> Hop:
        """Return where packets to an address go next."""
        return await asyncio.to_thread(look_up, address)


def family_folder(family: Family) -> str:
    """Return where the sysctls of a family are: `proc/sys/net/ipv4`."""
    return f"proc/sys/net/ipv{int(family)}"
