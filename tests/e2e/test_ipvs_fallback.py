"""`--proxy-mode=ipvs` where the kernel has no ip_vs: iptables serves, and everybody is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_daemon import answers, command, get, manifests, rules, steersman, until, world
from tests.kernel.namespace import in_namespace

HAS_IPVS = Path("/proc/net/ip_vs").exists() or Path("/sys/module/ip_vs").exists()
pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(HAS_IPVS, reason="this kernel has ip_vs: nothing falls back"),
]


def test_iptables_serves(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "objects", *world())
        flags = ("--proxy-mode=ipvs", f"--manifests={folder}")
        async with steersman(tmp_path, *flags) as process:
            await process.said("mode ipvs cannot run here; iptables serves instead")
            await process.said("Using iptables Proxier")
            assert "modprobe ip_vs" in process.log

            async def programmed() -> bool:
                return "KUBE-SVC-" in rules()

            await until(programmed)
            await answers("/metrics")
            metrics = (await get("/metrics"))[1]
            assert 'steersman_mode_fallback{used="iptables",wanted="ipvs"} 1.0' in metrics

    in_namespace(body)


def test_strict_fails(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "objects", *world())
        status, _, said = await command(
            "run", "--proxy-mode=ipvs", "--strict", f"--manifests={folder}"
        )
        assert status != 0
        assert "ipvs mode cannot run here" in said
        assert "modprobe ip_vs" in said

    in_namespace(body)
