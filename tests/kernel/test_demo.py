"""`make demo` shows what it says, and leaves nothing behind, however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

pytestmark = pytest.mark.kernel

SCRIPTS = Path(__file__).parents[2] / "scripts"


@contextmanager
def demo(script: str = "demo.py", *flags: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / script), *flags],
        text=True,
        stdin=subprocess.DEVNULL,  # it asks only people
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with process:
        try:
            yield process
        finally:
            process.terminate()  # it cleans up, also when a check here failed


def left_by(pid: int) -> list[str]:
    """Namespaces and processes that the demo of a pid left."""
    prefix = f"sm-demo-{pid}-"
    running = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if prefix.encode() in _read(path)
    ]
    return [path.name for path in Path("/run/netns").glob(f"{prefix}*")] + running


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_the_demo_shows_what_it_promises() -> None:
    with demo() as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert output.count("failed: 0") == 2  # when a pod goes, and during the switch
    assert "nftables mode serves" in output
    assert "\x1b" not in output  # no colours in a pipe
    assert "shop/web" in output
    assert "All cleaned up" in output
    assert "make demo-ui" in output
    assert left_by(process.pid) == []


def test_the_demo_has_colours_on_a_terminal() -> None:
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "demo.py")],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "NO_COLOR": ""},
    )
    os.close(theirs)
    printed = b""
    with process, open(ours, "rb", buffering=0) as terminal:
        try:
            while b"1. A cluster" not in printed and (part := terminal.read(4096)):
                printed += part
        finally:
            process.terminate()
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while terminal.read(4096):
                pass
    assert b"\x1b[1m" in printed
    assert left_by(process.pid) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", ["1.", "3.", "6.", "7."])
def test_the_demo_cleans_up_when_it_is_stopped(number: signal.Signals, step: str) -> None:
    with demo() as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(step):
                process.send_signal(number)
                break
        output = process.stdout.read()
        process.wait(60)
    assert process.returncode == 130, output
    assert f"stopped by {number.name}" in output
    assert left_by(process.pid) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_demo_ui_serves_pages_of_two_nodes_until_it_is_stopped(number: signal.Signals) -> None:
    with demo("demo_ui.py", "--port=0") as process:
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            if line.startswith("Open "):
                break
        else:
            pytest.fail("".join(printed))
        url = line.split()[1]
        wait_until(lambda: all(name in _page(url) for name in ("node-a", "node-b")))
        process.send_signal(number)
        output = process.stdout.read()
        process.wait(60)
    assert process.returncode == 0, output
    assert "All cleaned up" in output
    assert left_by(process.pid) == []


def _page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as reply:
        return str(reply.read().decode())
