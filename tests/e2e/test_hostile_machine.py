"""A machine that is short of what the process needs, or takes it away in the middle."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
from collections.abc import Callable, Sequence
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
    world,
)
from tests.support.waiting import until

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


def flags_for(program: str, tmp_path: Path) -> tuple[str, ...]:
    """A world, and the mode that writes with a program."""
    folder = manifests(tmp_path / "m", *world())
    variant = "legacy" if program == LEGACY else "nft"
    mode = "nftables" if program == "nft" else "iptables"
    words = (f"--proxy-mode={mode}", f"--iptables-variant={variant}", "--iptables-sync-period=1s")
    return (f"--manifests={folder}", *words)


def everything(program: str) -> str:
    if program == "nft":
        return sh("nft list ruleset")
    variant = "legacy" if program == LEGACY else "nft"
    return without_comments(sh(f"iptables-{variant}-save; ip6tables-{variant}-save"))


def put_first(
    program: str, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], None]:
    """Make a program that does what KILLED says; return what puts it before the real one."""
    real = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    programs = tmp_path / "bin"
    programs.mkdir()
    text = KILLED.format(real=real, folder=tmp_path, script=script.format(real=real))
    (programs / program).write_text(text)
    (programs / program).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    return lambda: monkeypatch.setenv("PATH", path)


async def undisturbed(tmp_path: Path, flags: Sequence[str], name: str) -> None:
    async with steersman(tmp_path, *flags, name=name) as proxy:
        await proxy.said("sync 1 (start)")
        await proxy.stop()


def after_a_fresh_start(tmp_path: Path, flags: Sequence[str], program: str) -> str:
    """Return what a program prints after the process has started on an empty node."""
    printed: list[str] = []

    async def start() -> None:
        await undisturbed(tmp_path, flags, "first")
        printed.append(everything(program))

    in_namespace(start)
    return printed[0]


@pytest.mark.parametrize(("program", "script"), DEATHS)
def test_killed_between_two_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, script: str
) -> None:
    """As for want of memory: before or after the kernel has the transaction."""
    kill = put_first(program, script, tmp_path, monkeypatch)
    flags = flags_for(program, tmp_path)
    fresh = after_a_fresh_start(tmp_path, flags, program)

    async def killed() -> None:
        kill()
        async with steersman(tmp_path, *flags) as proxy:
            if "PPID" in script:
                assert await proxy.process.wait() == -signal.SIGKILL
                await undisturbed(tmp_path, flags, "next")
            else:
                await proxy.said("sync 1 (start)")
                assert f"{program} was killed by SIGKILL" in proxy.log
                assert "Traceback" not in proxy.log
                await proxy.stop()
        assert everything(program) == fresh

    in_namespace(killed)


NO_MEMORY = """\
# The kernel kills the caller first, which has --oom-score-adj=1000. Then there is enough for the
# rest; if the caller's memory is free too late, the kernel kills one of these programs, too.
echo 0 > /proc/$$/oom_score_adj
dd if=/dev/zero of=/dev/null bs=140M count=1 status=none
exec {real} "$@"
"""
LIMIT = 160 << 20
"""Bytes: less than the process and NO_MEMORY take together, more than either."""


class LittleMemory:
    """A cgroup below our own with a limit of memory; of version 2, where version 1 has none."""

    def __init__(self) -> None:
        name, first = f"sm-{os.getpid()}", Path("/sys/fs/cgroup/memory")
        if first.is_dir():
            lines = Path("/proc/self/cgroup").read_text().splitlines()
            own = next(line for line in lines if ":memory:" in line).rpartition(":")[2]
            self._place, limit = first / own.lstrip("/") / name, "memory.limit_in_bytes"
            self._events = self._place / "memory.oom_control"
        else:
            self._place, limit = Path("/sys/fs/cgroup", name), "memory.max"
            self._events = self._place / "memory.events"
        try:
            self._place.mkdir()
            (self._place / limit).write_text(str(LIMIT))
        except OSError as error:
            if self._place.exists():
                self._place.rmdir()
            pytest.skip(f"memory cannot be limited here: {error}")
        self.through = ("sh", "-ec", f'echo $$ > {self._place}/cgroup.procs; exec "$@"', "")
        """What starts a command in it."""

    @property
    def kills(self) -> int:
        """How many processes the kernel has killed for the limit."""
        words = self._events.read_text().split()
        return int(words[words.index("oom_kill") + 1])

    async def remove(self) -> None:
        """Remove it when the last program in it has ended."""

        async def is_empty() -> bool:
            return not (self._place / "cgroup.procs").read_text()

        await until(is_empty)
        self._place.rmdir()


@pytest.mark.parametrize("program", ["nft", NFT, LEGACY])
def test_killed_by_the_kernel_for_want_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """While a program writes for it, which mostly goes on."""
    kill = put_first(program, NO_MEMORY, tmp_path, monkeypatch)
    flags = flags_for(program, tmp_path)
    fresh = after_a_fresh_start(tmp_path, flags, program)

    async def killed() -> None:
        kill()
        memory = LittleMemory()
        likely = "--oom-score-adj=1000"
        try:
            async with steersman(tmp_path, *flags, likely, through=memory.through) as proxy:
                async with asyncio.timeout(60):
                    assert await proxy.process.wait() == -signal.SIGKILL, proxy.log
            assert memory.kills, "nobody else has killed it"
        finally:
            await memory.remove()
        await undisturbed(tmp_path, flags, "next")
        assert everything(program) == fresh

    in_namespace(killed)
