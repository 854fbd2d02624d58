"""`steersman ui --login` as it runs in a cluster: beyond loopback, for readers with a token."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.apiserver.pods import steersman_pod
from tests.support.apiserver.server import ApiServer
from tests.support.http import free_port
from tests.support.lab.namespace import in_namespace
from tests.support.processes.steersman import NODE, command, manifests, steersman, world
from tests.support.waiting import until

WAIT = 60.0


async def test_beyond_loopback_a_login_is_needed() -> None:
    status, _, errors = await command("ui", "--listen=0.0.0.0:8026")
    assert status == 2
    assert "--login" in errors


@asynccontextmanager
async def pages(*words: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """`steersman ui` as the chart runs it, and its port."""
    port = free_port()
    words = ("ui", "--login", "--direct", f"--listen=0.0.0.0:{port}", *words)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "steersman", *words), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout
        async with asyncio.timeout(WAIT):
            assert await process.stdout.readline() == f"http://0.0.0.0:{port}/\n".encode()
        yield process, port
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_the_api_server_decides_who_sees_pages() -> None:
    async with ApiServer() as server:
        server.reviews.users |= {
            "anna": {"username": "anna", "groups": ["ops"]},
            "bert": {"username": "bert", "groups": ["dev"]},
        }
        server.reviews.allowed["ops"] = {("list", "nodes"), ("list", "services")}
        server.reviews.allowed["dev"] = {("get", "services", "shop")}
        async with pages(f"--master={server.url}") as (process, port):
            found = {}
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
                for token in ("", "nobody", "bert", "anna"):
                    headers = {"Authorization": f"Bearer {token}"} if token else {}
                    async with session.get("/about", headers=headers) as reply:
                        found[token] = reply.status
                async with session.get("/healthz") as reply:
                    assert reply.status == 200
            assert found == {"": 401, "nobody": 401, "bert": 403, "anna": 200}
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(WAIT):
                assert await process.wait() == 0


@pytest.mark.kernel
def test_pages_read_the_state_port_of_a_pod(tmp_path: Path) -> None:
    """The whole way of the chart: pods, the state port and its token, reviews, a page."""
    token = tmp_path / "token"
    token.write_text("t" * 43)
    flags = ("--state-bind-address=127.0.0.1:10247", f"--state-token-file={token}")

    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        async with (
            ApiServer([steersman_pod(NODE, port=10247)]) as server,
            steersman(tmp_path, f"--manifests={folder}", *flags),
            pages(f"--master={server.url}", f"--token-file={token}") as (_, port),
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
        ):
            server.reviews.users["anna"] = {"username": "anna"}
            server.reviews.allowed["anna"] = {("list", "nodes"), ("list", "services")}
            headers = {"Authorization": "Bearer anna", "Accept": "application/json"}
            row: dict[str, Any] = {}

            async def reached() -> bool:
                async with session.get("/", headers=headers) as reply:
                    assert reply.status == 200
                    rows = (await reply.json())["rows"]
                row.update(rows[0] if rows else {})
                known = row.get("name"), row.get("services"), row.get("health")
                return known == (NODE, 1, "ok")

            try:
                await until(reached, WAIT)
            except TimeoutError as error:
                raise AssertionError(f"{NODE} is not reached, or not well: {row}") from error

    in_namespace(body)
