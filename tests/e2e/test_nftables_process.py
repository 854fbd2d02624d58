"""The whole process in nftables mode: connections as metrics, node ports on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.apiserver.reading import service, slice_
from tests.support.lab.namespace import in_namespace, sh
from tests.support.processes.steersman import answers, get, manifests, steersman
from tests.support.waiting import until

pytestmark = pytest.mark.kernel
ONE, TWO = "10.244.0.5", "10.244.0.6"
VIP = "10.96.0.1"


@asynccontextmanager
async def pods(*addresses: str) -> AsyncIterator[None]:
    """Servers that say their address."""
    servers = []
    for address in addresses:
        sh(f"ip address add {address} dev lo")

        async def answer(
            _reader: asyncio.StreamReader, writer: asyncio.StreamWriter, word: str = address
        ) -> None:
            writer.write(word.encode())
            writer.close()

        servers.append(await asyncio.start_server(answer, address, 8080))
    try:
        yield
    finally:
        for each in servers:
            each.close()
            await each.wait_closed()


async def connect(address: str, port: int) -> str:
    """Who answers."""
    reader, writer = await asyncio.open_connection(address, port)
    word = await reader.read()
    writer.close()
    await writer.wait_closed()
    return word.decode()


async def counts(metric: str, label: str) -> dict[str, int]:
    """A metric by one of its labels."""
    _, text, _ = await get("/metrics/services")
    return {
        sample.labels[label]: int(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == metric and sample.labels["service"] == "web"
    }


async def endpoints() -> dict[str, int]:
    return await counts("steersman_connections_total", "endpoint")


async def frontends() -> dict[str, int]:
    return await counts("steersman_frontend_connections_total", "frontend")


def node_port() -> dict[str, Any]:
    made = service("web", VIP)
    made["spec"]["type"] = "NodePort"
    made["spec"]["ports"][0]["nodePort"] = 30080
    return made


def test_connections_are_metrics_that_never_fall(tmp_path: Path) -> None:
    async def body() -> None:
        sh("ip route add default dev lo")
        folder = manifests(tmp_path / "m", service("web", VIP), slice_("web-1", "web", ONE, TWO))
        flags = (f"--manifests={folder}", "--proxy-mode=nftables")
        async with pods(ONE, TWO), steersman(tmp_path, *flags):
            await answers("/readyz", 10256)
            assert await endpoints() == {f"{ONE}:8080": 0, f"{TWO}:8080": 0}
            said = [await connect(VIP, 80) for _ in range(20)]
            expected = {f"{pod}:8080": said.count(pod) for pod in (ONE, TWO)}
            assert await endpoints() == expected
            assert await frontends() == {f"{VIP}:80": 20}

            manifests(folder, service("web", VIP), slice_("web-1", "web", TWO))

            async def one_is_gone() -> bool:
                return f"{ONE}:8080" not in await endpoints()

            await until(one_is_gone)
            assert await endpoints() == {f"{TWO}:8080": said.count(TWO)}
            assert await connect(VIP, 80) == TWO
            assert await endpoints() == {f"{TWO}:8080": said.count(TWO) + 1}
            assert await frontends() == {f"{VIP}:80": 21}

    in_namespace(body)


def test_node_ports_answer_on_loopback(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", node_port(), slice_("web-1", "web", ONE))
        flags = (f"--manifests={folder}", "--proxy-mode=nftables")
        async with pods(ONE), steersman(tmp_path, *flags) as proxy:
            await answers("/readyz", 10256)
            assert await connect("127.0.0.1", 30080) == ONE
            assert sh("sysctl -n net.ipv4.conf.all.route_localnet").strip() == "0"
            assert await proxy.stop() == 0
            with pytest.raises(ConnectionRefusedError):
                await connect("127.0.0.1", 30080)

    in_namespace(body)


@pytest.mark.parametrize("damage", ["flush ruleset", "delete table ip kube-proxy"])
def test_a_flush_by_others_is_healed_before_any_sync_is_due(tmp_path: Path, damage: str) -> None:
    async def body() -> None:
        sh("ip route add default dev lo")
        folder = manifests(tmp_path / "m", service("web", VIP), slice_("web-1", "web", ONE))
        flags = (f"--manifests={folder}", "--proxy-mode=nftables", "--iptables-sync-period=1h")
        async with pods(ONE), steersman(tmp_path, *flags) as proxy:
            await answers("/readyz", 10256)
            assert await connect(VIP, 80) == ONE
            before = sh("nft list table ip kube-proxy | grep -v packets")
            sh(f"nft {damage}")
            await proxy.said("(drift)")
            assert await connect(VIP, 80) == ONE
            assert sh("nft list table ip kube-proxy | grep -v packets") == before

    in_namespace(body)
