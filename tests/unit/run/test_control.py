"""The local socket under want of descriptors: it waits, and never ends the process."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import Any

import pytest

from steersman.operate.client import Client
from steersman.run.serve import control
from steersman.run.serve.connections import POOL
from steersman.run.serve.control import ControlSocket
from steersman.run.serve.http import Answer, Request


async def test_an_accept_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_RETRY", 0.0)
    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    async def fails_once(sock: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return await accept(sock)

    monkeypatch.setattr(loop, "sock_accept", fails_once)
    name = f"steersman-test-{os.getpid()}"

    def page(_: Request) -> Answer:
        return Answer("here")

    served = ControlSocket({("GET", "/page"): page}, name)
    task = asyncio.create_task(served.run())
    try:
        await served.listening.wait()
        assert await asyncio.to_thread(Client(name).get, "/page") == b"here"
        assert not failures
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_descriptors_are_kept_for_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_RETRY", 0.0)
    answers = [False, False, True]
    monkeypatch.setattr(POOL, "spares", lambda _sock: answers.pop(0))
    served = ControlSocket({}, f"steersman-few-{os.getpid()}")
    task = asyncio.create_task(served.run())
    await served.listening.wait()
    assert answers == []
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
