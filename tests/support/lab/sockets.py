"""Sockets inside network namespaces: servers that say who they are, and probes that ask.

A socket belongs to the namespace in which it was made, whoever uses it afterwards. So one worker
thread makes them all (it alone changes namespaces), and a probe costs a millisecond, no process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.support.lab import sctp as lab_sctp

T = TypeVar("T")
CLONE_NEWNET = 0x40000000
SO_LINGER_NOW = b"\x01\x00\x00\x00\x00\x00\x00\x00"
"""l_onoff 1, l_linger 0: close with a reset, so that no TIME_WAIT keeps an address pair busy."""
ANSWER_TIMEOUT = 60.0
"""Seconds for the words of a server once TCP is connected: only a busy machine needs them."""
_TOTAL_RETRANS = 100  # offset in struct tcp_info (linux/tcp.h, since 2.4)
KINDS = {"TCP": socket.SOCK_STREAM, "UDP": socket.SOCK_DGRAM, "SCTP": socket.SOCK_RAW}

_libc = ctypes.CDLL(None, use_errno=True)
CGROUPS: dict[str, Path] = {}
"""By path of a lab's node: the cgroup that sockets of it and of its pods are to be in."""

_worker = ThreadPoolExecutor(1, thread_name_prefix="netns")


class Netns:
    """An open network namespace."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def _enter(self) -> None:
        if _libc.setns(self._fd, CLONE_NEWNET):  # os.setns exists from Python 3.12
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), self.path)

    def call(self, function: Callable[[], T]) -> T:
        """Run a short function inside, on the worker thread."""

        def inside() -> T:
            self._enter()
            return function()

        return _worker.submit(inside).result()

    def socket(self, address: str, protocol: str, cgroup: Path | None = None) -> socket.socket:
        """Make a socket inside, of the family of `address`; in a threaded cgroup where given."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        number = socket.IPPROTO_SCTP if protocol == "SCTP" else 0

        def make() -> socket.socket:
            return socket.socket(family, KINDS[protocol], number)

        return self.call(lambda: _within(cgroup, make) if cgroup else make())

    def close(self) -> None:
        os.close(self._fd)


def _within(cgroup: Path, make: Callable[[], T]) -> T:
    """Call a function while this thread is in a cgroup."""
    thread = str(threading.get_native_id())
    (cgroup / "cgroup.threads").write_text(thread)
    try:
        return make()
    finally:
        (cgroup.parent / "cgroup.threads").write_text(thread)


def printed(address: str, port: int) -> str:
    """`address:port`, as Kubernetes prints endpoints."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


@dataclass(frozen=True)
class Outcome:
    """What came of a probe."""

    kind: str
    """answered, refused (a reset or port-unreachable), timeout (dropped) or unreachable."""
    endpoint: str = ""
    """The name of the server that answered."""
    source: str = ""
    """The source address that the server saw."""


REFUSED = {errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE}
DROPPED = {errno.ETIMEDOUT, errno.EAGAIN, errno.EPERM, errno.ENOBUFS}
"""Nobody answers; the last two are how a kernel tells the sender itself (netfilter, tc)."""


def _failed(error: OSError) -> Outcome:
    if isinstance(error, TimeoutError) or error.errno in DROPPED:
        return Outcome("timeout")
    if error.errno in REFUSED:
        return Outcome("refused")
    return Outcome("unreachable", os.strerror(error.errno or 0))


def probe(
    netns: Netns,
    source: str,
    address: str,
    port: int,
    protocol: str,
    timeout: float,
    cgroup: Path | None = None,
    *,
    at_once: bool = False,
) -> Outcome:
    """Open one new connection (or send one datagram) and say what came of it.

    `source` may be "": then the kernel chooses. Within `timeout` seconds TCP must be connected,
    others must have answered. `at_once` tells that TCP had to repeat itself: that is a timeout.
    """
    with netns.socket(address, protocol, cgroup) as sock:
        sock.settimeout(timeout)
        try:
            if source:
                sock.bind((source, 0))
            answer = _ask(sock, address, port, protocol)
            if at_once:
                see_at_once(sock)
        except OSError as error:
            return _failed(error)
    endpoint, _, seen = answer.partition(" ")
    return Outcome("answered", endpoint, seen) if seen else Outcome("refused")


def see_at_once(sock: socket.socket) -> None:
    """See that TCP has not sent a packet again, as it would have after a lost one.

    Whatever the clock says: a busy machine stands still for seconds.

    Raises:
        TimeoutError: it has.
    """
    if again := sent_again(sock):
        raise TimeoutError(f"packets were sent again: {again}")


def sent_again(sock: socket.socket) -> int:
    """Return how many packets TCP has sent again."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TOTAL_RETRANS + 4)
    (again,) = struct.unpack_from("=I", info, _TOTAL_RETRANS)
    assert isinstance(again, int)
    return again


