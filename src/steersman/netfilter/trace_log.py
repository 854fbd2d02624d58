"""What iptables-legacy logs about a traced packet, read from nfnetlink_log.

`ip_tables` and `ip6_tables` hand each step of a packet with `nf_trace` to the logger of the family
(/proc/sys/net/netfilter/nf_log). As nfnetlink_log, it sends them to the program that listens to
group 0. The kernel's other logger, nf_log_syslog, writes to the kernel log and only for the first
network namespace, so for the time of a trace we put nfnetlink_log in its place. A child process
puts the old one back when we end, whatever way: its standard input then ends.
"""

from __future__ import annotations

import asyncio
import errno
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from steersman.host.exec import Successor
from steersman.host.netlink import NETLINK_NETFILTER, Netlink, NetlinkError
from steersman.host.nlmsg import Message, Request, attr, be32, messages
from steersman.model.errors import BusyError
from steersman.model.names import Family
from steersman.netfilter.trace_event import TraceEvent, parse_legacy

_LOGGER = "nfnetlink_log"
_CONFIG = 4 << 8 | 1  # NFNL_SUBSYS_ULOG, NFULNL_MSG_CONFIG
_COMMAND, _MODE, _THRESHOLD = 1, 2, 5  # NFULA_CFG_*
_BIND, _COPY_PACKET = 1, 2  # NFULNL_CFG_CMD_BIND, NFULNL_COPY_PACKET
_BYTES = 128  # of each packet: the headers
_GROUP = 0  # of packets that are logged without a group, such as by TRACE and LOG
_FILES = {Family.IPV4: "2", Family.IPV6: "10"}  # by NFPROTO_*
_TABLES = {Family.IPV4: "ip_tables_names", Family.IPV6: "ip6_tables_names"}
_RESTORE = """
import sys
sys.stdin.read()
path, was, ours = sys.argv[1:]
if open(path).read().strip() == ours:
    open(path, "w").write(was)
"""


def legacy_families(proc: Path = Path("/proc")) -> tuple[Family, ...]:
    """Return the families in which iptables-legacy has tables, in the namespace of this thread."""
    found = []
    for family, name in _TABLES.items():
        with suppress(OSError):  # the module is not loaded
            if (proc / "thread-self/net" / name).read_text().split():
                found.append(family)
    return tuple(found)


class TraceLog:
    """Lines of TRACE in the network namespace of the thread that opens it."""

    def __init__(self, families: Iterable[Family], root: Path = Path("/proc/sys")) -> None:
        """Listen, and make nfnetlink_log the logger of these families.

        Raises:
            BusyError: it is not possible; the message says why.
        """
        self._restorers: list[Successor] = []
        try:
            self._netlink = Netlink(NETLINK_NETFILTER, buffer=1 << 20, timeout=10.0)
        except OSError as error:
            raise BusyError(f"no netlink socket for nfnetlink_log: {error.strerror}") from error
        try:
            self._bind()
            for family in families:
                # The process that sets the logger back starts before it is changed.
                path = root / "net/netfilter/nf_log" / _FILES[family]
                was = path.read_text().strip()
                if was != _LOGGER:
                    self._restorers.append(Successor(_RESTORE, (str(path), was, _LOGGER)))
                    path.write_text(_LOGGER)
        except OSError as error:
            self.close()
            why = f"the logger of packets cannot be set: {error}"
            raise BusyError(f"rules of iptables-legacy cannot be traced: {why}") from error
        except BaseException:
            self.close()
            raise
        self._socket = self._netlink.socket
        self._socket.setblocking(False)

    def _bind(self) -> None:
        """Receive packets that are logged to group 0, each at once."""
        group = struct.pack("!BBH", 0, 0, _GROUP)
        wanted = (
            attr(_COMMAND, bytes((_BIND,))),
            attr(_MODE, struct.pack("!IBx", _BYTES, _COPY_PACKET)) + be32(_THRESHOLD, 1),
        )
        try:
            for part in wanted:
                self._netlink.request(Request(_CONFIG, group + part))
        except NetlinkError as error:
            if error.errno in (errno.EPERM, errno.EBUSY):
                why = (
                    "another program (ulogd? another trace?) listens to NFLOG group 0, or this"
                    " process lacks CAP_NET_ADMIN"
                )
            else:
                why = f"nfnetlink_log cannot be used: {error.strerror}"
            raise BusyError(f"rules of iptables-legacy cannot be traced: {why}") from error

    async def receive(self) -> list[TraceEvent]:
        """Wait for events."""
        data = await asyncio.get_running_loop().sock_recv(self._socket, 1 << 17)
        return _events(messages(data))

    def waiting(self) -> list[TraceEvent]:
        """Return the events received so far, without waiting."""
        found: list[TraceEvent] = []
        with suppress(BlockingIOError):
            while True:
                found += _events(messages(self._socket.recv(1 << 17)))
        return found

    def close(self) -> None:
        """Stop listening, and wait until the logger is as it was."""
        self._netlink.close()
        for restorer in self._restorers:
            restorer.finish()


def _events(received: Iterable[Message]) -> list[TraceEvent]:
    return [event for each in received if (event := parse_legacy(each))]
