"""Mark the first packet of a flow for tracing, in a table that vanishes with this process.

    table inet steersman-trace-PID        owned by our socket (NFT_TABLE_F_OWNER, Linux 5.12)
      first-prerouting, first-output      priority -500: before raw and conntrack
      reply-prerouting, reply-output      priority -199: after conntrack, the first answer

Each rule matches one packet only (`limit rate 1/day burst 1`), so neither a busy flow nor a
retransmission floods the reader. The packet itself stays as it is: a mark of ours could select
another route, or another rule, than the real traffic takes.

`nf_trace` of a packet is one bit for all of netfilter: rules of iptables-legacy report it, too,
without a TRACE rule, to the logger of the family (nftrace.py).
"""

from __future__ import annotations

import asyncio
import errno
import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from steersman.host.exec import Successor
from steersman.host.netlink import NETLINK_NETFILTER, Netlink, NetlinkError, Subscription
from steersman.host.nlmsg import (
    Message,
    Request,
    attr,
    be32,
    messages,
    nested,
)
from steersman.host.process import NEEDS_NET_ADMIN
from steersman.model.errors import BusyError
from steersman.model.names import Family, Protocol
from steersman.model.tracing import WatchedFlow
from steersman.netfilter import nflog
from steersman.netfilter.owned_table import (
    META_L4PROTO,
    META_NFPROTO,
    NETWORK,
    NFPROTO,
    OUTPUT,
    PREROUTING,
    REGISTER,
    TRANSPORT,
    Chain,
    expression,
    limit,
    load_ct,
    meta_is,
    owned_table,
    payload,
    payload_is,
    register_bits_are,
    register_is,
)
from steersman.netfilter.trace_steps import TraceEvent, parse_legacy, parse_nftrace

# -- nf_tables -------------------------------------------------------------------------------------

TABLE_PREFIX = "steersman-trace-"
FIRST_PREFIX, REPLY_PREFIX = "first-", "reply-"
"""Chains of the table whose rules match the first packet, and the first answer."""
_GROUP = 9  # NFNLGRP_NFTRACE
_FIRST, _AFTER_CONNTRACK = -500, -199
_META_NFTRACE = 12
_CT_DIRECTION, _CT_STATUS, _CT_PROTOCOL, _CT_PROTO_SRC, _CT_PROTO_DST = 1, 2, 10, 11, 12
_ASSURED = struct.pack("=I", 4)  # IPS_ASSURED: packets went both ways and back again
_CT_SRC_IP, _CT_DST_IP, _CT_SRC_IP6, _CT_DST_IP6 = 19, 20, 21, 22
_DAY = 86400
_ADDRESSES_AT = {Family.IPV4: (12, 16), Family.IPV6: (8, 24)}
"""Offsets of source and destination in the network header."""


class NftTrace:
    """Events about the first packet of a flow, and about the first answer."""

    def __init__(
        self, flow: WatchedFlow, *, replies: bool = True, to_anywhere: bool = False
    ) -> None:
        """Mark the first packet from now on, in the network namespace of this thread.

        Args:
            flow: which packets.
            replies: also trace the first answer; this makes the kernel track connections.
            to_anywhere: whatever the destination, as a mode changes it before netfilter sees the
                packet; the flow has the client's address or port.

        Raises:
            BusyError: the kernel does not allow it; the message says why.
        """
        self.table = f"{TABLE_PREFIX}{os.getpid()}"
        try:
            self._netlink = Netlink(NETLINK_NETFILTER, buffer=1 << 18, timeout=10.0)
        except OSError as error:
            raise BusyError(f"no netlink socket for nf_tables: {error.strerror}") from error
        self._events: Subscription | None = None
        try:
            self._events = Subscription(NETLINK_NETFILTER, [_GROUP], buffer=1 << 20)
            refused = self._netlink.batch(batch_of(self.table, flow, replies, to_anywhere))
        except OSError as error:
            self.close()
            raise BusyError(_explain(error)) from error
        if refused:
            self.close()
            raise BusyError(_explain(min(refused.items())[1]))

    async def receive(self) -> list[TraceEvent]:
        """Wait for events.

        Raises:
            AnswersLostError: some were lost.
        """
        assert self._events is not None
        return [event for each in await self._events.receive() if (event := parse_nftrace(each))]

    def waiting(self) -> list[TraceEvent]:
        """Return the events received so far, without waiting."""
        assert self._events is not None
        return [event for each in self._events.waiting() if (event := parse_nftrace(each))]

    def close(self) -> None:
        """Close the sockets; the kernel then removes the table."""
        if self._events is not None:
            self._events.__exit__(None, None, None)
        self._netlink.close()


