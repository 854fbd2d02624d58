"""SIGTERM ends a source at once, whatever it is blocked in."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

CHILD = """
import asyncio, os, signal, socket, sys, time
from pathlib import Path
from steersman.source import credentials, files
from steersman.source.apiserver import ApiServerSource
from steersman.source.files import FileSource
from steersman.source.kubeconfig import ClusterAccess, ExecPlugin
from steersman.source.store import Store

case, folder = sys.argv[1], Path(sys.argv[2])

def blocks(*_):
    os.write(1, b"begun\\n")  # in one piece: a thread for each kind may come here
    time.sleep(1000)

def source():
    match case:
        case "parsing":
            (folder / "a.yaml").write_text("a: 1")
            files.read_manifest = blocks
            return FileSource([folder])
        case "resolving":
            socket.getaddrinfo = blocks
            return ApiServerSource(ClusterAccess(servers=("https://api.invalid:6443",)), "n")
        case "handshake" | "answer":
            silent = socket.create_server(("127.0.0.1", 0))
            source.silent = silent
            scheme = "https" if case == "handshake" else "http"
            url = f"{scheme}://127.0.0.1:{silent.getsockname()[1]}"
            asyncio.get_running_loop().call_later(0.3, print, "begun")
            return ApiServerSource(ClusterAccess(servers=(url,)), "n")
        case "plugin":
            plugin = folder / "plugin"
            plugin.write_text("#!/bin/sh\\necho $$ > %s/pid\\nsleep 1000 & sleep 1000" % folder)
            plugin.chmod(0o700)
            access = ClusterAccess(
                servers=("https://127.0.0.1:1",), exec_plugin=ExecPlugin(str(plugin))
            )
            return ApiServerSource(access, "n")

async def main():
    task = asyncio.create_task(source().run(Store("n")))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    while case == "plugin" and not (folder / "pid").exists():
        await asyncio.sleep(0.01)
    if case == "plugin":
        print("begun", flush=True)
    await asyncio.gather(task, return_exceptions=True)

sys.stdout.reconfigure(line_buffering=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("case", ["parsing", "resolving", "handshake", "answer", "plugin"])
def test_the_end(case: str, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, case, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    limit = threading.Timer(60, child.kill)  # what never begins has said nothing then
    limit.start()
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
        if case == "plugin":  # killed, and nobody is left to wait for
            pid = (tmp_path / "pid").read_text().strip()
            assert not Path(f"/proc/{pid}").exists()
    finally:
        limit.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
