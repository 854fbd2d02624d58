"""`steersman cleanup` tells the truth: what it could not look at or remove, and exit status 1."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from steersman.host.exec import SubprocessExec
from steersman.run.process.mode_transition import other_modes, remove_leftovers_once
from tests.support.lab.namespace import in_namespace, sh
from tests.support.processes.steersman import NOBODY, manifests, rules, steersman, world

pytestmark = pytest.mark.kernel
PROGRAMS = ("iptables", "iptables-nft", "iptables-legacy", "nft", "ip6tables")


async def cleanup(*through: str, words: Sequence[str] = ("cleanup",)) -> tuple[int, str, str]:
    argv = [*through, sys.executable, "-m", "steersman", *words]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    assert b"Traceback" not in err, err.decode()
    return process.returncode or 0, out.decode(), err.decode()


async def written(tmp_path: Path, *flags: str) -> None:
    """Have rules in the kernel that a process has left there."""
    folder = manifests(tmp_path / "m", *world())
    async with steersman(tmp_path, f"--manifests={folder}", *flags) as proxy:
        await proxy.said("sync 1 (start)")
        await proxy.stop()


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("nftables", "cleanup --dry-run"),
        ("nftables", "run --cleanup --dry-run"),
        ("iptables", "cleanup --dry-run"),
    ],
)
def test_a_dry_run_lists_the_objects_and_removes_none(
    tmp_path: Path, mode: str, words: str
) -> None:
    async def body() -> None:
        await written(tmp_path, f"--proxy-mode={mode}")
        before = sh("nft list ruleset")
        assert "KUBE-SVC" in before or mode != "iptables"
        status, out, err = await cleanup(words=words.split())
        assert (status, err) == (1, "")
        assert f"# {mode} mode" in out
        assert f"{mode}: " in out
        assert "kernel objects would be removed" in out
        assert sh("nft list ruleset") == before
        await cleanup()
        assert await cleanup(words=words.split()) == (0, "nothing would be removed\n", "")

    in_namespace(body)


def hidden(then: str = "") -> Sequence[str]:
    """Run a command where no program of /usr/sbin is to be found."""
    return (
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'mount -t tmpfs none /usr/sbin; {then} exec "$@"',
        "",
    )


def test_nothing_is_left_and_that_is_the_answer_even_without_programs(tmp_path: Path) -> None:
    async def body() -> None:
        await written(tmp_path, "--proxy-mode=nftables")
        status, out, err = await cleanup(*hidden())
        assert (status, err) == (0, "")
        assert "nftables: 0" not in out
        assert sh("nft list tables") == ""
        status, out, err = await cleanup(*hidden())
        assert (status, err) == (0, "")
        assert "nftables: 0 kernel objects removed" in out

    in_namespace(body)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("", "iptables-nft is not installed; install the package iptables."),
        (
            " ".join(f"echo > /usr/sbin/{name};" for name in PROGRAMS),
            "iptables-nft cannot be executed: Permission denied.",
        ),
    ],
    ids=["missing", "not executable"],
)
def test_rules_that_cannot_be_removed_are_named(tmp_path: Path, how: str, why: str) -> None:
    async def body() -> None:
        await written(tmp_path, "--proxy-mode=iptables", "--iptables-variant=nft")
        before = rules()
        status, _, err = await cleanup(*hidden(how))
        assert status == 1
        assert "not removed: iptables mode (nft): chains are left: " in err
        assert why in err
        assert rules() == before
        status, _, err = await cleanup()
        assert (status, err) == (0, "")
        assert "KUBE-SVC" not in rules()

    in_namespace(body)


def test_tables_that_only_iptables_legacy_can_list_are_named(tmp_path: Path) -> None:
    async def body() -> None:
        await written(tmp_path, "--proxy-mode=iptables", "--iptables-variant=legacy")
        status, _, err = await cleanup(*hidden())
        assert status == 1
        assert "iptables mode (legacy): rules may be left in the tables filter, mangle, nat" in err
        status, _, err = await cleanup()
        assert (status, err) == (0, "")
        assert "KUBE-SVC" not in sh("iptables-legacy-save")

    in_namespace(body)


def test_who_may_not_look_is_told_what_is_missing(tmp_path: Path) -> None:
    async def body() -> None:
        await written(tmp_path, "--proxy-mode=iptables", "--iptables-variant=nft")
        status, _, err = await cleanup(*NOBODY)
        assert status == 1
        assert "iptables mode (nft): looking for chains needs root or CAP_NET_ADMIN" in err
        assert "nftables mode: looking for tables needs root or CAP_NET_ADMIN" in err

    in_namespace(body)


def test_a_lock_that_is_held_is_named(tmp_path: Path) -> None:
    async def body() -> None:
        await written(tmp_path, "--proxy-mode=iptables", "--iptables-variant=legacy")
        own = tmp_path / "xtables.lock"
        with own.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            mount = f"mount --bind {own} /run/xtables.lock; "
            through = ("unshare", "--mount", "sh", "-c", f'{mount} exec "$@"', "")
            status, _, err = await cleanup(*through)
        assert status == 1
        said = "iptables-legacy-restore: the xtables lock /run/xtables.lock is held by pid "
        assert f"iptables mode (legacy): {said}{os.getpid()} " in err

    in_namespace(body)


def test_an_instance_that_runs_is_named(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        async with steersman(tmp_path, f"--manifests={folder}") as proxy:
            await proxy.said("sync 1 (start)")
            status, _, err = await cleanup()
            assert status == 1
            assert f"an instance runs on this node (pid {proxy.process.pid} " in err

    in_namespace(body)


def test_kubelets_chains_are_no_leftovers_and_looking_makes_no_tables() -> None:
    async def body() -> None:
        sh("iptables-nft -N KUBE-FIREWALL; iptables-nft -I OUTPUT -j KUBE-FIREWALL")
        removal = await remove_leftovers_once(other_modes("nftables", SubprocessExec()))
        assert removal.messages == []
        assert ":KUBE-FIREWALL " in sh("iptables-nft-save")
        assert sh("cat /proc/net/ip_tables_names /proc/net/ip6_tables_names") == ""

    in_namespace(body)
