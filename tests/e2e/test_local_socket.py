"""Commands ask the running process through its local socket; nobody else gets an answer."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import pytest

from steersman.host.peers import CONTROL
from tests.support.lab.namespace import in_namespace, sh
from tests.support.processes.steersman import command, manifests, steersman, world
from tests.support.waiting import until

pytestmark = pytest.mark.kernel


async def listening() -> bool:
    return f"@{CONTROL}" in sh("ss -xl")


def test_a_command_asks_the_process_without_a_port(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = manifests(tmp_path / "world", *world())
        async with steersman(
            tmp_path, "--proxy-mode=nftables", "--metrics-bind-address=", f"--manifests={folder}"
        ) as process:
            await process.said("sync 1 (start)")
            await until(listening)
            status, out, err = await command("explain", "--to=10.96.0.1:80", "--from=10.244.0.9")
            assert (status, err) == (0, "")
            assert "forwarded to 10.244.0.5:8080" in out
            assert f"from the running process (pid {process.process.pid}, nftables mode)" in out
            # Completion knows the names, and a kind that has none is no error.
            for words, found in (
                (("explain", "shop/"), "shop/web"),
                (("explain", "kube-"), ""),
            ):
                assert (await command("__complete", *words))[1].strip() == found

    in_namespace(scenario)


def test_without_a_process_the_command_says_what_to_give() -> None:
    async def scenario() -> None:
        status, out, err = await command("explain", "--to=10.96.0.1:80")
        assert (status, out) == (2, "")
        assert "no steersman runs in this network namespace" in err
        assert "or give --manifests or --kubeconfig" in err
        assert err.count("\n") == 1

    in_namespace(scenario)


BECOME_NOBODY = "import os, socket, sys; os.setgid(65534); os.setuid(65534)\n"


async def nobody(script: str) -> asyncio.subprocess.Process:
    """Run a script as a user without rights."""
    pipe = asyncio.subprocess.PIPE
    words = (sys.executable, "-c", BECOME_NOBODY + script)
    return await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)


def test_another_user_gets_no_answer(tmp_path: Path) -> None:
    script = (
        f"s = socket.socket(socket.AF_UNIX); s.connect('\\0{CONTROL}'); s.settimeout(60)\n"
        "try: s.send(b'GET /world HTTP/1.0\\r\\n\\r\\n'); print(s.recv(100))\n"
        "except ConnectionError: print(b'')"
    )

    async def scenario() -> None:
        folder = manifests(tmp_path / "world", *world())
        async with steersman(tmp_path, "--proxy-mode=nftables", f"--manifests={folder}"):
            await until(listening)
            out, _ = await (await nobody(script)).communicate()
            assert out.strip() == b"b''"

    in_namespace(scenario)


def test_root_may_ask_a_process_without_root(tmp_path: Path) -> None:
    """As in a pod of the chart's nftables mode: another user, with CAP_NET_ADMIN."""
    drop = ("setpriv", "--reuid=65532", "--regid=65532", "--clear-groups")
    keep = ("--inh-caps=+net_admin", "--ambient-caps=+net_admin")

    async def scenario(folder: Path) -> None:
        flags = ("--proxy-mode=nftables", f"--manifests={folder}")
        async with steersman(tmp_path, *flags, through=(*drop, *keep)) as process:
            await process.said("sync 1 (start)")
            await until(listening)
            status, out, err = await command("explain", "--to=10.96.0.1:80", "--from=10.244.0.9")
            assert (status, err) == (0, "")
            assert "from the running process" in out

    with tempfile.TemporaryDirectory(prefix="sm-") as readable:  # pytest's are root's only
        Path(readable).chmod(0o755)
        folder = manifests(Path(readable) / "world", *world())
        in_namespace(lambda: scenario(folder))


def test_a_stranger_on_the_name_is_not_believed() -> None:
    """Somebody else's process has bound the name, and would answer."""
    script = (
        f"s = socket.socket(socket.AF_UNIX); s.bind('\\0{CONTROL}'); s.listen()\n"
        "print('bound', flush=True); sys.stdin.read()"
    )

    async def scenario() -> None:
        stranger = await nobody(script)
        try:
            assert stranger.stdout is not None
            await stranger.stdout.readline()
            status, _, err = await command("explain", "--to=10.96.0.1:80")
            assert status == 2
            assert f"belongs to process {stranger.pid} of user 65534" in err
        finally:
            await stranger.communicate(b"")

    in_namespace(scenario)
