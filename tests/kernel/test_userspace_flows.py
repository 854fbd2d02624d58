"""UDP clients that never pause: conntrack would lead them to where a listener was for ever."""

from __future__ import annotations

import asyncio
import socket

import pytest

from steersman.host.exec import SubprocessExec
from steersman.model.plan import Endpoint, Verdict
from steersman.modes.base import release
from tests.support.lab.namespace import sh
from tests.support.lab.userspace import userspace_mode
from tests.support.lab.userspace_node import (
    HOST,
    PORT,
    VARIANTS,
    VIP,
    become,
    damages,
    datagrams,
    on_a_node,
)
from tests.support.modes.userspace_proxy import server

pytestmark = pytest.mark.kernel


async def asks(sock: socket.socket, patience: float = 60.0) -> bytes:
    """Say something; what comes back, b"" for nothing."""
    loop = asyncio.get_running_loop()
    sock.setblocking(False)
    try:
        async with asyncio.timeout(patience):
            await loop.sock_sendto(sock, b"!", (VIP, PORT))
            return await loop.sock_recv(sock, 100)
    except (TimeoutError, OSError):
        return b""


@VARIANTS
@pytest.mark.parametrize("restarted", [False, True], ids=["without endpoints", "restarted"])
def test_a_udp_client_that_never_pauses_is_served_again(variant: str, restarted: bool) -> None:
    async def body(_: Endpoint) -> None:
        modes = [userspace_mode(SubprocessExec(), variant) for _ in "12"]
        mode = modes[0]
        for each in modes:
            await each.worker.do(each.probe)
        async with server(b"1") as (one, _answers):
            await become(mode)
            with socket.socket(type=socket.SOCK_DGRAM) as client:
                client.bind((HOST, 0))
                assert await asks(client, 1.0) == b"", "nobody serves it yet: it leaves this node"
                await become(mode, datagrams(one))
                assert await asks(client) == b"1!"
                if restarted:
                    await release(mode)
                    mode = modes[1]
                else:
                    await become(mode, datagrams(verdict=Verdict.REJECT))
                assert await asks(client, 1.0) == b""
                await become(mode, datagrams(one))
                assert await asks(client) == b"1!"
                with socket.socket(type=socket.SOCK_DGRAM) as another:
                    another.bind((HOST, 0))
                    sh(damages(variant)[0])
                    assert await asks(another, 1.0) == b""
                    assert await asks(client) == b"1!", "conntrack knows the way"
                    await become(mode, datagrams(one))
                    assert await asks(another) == b"1!"
                    assert await asks(client) == b"1!"
        await release(modes[0])
        await release(modes[1])

    on_a_node(body)
