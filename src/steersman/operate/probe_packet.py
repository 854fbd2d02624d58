"""Send one real packet from this node or from a pod on it, and see what comes back.

The packet is that of an ordinary socket: `connect` for TCP, one datagram for UDP; an INIT from a
raw socket for SCTP, as few kernels have its sockets. Its client port is known before it is sent, so
that a Tracer can pick it out. It carries no mark: rules and routes may depend on marks.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
import struct
import sys
import time
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from steersman.host.netns import call_inside
from steersman.model.addresses import family_of
from steersman.model.names import Family, Protocol
from steersman.model.plan import Value
from steersman.model.tracing import WatchedFlow
from steersman.operate.answer import QuestionError

ReplyKind = Literal["answer", "reset", "icmp", "none", "not-sent"]
_KINDS = {
    Protocol.TCP: (socket.SOCK_STREAM, 0),
    Protocol.UDP: (socket.SOCK_DGRAM, 0),
    Protocol.SCTP: (socket.SOCK_RAW, socket.IPPROTO_SCTP),
}
DNS_PORT = 53
DNS_QUESTION = b"\x01\0\0\1\0\0\0\0\0\0" + b"\0\0\2\0\1"  # name servers of the root; without id
_DATAGRAM = b" steersman.\n"
_NO_LINGER = struct.pack("ii", 1, 0)  # close with a reset: no TIME_WAIT stays behind
_IP_RECVERR, _IPV6_RECVERR = 11, 25
_SOL = {Family.IPV4: (socket.IPPROTO_IP, _IP_RECVERR), Family.IPV6: (41, _IPV6_RECVERR)}
_MSG_ERRQUEUE = 0x2000
_EXTENDED_ERROR = struct.Struct("=IBBBxII")  # struct sock_extended_err
_ORIGIN_ICMP = (2, 3)  # SO_EE_ORIGIN_ICMP, SO_EE_ORIGIN_ICMP6
_SOCKADDR_IN = 16
_INIT, _INIT_ACK, _ABORT = 1, 2, 6  # chunks of SCTP
_ICMP_NAMES = {
    (Family.IPV4, 3, 0): "network unreachable",
    (Family.IPV4, 3, 1): "host unreachable",
    (Family.IPV4, 3, 3): "port unreachable",
    (Family.IPV4, 3, 4): "fragmentation needed",
    (Family.IPV4, 3, 9): "network administratively prohibited",
    (Family.IPV4, 3, 10): "host administratively prohibited",
    (Family.IPV4, 3, 13): "administratively prohibited",
    (Family.IPV4, 11, 0): "TTL exceeded",
    (Family.IPV6, 1, 0): "no route",
    (Family.IPV6, 1, 1): "administratively prohibited",
    (Family.IPV6, 1, 3): "address unreachable",
    (Family.IPV6, 1, 4): "port unreachable",
    (Family.IPV6, 1, 6): "no route (reject)",
}


class Reply(Value, frozen=True, rename="camel"):
    """What came back for a probe."""

    kind: ReplyKind
    """`none`: nothing in time; `not-sent`: this machine refused to send."""
    text: str
    """For people, such as `SYN-ACK` or `ICMP port unreachable from 10.1.0.5`."""
    milliseconds: float = 0.0

    @property
    def answered(self) -> bool:
        """Whether the other side accepted."""
        return self.kind == "answer"


class ProbePacket:
    """One probe; a context manager."""

    def __init__(
        self,
        protocol: Protocol,
        destination: str,
        port: int,
        *,
        source: str = "",
        netns: Path | None = None,
    ) -> None:
        """Open and bind the socket; nothing is sent yet. Blocks for a moment.

        Args:
            protocol: of the packet.
            destination: a canonical address.
            port: of the destination.
            source: the client's address; "" for the one that the kernel chooses.
            netns: the network namespace to send from; None for that of this thread.

        Raises:
            QuestionError: the socket cannot be opened there; the message says why.
        """
        where = f"in the network namespace {netns}" if netns else "on this node"
        try:
            self._socket = call_inside(netns, partial(open_socket, protocol, destination, source))
        except PermissionError as error:
            raise QuestionError(f"a probe cannot be sent {where}: this needs root") from error
        except OSError as error:
            what = f"from {source} " if source else ""
            reason = error.strerror or error
            raise QuestionError(f"a probe cannot be sent {what}{where}: {reason}") from error
        if protocol is Protocol.SCTP:
            client_port = 32768 + secrets.randbelow(28000)
        else:
            client_port = self._socket.getsockname()[1]
        self.flow = WatchedFlow(protocol, destination, port, source, client_port)

    def __enter__(self) -> ProbePacket:
        return self

    def __exit__(self, *_: object) -> None:
        if self.flow.protocol is Protocol.TCP:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._socket.close()

    async def send(self, timeout: float) -> Reply:
        """Send the packet and wait for an answer, at most so many seconds."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout):
                kind, text = await self._exchange()
        except TimeoutError:
            kind, text = "none", f"nothing within {timeout:g} s"
        except OSError as error:
            kind, text = self._failure(error)
        return Reply(kind, text, round((time.monotonic() - started) * 1000, 1))

    async def _exchange(self) -> tuple[ReplyKind, str]:
        loop, flow = asyncio.get_running_loop(), self.flow
        if flow.protocol is Protocol.SCTP:
            await loop.sock_sendall(self._socket, sctp_init(flow.source_port, flow.port))
            while True:
                answer = await loop.sock_recv(self._socket, 2048)
                if chunk := self._sctp_chunk(answer):
                    return ("answer", "INIT-ACK") if chunk == _INIT_ACK else ("reset", "ABORT")
        await loop.sock_connect(self._socket, (flow.destination, flow.port))
        if flow.protocol is Protocol.TCP:
            return "answer", "SYN-ACK"
        # Each begins otherwise, by which PacketWatch tells them apart.
        datagram = secrets.token_hex(2).encode() + _DATAGRAM
        if flow.port == DNS_PORT:
            datagram = secrets.token_bytes(2) + DNS_QUESTION
        await loop.sock_sendall(self._socket, datagram)
        answer = await loop.sock_recv(self._socket, 2048)
        return "answer", f"a datagram of {len(answer)} bytes"

    def _sctp_chunk(self, packet: bytes) -> int:
        """Return the kind of chunk of a packet to our port; 0 if it is another's."""
        if self.flow.family is Family.IPV4:  # raw sockets of IPv4 also get the IP header
            packet = packet[(packet[0] & 15) * 4 :]
        ours = self.flow.source_port.to_bytes(2, "big")
        if len(packet) < 13 or packet[2:4] != ours or packet[12] not in (_INIT_ACK, _ABORT):
            return 0
        return packet[12]

    def _failure(self, error: OSError) -> tuple[ReplyKind, str]:
        """Say what an error of the socket means: an ICMP message, a reset, or no packet at all."""
        if icmp := icmp_error(self._socket):
            key = self.flow.family, icmp.kind, icmp.code
            name = _ICMP_NAMES.get(key, f"type {icmp.kind} code {icmp.code}")
            return "icmp", f"ICMP {name} from {icmp.sender}"
        if self.flow.protocol is Protocol.TCP and error.errno == errno.ECONNRESET:
            # Linux says ECONNREFUSED if a RST answers the SYN. So this one came after the SYN-ACK,
            # as from a proxy that finds no endpoint for a connection that it has accepted.
            return "answer", "SYN-ACK, then RST"
        if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE):
            return "reset", "RST" if self.flow.protocol is Protocol.TCP else "refused"
        if error.errno in (errno.EPERM, errno.EACCES):
            what = "a rule of an output chain, a program of a cgroup or an IPsec policy"
            return "not-sent", f"this machine refuses to send it: {what}"
        reason = error.strerror or os.strerror(error.errno or 0)
        return "not-sent", f"this machine cannot send it: {reason}"


