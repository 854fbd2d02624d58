"""Connections that netfilter translates, made in another mode, when this one takes its place.

Their packets pass our programs untouched, and conntrack goes on translating them, but only for as
long as somebody has a chain of type nat and somebody asks for a state of conntrack: with the last
rule the kernel takes its hooks away, and connections stand still. So two chains without an effect
stay in a table of nftables until nothing is translated any more.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable

from steersman.host.exec import Exec
from steersman.host.netlink import DumpInterruptedError, Netlink, Request
from steersman.host.nlmsg import attributes

TABLE = "steersman-hold"
_CT_GET = 0x101
_CTA_STATUS = 3
_TRANSLATED = 0x30  # IPS_SRC_NAT, IPS_DST_NAT
_FAMILIES = ("ip", "ip6")
log = logging.getLogger("steersman.ebpf")


class Hold:
    """The table that keeps netfilter's hooks in place."""

    def __init__(self, execute: Exec, connect: Callable[[], Netlink]) -> None:
        """Make it without touching the kernel.

        Args:
            execute: the door to `nft`.
            connect: opens a netlink socket of NETLINK_NETFILTER in the node's namespace.
        """
        self._exec = execute
        self._connect = connect
        self._held: bool | None = None
        """None until it is known: an earlier process may have left the table."""

    async def take(self) -> None:
        """Keep what is translated now going; nothing where there is none."""
        if await asyncio.to_thread(self._translated):
            problem = await self._nft("".join(map(_added, _FAMILIES)))
            self._held = not problem
            if problem:
                log.warning("ebpf: connections of the mode before are cut: %s", problem)

    async def let_go(self, *, even_if_used: bool = False) -> None:
        """Remove the table once nothing is translated any more."""
        if self._held is None:
            self._held = not await self._nft(f"list table ip {TABLE}\n")
        if not self._held:
            return
        if even_if_used or not await asyncio.to_thread(self._translated):
            await self._nft("".join(map(_removed, _FAMILIES)))
            self._held = False

    async def _nft(self, script: str) -> str:
        """Run a script; what is wrong, or "" where it went in."""
        try:
            result = await self._exec.run(["nft", "-f", "-"], script.encode())
        except (OSError, TimeoutError) as error:
            return f"nft: {error}"
        return result.message or "nft failed" if result.returncode else ""

    def _translated(self) -> int:
        """How many connections netfilter translates; 0 where it cannot be asked."""
        count = 0
        try:
            with self._connect() as netlink:
                for reply in netlink.dump(Request(_CT_GET, bytes(4))):
                    count += _is_translated(reply.payload)
        except DumpInterruptedError:  # what was seen counts
            return count
        except OSError as error:
            log.debug("ebpf: conntrack does not answer: %s", error)
        return count


def _is_translated(payload: bytes) -> bool:
    (status,) = struct.unpack("!I", attributes(payload, 4).get(_CTA_STATUS, bytes(4)))
    return bool(status & _TRANSLATED)


def _added(family: str) -> str:
    name = f"{family} {TABLE}"
    return (
        f'add table {name} {{ comment "of steersman\'s ebpf mode" ; }}\n'
        f"flush table {name}\n"
        f"add chain {name} nat {{ type nat hook prerouting priority -100 ; }}\n"
        f"add chain {name} track {{ type filter hook prerouting priority 0 ; }}\n"
        f"add rule {name} track ct state established\n"
    )


def _removed(family: str) -> str:
    return f"add table {family} {TABLE}\ndelete table {family} {TABLE}\n"
