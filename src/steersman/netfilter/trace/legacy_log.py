"""What iptables-legacy logs about a traced packet, read from nfnetlink_log.

`ip_tables` and `ip6_tables` hand each step of a packet with `nf_trace` to the logger of the
family (/proc/sys/net/netfilter/nf_log). As nfnetlink_log, it sends them to the program that
listens to group 0. The kernel's other logger, nf_log_syslog, writes to the kernel log and only
for the first network namespace, so for the time of a trace we put nfnetlink_log in its place. A
child process puts the old one back when we end, whatever way: its standard input then ends.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

from steersman.host.exec import Successor
from steersman.host.netlink import NETLINK_NETFILTER, Netlink, NetlinkError
from steersman.model.errors import BusyError
from steersman.model.names import Family
from steersman.netfilter import nflog
from steersman.netfilter.iptables.tool import legacy_tables
from steersman.netfilter.nft.wire import NFPROTO
from steersman.netfilter.trace.events import TraceEvent, parse_legacy

_LOGGER = "nfnetlink_log"
_LOG_GROUP = 0  # of packets that are logged without a group, such as by TRACE and LOG
_RESTORE = """
import sys
sys.stdin.read()
path, was, ours = sys.argv[1:]
if open(path).read().strip() == ours:
    open(path, "w").write(was)
"""


def has_legacy_tables(family: Family) -> bool:
    """Return whether iptables-legacy has tables, in the namespace of this thread."""
    with suppress(OSError):
        return any(legacy_tables([family]).values())
    return False


class TraceLog:
    """Lines of TRACE in the network namespace of the thread that opens it."""

    def __init__(self, family: Family, root: Path = Path("/proc/sys")) -> None:
        """Listen, and make nfnetlink_log the logger of a family.

        Raises:
            BusyError: it is not possible; the message says why.
        """
        self._restorer: Successor | None = None
        try:
            self._netlink = Netlink(NETLINK_NETFILTER, buffer=1 << 20, timeout=10.0)
        except OSError as error:
            raise BusyError(f"no netlink socket for nfnetlink_log: {error.strerror}") from error
        try:
            self._bind()
            # The process that sets the logger back starts before it is changed.
            path = root / "net/netfilter/nf_log" / str(NFPROTO[family])
            was = path.read_text().strip()
            if was != _LOGGER:
                self._restorer = Successor(_RESTORE, (str(path), was, _LOGGER))
                path.write_text(_LOGGER)
        except OSError as error:
            self.close()
            why = f"the logger of packets cannot be set: {error}"
            raise BusyError(f"rules of iptables-legacy cannot be traced: {why}") from error
        except BaseException:
            self.close()
            raise

    def _bind(self) -> None:
        """Receive packets that are logged to group 0, each at once."""
        try:
            nflog.listen(self._netlink.request, [_LOG_GROUP])
        except NetlinkError as error:
            if error.errno == errno.EPERM:
                why = (
                    "another program (ulogd? another trace?) listens to NFLOG group 0, or this"
                    " process lacks CAP_NET_ADMIN"
                )
            else:
                why = f"nfnetlink_log cannot be used: {error.strerror}"
            raise BusyError(f"rules of iptables-legacy cannot be traced: {why}") from error

    def waiting(self) -> list[TraceEvent]:
        """Return the events received so far, without waiting.

        Raises:
            AnswersLostError: some were lost.
        """
        return [event for each in self._netlink.waiting() if (event := parse_legacy(each))]

    def close(self) -> None:
        """Stop listening, and wait until the logger is as it was."""
        self._netlink.close()
        if self._restorer:
            self._restorer.finish()
