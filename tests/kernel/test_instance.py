"""One instance for each network namespace: real processes, in namespaces, killed and stopped."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from steersman.netfilter.nft.owned import NoTablesError, OwnedTables
from steersman.run.process import instance as instance_module
from steersman.run.process.instance import NAME, NEXT, Holder, Instance
from steersman.run.process.startup import StartError
from tests.support.lab.namespace import in_namespace, sh
from tests.support.processes.steersman import (
    NOBODY,
    answers,
    get,
    manifests,
    rules,
    steersman,
    world,
)
from tests.support.waiting import until

pytestmark = pytest.mark.kernel
OTHER_NAMESPACES = ("unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child")
REFUSED = "another instance runs on this node"


def holder() -> Holder | None:
    tables = OwnedTables()
    try:
        comment = tables.comment(NAME)
        return Holder.of(comment) if comment is not None else None
    finally:
        tables.close()


def lock() -> str:
    """The lock as `nft` shows it."""
    return sh("nft list ruleset")


def test_the_lock_names_another_mode_without_a_moment_of_freedom() -> None:
    async def body() -> None:
        mine = Instance("iptables", "here", take_over=False)
        await mine.claim()
        mine.rename("nftables")
        now = holder()
        assert now is not None
        assert (now.mode, now.host) == ("nftables", "here")
        other = Instance("iptables", "there", take_over=False)
        with pytest.raises(StartError, match="nftables mode"):
            await other.claim()
        mine.release()
        assert holder() is None

    in_namespace(body)


@pytest.mark.parametrize("through", [(), OTHER_NAMESPACES], ids=["same", "container"])
def test_a_second_one_is_refused_and_told_who_the_first_is(
    tmp_path: Path, through: tuple[str, ...]
) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        flags = (f"--manifests={folder}", "--proxy-mode=iptables")
        async with steersman(tmp_path, *flags) as first:
            await first.said("sync 1 (start)")
            before = rules()
            async with steersman(tmp_path, *flags, name="second", through=through) as second:
                assert await second.process.wait() == 1
            assert f"{REFUSED} (pid {first.process.pid} on host " in second.log
            assert "iptables mode, since 2" in second.log
            assert "Traceback" not in second.log
            assert rules() == before
            assert (await get("/livez", 10256))[0] == 200
            assert await first.stop() == 0
        assert NAME not in lock()

    in_namespace(body)


def test_a_first_one_in_a_container_is_named_by_both_its_pids(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        flags = (f"--manifests={folder}",)
        async with steersman(tmp_path, *flags, through=OTHER_NAMESPACES) as first:
            await first.said("sync 1 (start)")
            (child,) = sh(f"pgrep -P {first.process.pid}").split()
            async with steersman(tmp_path, *flags, name="second") as second:
                assert await second.process.wait() == 1
            assert f"{REFUSED} (pid 1 on host" in second.log
            assert f"pid {child} as seen from here)" in second.log

    in_namespace(body)


def test_the_lock_goes_with_its_holder_and_stays_while_it_is_stopped(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        flags = (f"--manifests={folder}",)
        async with steersman(tmp_path, *flags) as first:
            await first.said("sync 1 (start)")
            first.process.send_signal(signal.SIGSTOP)
            async with steersman(tmp_path, *flags, name="second") as second:
                assert await second.process.wait() == 1
            assert f"{REFUSED} (pid {first.process.pid} " in second.log
            await first.stop(signal.SIGKILL)
        async with steersman(tmp_path, *flags, name="third") as third:
            await third.said("sync 1 (start)")

    in_namespace(body)


def test_another_network_namespace_is_another_node(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        flags = (f"--manifests={folder}",)
        inside = ("unshare", "--net")
        async with steersman(tmp_path, *flags) as first:
            await first.said("sync 1 (start)")
            async with steersman(tmp_path, *flags, name="second", through=inside) as second:
                await second.said("sync 1 (start)")

    in_namespace(body)


def test_a_newcomer_takes_over_and_rules_are_there_all_the_time(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        flags = (f"--manifests={folder}",)
        async with steersman(tmp_path, *flags) as first:
            await first.said("sync 1 (start)")
            missing = []

            async def watch() -> None:
                while True:
                    missing.extend([1] * ("10.244.0.5:" not in rules()))
                    await asyncio.sleep(0.01)

            watching = asyncio.create_task(watch())
            over = (*flags, "--take-over")
            async with steersman(
                tmp_path, *over, name="second", through=OTHER_NAMESPACES
            ) as second:
                assert await first.process.wait() == 0
                await second.said("took over from the previous instance: pid")
                await second.said("kernel objects 0 added, 0 changed, 0 removed")
                await answers("/healthz", 10256)
                watching.cancel()
                assert missing == []
                assert "another instance is taking over: pid" in first.log
                assert NEXT not in lock()

    in_namespace(body)


def test_a_newcomer_of_another_mode_takes_over_without_a_gap(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        flags = (f"--manifests={folder}",)
        async with steersman(tmp_path, *flags, "--proxy-mode=iptables") as first:
            await first.said("sync 1 (start)")
            gaps = []

            async def watch() -> None:
                while True:
                    ruleset = lock()
                    gaps.extend([1] * ("KUBE-SEP-" not in ruleset and "10.244.0.5" not in ruleset))
                    await asyncio.sleep(0.01)

            watching = asyncio.create_task(watch())
            words = ("--proxy-mode=nftables", "--take-over")
            async with steersman(tmp_path, *flags, *words, name="second") as second:
                assert await first.process.wait() == 0
                await second.said("iptables (nft) mode: removed ")
                watching.cancel()
                assert gaps == []
                assert "KUBE-SEP-" not in lock()
                assert "10.244.0.5" in lock()

    in_namespace(body)


def test_a_stopped_one_does_not_let_go_and_the_newcomer_says_so(tmp_path: Path) -> None:
    """Nor does what it was asked then make it end when it goes on."""

    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        flags = (f"--manifests={folder}",)
        async with steersman(tmp_path, *flags) as first:
            await first.said("sync 1 (start)")
            first.process.send_signal(signal.SIGSTOP)
            async with steersman(tmp_path, *flags, "--take-over", name="second") as second:
                await until(lambda: _listed(NEXT))
                second.process.terminate()
                async with asyncio.timeout(20):  # PATIENCE is 30
                    assert await second.process.wait() == 0
            first.process.send_signal(signal.SIGCONT)
            manifests(folder, *world("10.244.0.6"))
            await until(lambda: _in_rules("10.244.0.6:"))
            assert first.process.returncode is None

    in_namespace(body)


async def _listed(name: str) -> bool:
    return name in lock()


async def _in_rules(text: str) -> bool:
    return text in rules()


SQUAT = """
import socket, sys, time
from steersman.netfilter.nft.owned import NoTablesError, OwnedTables
from steersman.run.process.instance import NAME
sock = socket.socket(socket.AF_UNIX)
sock.bind("\\0" + NAME)
sock.listen(1)
try:
    print(OwnedTables().make(NAME, "pid=1"), flush=True)
