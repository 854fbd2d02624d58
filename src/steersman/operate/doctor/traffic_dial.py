"""Dial a destination from the node, or from inside a network namespace, and say what came of it.

A dial opens a TCP connection and closes it, as a health check does; for UDP it sends one datagram,
a question to port 53 and an empty one elsewhere, after which an answer or an ICMP error may come.
The kernel queues the ICMP errors of a socket with their sender, so a firewall on the way differs
from a port where nobody listens.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from steersman.host.netns import call_inside
from steersman.host.probe import outcome_of
from steersman.host.threads import in_thread
from steersman.model.addresses import join_host_port
from steersman.model.names import Protocol
from steersman.operate.probe_packet import DNS_PORT, DNS_QUESTION, icmp_error, open_socket

Outcome: TypeAlias = Literal["connected", "refused", "timeout", "unreachable", "silent", "failed"]
TIMEOUT = 3.0
"""Seconds: TCP has sent its second packet after one second, so one loss is survived."""
_SILENCES = (0.5, 1.0)
"""Seconds that an answer or an ICMP error may take, to the first datagram and to the second."""
_ACKNOWLEDGED, _LOOKS = 2.0, 40
"""Seconds until data has to be acknowledged, and how often that is looked at."""
_LARGE = 4000
"""Bytes that need several packets."""
_RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: what was not sent is thrown away
_UNACKED, _RTT, _TOTAL_RETRANS = 24, 68, 100  # offsets in struct tcp_info (linux/tcp.h, since 2.4)


class Target(msgspec.Struct, frozen=True):
    """Where to dial."""

    address: str
    port: int
    protocol: Protocol = Protocol.TCP

    def open(self, source: str = "") -> socket.socket:
        """Return a socket for it; see open_socket."""
        return open_socket(self.protocol, self.address, source)

    def __str__(self) -> str:
        return join_host_port(self.address, self.port)


class Dial(msgspec.Struct, frozen=True):
    """What came of one dial."""

    target: Target
    outcome: Outcome
    """`silent`: a datagram was sent and no error came back, which is all that can be known.
    `failed`: it could not be tried."""
    seconds: float = 0.0
    """Until the connection was there (as the kernel measured it), or the error."""
    by: str = ""
    """The address that sent the ICMP error; "" if none came (a reset comes from the target)."""
    repeated: int = 0
    """Packets that TCP sent again until it was connected."""
    reason: str = ""
    """The kernel's words for an error."""
    client: tuple[str, int] = ("", 0)
    """Address and port that it was made from; the port is 0 if none was needed."""

    @property
    def good(self) -> bool:
        """Whether nothing speaks against the target."""
        return self.outcome in ("connected", "silent")

    def __str__(self) -> str:
        """Say it in words, without the target."""
        match self.outcome:
            case "connected":
                again = f", after {self.repeated} packets were sent again" * bool(self.repeated)
                return f"connected in {self.seconds * 1e3:.1f} ms{again}"
            case "refused" if self.by:
                return f"refused by {self.by} (ICMP), as a REJECT rule does"
            case "refused":
                return "refused with a reset: no process listens there"
            case "timeout":
                return f"no answer in {self.seconds:.1f} s: something drops the packets"
            case "unreachable":
                where = f", says {self.by}" if self.by else ""
                return f"unreachable{where}: {self.reason}"
            case "silent":
                return "no ICMP error came back; more cannot be known of UDP"
            case _:
                return f"not tried: {self.reason}"


async def dial(
    target: Target, netns: Path | None = None, timeout: float = TIMEOUT, source: str = ""
) -> Dial:
    """Dial a target once.

    Args:
        target: where to.
        netns: the network namespace to dial from; None for that of this process.
        timeout: seconds for TCP to connect.
        source: the address to dial from; "" if the kernel may choose.
    """
    if target.protocol is Protocol.SCTP:
        return Dial(target, "failed", reason="doctor does not speak SCTP")
    try:
        sock = await in_thread(call_inside, netns, partial(target.open, source))
    except OSError as error:
        what = f"no socket in {netns}" if netns else "no socket"
        return Dial(target, "failed", reason=f"{what}: {error.strerror or error}")
    with sock:
        found = await _dial(sock, target, timeout)
        host, port, *_ = sock.getsockname()
        return msgspec.structs.replace(found, client=(host, port))


async def _dial(sock: socket.socket, target: Target, timeout: float) -> Dial:
    begin = time.monotonic()
    try:
        if target.protocol is Protocol.UDP:
            return await _send(sock, target)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.get_running_loop().sock_connect(sock, (target.address, target.port))
        except TimeoutError:
            # If this process stood still, the kernel may have connected in time.
            with suppress(OSError):
                sock.getpeername()
                return Dial(target, "connected", time.monotonic() - begin)
            return Dial(target, "timeout", time.monotonic() - begin)
    except OSError as error:
        outcome = _outcome_of(error)
        icmp = icmp_error(sock) if outcome in ("refused", "unreachable") else None
        by = icmp.sender if icmp else ""
        # asyncio's own text is no word of the kernel; Windows' numbers have no text in C.
        if error.errno and sys.platform == "linux":
            words = os.strerror(error.errno)
        else:
            words = error.strerror or str(error)
        return Dial(target, outcome, time.monotonic() - begin, by, reason=words)
    # Elapsed time has the time in which this process did other work: many dials are made at
    # once. The kernel measured the handshake itself, unless a packet was sent again.
    seconds, again = time.monotonic() - begin, 0
    if sys.platform == "linux":
        rtt, again = _tcp_info(sock, _RTT), _tcp_info(sock, _TOTAL_RETRANS)
        seconds = rtt / 1e6 if rtt and not again else seconds
    return Dial(target, "connected", seconds, repeated=again)


def _outcome_of(error: OSError) -> Outcome:
    """Return what the error of a socket says of the other side, or of a rule on the way."""
    if isinstance(error, PermissionError):  # a rule of an output chain
        return "unreachable"
    match outcome_of(error):
        case "silent":
            return "timeout"
        case "refused" | "unreachable" as found:
            return found
        case _:
            return "failed"


def _tcp_info(sock: socket.socket, offset: int) -> int:
    """Return a field of struct tcp_info; Linux only."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, offset + 4)
    return int.from_bytes(info[offset:], sys.byteorder)


async def takes_data(target: Target, netns: Path | None) -> bool:
    """Whether data that needs large packets is acknowledged; True if nothing connects at all."""
    try:
        with await in_thread(call_inside, netns, target.open) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            async with asyncio.timeout(_ACKNOWLEDGED):
                await asyncio.get_running_loop().sock_connect(sock, (target.address, target.port))
            sock.send(bytes(_LARGE))
            for _ in range(_LOOKS):
                if not _tcp_info(sock, _UNACKED):
                    return True
                await asyncio.sleep(_ACKNOWLEDGED / _LOOKS)
            return False
    except OSError:  # TimeoutError, too
        return True


async def _send(sock: socket.socket, target: Target) -> Dial:
    """Send a datagram, and once more if nothing comes; an ICMP error is raised as OSError."""
    sock.connect((target.address, target.port))
    for seconds in _SILENCES:
        sock.send(bytes(2) + DNS_QUESTION if target.port == DNS_PORT else b"")
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.get_running_loop().sock_recv(sock, 1)
                return Dial(target, "connected", reason="the server answered")
        with suppress(BlockingIOError):  # if this process stood still, it came in time
            sock.recv(1)
            return Dial(target, "connected", reason="the server answered")
    return Dial(target, "silent", sum(_SILENCES))
