"""The listening sockets of a network namespace."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from steersman.host.listening import ListeningSocket, listening_sockets, sockets
from steersman.model.names import Protocol


def test_own_sockets_are_found() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(type=socket.SOCK_DGRAM) as udp,
    ):
        udp.bind(("127.0.0.1", 0))
        found = listening_sockets()
        assert ListeningSocket(Protocol.TCP, "127.0.0.1", tcp.getsockname()[1]) in found
        assert ListeningSocket(Protocol.UDP, "127.0.0.1", udp.getsockname()[1]) in found


def test_connected_sockets_and_broken_rows_do_not_count(tmp_path: Path) -> None:
    net = tmp_path / "net"
    net.mkdir()
    rest = "00000000:00000000 00:00000000 00000000     0        0"
    rows = [
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid inode",
        f"   0: 0100007F:1F90 00000000:0000 0A {rest} 4242 1",
        f"   1: 0100007F:1F91 0100007F:C350 01 {rest} 4243 1",
        "   2: broken",
    ]
    (net / "tcp").write_text("\n".join(rows) + "\n")
    address = "0" * 24 + "01000000"
    (net / "udp6").write_text(f"head\n  0: {address}:0035 {'0' * 32}:0000 07 {rest} 77 2\n")
    assert listening_sockets(tmp_path) == {
        ListeningSocket(Protocol.TCP, "127.0.0.1", 8080): 4242,
        ListeningSocket(Protocol.UDP, "::1", 53): 77,
    }


@pytest.mark.skipif(sys.byteorder != "little", reason="/proc has native words")
@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0100007F:0050", ("127.0.0.1", 80)),
        ("00000000000000000000000001000000:1F90", ("::1", 8080)),
        ("0000000000000000FFFF00000100007F:0001", ("127.0.0.1", 1)),
    ],
)
def test_addresses(tmp_path: Path, text: str, address: tuple[str, int]) -> None:
    (tmp_path / "net").mkdir()
    row = f"0: {text} 00000000:0000 0A 0:0 00:0 0 0 0 7 1"
    (tmp_path / "net/tcp").write_text(f"head\n{row}\n")
    assert [each.local for each in sockets(proc=tmp_path)] == [address]
