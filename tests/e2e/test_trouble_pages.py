"""The pages of problems, of the last hour and of plans about a real process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.lab.namespace import in_namespace, sh
from tests.support.processes.steersman import manifests, steersman, world
from tests.support.reader import reading

pytestmark = [pytest.mark.kernel, pytest.mark.slow]
POD = "10.244.0.5"
NEW = """
apiVersion: v1
kind: Service
metadata: {name: new, namespace: shop}
spec: {clusterIP: 10.96.0.77, ports: [{port: 80, protocol: TCP}]}
"""


def texts(found: dict[str, Any]) -> str:
    return "\n".join(f"{each['object']} {each['text']}" for each in found["problems"])


def test_a_process_in_trouble(tmp_path: Path) -> None:
    async def scenario() -> None:
        sh("ip link add eth0 type bridge && ip link set eth0 up")
        sh("ip addr add 192.0.2.1/24 dev eth0")
        sh("ip route add default dev eth0")
        folder = manifests(tmp_path / "world", *world(POD))
        arguments = (
            "--proxy-mode=nftables",
            f"--manifests={folder}",
            "--cluster-cidr=10.244.0.0/16",
        )
        async with steersman(tmp_path, *arguments) as process:
            await process.said("sync 1 (start)")
            async with reading() as reader:
                found = await reader.until("/time", lambda got: got["syncs"] >= 1)
                assert found["node"] == "node-a"
                assert found["rows"][-1]["record"]["reason"] == "start"
                assert "plan" in {each["label"] for each in found["phases"]["series"]}
                # What a change would do; then it is made, and seen in the timeline.
                before = sh("nft list ruleset")
                planned = await reader.send("/plan", text=NEW, lines="1")
                (result,) = planned["results"]
                assert result["nodes"] == ["node-a"]
                assert result["problem"] == ""
                assert {"shop/new"} == {
                    name for each in result["plan"]["treatments"] for name in each["services"]
                }
                assert any("10.96.0.77" in line for line in result["plan"]["details"])
                assert sh("nft list ruleset") == before
                (folder / "new.yaml").write_text(NEW)
                found = await reader.until("/time", lambda got: "shop/new" in str(got["rows"]))
                assert "10.96.0.77" in sh("nft list ruleset")
                again = await reader.send("/plan", text=NEW)
                assert again["results"][0]["plan"]["treatments"] == []
                # A bad field, and another program that removes rules.
                (folder / "new.yaml").write_text(NEW.replace("port: 80", "port: 70000"))
                await reader.until("/problems", lambda got: "70000 must be" in texts(got))
                sh("nft delete table ip kube-proxy")
                found = await reader.until("/problems", lambda got: "changed by nft" in texts(got))
                await reader.until("/time?only=drift", lambda got: got["matching"] >= 1)
                # Doctor with one click; its results are listed with the others.
                found = await reader.send("/problems/doctor", node="node-a")
                assert "doctor" in {each["kind"] for each in found["problems"]}
                await process.stop()
                await reader.until("/problems", lambda got: "cannot be reached" in texts(got))

    in_namespace(scenario)
