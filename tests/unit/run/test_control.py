"""The local socket under want of descriptors, and work whose steps it tells."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import pytest

from steersman.model.errors import BusyError
from steersman.model.switch import SwitchRequest
from steersman.operate.answer import QuestionError
from steersman.operate.client import Client
from steersman.run.serve import connections, control
from steersman.run.serve.connections import POOL
from steersman.run.serve.control import ControlSocket, told_in_lines
from steersman.run.serve.http import Answer, Request


async def test_an_accept_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_PAUSE", 0.0)
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


Work: TypeAlias = Callable[[SwitchRequest, Callable[[object], None]], Awaitable[object]]


@asynccontextmanager
async def working(work: Work) -> AsyncIterator[Callable[[], Awaitable[list[object]]]]:
    """Serve some work; yield a function that asks for it, and returns the lines of the answer."""
    name = f"steersman-work-{os.getpid()}"
    served = ControlSocket({("POST", "/work"): told_in_lines(SwitchRequest, work)}, name)
    task = asyncio.create_task(served.run())
    await served.listening.wait()
    client = Client(name)

    async def ask() -> list[object]:
        return await asyncio.to_thread(lambda: list(client.post("/work", {"to": "nftables"})))

    try:
        yield ask
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (BusyError("another one is under way"), "^another one is under way$"),
        (KeyError("x"), "^KeyError: 'x'; the log of the process says more$"),
        (asyncio.CancelledError(), "^the process is ending$"),
    ],
)
async def test_work_that_fails_is_never_an_empty_answer(
    error: BaseException, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(_: SwitchRequest, tell: Callable[[object], None]) -> None:
        raise error

    async with working(fails) as ask:
        with pytest.raises(QuestionError, match=text):
            await ask()
    assert ("Traceback" in caplog.text) == isinstance(error, KeyError)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (BusyError("the process ends"), "the process ends"),
        (KeyError("x"), "KeyError: 'x'; the log of the process says more"),
    ],
)
async def test_work_that_fails_after_a_step_says_so_in_the_last_line(
    error: Exception, text: str
) -> None:
    async def fails(asked: SwitchRequest, tell: Callable[[object], None]) -> None:
        tell({"step": asked.to})
        raise error

    async with working(fails) as ask:
        assert await ask() == [{"step": "nftables"}, {"error": text}]
