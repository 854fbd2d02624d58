"""Sockets of a proxy, as /proc lists them."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from steersman.host.listening import sockets
from steersman.model.names import Protocol
from steersman.modes.userspace.relay_tracer import find_process

pytestmark = pytest.mark.skipif(sys.byteorder != "little", reason="/proc has native words")


def test_a_connection_is_found_with_its_process() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        port = server.getsockname()[1]
        (found,) = [
            each
            for each in sockets((Protocol.TCP,))
            if each.remote == ("127.0.0.1", port) and each.local == client.getsockname()
        ]
        process = find_process({found.inode})
    assert process is not None
    assert process[0].endswith(f"(pid {os.getpid()})")
    assert found.inode in process[1]


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert not list(sockets((Protocol.SCTP,)))
    assert not list(sockets((Protocol.TCP,), tmp_path))
    assert find_process({1}, tmp_path) is None


def test_a_child_that_was_forked_before_is_not_taken_for_its_parent(tmp_path: Path) -> None:
    for pid, started, inodes in (
        ("5", 30, [1]),
        ("6", 40, [1, 2]),
        ("9", 20, [1, 2]),
        ("12", 10, [3, 4, 5]),
    ):
        folder = tmp_path / pid
        (folder / "fd").mkdir(parents=True)
        (folder / "comm").write_text("steersman\n")
        (folder / "stat").write_text(f"{pid} (steersman) S {'0 ' * 18}{started} 0\n")
        for number, inode in enumerate(inodes):
            (folder / "fd" / str(number)).symlink_to(f"socket:[{inode}]")
    assert find_process({1}, tmp_path) == ("steersman (pid 9)", frozenset({1, 2}))
