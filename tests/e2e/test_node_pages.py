"""What a running process offers to pages: its state as a stream, and parts of its World."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import pytest

from steersman.host.peers import CONTROL
from steersman.model.history import History
from steersman.model.names import ObjectName
from steersman.model.node_state import NodeState
from steersman.model.world import Origin, World
from steersman.operate.world_reader import decode_world
from tests.support.apiserver.reading import service
from tests.support.lab.namespace import in_namespace, sh
from tests.support.otlp import otlp_receiver
from tests.support.processes.steersman import Process, command, manifests, steersman, world
from tests.support.waiting import until

pytestmark = pytest.mark.kernel

SECONDS = 60.0


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
            while not first.digest:  # it is made when somebody asks for the first time
                first = await next_state(stream)
            # A change arrives in the stream, with the time that it took.
            manifests(folder, *world("10.244.0.5", "10.244.0.6"))
            state = first
            while state.objects == first.objects:
                state = await next_state(stream)
            assert state.revision > first.revision
            assert state.digest != first.digest
            async with session.get("/digests") as answer:
                assert await answer.json() == {"shop/web": state.digest}
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
            # All of it is remembered.
            async with session.get("/history") as answer:
                history = msgspec.json.decode(await answer.read(), type=History)
            assert (history.node, history.since > 0) == ("node-a", True)
            reasons = [record.reason for record in history.records]
            assert (reasons[0], reasons[-1]) == ("start", "drift")
            (change,) = (record for record in history.records if record.lag is not None)
            assert (change.names, change.lag) == (("shop/web",), state.lag)
            assert change.phases.keys() >= {"plan", "render", "apply"}
            assert history.records[-1].drift

    in_namespace(scenario)


def test_a_world_of_one_service(tmp_path: Path) -> None:
    async def scenario() -> None:
        headless = service("db", "None")
        other = service("api", "10.96.0.2")
        many = [service(f"s{n}", f"10.96.1.{n}") for n in range(200)]
        folder = manifests(tmp_path / "world", *world(), headless, other, *many)
        async with running(tmp_path, folder) as (_, session):

            async def get(name: str) -> World:
                async with session.get("/world", params={"service": name}) as answer:
                    assert answer.status == 200
                    data = await answer.read()
                assert len(data) < 10_000
                return decode_world(data, Origin("process", "a test"))

            web = await get("shop/web")
            assert list(web.snapshot.services) == [ObjectName("shop", "web")]
            assert [
                e.addresses
                for s in web.snapshot.slices.values()
                for x in s
                for e in x.endpoints or ()
            ] == [["10.244.0.5"]]
            assert {key.name.service for key in web.plan.services} == {"web"}
            assert web.process is not None
            both = [("service", "shop/web"), ("service", "shop/api"), ("service", "shop/none")]
            async with session.get("/world", params=both) as answer:
                found = decode_world(await answer.read(), Origin("process", "a test"))
            assert {name.name for name in found.snapshot.services} == {"web", "api"}
            db = await get("shop/db")
            assert (dict(db.snapshot.services), list(db.unserved)) == (
                {},
                [ObjectName("shop", "db")],
            )
            for name in ("shop/none", "none", "", "<script>/x"):
                async with session.get("/world", params={"service": name}) as answer:
                    assert answer.status == 404
                    assert f"there is no Service {name!r}" in await answer.text()

    in_namespace(scenario)


def test_pages_run_commands_on_the_node(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = manifests(tmp_path / "world", *world())
        async with running(tmp_path, folder) as (_, session):

            async def run(*words: str) -> dict[str, Any]:
                asked = {"command": words[0], "arguments": words[1:]}
                async with session.post("/run", json=asked) as answer:
                    assert answer.status == 200, await answer.text()
                    lines = (await answer.text()).splitlines()
                return cast(dict[str, Any], json.loads(lines[-1]))

            dump = await run("dump", "shop/web")
            assert dump["exitCode"] == 0
            assert "10.244.0.5" in json.dumps(dump["answer"])
            explained = await run("explain", "--to", "shop/web", "--from=outside")
            assert explained["exitCode"] in (0, 1)
            assert "10.96.0.1" in json.dumps(explained["answer"])
            doctor = await run("doctor", "shop/web")
            assert doctor["answer"]["results"], doctor
            missing = await run("dump", "shop/none")
            assert missing["exitCode"] == 2
            assert "shop/none" in missing["error"]

    in_namespace(scenario)


def test_the_port_needs_a_token_and_survives_a_switch(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a token of some length\n")
    where = ("--state-bind-address=127.0.0.1:18250", f"--state-token-file={token}")

    async def scenario() -> None:
        folder = manifests(tmp_path / "world", *world())
        headers = {"X-Steersman-Token": "a token of some length"}
        async with (
            running(tmp_path, folder, *where) as (_, session),
            aiohttp.ClientSession("http://127.0.0.1:18250") as there,
        ):

            async def open_() -> bool:
                try:
                    async with there.get("/node") as answer:
                        assert answer.status == 401
                        return True
                except aiohttp.ClientConnectionError:
                    return False

            await until(open_)
            async with (
                asyncio.timeout(SECONDS),
                there.get("/node?watch=1", headers=headers) as stream,
            ):
                assert (await next_state(stream)).mode == "nftables"
                async with session.post("/switch", json={"to": "iptables"}) as switch:
                    result = json.loads((await switch.text()).splitlines()[-1])
                    assert result["mode"] == "iptables", result
                state = await next_state(stream)
                while state.mode != "iptables":
                    state = await next_state(stream)
            for path in ("/node", "/world", "/history", "/state", "/top", "/names?kind=service"):
                async with there.get(path, headers=headers) as answer:
                    assert (answer.status, path) == (200, path)
                async with there.get(path) as answer:
                    assert (answer.status, path) == (401, path)
            async with there.post("/switch", headers=headers, json={"to": "nftables"}) as answer:
                assert answer.status == 404

    in_namespace(scenario)


def test_a_port_without_a_token_file_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        status, _, err = await command("run", "--state-bind-address=127.0.0.1:18250")
        assert status != 0
        assert "steersman.state.tokenFile: Required value: name a file with a token" in err

    in_namespace(scenario)


def test_a_change_is_traced(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = manifests(tmp_path / "world", *world())
        async with (
            otlp_receiver() as (received, url),
            running(tmp_path, folder, f"--tracing-endpoint={url}"),
        ):
            manifests(folder, *world("10.244.0.5", "10.244.0.6"))
            async with asyncio.timeout(SECONDS):
                while len(received.named("change")) < 2:
                    received.news.clear()
                    await received.news.wait()
            start, change = received.named("change")
            reasons = [
                each["value"]["stringValue"]
                for span in (start, change)
                for each in span["attributes"]
                if each["key"] == "steersman.reason"
            ]
            assert reasons == ["start", "changes"]
            parts = [
                each for each in received.spans if each.get("parentSpanId") == change["spanId"]
            ]
            assert {each["name"] for each in parts} >= {"queue", "plan", "render", "apply"}

    in_namespace(scenario)