def _ask(sock: socket.socket, address: str, port: int, protocol: str) -> str:
    if protocol == "SCTP":
        sock.connect((address, 0))
        return lab_sctp.ask(sock, port)
    sock.connect((address, port))
    if protocol == "UDP":
        with contextlib.suppress(PermissionError):  # OUTPUT drops it, or rejects: recv will tell
            sock.send(b"who are you?")
    else:
        sock.settimeout(ANSWER_TIMEOUT)
    answer = sock.recv(200).decode()
    if protocol == "TCP":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, SO_LINGER_NOW)
    return answer


class Servers:
    """Servers for any number of endpoints, all served by one thread.

    Each answers with its name and with the address that it saw the question come from.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._stop, waker = socket.socketpair()
        self._selector.register(waker, selectors.EVENT_READ, None)
        self._waker = waker
        self._listening: dict[tuple[str, str, int, str], socket.socket] = {}
        self._thread = threading.Thread(target=self._serve, name="servers", daemon=True)
        self._thread.start()

    def listen(self, netns: Netns, address: str, port: int, protocol: str, name: str = "") -> None:
        """Serve an address from now on; twice is once."""
        key = (netns.path, address, port, protocol)
        if key in self._listening:
            return
        sock = netns.socket(address, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, 0 if protocol == "SCTP" else port))
            if protocol == "TCP":
                sock.listen(64)
        except OSError:
            sock.close()
            raise
        sock.setblocking(False)
        handler = {"TCP": self._accept, "UDP": _answer, "SCTP": lab_sctp.answer}[protocol]
        self._listening[key] = sock
        self._selector.register(
            sock, selectors.EVENT_READ, (handler, name or printed(address, port), port)
        )

    def silence(self, address: str = "") -> None:
        """Stop serving an address, or everything."""
        for key in [key for key in self._listening if address in ("", key[1])]:
            sock = self._listening.pop(key)
            self._selector.unregister(sock)
            sock.close()

    def _accept(self, sock: socket.socket, name: str, _port: int) -> None:
        client, peer = sock.accept()
        try:
            client.send(f"{name} {peer[0]}".encode())
        except OSError:  # it was reset meanwhile
            client.close()
            return
        self._selector.register(client, selectors.EVENT_READ, (self._hang_up, "", 0))

    def _hang_up(self, sock: socket.socket, _name: str, _port: int) -> None:
        self._selector.unregister(sock)
        sock.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                handler, name, port = key.data
                assert isinstance(key.fileobj, socket.socket)
                with contextlib.suppress(OSError, KeyError, ValueError):  # gone meanwhile
                    handler(key.fileobj, name, port)

    def close(self) -> None:
        """Stop the thread and close every socket."""
        self._stop.send(b".")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._stop.close()


def _answer(sock: socket.socket, name: str, _port: int) -> None:
    _, peer = sock.recvfrom(100)
    sock.sendto(f"{name} {peer[0]}".encode(), peer)
