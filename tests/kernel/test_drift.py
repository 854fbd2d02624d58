"""Other programs that change the rules of a running process: found, named, repaired, told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lab.namespace import in_namespace, sh
from tests.support.processes.steersman import (
    Process,
    answers,
    command,
    get,
    manifests,
    steersman,
    world,
)
from tests.support.waiting import until

pytestmark = pytest.mark.kernel
PATIENCE = 60.0


async def metric(name: str) -> float:
    _, text, _ = await get("/metrics")
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


async def repaired(process: Process, times: int) -> None:
    async def does() -> bool:
        return await metric("steersman_drift_repairs_total") >= times

    try:
        await until(does, PATIENCE)
    except TimeoutError as error:
        raise AssertionError(process.log) from error


async def started(process: Process) -> None:
    await process.said("(start)", PATIENCE)
    await answers("/metrics")


def test_nft_that_deletes_an_element_is_named_with_its_parent_at_once(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "objects", *world())
        flags = (f"--manifests={folder}", "--proxy-mode=nftables")
        async with steersman(tmp_path, *flags) as process:
            await started(process)
            # of another table: none of our business
            sh("nft 'add table ip other; delete table ip other'")
            # the tool goes on for a while, as a program that does more than this
            script = "delete element ip kube-proxy cluster-ips { 10.96.0.1 }"
            sh(f"(echo '{script}'; sleep 0.5) | nft -i >/dev/null")
            await repaired(process, 1)
            assert "10.96.0.1" in sh("nft list set ip kube-proxy cluster-ips")
            (line,) = [each for each in process.log.splitlines() if "drift: " in each]
            assert "changed by nft (pid " in line
            assert ": repaired" in line

    in_namespace(body)


def test_a_flush_in_nftables_mode_is_repaired_and_counted(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "objects", *world())
        flags = (f"--manifests={folder}", "--proxy-mode=nftables")
        async with steersman(tmp_path, *flags) as process:
            await started(process)
            before = await metric("steersman_kernel_objects")
            sh("nft flush ruleset")
            await repaired(process, 1)
            assert await metric("steersman_drift_objects_total") > before / 2
            assert "changed by nft (pid " in process.log

    in_namespace(body)


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_a_program_that_rewrites_the_chains_again_and_again_becomes_a_finding(
    tmp_path: Path, variant: str
) -> None:
    """As an upstream kube-proxy would: it knows nothing of us, and restores its own chains."""

    async def body() -> None:
        folder = manifests(tmp_path / "objects", *world())
        flags = (f"--manifests={folder}", "--iptables-sync-period=1s")
        sh(f"iptables-{variant} -t mangle -N KUBE-IPTABLES-HINT")  # the variant of this machine
        async with steersman(tmp_path, *flags) as process:
            await started(process)
            foreign = "*nat\n:KUBE-SERVICES - [0:0]\nCOMMIT\n"
            for number in (1, 2, 3):
                sh(f"printf '{foreign}' | iptables-{variant}-restore --noflush")
                await repaired(process, number)
            await process.said("another program rewrites our rules", PATIENCE)
            lines = [each for each in process.log.splitlines() if "drift: " in each]
            assert len(lines) == 1  # the others follow within a minute
            # The legacy variant of the kernel announces nothing.
            who = "an unknown program" if variant == "legacy" else "iptables-nft-re (pid "
            assert f"changed by {who}" in lines[0]
            assert "web" in sh(f"iptables-{variant}-save -t nat")
            assert "2 kernel objects (2 missing)" in lines[0]

    in_namespace(body)


def test_drift_asks_the_running_process_and_shows_who_did_it(tmp_path: Path) -> None:
    async def body() -> None:
        assert (await command("drift"))[0] == 2  # nobody runs here
        folder = manifests(tmp_path / "objects", *world())
        flags = (f"--manifests={folder}", "--iptables-sync-period=1h")
        async with steersman(tmp_path, *flags) as process:
            await started(process)
            code, out, _ = await command("drift")
            assert code == 0
            assert "as the process wrote them" in out
            sh("iptables -t nat -F KUBE-POSTROUTING")
            code, out, _ = await command("drift")
            assert code == 1, out
            assert "1 kernel object (1 changed) differ from what the process wrote" in out
            assert "-j MASQUERADE" in out
            assert (await command("drift"))[0] == 1  # asking repairs nothing

    in_namespace(body)
