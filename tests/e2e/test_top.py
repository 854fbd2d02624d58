"""`steersman top` on a running process: one screen in a pipe, and the live view on a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import signal
import struct
import sys
import termios
from pathlib import Path

import pytest

from tests.support.lab.namespace import in_namespace
from tests.support.processes.steersman import command, manifests, steersman, world
from tests.support.waiting import until

pytestmark = pytest.mark.kernel
WAIT = 60.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>78]")


class Terminal:
    """A program on a pseudo-terminal of 80 columns and 24 lines."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(80, 24)
        self.before = termios.tcgetattr(self.slave)
        self.output = b""
        os.set_blocking(self.master, False)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    async def start(self, *words: str) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "steersman", *words),
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env={**os.environ, "TERM": "xterm-256color"},
            start_new_session=True,
        )
        asyncio.get_running_loop().add_reader(self.master, self._read)

    def _read(self) -> None:
        self.output += os.read(self.master, 1 << 16)

    def press(self, keys: str) -> None:
        self.output = b""
        os.write(self.master, keys.encode())

    async def shows(self, text: str) -> None:
        """Wait until a text is printed."""

        async def printed() -> bool:
            return text in _ESCAPES.sub("", self.output.decode(errors="replace"))

        try:
            await until(printed, WAIT)
        except TimeoutError as error:
            raise AssertionError(f"{text!r} is not in {self.output[-4000:]!r}") from error

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.master)
        if self.process.returncode is None:
            self.process.kill()
        os.close(self.master)
        os.close(self.slave)


def test_the_live_view_takes_keys_and_gives_the_terminal_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = manifests(tmp_path / "world", *world("10.244.0.5", "10.244.0.6"))
        async with steersman(tmp_path, "--proxy-mode=nftables", f"--manifests={folder}") as process:
            await process.said("sync 1 (start)")
            terminal = Terminal()
            await terminal.start("top", "--delay=200ms")
            try:
                await terminal.shows(">shop/web")
                assert b"\x1b[?1049h" in terminal.output, "the alternate screen"
                terminal.press("\r")
                await terminal.shows("10.244.0.6:8080")
                terminal.press("\x1b")
                await terminal.shows(">shop/web")
                terminal.press("/nothing\r")
                await terminal.shows("nothing whose name has 'nothing'")
                terminal.press("\x1b")
                await terminal.shows(">shop/web")
                terminal.press("?")
                await terminal.shows("run doctor on the Service")
                terminal.press("\x1b")
                await terminal.shows(">shop/web")
                # A smaller terminal loses columns, at once.
                terminal.output = b""
                terminal.resize(45, 12)
                os.killpg(terminal.process.pid, signal.SIGWINCH)
                await terminal.shows("*PER S  ENDPOINTS\r\n")
                terminal.press("d")
                await terminal.shows("doctor shop/web")
                terminal.press("q")
                async with asyncio.timeout(WAIT):
                    assert await terminal.process.wait() == 0
                assert b"\x1b[?1049l" in terminal.output, "the usual screen"
                assert termios.tcgetattr(terminal.slave) == terminal.before
            finally:
                terminal.close()

    in_namespace(scenario)


def test_a_signal_gives_the_terminal_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = manifests(tmp_path / "world", *world("10.244.0.5"))
        async with steersman(tmp_path, "--proxy-mode=nftables", f"--manifests={folder}") as process:
            await process.said("sync 1 (start)")
            terminal = Terminal()
            await terminal.start("top")
            try:
                await terminal.shows(">shop/web")
                terminal.process.terminate()
                async with asyncio.timeout(WAIT):
                    assert await terminal.process.wait() == 0
                await terminal.shows("")
                assert termios.tcgetattr(terminal.slave) == terminal.before
            finally:
                terminal.close()

    in_namespace(scenario)


def test_in_a_pipe_one_screen_is_printed(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = manifests(tmp_path / "world", *world("10.244.0.5"))
        async with steersman(tmp_path, "--proxy-mode=nftables", f"--manifests={folder}") as process:
            await process.said("sync 1 (start)")
            status, out, err = await command("top")
            assert (status, err) == (0, "")
            assert "nftables mode" in out
            row = next(line for line in out.splitlines() if line.startswith("shop/web"))
            assert row.split()[1:] == ["0.0", "0", "-", "-", "1"]
            status, out, _ = await command("top", "shop/", "-o", "json")
            sample = json.loads(out)["sample"]
            assert (status, sample["matching"], sample["interval"] > 0) == (0, 1, True)
            status, out, err = await command("top", "--once", "--sort=height")
            assert status == 2

    in_namespace(scenario)


def test_without_a_process_it_says_so() -> None:
    async def scenario() -> None:
        status, out, err = await command("top", "--once")
        assert (status, out) == (2, "")
        assert "no steersman runs in this network namespace" in err
        assert "--manifests" not in err  # it has no such flag

    in_namespace(scenario)
