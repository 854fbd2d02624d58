"""`steersman ui --login` as it runs in a cluster: beyond loopback, for readers with a token."""

from __future__ import annotations

import asyncio
import signal
import sys

import aiohttp

from tests.support.apiserver.server import ApiServer
from tests.support.http import free_port
from tests.support.processes.steersman import command

WAIT = 60.0


async def test_beyond_loopback_a_login_is_needed() -> None:
    status, _, errors = await command("ui", "--listen=0.0.0.0:8026")
    assert status == 1
    assert "--login" in errors


async def test_the_api_server_decides_who_sees_pages() -> None:
    async with ApiServer() as server:
        server.reviews.users |= {
            "anna": {"username": "anna", "groups": ["ops"]},
            "bert": {"username": "bert", "groups": ["dev"]},
        }
        server.reviews.allowed["ops"] = {("list", "nodes"), ("list", "services")}
        server.reviews.allowed["dev"] = {("get", "services", "shop")}
        port = free_port()
        words = ("ui", "--login", f"--listen=0.0.0.0:{port}", f"--master={server.url}", "--direct")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "steersman", *words), stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout
            async with asyncio.timeout(WAIT):
                assert await process.stdout.readline() == f"http://0.0.0.0:{port}/\n".encode()
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
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
