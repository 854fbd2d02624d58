"""See connections to endpoints fail: retransmitted SYNs, resets and ICMP errors, by NFLOG.

    table inet steersman-failures-PID-GROUP      owned by our socket: it vanishes with this process
      postrouting, input    a SYN of a connection that conntrack knows already: the first SYN is
                            confirmed only behind these hooks, so this one is a retransmission
      prerouting, output    RST with sequence number 0, which only answers a SYN
                            ICMP destination unreachable

IPVS translates packets to endpoints on this node only at the end of the hook input, so there the
chain comes later.

No packet of a connection that succeeds matches, so healthy traffic passes a few comparisons and
costs this process nothing. Postrouting runs after DNAT: the packet has the endpoint as destination,
and still the client as source. The rules only log; they never change or drop a packet.

NFLOG: linux/netfilter/nfnetlink_log.h. One program listens to a group of a network namespace.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress

from steersman.failover.watch import Failure, FailureWatch
from steersman.host.netlink import NETLINK_NETFILTER, AnswersLostError, Netlink
from steersman.host.nlmsg import Message, be16, be32, text
from steersman.host.process import CAP_NET_ADMIN, NEEDS_NET_ADMIN, has_capability
from steersman.host.worker import KernelWorker, Pause
from steersman.model.errors import BusyError
from steersman.model.failover import Backend, Observation
from steersman.model.names import PROTOCOL_BY_NUMBER
from steersman.netfilter import nflog
from steersman.netfilter.conntrack.unanswered import delete_unanswered
from steersman.netfilter.nft.expressions import (
    CT_STATE,
    CT_STATUS,
    META_L4PROTO,
    TRANSPORT,
    expression,
    limit,
    load_ct,
    meta_is,
    payload,
    payload_is,
    register_bits_are,
)
from steersman.netfilter.nft.owned import Chain, owned_table
from steersman.netfilter.nft.wire import INPUT, OUTPUT, POSTROUTING, PREROUTING

TABLE_PREFIX = "steersman-failures-"
GROUPS = range(0x5374, 0x5384)
"""NFLOG groups to try: another program may listen to one."""
_AFTER_CONNTRACK = -150
_AFTER_IPVS = 150  # which takes packets at 98 and 99; conntrack confirms connections last
_RATE = 1000  # packets of each kind a second; more prove no more
_TOO_BIG = 4  # code of ICMP destination unreachable: fragmentation needed (RFC 1191)
_TCP = 6
_STATE_NEW = struct.pack("=I", 8)
_CONFIRMED, _DST_NAT = 1 << 3, 1 << 5  # IPS_*


class FailureLog(FailureWatch):
    """Failures in the network namespace of the thread that makes it."""

    def __init__(self, worker: KernelWorker, *, translated: bool = True) -> None:
        """Start to listen.

        Args:
            worker: that thread.
            translated: whether the kernel marks connections to Services as translated (DNAT).
                IPVS does not: then every retransmitted SYN is logged.

        Raises:
            BusyError: the kernel does not allow it; the message says why.
        """
        self._worker = worker
        self._sockets = ExitStack()
        try:
            listener = self._sockets.enter_context(
                Netlink(NETLINK_NETFILTER, buffer=1 << 20, timeout=10.0)
            )
            group = nflog.listen(listener.request, GROUPS)
            # In another pod on the network of the node, another steersman may have our process id.
            name = f"{TABLE_PREFIX}{os.getpid()}-{group}"
            self._sockets.enter_context(owned_table(name, chains(group, translated)))
        except OSError as error:
            self._sockets.close()
            raise BusyError(_explain(error)) from error
        self._listener = listener

    async def receive(self) -> list[Failure]:
        """Wait for failures."""
        return await self._worker.do_slowly(self._read())

    def _read(self) -> Generator[Pause, None, list[Failure]]:
        while True:
            yield Pause(self._listener.fileno())
            with suppress(AnswersLostError):  # no harm: clients try again
                return list(failures(self._listener.waiting()))

    async def cut(self, backends: Collection[Backend]) -> int:
        """Delete conntrack entries that endpoints have not answered."""
        return await self._worker.do_slowly(delete_unanswered(backends))

    async def aclose(self) -> None:
        """Stop; the kernel removes the table."""
        await self._worker.do(self._sockets.close)


def _explain(error: OSError) -> str:
    """Say why packets cannot be logged."""
    if error.errno in (errno.EPERM, errno.EACCES):
        if not has_capability(CAP_NET_ADMIN):
            return f"logging packets of failing connections {NEEDS_NET_ADMIN}"
        return f"other programs listen to all NFLOG groups from {GROUPS[0]} to {GROUPS[-1]}"
    needs = "needs nf_tables with owned tables and NFLOG, Linux 5.12"
    return f"logging packets of failing connections {needs} ({error.strerror})"


# Rules


def chains(group: int, translated: bool) -> list[Chain]:
    """Return the chains with the rules that log to a group."""
    known = _CONFIRMED | (_DST_NAT if translated else 0)
    bits = struct.pack("=I", known)
    # Comparisons of 4 bytes are several times as fast as others, and the ones that most packets
    # fail come first. The word at 12 has the flags: SYN, and none of FIN, RST, ACK; or RST and ACK.
    retransmitted = [
        *_flags_are(b"\x17", b"\x02"),
        *meta_is(META_L4PROTO, _TCP),
        load_ct(CT_STATUS),
        *register_bits_are(bits, bits),
        load_ct(CT_STATE),
        *register_bits_are(_STATE_NEW, _STATE_NEW),
        *_logged(group, "syn"),
    ]
    refused = [
        *payload_is(TRANSPORT, 4, bytes(4)),
        *_flags_are(b"\x16", b"\x14"),
        *meta_is(META_L4PROTO, _TCP),
        *_logged(group, "rst"),
    ]
    unreachable = [
        [
            *payload_is(TRANSPORT, 0, bytes((kind,))),
            *meta_is(META_L4PROTO, number),
            *_logged(group, "icmp"),
        ]
        for number, kind in ((nflog.ICMP, 3), (nflog.ICMP6, 1))
    ]
    return [
        Chain("postrouting", POSTROUTING, _AFTER_CONNTRACK, [retransmitted]),
        Chain("input", INPUT, _AFTER_CONNTRACK if translated else _AFTER_IPVS, [retransmitted]),
        *(
            Chain(name, hook, _AFTER_CONNTRACK, [refused, *unreachable])
            for name, hook in (("prerouting", PREROUTING), ("output", OUTPUT))
        ),
    ]


def _flags_are(mask: bytes, value: bytes) -> list[bytes]:
    """Compare some flags of TCP, in the word of the length of the header, flags and window."""
    around = b"\0%b\0\0"
    return [payload(TRANSPORT, 12, 4), *register_bits_are(around % mask, around % value)]


def _logged(group: int, prefix: str) -> Sequence[bytes]:
    to = be16(1, group), text(2, prefix), be32(3, nflog.BYTES), be16(4, 1)  # NFTA_LOG_*
    return limit(_RATE, 1, burst=_RATE), expression("log", *to)


# Packets


def failures(received: Iterable[Message]) -> Iterator[Failure]:
    """Yield the failures in messages of nfnetlink_log; other packets say nothing."""
    for message in received:
        logged = nflog.read(message)
        if logged and (found := parse_packet(logged.prefix, logged.packet)):
            yield found


def parse_packet(prefix: str, packet: bytes) -> Failure | None:
    """Return the failure that a logged packet shows; None if it shows none.

    Args:
        prefix: of the rule: `syn`, `rst` or `icmp`.
        packet: its first bytes, from the network header on.
    """
    header = nflog.ip_header(packet)
    if header is None:
        return None
    if prefix == "syn":
        return _failure(header, Observation.SILENT)
    if prefix == "rst":
        backend = Backend(header.source, header.source_port, PROTOCOL_BY_NUMBER[_TCP])
        # Masqueraded connections all seem to be of this node.
        return Failure(backend, Observation.REFUSED, header.destination) if header.port else None
    # The error quotes the packet that it is about, behind a header of 8 bytes.
    about = nflog.ip_header(packet[header.size + 8 :])
    if about is None:
        return None
    code = packet[header.size + 1]
    if header.protocol == nflog.ICMP and code == _TOO_BIG:  # it goes on in smaller packets
        return None
    port_closed = code == (3 if header.protocol == nflog.ICMP else 4)
    return _failure(about, Observation.REFUSED if port_closed else Observation.UNREACHABLE)


def _failure(header: nflog.IpHeader, observation: Observation) -> Failure | None:
    protocol = PROTOCOL_BY_NUMBER.get(header.protocol)
    if protocol is None or not header.port:
        return None
    backend = Backend(header.destination, header.port, protocol)
    return Failure(backend, observation, header.source)
