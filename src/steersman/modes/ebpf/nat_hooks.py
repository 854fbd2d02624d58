"""Connections that netfilter translates, left by another mode when this one takes its place.

Their packets pass our programs untouched, and conntrack keeps translating them, but only while
somebody has a chain of type nat and a rule about connection states: with the last one the kernel
removes its hooks, and connections stall. So two chains without effect stay in a table of nftables
until nothing is translated any more.
"""

from __future__ import annotations

import logging

from steersman.host.exec import Exec
from steersman.host.netlink import NETLINK_NETFILTER, Netlink
from steersman.host.nlmsg import Request
from steersman.netfilter.conntrack.wire import CT_GET, DST_NAT, SRC_NAT, status_of

TABLE = "steersman-hold"
_CREATE = """\
add table {family} {table} {{ comment "of steersman's ebpf mode" ; }}
flush table {family} {table}
add chain {family} {table} nat {{ type nat hook prerouting priority -100 ; }}
add chain {family} {table} track {{ type filter hook prerouting priority 0 ; }}
add rule {family} {table} track ct state established
"""
_DELETE = "add table {family} {table}\ndelete table {family} {table}\n"
_FAMILIES = ("ip", "ip6")
log = logging.getLogger("steersman.ebpf")


class NatHookGuard:
    """The table that keeps netfilter's hooks registered."""

    def __init__(self, execute: Exec) -> None:
        """Touch nothing yet.

        Args:
            execute: runs nft.
        """
        self._exec = execute
        # None until it is known: an earlier process may have left the table.
        self._exists: bool | None = None

    def create(self) -> None:
        """Create the table if netfilter translates connections now."""
        if self._translates():
            problem = self._nft(_CREATE)
            self._exists = not problem
            if problem:
                log.warning("ebpf: connections of the previous mode are cut: %s", problem)

    def remove(self, *, even_if_used: bool = False) -> None:
        """Remove the table if nothing is translated any more."""
        if self._exists is None:
            self._exists = not self._nft("list table ip {table}\n", families=("ip",))
        if not self._exists:
            return
        if even_if_used or not self._translates():
            self._nft(_DELETE)
            self._exists = False

    def _nft(self, template: str, families: tuple[str, ...] = _FAMILIES) -> str:
        """Run a script for each family; return the error, or "" on success."""
        script = "".join(template.format(family=family, table=TABLE) for family in families)
        try:
            result = self._exec.run_tool(["nft", "-f", "-"], script.encode())
        except (OSError, TimeoutError) as error:
            return f"nft: {error}"
        return result.message or "nft failed" if result.returncode else ""

    def _translates(self) -> bool:
        """Return whether netfilter translates a connection; False if conntrack does not answer."""
        # A list that changes while it is read is good enough: any translated connection counts.
        try:
            with Netlink(NETLINK_NETFILTER) as netlink:
                return any(
                    status_of(reply.payload) & (SRC_NAT | DST_NAT)
                    for reply in netlink.dump(Request(CT_GET, bytes(4)))
                )
        except OSError as error:
            log.debug("ebpf: conntrack does not answer: %s", error)
        return False
