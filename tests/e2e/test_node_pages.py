"""What a running process offers to pages: its state as a stream, and parts of its World."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest

from steersman.host.local_socket import CONTROL
from steersman.model.node_state import NodeState
from tests.support.lab.namespace import in_namespace, sh
from tests.support.processes.steersman import Process, manifests, steersman, until, world

pytestmark = pytest.mark.kernel

SECONDS = 40.0


async def listening() -> bool:
    return f"@{CONTROL}" in sh("ss -xl")


@asynccontextmanager
async def running(
    tmp_path: Path, folder: Path, *flags: str
) -> AsyncIterator[tuple[Process, aiohttp.ClientSession]]:
    """A process on a folder of manifests, and a session on its local socket."""
    arguments = ("--proxy-mode=nftables", f"--manifests={folder}", *flags)
    connector = aiohttp.UnixConnector(f"\0{CONTROL}")
    async with (
        steersman(tmp_path, *arguments) as process,
        aiohttp.ClientSession("http://steersman", connector=connector) as session,
    ):
        await process.said("sync 1 (start)")
        await until(listening)
        yield process, session


async def next_state(answer: aiohttp.ClientResponse) -> NodeState:
    async with asyncio.timeout(SECONDS):
        return msgspec.json.decode(await answer.content.readline(), type=NodeState)


def test_the_stream_follows_changes_and_failures(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = manifests(tmp_path / "world", *world())
        async with (
            running(tmp_path, folder) as (process, session),
            session.get("/node?watch=1") as stream,
        ):
            first = await next_state(stream)
            assert (first.node, first.mode, first.pid) == (
                "node-a",
                "nftables",
                process.process.pid,
            )
            assert (first.services, first.service_ports, first.endpoint_slices) == (1, 1, 1)
            assert (first.sync_reason, first.lag) == ("start", None)
            assert {each.type: each.status for each in first.conditions}["Synced"] == "True"
            # A change arrives in the stream, with the time that it took.
            manifests(folder, *world("10.244.0.5", "10.244.0.6"))
            state = first
            while state.objects == first.objects:
                state = await next_state(stream)
            assert state.revision > first.revision
            assert state.lag is not None
            assert state.lag_p99 == state.lag
            assert 0 < state.lag < SECONDS
            # Changes by another program, too.
            sh("nft delete table ip kube-proxy")
            while state.drift is None:
                state = await next_state(stream)
            assert (state.repairs, state.drift.repaired_at > 0) == (1, True)
            assert state.memory > 1 << 20
            assert state.cpu > 0

    in_namespace(scenario)
