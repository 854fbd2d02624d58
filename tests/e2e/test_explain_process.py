"""`explain` asks a real process that watches an API server: pods by name, other nodes on demand."""

from __future__ import annotations

from pathlib import Path

import pytest

from steersman.host.peers import CONTROL
from tests.support.apiserver.server import ApiServer
from tests.support.builders import kube
from tests.support.builders.asked import DEMO, NODE_B
from tests.support.lab.namespace import in_namespace, sh
from tests.support.processes.steersman import command, steersman
from tests.support.waiting import until

pytestmark = pytest.mark.kernel

DATABASE = kube.service("db", "", type="ExternalName", externalName="db.example.net", ports=[])


async def listening() -> bool:
    return f"@{CONTROL}" in sh("ss -xl")


def test_a_process_that_watches_an_api_server_is_asked(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            ApiServer((*DEMO, DATABASE)) as server,
            steersman(
                tmp_path,
                "--proxy-mode=nftables",
                "--metrics-bind-address=",
                f"--master={server.url}",
            ) as process,
        ):
            await process.said("sync 1 (start)")
            await until(listening)
            status, out, err = await command("explain", "shop/web")
            assert (status, err) == (0, "")
            assert "10.244.2.13:8080   shop/web-3   node-b" in out
            # This process holds its own Node only; the other one is asked for now.
            before = len(server.requests("Node"))
            status, out, err = await command("explain", "--from=shop/web-1", f"--to={NODE_B}:30080")
            assert (status, err) == (0, "")
            assert "forwarded to one of 3 endpoints" in out.splitlines()[0]
            assert "  on node node-b:" in out.splitlines()
            assert len(server.requests("Node")) == before + 1
            status, out, _ = await command("explain", "db.shop")
            assert "ExternalName: cluster DNS answers with db.example.net" in out
            server.fault("status", kind="Node", verb="list", times=-1, status=403, message="no")
            status, out, _ = await command("explain", "--from=node", f"--to={NODE_B}:30080")
            assert status == 0
            assert "not all Nodes are known, so this may be incomplete: API server" in out

    in_namespace(scenario)
