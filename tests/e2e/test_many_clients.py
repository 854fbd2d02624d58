"""Thousands of idle clients on the health ports of a whole process with few descriptors."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import pytest

from steersman.host.limits import raise_descriptor_limit
from tests.support.lab.namespace import in_namespace
from tests.support.processes.steersman import answers, get, in_rules, manifests, steersman, world
from tests.support.waiting import until

pytestmark = pytest.mark.kernel

CLIENTS = 2000


def idle_client(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=60)
    sock.setblocking(False)
    return sock


@pytest.mark.skipif(raise_descriptor_limit() < CLIENTS + 200, reason="too few descriptors")
def test_rules_are_written_however_many_clients_there_are(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        async with steersman(tmp_path, f"--manifests={folder}") as proxy:
            await proxy.said("sync 1 (start)")
            resource.prlimit(proxy.process.pid, resource.RLIMIT_NOFILE, (1024, 1024))
            clients = []
            for number in range(CLIENTS):
                clients.append(idle_client((10256, 10249)[number % 2]))
                if number % 100 == 0:
                    assert (await get("/livez", 10256))[0] == 200
            manifests(folder, *world("10.244.0.77"))
            await until(lambda: in_rules("10.244.0.77:"))
            await answers("/healthz", 10256)
            assert (await get("/metrics"))[0] == 200
            assert await proxy.stop() == 0
            for client in clients:
                client.close()
            assert len(proxy.log.splitlines()) < 30
            assert "Traceback" not in proxy.log

    in_namespace(body)
