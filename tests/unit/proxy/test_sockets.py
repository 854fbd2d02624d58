"""Proxy ports: given out, cooled down, used up."""

from __future__ import annotations

import errno
import socket

import pytest

from steersman.proxy.ports import PortAllocator, PortError


class Sock:
    """A socket that can bind all but the ports in use."""

    def __init__(self, used: set[int]) -> None:
        self.used, self.port = used, 0

    def bind(self, address: tuple[str, int]) -> None:
        if address[1] in self.used:
            raise OSError(errno.EADDRINUSE, "in use")
        self.port = address[1]
        self.used.add(self.port)

    def getsockname(self) -> tuple[str, int]:
        return ("", self.port)


def bind(ports: PortAllocator, used: set[int]) -> int:
    sock = Sock(used)
    return ports.bind(sock, "127.0.0.1")  # type: ignore[arg-type]


def test_ports_of_a_range_in_turn_and_freed_ones_cool_down() -> None:
    now, used = 0.0, {20002}
    ports = PortAllocator((20000, 20003), lambda: now)
    assert {bind(ports, used) for _ in range(3)} == {20000, 20001, 20003}
    with pytest.raises(PortError, match="20000-20003"):
        bind(ports, used)
    used.remove(20001)
    ports.release(20001)
    with pytest.raises(PortError):
        bind(ports, used)
    now = 0.6
    assert bind(ports, used) == 20001


def test_without_a_range_the_kernel_chooses() -> None:
    ports = PortAllocator()
    with socket.socket() as one, socket.socket() as two:
        assert ports.bind(one, "127.0.0.1") != ports.bind(two, "127.0.0.1") != 0


def test_an_address_that_is_not_here_is_an_error() -> None:
    with socket.socket() as sock, pytest.raises(OSError) as raised:  # noqa: PT011 - its errno
        PortAllocator().bind(sock, "203.0.113.1")
    assert raised.value.errno == errno.EADDRNOTAVAIL
