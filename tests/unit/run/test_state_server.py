"""The server for pages of a cluster: nobody gets an answer without the token of the file."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from steersman.config.types import StateServer
from steersman.run.serve import state_server
from steersman.run.serve.connections import Bounds, ClientPool
from steersman.run.serve.http import Answer, Request, listen
from steersman.run.serve.state_server import TokenFile, serve_state, state_app
from tests.support.apiserver.certificates import Authority
from tests.support.http import free_port
from tests.support.waiting import until

SECONDS = 60.0
TOKEN = "a token of some length"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


def page(request: Request) -> Answer:
    return Answer(f"{request.method} {request.path}")


PAGES = {("GET", "/node"): page, ("POST", "/run"): page, ("POST", "/switch"): page}


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    server = await listen(state_app(PAGES, TokenFile(path)), "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session:
            yield session, f"http://127.0.0.1:{server.port}"
    finally:
        await server.close()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


async def status(url: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, headers=headers) as answer,
    ):
        if answer.status == 401:
            assert await answer.text() == "unauthorized\n"
        return answer.status


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        (BEARER, 200),
        ({"Authorization": f"bearer  {TOKEN}"}, 200),
        ({"X-Steersman-Token": TOKEN}, 200),
        ({"X-Steersman-Token": TOKEN, "Authorization": "Bearer other"}, 200),
        ({}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": TOKEN}, 401),
        ({"Authorization": f"Basic {TOKEN}"}, 401),
        ({"Authorization": f"Bearer {TOKEN}x"}, 401),
        ({"Authorization": f"Bearer {TOKEN[:-1]}"}, 401),
        ({"X-Steersman-Token": "öäü"}, 401),
    ],
)
async def test_a_request_brings_the_token(
    token: Path, headers: Mapping[str, str], found: int
) -> None:
    async with served(token) as (_, url):
        assert await status(f"{url}/node", headers) == found
        # Without it, nobody learns which pages there are.
        assert await status(f"{url}/none", headers) == (404 if found == 200 else 401)


async def test_the_pages_are_those_of_the_local_socket_without_the_switch(token: Path) -> None:
    async with served(token) as (_, url):
        assert await status(f"{url}/run", BEARER, "POST") == 200
        assert await status(f"{url}/run", BEARER, "GET") == 404
        assert await status(f"{url}/switch", BEARER, "POST") == 404


async def test_the_file_is_read_again_when_it_changes(
    token: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(token) as (_, url):
        assert await status(f"{url}/node", BEARER) == 200
        new = token.with_name("new")
        new.write_text("another token of some length")
        new.replace(token)  # as a Secret's files are
        assert await status(f"{url}/node", BEARER) == 401
        other = {"Authorization": "Bearer another token of some length"}
        assert await status(f"{url}/node", other) == 200
        # No file, an empty one, a short one: nobody gets in, and the log says why, once each.
        token.unlink()  # noqa: ASYNC240
        for _ in range(3):
            assert await status(f"{url}/node", other) == 401
        for text in ("", " \n", "short"):
            token.write_text(text)  # noqa: ASYNC240
            for given in ("", text, text.strip() or "x"):
                headers = {"X-Steersman-Token": given} if given.strip() else {}
                assert await status(f"{url}/node", headers) == 401
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(lines) == 2
    assert "cannot be read: No such file" in lines[0]
    assert "write at least 16 characters" in lines[1]


async def refused(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return True
    writer.close()
    return False


@asynccontextmanager
async def serving(config: StateServer) -> AsyncIterator[None]:
    task = asyncio.create_task(
        serve_state(config, PAGES, on_failure=lambda _: None, hard_fail=False)
    )
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_open(port: int) -> None:
    async def answers() -> bool:
        return not await refused(port)

    await until(answers)


async def test_nothing_listens_before_there_is_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state_server, "RETRY_SECONDS", 0.01)
    port, path = free_port(), tmp_path / "token"
    async with serving(StateServer(bind_address=f"127.0.0.1:{port}", token_file=str(path))):
        await until(lambda: "answers nobody" in caplog.text)
        assert await refused(port)
        path.write_text(TOKEN)
        await until_open(port)
        assert await status(f"http://127.0.0.1:{port}/node", BEARER) == 200


async def test_it_serves_with_tls_and_takes_a_new_certificate(
    token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_server, "_CERTIFICATE_CHECK", 0.01)
    authority = Authority()
    cert, key = token.with_name("cert.pem"), token.with_name("key.pem")

    def write(name: str) -> None:
        data, private = authority.issue(name, "127.0.0.1")
        key.write_bytes(private)
        cert.write_bytes(data)

    write("first")
    trust = ssl.create_default_context(cadata=authority.pem.decode())

    async def name(port: int) -> str:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
        found = writer.get_extra_info("peercert")["subject"][0][0][1]
        writer.close()
        return str(found)

    port = free_port()
    config = StateServer(
        bind_address=f"127.0.0.1:{port}",
        token_file=str(token),
        cert_file=str(cert),
        key_file=str(key),
    )
    async with serving(config):
        await until_open(port)
        connector = aiohttp.TCPConnector(ssl=trust)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get(f"https://127.0.0.1:{port}/node", headers=BEARER) as answer,
        ):
            assert (answer.status, await answer.text()) == (200, "GET /node")
        assert await name(port) == "first"
        write("second")

        async def is_second() -> bool:
            return await name(port) == "second"

        await until(is_second)  # it looks now and then
        # One that says nothing during the handshake does not keep others waiting.
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        assert await name(port) == "second"
        for _, writer in silent:
            writer.close()


def with_certificate(token: Path, port: int, password: bytes = b"") -> StateServer:
    """A configuration with a certificate, whose key may be encrypted."""
    cert, key = token.with_name("cert.pem"), token.with_name("key.pem")
    data, private = Authority().issue("node", "127.0.0.1")
    if password:
        private = load_pem_private_key(private, None).private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password)
        )
    cert.write_bytes(data)
    key.write_bytes(private)
    return StateServer(
        bind_address=f"127.0.0.1:{port}",
        token_file=str(token),
        cert_file=str(cert),
        key_file=str(key),
    )


async def test_an_encrypted_key_is_an_error_and_no_prompt(
    token: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenSSL would ask on the terminal, and hold the event loop."""
    monkeypatch.setattr(state_server, "RETRY_SECONDS", 0.01)
    port = free_port()
    config = with_certificate(token, port, b"a password")
    async with serving(config):
        await until(lambda: "key.pem is encrypted" in caplog.text)
        assert await refused(port)
        with_certificate(token, port)
        await until_open(port)
    assert caplog.text.count("is encrypted") == 1


async def test_a_defect_in_following_the_certificate_ends_the_server(
    token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("out of cheese")

    monkeypatch.setattr(state_server, "follow_certificate", broken)
    port = free_port()
    config = with_certificate(token, port)
    with pytest.raises(RuntimeError, match="out of cheese"):
        await serve_state(config, PAGES, on_failure=lambda _: None, hard_fail=False)
    assert await refused(port)


async def test_clients_are_bounded(token: Path) -> None:
    pool = ClientPool(Bounds(per_server=4, total=4))
    server = await listen(state_app(PAGES, TokenFile(token)), "127.0.0.1", 0, pool)
    try:
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(12)]
        assert await status(f"http://127.0.0.1:{server.port}/node", BEARER) == 200
        assert pool.count <= 4
        for _, writer in idle:
            writer.close()
    finally:
        await server.close()
