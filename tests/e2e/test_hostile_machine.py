"""A machine that is short of what the process needs, or takes it away in the middle."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.lab.namespace import in_namespace, sh
from tests.support.modes.iptables_rules import without_comments
from tests.support.processes.steersman import (
    answers,
    ended,
    get,
    manifests,
    rules,
    steersman,
    until,
    world,
)

pytestmark = pytest.mark.kernel


def mounted(script: str) -> tuple[str, ...]:
    """Run a command in a mount namespace of its own, changed by a script."""
    return ("unshare", "--mount", "sh", "-ec", f'{script}; exec "$@"', "")


def test_a_lock_that_is_held_for_ever_is_waited_for_and_named(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        lock = tmp_path / "xtables.lock"
        flags = (f"--manifests={folder}", "--iptables-variant=legacy", "--v=2")
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            through = mounted(f"mount --bind {lock} /run/xtables.lock")
            async with steersman(tmp_path, *flags, through=through) as proxy:
                said = f"the xtables lock /run/xtables.lock is held by pid {os.getpid()} "
                await proxy.said(said, 60.0)
                assert "Traceback" not in proxy.log
                assert (await get("/livez", 10256))[0] == 200
                assert (await get("/readyz", 10256))[0] == 503
                proxy.process.terminate()
                assert await ended(proxy) == 0
            async with steersman(tmp_path, *flags, name="next", through=through) as proxy:
                await proxy.said(said, 60.0)
                fcntl.flock(held, fcntl.LOCK_UN)
                await proxy.said("sync 1 (start)", 60.0)
                assert "10.244.0.5:" in sh("iptables-legacy-save -t nat")

    in_namespace(body)


def test_where_kernel_settings_are_read_only(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        read_only = "mount --bind /proc/sys /proc/sys; mount -o remount,bind,ro /proc/sys"
        through, name = mounted(read_only), "/proc/sys/net/netfilter/nf_conntrack_"
        hint = "Read-only file system; set it on the host, or mount /proc/sys writable"
        established = "--conntrack-tcp-timeout-established=86401s"
        flags: tuple[str, ...] = (f"--manifests={folder}", established)
        async with steersman(tmp_path, *flags, through=through) as proxy:
            assert await proxy.process.wait() == 1
            said = f"steersman: {name}tcp_timeout_established cannot be set to 86401: {hint}\n"
            assert proxy.log.endswith(said)
        flags = (
            *(f"--manifests={folder}", "--conntrack-tcp-timeout-established=0s"),
            "--conntrack-tcp-timeout-close-wait=0s",
        )
        async with steersman(tmp_path, *flags, name="next", through=through) as proxy:
            await proxy.said("sync 1 (start)")
            assert "no node ports on localhost: " in proxy.log
            assert hint in proxy.log

    in_namespace(body)


def test_a_log_on_a_full_disk_stops_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        disk = tmp_path / "disk"
        disk.mkdir()
        fill = f"mount -t tmpfs -o size=4k none {disk}; cat /dev/zero > {disk}/all 2>&- || true"
        through = mounted(f"{fill}; exec > {disk}/log 2>&1")
        async with steersman(tmp_path, f"--manifests={folder}", through=through) as proxy:
            await until(lambda: in_rules("10.244.0.5:"))
            manifests(folder, *world("10.244.0.6"))
            await until(lambda: in_rules("10.244.0.6:"))
            await answers("/livez", 10256)
            assert await proxy.stop() == 0

    in_namespace(body)


async def in_rules(text: str) -> bool:
    return text in rules()


def test_few_descriptors_are_kept_for_rules(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        through = ("prlimit", "--nofile=24:24")
        async with steersman(tmp_path, f"--manifests={folder}", through=through) as proxy:
            await until(lambda: in_rules("10.244.0.5:"))
            manifests(folder, *world("10.244.0.6"))
            await until(lambda: in_rules("10.244.0.6:"))
            assert await proxy.stop() == 0
            assert "Traceback" not in proxy.log

    in_namespace(body)


KILLED = """\
#!/bin/sh
# A program as it is, but at its first transaction it or its parent is killed (kill -9).
[ "$1" = --version ] && exec {real} "$@"
if [ -e {folder}/killed ]; then exec {real} "$@"; fi
touch {folder}/killed
{script}
"""
ITSELF_BEFORE, ITSELF_AFTER = "kill -9 $$", '{real} "$@"; kill -9 $$'
CALLER_BEFORE, CALLER_AFTER = 'kill -9 $PPID; exec {real} "$@"', '{real} "$@"; kill -9 $PPID'
NFT, LEGACY = "iptables-nft-restore", "iptables-legacy-restore"
DEATHS = [
    *[("nft", each) for each in (ITSELF_BEFORE, ITSELF_AFTER, CALLER_BEFORE, CALLER_AFTER)],
    *[(name, each) for name in (NFT, LEGACY) for each in (ITSELF_BEFORE, ITSELF_AFTER)],
]
"""For the daemon with iptables see test_iptables_process.py."""


@pytest.mark.parametrize(("program", "script"), DEATHS)
def test_killed_between_two_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, script: str
) -> None:
    """As for want of memory: before or after the kernel has the transaction."""
    real = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    programs = tmp_path / "bin"
    programs.mkdir()
    text = KILLED.format(real=real, folder=tmp_path, script=script.format(real=real))
    (programs / program).write_text(text)
    (programs / program).chmod(0o755)
    folder = manifests(tmp_path / "m", *world())
    variant = "legacy" if program == LEGACY else "nft"
    mode = "nftables" if program == "nft" else "iptables"
    words = (f"--proxy-mode={mode}", f"--iptables-variant={variant}", "--iptables-sync-period=1s")
    flags = (f"--manifests={folder}", *words)

    def everything() -> str:
        if mode == "nftables":
            return sh("nft list ruleset")
        return without_comments(sh(f"iptables-{variant}-save; ip6tables-{variant}-save"))

    fresh: list[str] = []

    async def undisturbed() -> None:
        async with steersman(tmp_path, *flags) as proxy:
            await proxy.said("sync 1 (start)")
            await proxy.stop()
        fresh.append(everything())

    async def killed() -> None:
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        async with steersman(tmp_path, *flags) as proxy:
            if "PPID" in script:
                assert await proxy.process.wait() == -signal.SIGKILL
                async with steersman(tmp_path, *flags, name="next") as second:
                    await second.said("sync 1 (start)")
                    await second.stop()
            else:
                await proxy.said("sync 1 (start)")
                assert f"{program} was killed by SIGKILL" in proxy.log
                assert "Traceback" not in proxy.log
                await proxy.stop()
        assert [everything()] == fresh

    in_namespace(undisturbed)
    in_namespace(killed)
