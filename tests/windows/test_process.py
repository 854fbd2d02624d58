"""The process on Windows' Python: it serves manifests, follows changes and ends in order."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from tests.support.builders import kube
from tests.support.lab.namespace import sh
from tests.support.modes.userspace_proxy import answering, ask, endpoint
from tests.support.processes.steersman import get, manifests
from tests.support.waiting import PATIENCE, until
from tests.windows.node import CONTROLLED, HOST, OTHER, VIP, Node, on_a_node, world

pytestmark = [pytest.mark.kernel, pytest.mark.slow(seconds=40)]


def test_it_serves_follows_changes_and_ends_in_order(tmp_path: Path) -> None:
    async def body(node: Node) -> None:
        async with endpoint(answering(b"1"), HOST) as one, endpoint(answering(b"2"), HOST) as two:
            folder = manifests(node.folder / "manifests", *world(one))
            node.netsh.refusals.append("The object is in use.")
            async with node.steersman() as process:
                await process.said("kernel objects")
                assert not node.netsh.refusals, "it was tried again"
                assert await ask(80, b"!", VIP) == b"1!"
                manifests(folder, *world(two, OTHER))
                await until(lambda: node.service_addresses() == {OTHER})
                assert await ask(80, b"!", OTHER) == b"2!"
                assert (await get("/healthz", 10256))[0] == 200
                page = (await get("/metrics"))[1]
                used = float(page.partition("\nprocess_resident_memory_bytes ")[2].split()[0])
                assert 10e6 < used < 1e9
                async with asyncio.timeout(PATIENCE):  # the sync may not have ended yet
                    counted = f'endpoint="{two}"'
                    while counted not in (await get("/metrics/services"))[1]:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                async with node.steersman() as second:
                    assert await second.ended() == 1
                    assert "another instance runs on this machine" in second.log
                process.process.send_signal(signal.SIGINT)  # Wine makes it Ctrl-C
                assert await process.ended() == 0, process.log
            assert node.service_addresses() == set()
            assert "Traceback" not in process.log

    on_a_node(tmp_path, body)


def test_ctrl_break_ends_it_in_order(tmp_path: Path) -> None:
    async def body(node: Node) -> None:
        async with endpoint(answering(b"1"), HOST) as one:
            manifests(node.folder / "manifests", *world(one))
            async with node.steersman(program=CONTROLLED) as process:
                await process.said("kernel objects")
                assert node.service_addresses() == {VIP}
                process.tell("break")
                assert await process.ended() == 0, process.log
            assert node.service_addresses() == set()

    on_a_node(tmp_path, body)


def test_addresses_that_a_kill_left_are_removed(tmp_path: Path) -> None:
    async def body(node: Node) -> None:
        async with endpoint(answering(b"1"), HOST) as one:
            folder = manifests(node.folder / "manifests", *world(one))
            async with node.steersman() as process:
                await process.said("kernel objects")
                await process.kill()
            assert node.service_addresses() == {VIP}
            # The next start removes what no Service has any more.
            manifests(folder, *world(one, OTHER))
            async with node.steersman() as process:
                await process.said("kernel objects")
                assert node.service_addresses() == {OTHER}
                assert await ask(80, b"!", OTHER) == b"1!"
                await process.kill()
            assert node.service_addresses() == {OTHER}
            # Added by somebody else: it stays.
            sh("ip address add 10.96.0.99/32 dev hns0")
            results = await node.commands("cleanup --dry-run", "cleanup", "cleanup --dry-run")
            assert [status for status, _ in results] == [1, 0, 0], results
            assert node.service_addresses() == {"10.96.0.99"}

    on_a_node(tmp_path, body)


def test_two_thousand_addresses_need_few_processes(tmp_path: Path) -> None:
    async def body(node: Node) -> None:
        async with endpoint(answering(b"1"), HOST) as one:
            wanted = {f"10.97.{number >> 8}.{number & 255}" for number in range(2000)}
            port = [{"name": "http", "port": 80}]
            others = (
                kube.service(f"s-{address.replace('.', '-')}", address, ports=port)
                for address in wanted
            )
            manifests(node.folder / "manifests", *world(one), *others)
            async with node.steersman() as process:
                await process.said("kernel objects", limit=300)
                assert node.service_addresses() == {VIP, *wanted}
                assert await ask(80, b"!", VIP) == b"1!"
                process.process.send_signal(signal.SIGINT)
                assert await process.ended(minutes=5) == 0, process.log
            assert node.service_addresses() == set()
            assert node.netsh.processes < 40

    on_a_node(tmp_path, body)


def test_commands_ask_the_process(tmp_path: Path) -> None:
    async def body(node: Node) -> None:
        async with endpoint(answering(b"1"), HOST) as one:
            silent = kube.endpoint_slice("bad-1", "bad", HOST, ports=[{"name": "http", "port": 9}])
            bad = kube.service("bad", OTHER, ports=[{"name": "http", "port": 80}])
            manifests(node.folder / "manifests", *world(one), bad, silent)
            ((status, said),) = await node.commands("doctor")
            assert (status, "no steersman runs" in said) == (2, True), said
            async with node.steersman() as process:
                await process.said("kernel objects")
                expected = {
                    "status": "winuserspace",
                    "services": VIP,
                    "endpoints": str(one.port),
                    "explain shop/web": str(one),
                    "problems": "no problems",
                }
                doctor = ("doctor shop/web --output=json", "doctor shop/bad")
                *answers, (_, good), (exit_status, said) = await node.commands(*expected, *doctor)
                for (words, part), (status, text) in zip(expected.items(), answers, strict=True):
                    assert (status, part in text) == (0, True), (words, status, text)
                found = {each["check"]: each["verdict"] for each in json.loads(good)["results"]}
                checks = ("endpoints-from-node", "tries", "process", "rules")
                assert [found[name] for name in checks] == ["ok", "ok", "ok", "skipped"], good
                assert (exit_status, "refused" in said) == (1, True), said
            # Wine makes the rights of administrators those of the group.
            private = node.drive / "Program Files/steersman/private"
            assert private.stat().st_mode & 0o007 == 0

    on_a_node(tmp_path, body)
