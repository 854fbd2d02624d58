"""The running process in iptables mode: killed, restarted, flushed, grown, cleaned up after."""

from __future__ import annotations

import json
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from steersman.modes.iptables.parse import parse
from tests.support.apiserver.reading import service, slice_
from tests.support.lab.namespace import in_namespace, sh
from tests.support.processes.steersman import command, manifests, steersman
from tests.support.waiting import until

pytestmark = pytest.mark.kernel

RESTORE = """\
#!/bin/sh
# iptables-restore as it is, but counted; at one of the runs the caller is killed with kill -9
# while it runs: what was not in the pipe yet is lost.
[ "$1" = --version ] && exec {real} "$@"
echo {real} >> "$RESTORES"
number=$(wc -l < "$RESTORES")
[ "$number" = "$KILL" ] && kill -9 $PPID
exec {real} "$@"
"""
FIREWALL = "*filter\n:FORWARD ACCEPT [0:0]\n-A FORWARD -s 192.0.2.7/32 -j DROP\nCOMMIT\n"


class Counted:
    """The iptables-restore of one variant, put before the real one in PATH."""

    def __init__(self, folder: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.file = folder / "restores"
        programs = folder / "bin"
        programs.mkdir()
        for name in (f"iptables-{variant}-restore", f"ip6tables-{variant}-restore"):
            real = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
            (programs / name).write_text(RESTORE.format(real=real))
            (programs / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        monkeypatch.setenv("RESTORES", str(self.file))

    def begin(self, kill: str = "") -> None:
        self.file.write_text("")
        self.monkeypatch.setenv("KILL", kill)

    @property
    def runs(self) -> int:
        return len(self.file.read_text().splitlines())


def ruleset(variant: str) -> dict[Any, str]:
    """What the kernel has of ours, both families."""
    found: dict[Any, str] = {}
    for family, program in ((4, "iptables"), (6, "ip6tables")):
        found |= parse(sh(f"{program}-{variant}-save 2>/dev/null"), family).ruleset
    return found


def world(count: int) -> list[dict[str, Any]]:
    """Enough for a first start in several runs where there are 320 of them."""
    objects = []
    for number in range(count):
        high, low = divmod(number, 200)
        pods = (f"10.244.{high}.{low + 1}", f"10.244.{high + 10}.{low + 1}")
        objects.append(service(f"s{number}", f"10.96.{high}.{low + 1}"))
        objects.append(slice_(f"s{number}-x", f"s{number}", *pods))
    return objects


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_killed_at_any_command_the_next_start_repairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    file = tmp_path / "world.json"  # read faster than YAML
    file.write_text(json.dumps({"kind": "List", "items": world(320)}))
    flags = (f"--manifests={file}", f"--iptables-variant={variant}")
    counted = Counted(tmp_path, variant, monkeypatch)
    whole: dict[Any, str] = {}
    totals: list[int] = []

    async def undisturbed() -> None:
        counted.begin()
        async with steersman(tmp_path, *flags) as proxy:
            await proxy.said("sync 1 (start)")
        whole.update(ruleset(variant))
        totals.append(counted.runs)
        async with steersman(tmp_path, *flags) as proxy:
            await proxy.said("kernel objects 0 added, 0 changed, 0 removed")
        assert [counted.runs] == totals

    async def killed(number: int) -> None:
        counted.begin(str(number))
        async with steersman(tmp_path, *flags) as proxy:
            assert await proxy.process.wait() == -9
        counted.begin()
        async with steersman(tmp_path, *flags) as proxy:
            await proxy.said("sync 1 (start)")
        assert ruleset(variant) == whole

    in_namespace(undisturbed)
    assert totals[0] >= (5 if variant == "nft" else 2)
    for number in range(1, totals[0] + 1):
        in_namespace(partial(killed, number))


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_a_firewall_that_replaces_all_rules_is_healed_around(tmp_path: Path, variant: str) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world(2))
        flags = (f"--manifests={folder}", f"--iptables-variant={variant}")
        async with steersman(tmp_path, *flags, "--iptables-sync-period=300ms") as proxy:
            await proxy.said("sync 1 (start)")
            before = ruleset(variant)
            for table in ("filter", "nat", "mangle"):
                flush = f"iptables-{variant} -w -t {table}"
                sh(f"{flush} -F; {flush} -X || true")
            sh(f"printf '{FIREWALL}' | iptables-{variant}-restore -w")

            async def healed() -> bool:
                return ruleset(variant) == before

            await until(healed)
            assert "-A FORWARD -s 192.0.2.7/32 -j DROP" in sh(f"iptables-{variant}-save -t filter")

    in_namespace(body)


@pytest.mark.parametrize(("threshold", "splits"), [(4, True), (0, False)])
def test_the_dispatch_list_is_split_and_joined_while_running(
    tmp_path: Path, threshold: int, splits: bool
) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world(2))
        flags = (f"--manifests={folder}", f"--split-threshold={threshold}")
        async with steersman(tmp_path, *flags) as proxy:
            await proxy.said("sync 1 (start)")
            small = ruleset("nft")
            manifests(folder, *world(8))

            async def grown() -> bool:
                return "10.96.0.8/32" in sh("iptables-nft-save -t nat")

            await until(grown)
            assert ("-j KUBE-SVC-BYADDR-" in sh("iptables-nft-save -t nat")) is splits
            manifests(folder, *world(2))

            async def shrunk() -> bool:
                return ruleset("nft") == small

            await until(shrunk)

    in_namespace(body)


def test_cleanup_finds_both_variants_and_leaves_what_is_foreign(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world(2))
        sh("iptables-legacy -A FORWARD -s 192.0.2.7 -j DROP; iptables-nft -N KUBE-MINE")
        for variant in ("legacy", "nft"):
            flags = (f"--manifests={folder}", f"--iptables-variant={variant}")
            async with steersman(tmp_path, *flags) as proxy:
                await proxy.said("sync 1 (start)")
        status, out, err = await command("cleanup")
        assert status == 0, err
        assert re.search(r"^iptables: [1-9]\d* kernel objects removed$", out, re.MULTILINE)
        for variant in ("legacy", "nft"):
            left = ruleset(variant)
            assert {chain for _, _, chain, _ in left} <= {"KUBE-FIREWALL", "INPUT", "OUTPUT"}
        assert "-A FORWARD -s 192.0.2.7/32 -j DROP" in sh("iptables-legacy-save -t filter")
        assert ":KUBE-MINE " in sh("iptables-nft-save -t filter 2>/dev/null")
        _, out, _ = await command("cleanup")
        assert "iptables: 0 kernel objects removed" in out  # kubelet's chains stay

    in_namespace(body)
