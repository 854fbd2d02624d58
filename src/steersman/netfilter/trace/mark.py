"""Mark the first packet of a flow for tracing, in a table that vanishes with this process.

    table inet steersman-trace-PID        owned by our socket (NFT_TABLE_F_OWNER, Linux 5.12)
      first-prerouting, first-output      priority -500: before raw and conntrack
      reply-prerouting, reply-output      priority -199: after conntrack, the first answer

Each rule matches one packet only (`limit rate 1/day burst 1`), so neither a busy flow nor a
retransmission floods the reader. The packet itself stays as it is: a mark of ours could select
another route, or another rule, than the real traffic takes.

`nf_trace` of a packet is one bit for all of netfilter: rules of iptables-legacy report it, too,
without a TRACE rule, to the logger of the family (legacy_log.py).
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from ipaddress import ip_address

from steersman.host.netlink import NETLINK_NETFILTER, Subscription
from steersman.host.nlmsg import (
    attr,
    be32,
    nested,
)
from steersman.host.process import NEEDS_NET_ADMIN
from steersman.model.errors import BusyError
from steersman.model.names import Protocol
from steersman.model.tracing import WatchedFlow
from steersman.netfilter.nft.expressions import (
    CT_DIRECTION,
    CT_DST_IP,
    CT_PROTO_DST,
    CT_PROTO_SRC,
    CT_PROTOCOL,
    CT_SRC_IP,
    CT_STATUS,
    META_L4PROTO,
    META_NFPROTO,
    REGISTER,
    TRANSPORT,
    expression,
    field_is,
    limit,
    load_ct,
    load_original,
    meta_is,
    payload,
    payload_is,
    register_bits_are,
    register_is,
)
from steersman.netfilter.nft.owned import Chain, owned_table
from steersman.netfilter.nft.wire import NFPROTO, OUTPUT, PREROUTING
from steersman.netfilter.trace.events import FIRST, REPLY, TraceEvent, parse_nftrace

TABLE_PREFIX = "steersman-trace-"
_GROUP = 9  # NFNLGRP_NFTRACE
_BEFORE_ALL, _AFTER_CONNTRACK = -500, -199
_META_NFTRACE = 12
_ASSURED = struct.pack("=I", 4)  # IPS_ASSURED: packets went both ways and back again
_DAY = 86400


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
            with ExitStack() as sockets:
                # Before packets are marked, so that no event is missed.
                self._events = sockets.enter_context(
                    Subscription(NETLINK_NETFILTER, [_GROUP], buffer=1 << 20)
                )
                sockets.enter_context(owned_table(self.table, chains(flow, replies, to_anywhere)))
                self._sockets = sockets.pop_all()
        except OSError as error:
            raise BusyError(_explain(error)) from error

    async def receive(self) -> list[TraceEvent]:
        """Wait for events.

        Raises:
            AnswersLostError: some were lost.
        """
        return [event for each in await self._events.receive() if (event := parse_nftrace(each))]

    def waiting(self) -> list[TraceEvent]:
        """Return the events received so far, without waiting."""
        return [event for each in self._events.waiting() if (event := parse_nftrace(each))]

    def close(self) -> None:
        """Close the sockets; the kernel then removes the table."""
        self._sockets.close()


def _explain(error: OSError) -> str:
    """Say why there is no table."""
    if error.errno in (errno.EPERM, errno.EACCES):
        return f"tracing {NEEDS_NET_ADMIN}"
    if error.errno in (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.EINVAL):
        return (
            "tracing takes nf_tables with tables that have an owner: Linux 5.12 or later with"
            f" CONFIG_NF_TABLES ({error.strerror})"
        )
    return f"nf_tables cannot be used for tracing: {error.strerror}"


def chains(flow: WatchedFlow, replies: bool, to_anywhere: bool) -> list[Chain]:
    """Return the chains with their rules."""
    first = [(*first_packet(flow, to_anywhere), *_TRACE)]
    answer = [(*first_answer(flow), *_TRACE)]
    marking = [(FIRST, _BEFORE_ALL, first)]
    if replies:
        marking.append((REPLY, _AFTER_CONNTRACK, answer))
    return [
        Chain(f"{which}{name}", hook, priority, rules)
        for which, priority, rules in marking
        for name, hook in (("prerouting", PREROUTING), ("output", OUTPUT))
    ]


def first_packet(flow: WatchedFlow, to_anywhere: bool = False) -> Sequence[bytes]:
    """Return expressions that match the packet that opens a connection, or a datagram."""
    family, number = flow.family, flow.protocol.number
    matches = [*meta_is(META_NFPROTO, NFPROTO[family]), *meta_is(META_L4PROTO, number)]
    if not to_anywhere:
        matches += field_is(family, "daddr", ip_address(flow.destination).packed)
        matches += field_is(family, "dport", flow.port.to_bytes(2, "big"))
    if flow.source:
        matches += field_is(family, "saddr", ip_address(flow.source).packed)
    if flow.source_port:
        matches += field_is(family, "sport", flow.source_port.to_bytes(2, "big"))
    if flow.protocol is Protocol.TCP:  # SYN without ACK
        matches += [payload(TRANSPORT, 13, 1), *register_bits_are(b"\x12", b"\x02")]
    elif flow.protocol is Protocol.SCTP:  # the first chunk is INIT
        matches += payload_is(TRANSPORT, 12, b"\x01")
    return matches


def first_answer(flow: WatchedFlow) -> Sequence[bytes]:
    """Return expressions that match an answer, ICMP errors included, by its connection.

    Only the beginning of a connection counts: of other clients' there may be many.
    """
    family = flow.family
    keys = {
        CT_PROTOCOL: bytes((flow.protocol.number,)),
        CT_DST_IP[family]: ip_address(flow.destination).packed,
        CT_PROTO_DST: flow.port.to_bytes(2, "big"),
    }
    if flow.source:
        keys[CT_SRC_IP[family]] = ip_address(flow.source).packed
    if flow.source_port:
        keys[CT_PROTO_SRC] = flow.source_port.to_bytes(2, "big")
    matches = [
        *meta_is(META_NFPROTO, NFPROTO[family]),
        load_ct(CT_DIRECTION),
        register_is(b"\x01"),
        load_ct(CT_STATUS),
        *register_bits_are(_ASSURED, bytes(4)),
    ]
    for key, value in keys.items():
        matches += [load_original(key), register_is(value)]
    return matches


_TRACE = (
    limit(1, _DAY, burst=1),
    expression("immediate", be32(1, REGISTER), nested(2, attr(1, b"\x01"))),
    expression("meta", be32(2, _META_NFTRACE), be32(3, REGISTER)),
)
"""Once: `limit rate 1/day burst 1 packets meta nftrace set 1`."""
