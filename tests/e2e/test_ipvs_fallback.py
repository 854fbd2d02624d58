"""`--proxy-mode=ipvs` without ip_vs in the kernel: iptables serves, and events and logs say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.apiserver.server import ApiServer
from tests.support.builders import kube
from tests.support.lab.namespace import in_namespace, sh
from tests.support.processes.steersman import (
    FLAGS,
    HAS_IPVS,
    NODE,
    answers,
    command,
    get,
    manifests,
    rules,
    steersman,
    world,
)
from tests.support.waiting import until

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(HAS_IPVS, reason="this kernel has ip_vs: nothing falls back"),
]
WANTED = "mode ipvs cannot run here; iptables serves instead"


def test_iptables_serves(tmp_path: Path) -> None:
    async def body() -> None:
        node = kube.node(NODE, "192.0.2.1")
        async with ApiServer([*world(), node]) as server:  # noqa: SIM117 - the flag needs its URL
            async with steersman(
                tmp_path, "--proxy-mode=ipvs", f"--master={server.url}"
            ) as process:
                await process.said(WANTED)
                await process.said("Using iptables Proxier")
                assert "modprobe ip_vs" in process.log

                async def programmed() -> bool:
                    return "KUBE-SVC-" in rules()

                await until(programmed)
                await answers("/metrics")
                metrics = (await get("/metrics"))[1]
                assert 'steersman_mode_fallback{used="iptables",wanted="ipvs"} 1.0' in metrics
                assert WANTED in (await get("/state"))[1]  # as a Finding

                async def told() -> bool:
                    return any(event["reason"] == "ModeFallback" for event in server.events)

                await until(told)
                (event,) = [e for e in server.events if e["reason"] == "ModeFallback"]
                assert (event["type"], event["regarding"]["kind"]) == ("Warning", "Node")
                assert WANTED in event["note"]

    in_namespace(body)


def test_strict_fails_and_initializing_does_not(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "objects", *world())
        status, _, said = await command(
            "run", "--proxy-mode=ipvs", "--strict", f"--manifests={folder}"
        )
        assert status != 0
        assert "ipvs mode cannot run here" in said
        assert "modprobe ip_vs" in said
        status, _, said = await command("run", "--init-only", "--proxy-mode=ipvs", *FLAGS)
        assert (status, WANTED in said) == (0, True)
        assert sh("cat /proc/sys/net/ipv4/conf/all/route_localnet") == "1\n"  # iptables' own

    in_namespace(body)