except NoTablesError as error:
    print(error, flush=True)
sys.stdin.read()
"""


def test_a_user_without_rights_keeps_nobody_from_starting_or_running(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        flags = (f"--manifests={folder}",)
        pipe = subprocess.PIPE
        argv = [*NOBODY, sys.executable, "-c", SQUAT]
        squatter = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True)  # noqa: ASYNC220
        with squatter:
            assert squatter.stdout
            assert squatter.stdout.readline() == "Operation not permitted\n"
            async with steersman(tmp_path, *flags) as first:
                await first.said("sync 1 (start)")
                held = holder()
                assert held
                assert held.pid == first.process.pid
                for _ in range(50):
                    with socket.socket(socket.AF_UNIX) as sock:
                        sock.connect(f"\0{held.door}")
                        sock.send(held.comment.encode())
                async with steersman(tmp_path, *flags, name="second") as second:
                    assert await second.process.wait() == 1
                assert REFUSED in second.log
                assert (await get("/livez", 10256))[0] == 200
            squatter.kill()

    in_namespace(body)


def test_a_table_of_the_name_that_nobody_owns_is_no_lock(tmp_path: Path) -> None:
    async def body() -> None:
        sh(f"nft add table inet {NAME}")
        folder = manifests(tmp_path / "m", *world())
        async with steersman(tmp_path, f"--manifests={folder}") as first:
            await first.said("sync 1 (start)")
            assert "flags owner" in lock()
            sh("nft flush ruleset")
            assert holder()

    in_namespace(body)


RIGHTLESS = ("--proxy-mode=userspace", "--userspace-portals=none")


def test_without_the_right_to_make_tables_a_socket_is_the_lock(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        flags = (f"--manifests={folder}", *RIGHTLESS)
        async with steersman(tmp_path, *flags, through=NOBODY) as first:
            await first.said("sync 1 (start)")
            async with steersman(tmp_path, *flags, name="second", through=NOBODY) as second:
                assert await second.process.wait() == 1
            assert f"{REFUSED} (pid {first.process.pid})" in second.log
            assert first.process.returncode is None
            over = (*flags, "--take-over")
            async with steersman(tmp_path, *over, name="third", through=NOBODY) as third:
                assert await first.process.wait() == 0, first.log
                await third.said("sync 1 (start)")

    in_namespace(body)


def test_root_is_not_kept_out_by_a_user_without_rights_and_keeps_it_out(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        flags = (f"--manifests={folder}",)
        async with steersman(tmp_path, *flags) as first:
            await first.said("sync 1 (start)")
            async with steersman(
                tmp_path, *flags, *RIGHTLESS, name="second", through=NOBODY
            ) as second:
                assert await second.process.wait() == 1
            assert f"{REFUSED} (pid {first.process.pid})" in second.log

    in_namespace(body)


async def refusal(instance: Instance) -> str:
    with pytest.raises(StartError) as refused:
        await instance.claim()
    return str(refused.value)


def test_who_does_not_let_go_in_time_is_named_and_no_longer_asked() -> None:
    async def body() -> None:
        first = OwnedTables()
        first.make(NAME, Holder(17, "node-a", "iptables", 0).comment)
        newcomer = Instance("iptables", "node-a", take_over=True, patience=0.2)
        said = await refusal(newcomer)
        assert said.startswith("the previous instance (pid 17 on host node-a, iptables mode, ")
        assert said.endswith("did not release the lock within 0.2 s; stop or kill it")
        assert first.comment(NEXT) is None
        first.close()
        await newcomer.claim()
        newcomer.release()

    in_namespace(body)


def test_one_newcomer_takes_over_when_two_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        first = Instance("iptables", "a", take_over=False)
        await first.claim()
        two = [Instance("iptables", name, take_over=True, patience=5.0) for name in "bc"]
        claims = [asyncio.create_task(each.claim()) for each in two]
        await first.newcomer
        first.release()
        await asyncio.wait(claims)
        assert [claim.exception() is None for claim in claims].count(True) == 1
        for each in two:
            each.release()

    in_namespace(body)


@pytest.mark.parametrize("listens", [True, False])
def test_where_sockets_are_the_lock_a_stranger_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, listens: bool
) -> None:
    """As before Linux 5.12, which has no tables with an owner."""

    def make(*_: object) -> bool:
        raise NoTablesError("Operation not supported")

    monkeypatch.setattr(OwnedTables, "make", make)
    monkeypatch.setattr(instance_module, "_SILENT", 0.0)

    async def body() -> None:
        script = SQUAT if listens else SQUAT.replace("sock.listen(1)\n", "")
        argv = [*NOBODY, sys.executable, "-c", script]
        pipe = asyncio.subprocess.PIPE
        squatter = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)
        assert squatter.stdout
        await squatter.stdout.readline()
        instance = Instance("iptables", "node-a", take_over=False)
        await instance.claim()
        who = f"process {squatter.pid} of user 65534" if listens else "a process that is silent"
        assert f"{who} has bound the abstract socket {NAME} and is not an instance" in caplog.text
        instance.release()
        squatter.kill()
        await squatter.communicate()
        first = Instance("iptables", "node-a", take_over=False)
        await first.claim()
        said = await refusal(Instance("iptables", "node-a", take_over=False))
        assert said.startswith("another instance runs on this node (pid ")
        first.release()

    in_namespace(body)
