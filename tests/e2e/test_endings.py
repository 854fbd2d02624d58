"""SIGTERM at any moment ends the process soon, and what it had begun to write is whole."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.lab.namespace import in_namespace
from tests.support.processes.steersman import (
    AT_ONCE,
    FLAGS,
    ended,
    manifests,
    rules,
    steersman,
    world,
)
from tests.support.waiting import until

pytestmark = pytest.mark.kernel
WAITS = """\
#!/bin/sh
# A program as it is, but at one of its runs it waits until a file is there.
case "$*" in *{when}*) {first} touch {folder}/runs; while ! [ -e {folder}/go ]; do sleep 0.01; done
esac
{then} exec {real} "$@"
"""


def waiting(folder: Path, name: str, when: str, *, reads: bool = False) -> dict[str, str]:
    """Have a program wait, with what it reads already in its hands; the environment for that."""
    programs = folder / "bin"
    programs.mkdir()
    real = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    text = WAITS.format(
        when=when,
        folder=folder,
        first=f"cat > {folder}/read;" if reads else "",
        then=f"[ -e {folder}/read ] && exec < {folder}/read;" if reads else "",
        real=real,
    )
    (programs / name).write_text(text)
    (programs / name).chmod(0o755)
    return {"PATH": f"{programs}:{os.environ['PATH']}"}


def patient(folder: Path) -> dict[str, str]:
    """Give a writer more than its second of grace to end; the environment for that.

    On a machine with ten times the load, even iptables-nft-restore with one Service takes longer.
    """
    text = "import steersman.host.exec as program\nprogram._GRACE = 8.0  # less than AT_ONCE\n"
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": str(folder)}


async def there(path: Path) -> bool:
    return path.exists()  # noqa: ASYNC240


@pytest.mark.parametrize(
    "ignored", [(), (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)], ids=["alone", "after others"]
)
def test_while_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignored: Sequence[int]
) -> None:
    """A program that it waits for hangs, which may last for 60 s.

    The kernel delivers the signal of the least number first: those to ignore before SIGTERM.
    """

    async def body() -> None:
        for name, value in waiting(tmp_path, "iptables", "POSTROUTING").items():
            monkeypatch.setenv(name, value)
        folder = manifests(tmp_path / "m", *world())
        async with steersman(tmp_path, f"--manifests={folder}") as proxy:
            await until(lambda: there(tmp_path / "runs"))
            for number in (*ignored, signal.SIGTERM):
                proxy.process.send_signal(number)
            assert await ended(proxy) == 0
            assert "stopping before anything was written" in proxy.log

    in_namespace(body)


@pytest.mark.parametrize("goes_on", [True, False], ids=["slow", "hangs"])
def test_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool) -> None:
    async def body() -> None:
        name = "iptables-nft-restore"
        environment = waiting(tmp_path, name, "noflush", reads=True)
        if goes_on:
            environment |= patient(tmp_path)
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        folder = manifests(tmp_path / "m", *world())
        flags = (f"--manifests={folder}", "--iptables-variant=nft")
        async with steersman(tmp_path, *flags) as proxy:
            await until(lambda: there(tmp_path / "runs"))
            proxy.process.terminate()
            if goes_on:
                (tmp_path / "go").touch()
            assert await ended(proxy) == 0
            assert ("10.244.0.5:" in rules()) is goes_on
        (tmp_path / "go").touch()
        async with steersman(tmp_path, *flags, name="next") as proxy:
            await proxy.said("sync 1 (start)")
            assert "10.244.0.5:" in rules()
            whole = rules()
            await proxy.stop(signal.SIGKILL)
        async with steersman(tmp_path, *flags, name="last") as proxy:
            await proxy.said("kernel objects 0 added, 0 changed, 0 removed")
            assert rules() == whole

    in_namespace(body)


def test_as_process_1_before_the_program_is_imported(tmp_path: Path) -> None:
    """The kernel keeps signals without a handler from process 1."""

    async def body() -> None:
        (tmp_path / "steersman").mkdir()
        argv = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-v", "-m"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *(*argv, "steersman", "run", "--manifests=/nowhere", *FLAGS), stderr=pipe
        )
        assert process.stderr
        importing = b"import 'steersman'"
        async for line in process.stderr:
            if importing in line and importing == b"import 'steersman'":
                importing = b"asyncio"  # of cli.py
            elif importing in line:
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()  # noqa: ASYNC240
        os.kill(int(children), signal.SIGTERM)
        async with asyncio.timeout(AT_ONCE):
            _, code = await asyncio.gather(process.stderr.read(), process.wait())
        assert code == 128 + signal.SIGTERM

    in_namespace(body)