def _explain(error: OSError) -> str:
    """Say why nf_tables refused the table."""
    if error.errno in (errno.EPERM, errno.EACCES):
        return f"tracing {NEEDS_NET_ADMIN}"
    if error.errno in (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.EINVAL):
        return (
            "tracing takes nf_tables with tables that have an owner: Linux 5.12 or later with"
            f" CONFIG_NF_TABLES ({error.strerror})"
        )
    return f"nf_tables refuses a table for tracing: {error.strerror}"


# Messages


def batch_of(
    table: str, flow: WatchedFlow, replies: bool, to_anywhere: bool = False
) -> list[Request]:
    """Return the transaction that makes the table with its chains and rules."""
    first = [(*first_packet(flow, to_anywhere), *_TRACE)]
    answer = [(*first_answer(flow), *_TRACE)]
    chains = [
        Chain(f"{FIRST_PREFIX}prerouting", PREROUTING, _FIRST, first),
        Chain(f"{FIRST_PREFIX}output", OUTPUT, _FIRST, first),
    ]
    if replies:
        chains += [
            Chain(f"{REPLY_PREFIX}prerouting", PREROUTING, _AFTER_CONNTRACK, answer),
            Chain(f"{REPLY_PREFIX}output", OUTPUT, _AFTER_CONNTRACK, answer),
        ]
    return owned_table(table, chains)


def first_packet(flow: WatchedFlow, to_anywhere: bool = False) -> Sequence[bytes]:
    """Return expressions that match the packet that opens a connection, or a datagram."""
    source_at, destination_at = _ADDRESSES_AT[flow.family]
    number = flow.protocol.number
    matches = [
        *meta_is(META_NFPROTO, NFPROTO[flow.family]),
        *meta_is(META_L4PROTO, number),
    ]
    if not to_anywhere:
        matches += payload_is(NETWORK, destination_at, ip_address(flow.destination).packed)
        matches += payload_is(TRANSPORT, 2, flow.port.to_bytes(2, "big"))
    if flow.source:
        matches += payload_is(NETWORK, source_at, ip_address(flow.source).packed)
    if flow.source_port:
        matches += payload_is(TRANSPORT, 0, flow.source_port.to_bytes(2, "big"))
    if flow.protocol is Protocol.TCP:  # SYN without ACK
        matches += [payload(TRANSPORT, 13, 1), *register_bits_are(b"\x12", b"\x02")]
    elif flow.protocol is Protocol.SCTP:  # the first chunk is INIT
        matches += payload_is(TRANSPORT, 12, b"\x01")
    return matches


def first_answer(flow: WatchedFlow) -> Sequence[bytes]:
    """Return expressions that match an answer, ICMP errors included, by its connection.

    Only the beginning of a connection counts: of other clients' there may be many.
    """
    wide = flow.family is Family.IPV6
    keys = {
        _CT_PROTOCOL: bytes((flow.protocol.number,)),
        _CT_DST_IP6 if wide else _CT_DST_IP: ip_address(flow.destination).packed,
        _CT_PROTO_DST: flow.port.to_bytes(2, "big"),
    }
    if flow.source:
        keys[_CT_SRC_IP6 if wide else _CT_SRC_IP] = ip_address(flow.source).packed
    if flow.source_port:
        keys[_CT_PROTO_SRC] = flow.source_port.to_bytes(2, "big")
    matches = [
        *meta_is(META_NFPROTO, NFPROTO[flow.family]),
        load_ct(_CT_DIRECTION),
        register_is(b"\x01"),
        load_ct(_CT_STATUS),
        *register_bits_are(_ASSURED, bytes(4)),
    ]
    for key, value in keys.items():  # of the original direction
        matches += [
            expression("ct", be32(2, key), be32(1, REGISTER), attr(3, b"\0")),
            register_is(value),
        ]
    return matches


_TRACE = (
    limit(1, _DAY, burst=1),
    expression("immediate", be32(1, REGISTER), nested(2, attr(1, b"\x01"))),
    expression("meta", be32(2, _META_NFTRACE), be32(3, REGISTER)),
)
"""Once: `limit rate 1/day burst 1 packets meta nftrace set 1`."""


# -- iptables-legacy -------------------------------------------------------------------------------
#
# What iptables-legacy logs about a traced packet, read from nfnetlink_log.
#
# `ip_tables` and `ip6_tables` hand each step of a packet with `nf_trace` to the logger of the
# family (/proc/sys/net/netfilter/nf_log). As nfnetlink_log, it sends them to the program that
# listens to group 0. The kernel's other logger, nf_log_syslog, writes to the kernel log and only
# for the first network namespace, so for the time of a trace we put nfnetlink_log in its place. A
# child process puts the old one back when we end, whatever way: its standard input then ends.

_LOGGER = "nfnetlink_log"
_LOG_GROUP = 0  # of packets that are logged without a group, such as by TRACE and LOG
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
