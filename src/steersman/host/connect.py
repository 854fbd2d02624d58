"""Connect to a host by TCP: to the first of its addresses that answers (RFC 8305)."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, zip_longest
from typing import Any

from steersman.host.threads import in_thread
from steersman.model.addresses import canonical_ip

_HEAD_START = 0.25  # seconds that an address has before the next one is tried as well (RFC 8305)
TCP_INFO_SIZE = 56
_LAST_SENT, _LAST_RECEIVED = slice(44, 48), slice(52, 56)  # of struct tcp_info (linux/tcp.h), ms


def socket_address(address: str, port: int) -> tuple[str, int] | tuple[str, int, int, int]:
    """Return what `loop.sock_connect` takes on every loop: Windows' wants all parts of IPv6."""
    return (address, port, 0, 0) if ":" in address else (address, port)


async def connect_tcp(host: str, port: int) -> socket.socket:
    """Connect to the address of a host that answers first, giving earlier ones a head start.

    Raises:
        OSError: the name has no address, or none of them answers; the first failure.
    """
    waiting = deque(await _addresses(host, port))
    if len(waiting) == 1:
        return await _connected(waiting[0])
    started: list[asyncio.Task[socket.socket]] = []
    chosen = None
    try:
        while chosen is None:
            if waiting:
                started.append(asyncio.create_task(_connected(waiting.popleft())))
            trying = [task for task in started if not task.done()]
            if not trying and not waiting:
                return started[0].result()  # raises: all have failed
            if trying:
                patience = _HEAD_START if waiting else None
                await asyncio.wait(trying, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            chosen = next(filter(_succeeded, started), None)
        return chosen.result()
    finally:
        for task in started:
            task.cancel()  # no effect on those that have ended
            if task is not chosen and _succeeded(task):
                task.result().close()


def _succeeded(task: asyncio.Task[socket.socket]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def _addresses(host: str, port: int) -> Sequence[Any]:
    """Return the addresses of a host, as getaddrinfo(3) sorts them, with families in turn."""
    if ":" in host or canonical_ip(host):  # an address, perhaps with a zone (fe80::1%eth0)
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM, 0, numeric)
    # In a thread that does not delay the end of the process.
    kind, flags = socket.SOCK_STREAM, socket.AI_ADDRCONFIG
    found = await in_thread(socket.getaddrinfo, host, port, 0, kind, 0, flags)
    first = [each for each in found if each[0] == found[0][0]]
    others = [each for each in found if each[0] != found[0][0]]
    return [each for each in chain(*zip_longest(first, others)) if each]


async def _connected(address: Any) -> socket.socket:
    """Connect a socket that notices within about half a minute that its peer is gone."""
    family, kind, protocol, _, where = address
    made = socket.socket(family, kind, protocol)
    try:
        # A silent peer: 15 s, then 3 probes 5 s apart. A peer that does not acknowledge data: 30 s.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", 15),
            ("TCP_KEEPINTVL", 5),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", 30_000),  # milliseconds; Linux
        ):
            if hasattr(socket, name):
                with suppress(OSError):  # Windows before 1709 knows the names only
                    made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, where)
    except BaseException:
        made.close()
        raise
    return made


def idle_seconds(tcp_info: bytes) -> float | None:
    """Return the time without data in either direction, by the TCP_INFO of a connection.

    Args:
        tcp_info: the first TCP_INFO_SIZE bytes of it; less are no answer.
    """
    if len(tcp_info) < TCP_INFO_SIZE:
        return None
    times = (tcp_info[part] for part in (_LAST_SENT, _LAST_RECEIVED))
    return min(int.from_bytes(each, sys.byteorder) for each in times) / 1000
