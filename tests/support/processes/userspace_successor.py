"""A process that takes listening sockets over: prints how many, serves on request, stays until EOF.

With `--without-capabilities` it has none, though its user is the same.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
import sys

from steersman.proxy.handoff import HandoffChannel
from steersman.proxy.sockets import ListenerKey, Sockets

_CAPABILITY_VERSION_3 = 0x20080522


class Giver:
    """Has one socket to give to the next one."""

    def offer(self) -> Sockets:
        sock = socket.create_server(("127.0.0.1", 0))
        return {ListenerKey("127.0.0.1:80/TCP", ""): sock}

    def retire(self) -> None: ...

    def resume(self) -> None: ...


def drop_capabilities() -> None:
    head = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capset(head, struct.pack("6I", *[0] * 6)) == 0


async def main(name: str, *options: str) -> None:
    if "--without-capabilities" in options:
        drop_capabilities()
    channel = HandoffChannel(name, Giver())
    print(len(channel.receive()), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        assert line == "serve\n"
        await channel.listen()
        print("serving", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