def open_socket(protocol: Protocol, destination: str, source: str) -> socket.socket:
    """Return a socket that does not block, bound, with a queue for ICMP errors (on Linux).

    Args:
        protocol: of its packets.
        destination: a canonical address.
        source: the client's address; "" for the one that the kernel chooses.

    Raises:
        OSError: it cannot be opened here.
    """
    kind, number = _KINDS[protocol]
    sock = socket.socket(socket.AF_INET6 if ":" in destination else socket.AF_INET, kind, number)
    try:
        sock.setblocking(False)
        if sys.platform == "linux" and protocol is not Protocol.SCTP:
            sock.setsockopt(*_SOL[family_of(destination)], 1)
        sock.bind((source, 0))
        if protocol is Protocol.SCTP:
            sock.connect((destination, 0))
    except BaseException:
        sock.close()
        raise
    return sock


class IcmpError(NamedTuple):
    """An ICMP error that came back to a socket."""

    sender: str
    kind: int
    code: int


def icmp_error(sock: socket.socket) -> IcmpError | None:
    """Return the ICMP error in the error queue of a socket; None if there is none."""
    if sys.platform == "win32":  # its sockets do not say
        return None
    try:
        _, controls, _, _ = sock.recvmsg(512, 512, _MSG_ERRQUEUE)
    except OSError:  # the queue is empty
        return None
    for _, _, data in controls:
        if len(data) < _EXTENDED_ERROR.size + _SOCKADDR_IN:
            continue
        _, origin, kind, code, *_ = _EXTENDED_ERROR.unpack_from(data)
        if origin not in _ORIGIN_ICMP:
            continue
        host = data[_EXTENDED_ERROR.size :]  # struct sockaddr_in or sockaddr_in6 of the sender
        if origin == _ORIGIN_ICMP[0]:
            return IcmpError(socket.inet_ntop(socket.AF_INET, host[4:8]), kind, code)
        return IcmpError(socket.inet_ntop(socket.AF_INET6, host[8:24]), kind, code)
    return None


def sctp_init(source: int, destination: int) -> bytes:
    """Return an INIT packet (RFC 9260, 3.3.2) with its checksum."""
    chunk = struct.pack(
        "!BBHIIHHI", _INIT, 0, 20, 1 + secrets.randbelow((1 << 32) - 1), 1 << 16, 1, 1, 1
    )
    head = struct.pack("!HHI", source, destination, 0)
    checksum = crc32c(head + bytes(4) + chunk)
    return head + struct.pack("<I", checksum) + chunk


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) that SCTP uses; the standard library has none."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
