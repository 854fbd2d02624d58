"""`steersman status` of real processes: well, waiting, in trouble, stopped; and lists of one."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.apiserver.reading import slice_
from tests.support.apiserver.server import ApiServer
from tests.support.builders import kube
from tests.support.lab.namespace import in_namespace, sh
from tests.support.processes.steersman import NODE, command, manifests, steersman, world
from tests.support.waiting import until

pytestmark = pytest.mark.kernel
PATIENCE = 60.0


async def asked(*words: str) -> tuple[int, dict[str, dict[str, Any]], dict[str, Any]]:
    """The exit status, the conditions by type, and the whole answer."""
    status, out, err = await command("status", "-o", "json", *words)
    assert out, err
    document = json.loads(out)
    return status, {each["type"]: each for each in document["conditions"]}, document


def test_waiting_for_a_process_that_is_well(tmp_path: Path) -> None:
    async def body() -> None:
        status, conditions, _ = await asked()
        assert (status, conditions["Running"]["reason"]) == (1, "NotRunning")
        waiting = asyncio.create_task(asked("--wait", "--timeout=60s"))
        folder = manifests(tmp_path / "objects", *world())
        flags = ("--proxy-mode=nftables", f"--manifests={folder}")
        async with steersman(tmp_path, *flags):
            status, conditions, document = await waiting
            assert status == 0
            assert {each["status"] for each in conditions.values()} == {"True"}
            assert len(conditions) == 6
            assert (document["mode"], document["node"], document["services"]) == (
                "nftables",
                NODE,
                1,
            )
            status, out, _ = await command("status")
            assert status == 0
            assert "1 Services, 1 EndpointSlices, 1 ServicePorts" in out

    in_namespace(body)


def test_errors_are_bad_news_and_waiting_for_them_ends(tmp_path: Path) -> None:
    async def body() -> None:
        broken = kube.service("broken", "10.96.0.1")  # the address of shop/web
        folder = manifests(tmp_path / "objects", *world(), broken)
        flags = ("--proxy-mode=nftables", f"--manifests={folder}")
        async with steersman(tmp_path, *flags) as process:
            await process.said("(start)", PATIENCE)
            status, conditions, _ = await asked("--wait", "--timeout=1s")
            assert status == 1
            assert conditions["NoFindings"]["reason"] == "Errors"
            assert "10.96.0.1" in conditions["NoFindings"]["message"]
            assert {t for t, each in conditions.items() if each["status"] != "True"} == {
                "NoFindings"
            }

    in_namespace(body)


def test_a_process_that_waits_for_its_node_says_so(tmp_path: Path) -> None:
    async def body() -> None:
        objects = [kube.service("web", "10.96.0.1"), slice_("web-1", "web", "10.244.0.5")]
        async with ApiServer(objects) as server:
            flags = ("--proxy-mode=nftables", f"--master={server.url}")
            async with steersman(tmp_path, *flags):

                async def waits() -> bool:
                    _, conditions, _ = await asked()
                    synced = conditions.get("Synced", {})
                    return f'waiting for node "{NODE}" to exist' in synced.get("message", "")

                await until(waits, PATIENCE)
                server.add(kube.node(NODE, "192.0.2.7"))
                status, conditions, document = await asked("--wait", "--timeout=60s")
                assert (status, document["waiting"]) == (0, "")
                assert server.url in conditions["SourceConnected"]["message"]

    in_namespace(body)


@pytest.mark.parametrize("listing", ["services", "endpoints"])
def test_lists_of_an_api_server_name_pods_and_say_where_from(listing: str) -> None:
    async def body() -> None:
        entry = {
            "addresses": ["10.244.0.5"],
            "nodeName": NODE,
            "targetRef": {"kind": "Pod", "name": "web-7d4b9"},
        }
        ends = kube.endpoint_slice("web-1", "web", entry)
        pods = kube.service("pods", "None")
        async with ApiServer([kube.service("web", "10.96.0.1"), pods, ends]) as server:
            where = (f"--master={server.url}", f"--hostname-override={NODE}")
            status, out, err = await command(listing, *where, "--pod=shop/web-7d4b9")
            assert status == 0, err
            assert "shop/web " in out
            assert f"from the API server {server.url}" in out
            assert ("shop/web-7d4b9" in out) == (listing == "endpoints")
            assert (await command(listing, *where, "--pod=shop/nobody"))[0] == 1
            if listing == "services":
                _, out, _ = await command(listing, *where, "shop/pods")
                assert "headless" in out

    in_namespace(body)


def test_an_unreachable_api_server_is_named(tmp_path: Path) -> None:
    async def body() -> None:
        url = "http://127.0.0.1:1"
        flags = ("--proxy-mode=nftables", f"--master={url}")
        async with steersman(tmp_path, *flags):

            async def tells() -> bool:
                _, conditions, _ = await asked()
                source = conditions.get("SourceConnected", {})
                return source.get("reason") == "NotConnected" and url in source["message"]

            await until(tells, PATIENCE)
            status, conditions, _ = await asked()
            assert status == 1
            assert url in conditions["Synced"]["message"]

    in_namespace(body)


def test_a_refused_sync_fails_conditions_until_it_succeeds(tmp_path: Path) -> None:
    """Without its tool the process cannot repair; its rules are gone meanwhile."""

    async def body() -> None:
        folder = manifests(tmp_path / "objects", *world())
        flags = ("--proxy-mode=nftables", f"--manifests={folder}")
        # nft of the test: it can be taken away
        tools = tmp_path / "bin"
        sh(f"mkdir {tools} && cp $(command -v nft) {tools}/nft")
        hide = ("env", f"PATH={tools}:/usr/bin:/bin")
        async with steersman(tmp_path, *flags, through=hide) as process:
            await process.said("(start)", PATIENCE)
            dying = "#!/bin/sh\\nkill -9 $$\\n"
            sh(f"printf '{dying}' > {tools}/no; chmod +x {tools}/no; mv {tools}/no {tools}/nft")
            sh("nft delete table ip kube-proxy")

            async def fails() -> bool:
                _, conditions, _ = await asked()
                return bool(conditions["Synced"]["status"] == "False")

            await until(fails, PATIENCE)
            _, conditions, _ = await asked()
            assert conditions["KernelMatches"]["status"] != "True"
            sh(f"cp $(command -v nft) {tools}/nft.ok; mv {tools}/nft.ok {tools}/nft")
            status, conditions, _ = await asked("--wait", "--timeout=60s")
            assert status == 0, conditions

    in_namespace(body)


def test_a_stopped_process_is_told_from_none(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "objects", *world())
        flags = ("--proxy-mode=nftables", f"--manifests={folder}")
        async with steersman(tmp_path, *flags) as process:
            await process.said("(start)", PATIENCE)
            await asked("--wait", "--timeout=60s")
            process.process.send_signal(signal.SIGSTOP)
            status, conditions, _ = await asked()
            assert (status, conditions["Running"]["reason"]) == (1, "Unreachable")
            assert f"pid {process.process.pid} " in conditions["Running"]["message"]
            process.process.send_signal(signal.SIGCONT)

    in_namespace(body)


@pytest.mark.parametrize("mode", ["iptables", "nftables", "userspace"])
def test_a_running_process_lists_what_it_serves(tmp_path: Path, mode: str) -> None:
    """By its socket, with the connections of modes that count them."""

    async def body() -> None:
        sh("ip address add 192.0.2.7/32 dev lo; ip address add 10.244.0.5/32 dev lo")
        sh("ip route add 10.96.0.0/12 dev lo")
        server = await asyncio.start_server(lambda _, w: w.close(), "10.244.0.5", 8080)
        folder = manifests(tmp_path / "objects", *world())
        flags = (f"--proxy-mode={mode}", f"--manifests={folder}")
        async with server, steersman(tmp_path, *flags) as process:
            await process.said("(start)", PATIENCE)
            for _ in range(3):
                reader, writer = await asyncio.open_connection("10.96.0.1", 80)
                assert await reader.read() == b""
                writer.close()

            async def listed(*words: str) -> dict[str, Any]:
                status, out, err = await command(*words, "shop/web", "-o", "json")
                assert status == 0, err
                found: dict[str, Any] = json.loads(out)
                assert "the running process" in found["source"]
                return found

            (port,) = (await listed("services"))["ports"]
            assert port["frontends"][0]["address"] == "10.96.0.1"
            assert port["objects"]
            (end,) = (await listed("endpoints"))["ports"][0]["endpoints"]
            assert (end["address"], end["used"]) == ("10.244.0.5:8080", True)
            if mode == "iptables":
                _, out, _ = await command("services", "--rates")
                assert "the iptables mode does not count connections" in out
            else:
                assert end["counts"]["connections"] == 3
                rated = await listed("endpoints", "--rates")
                assert rated["ports"][0]["endpoints"][0]["counts"]["rate"] == 0.0

    in_namespace(body)
