"""A process that takes listening sockets over: prints how many, serves on request, stays until EOF.

With `--without-capabilities` it has none, though its user is the same.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
import sys

from steersman.proxy.engine import Proxy
from steersman.proxy.handoff import SocketHandoff
from steersman.proxy.ports import PortAllocator
from steersman.proxy.sockets import ListenerKey

_CAPABILITY_VERSION_3 = 0x20080522


class OneSocket(Proxy):
    """Has one socket to give to the next one."""

    def __init__(self) -> None:
        super().__init__(PortAllocator(), 1.0)

    def sockets(self) -> dict[ListenerKey, socket.socket]:
        return {ListenerKey("127.0.0.1:80/TCP", ""): socket.create_server(("127.0.0.1", 0))}


def drop_capabilities() -> None:
    head = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capset(head, struct.pack("6I", *[0] * 6)) == 0


async def main(name: str, *options: str) -> None:
    if "--without-capabilities" in options:
        drop_capabilities()
    proxy = OneSocket()
    handoff = SocketHandoff(name, proxy)
    handoff.take_over()
    print(len(proxy._inherited), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        assert line == "serve\n"
        await handoff.started()
        print("serving", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
