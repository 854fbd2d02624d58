"""The local port of Windows, on Linux: only who knows its secret asks and answers."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest

from steersman.host.local_port import LocalPort, find, publish
from steersman.operate.answer import QuestionError
from steersman.operate.client import Client, NotRunningError
from steersman.run.serve.control import told_in_lines
from steersman.run.serve.http import Answer, Page, Request
from steersman.run.serve.local_port import ControlPort


class Asked(msgspec.Struct):
    number: int


async def count(asked: Asked, say: Any) -> object:
    for number in range(asked.number):
        say({"step": number})
    return {"done": True}


async def later(_: Request) -> Answer:
    return Answer("later")


@asynccontextmanager
async def serving(file: Path) -> AsyncIterator[None]:
    pages: dict[tuple[str, str], Page] = {
        ("GET", "/now"): lambda _: Answer("now"),
        ("GET", "/later"): later,
        ("POST", "/count"): told_in_lines(Asked, count),
    }
    server = ControlPort(pages, file)
    task = asyncio.create_task(server.run())
    await server.listening.wait()
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_commands_find_the_process_by_a_file(tmp_path: Path) -> None:
    file = tmp_path / "state" / "private" / "port"
    client = Client(port_file=file)
    async with serving(file):
        assert await asyncio.to_thread(client.get, "/now") == b"now"
        assert await asyncio.to_thread(client.get, "/later") == b"later"
        said = await asyncio.to_thread(lambda: list(client.post("/count", {"number": 2})))
        assert said == [{"step": 0}, {"step": 1}, {"done": True}]
        assert await asyncio.to_thread(client.server_pid) == 0
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        with pytest.raises(QuestionError, match=r"404|not found"):
            await asyncio.to_thread(client.get, "/other")
    assert not file.exists()
    with pytest.raises(NotRunningError):
        client.get("/now")


async def test_who_does_not_know_the_secret_gets_no_answer(tmp_path: Path) -> None:
    file = tmp_path / "private" / "port"
    async with serving(file):
        found = find(file)
        assert found is not None
        stranger = tmp_path / "stranger" / "port"
        publish(stranger, found._replace(secret="guessed"))
        with pytest.raises(NotRunningError, match="another program"):
            await asyncio.to_thread(Client(port_file=stranger).get, "/now")
        reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
        writer.write(b"GET /now HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 401")
        writer.close()


@pytest.fixture
def stranger() -> Iterator[int]:
    class Lies(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"all is well")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Lies) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_another_program_on_the_port_is_not_believed(tmp_path: Path, stranger: int) -> None:
    file = tmp_path / "private" / "port"
    publish(file, LocalPort(stranger, "secret"))
    with pytest.raises(NotRunningError, match="another program"):
        Client(port_file=file).get("/now")


def test_a_port_that_nobody_has_is_no_process(tmp_path: Path) -> None:
    file = tmp_path / "private" / "port"
    with closing(socket.create_server(("127.0.0.1", 0))) as gone:
        port = gone.getsockname()[1]
    publish(file, LocalPort(port, "secret"))
    with pytest.raises(NotRunningError, match="no steersman runs"):
        Client(port_file=file).get("/now")


def test_a_file_that_is_none_is_not_believed(tmp_path: Path) -> None:
    file = tmp_path / "port"
    file.write_text("nonsense")
    assert find(file) is None
    file.unlink()
    file.mkdir()
    with pytest.raises(QuestionError, match="administrator"):
        Client(port_file=file).get("/now")
