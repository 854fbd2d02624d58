"""The whole process in the ipvs mode, and the state after another mode takes over."""

from __future__ import annotations

from pathlib import Path

from tests.support.lab.namespace import in_namespace, sh
from tests.support.processes.steersman import FLAGS, command, get, manifests, steersman, world
from tests.support.waiting import until
from tests.vm.guest.ipvs import only_with_all

SECONDS = 300.0
"""In an emulated machine Python alone takes many."""


def table() -> str:
    return sh("cat /proc/thread-self/net/ip_vs")


def test_from_start_to_the_next_mode(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "objects", *world())
        flags = (f"--manifests={folder}", "--iptables-sync-period=1s")
        async with steersman(tmp_path, "--proxy-mode=ipvs", *flags) as process:
            await process.said("Using ipvs Proxier", SECONDS)
            await process.said("sync 1 (start)", SECONDS)
            assert "-> 0AF40005:" in table()
            manifests(folder, *world("10.244.0.6"))

            async def changed() -> bool:
                return "-> 0AF40006:" in table()

            await until(changed, SECONDS)
            metrics = (await get("/metrics/services"))[1]
            for name in (
                "connections",
                "frontend_connections",
                "proxied_bytes",
                "frontend_packets",
            ):
                assert f"\nsteersman_{name}_total{{" in metrics
            assert 'endpoint="10.244.0.6:' in metrics
            assert await process.stop() == 0
        assert "-> 0AF40006:" in table()  # the data path outlives the process
        async with steersman(tmp_path, *flags, name="second") as process:
            await process.said("ipvs mode: removed", SECONDS)
            assert "->" not in table().partition("RemoteAddress")[2]
            assert "kube-ipvs0" not in sh("ip link")
            assert "KUBE-SVC-" in sh("iptables-save")

    in_namespace(body)


@only_with_all
def test_clean_up(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "objects", *world())
        status, _, said = await command("run", "--init-only", "--proxy-mode=ipvs", *FLAGS)
        assert status == 0, said
        assert sh("cat /proc/sys/net/ipv4/vs/conntrack") == "1\n"
        assert "KUBE-IPVS" not in sh("ipset save; iptables-save")
        async with steersman(tmp_path, "--proxy-mode=ipvs", f"--manifests={folder}") as process:
            await process.said("sync 1 (start)", SECONDS)
        status, out, _ = await command("cleanup")
        assert (status, "ipvs: " in out) == (0, True)
        assert "->" not in table().partition("RemoteAddress")[2]
        assert "KUBE-IPVS" not in sh("ipset save; iptables-save; ip link")

    in_namespace(body)
