"""The whole process on a node of its own, with an API server or manifests beside it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import world

ROOT = Path(__file__).parents[1]
_NODE = {
    "kind": "Node",
    "metadata": {"name": world.NODE},
    "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]},
}
_FLAGS = ("--hostname-override", world.NODE, "--cluster-cidr", world.CLUSTER_CIDR)
_KEPT = ("PATH", "LANG", "PYTHONPATH")
_NETFILTER, _NFNLGRP_NFTABLES = 12, 7  # linux/netlink.h, linux/netfilter/nfnetlink.h
_SOL_NETLINK, _NETLINK_ADD_MEMBERSHIP = 270, 1
_READY = "http://127.0.0.1:10256/readyz"


def environment() -> dict[str, str]:
    """What a container has: nothing that makes libraries read more files (SSL_CERT_FILE)."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ}


class FirstRule:
    """Hears of the first rule of ours in this network namespace from the kernel itself."""

    def __init__(self) -> None:
        self._news = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER)
        self._news.bind((0, 0))
        self._news.setsockopt(_SOL_NETLINK, _NETLINK_ADD_MEMBERSHIP, _NFNLGRP_NFTABLES)
        self._news.settimeout(60)

    def wait(self) -> None:
        """Return when it is there."""
        while b"KUBE-" not in self._news.recv(1 << 16):
            pass
        self._news.close()


@contextmanager
def api_server(objects: Sequence[bytes], folder: Path) -> Iterator[str]:
    """Run the test API server with this node and these objects; its URL."""
    file = folder / "objects.json"
    items = [_NODE, *map(json.loads, objects)]
    file.write_text(json.dumps({"items": items}))
    argv = [sys.executable, "-m", "tests.support.apiserver.server", "--objects", str(file)]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait()


@contextmanager
def steersman(*flags: str, before: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """Run the process in the namespace that we are in; `before` are words that run it."""
    process = subprocess.Popen(
        [*before, sys.executable, "-m", "steersman", "run", *_FLAGS, *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_ready(process: subprocess.Popen[bytes], seconds: float = 600.0) -> None:
    """Return when the first full sync has reached the kernel."""
    end = time.monotonic() + seconds
    while True:
        try:
            get(_READY)
            return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"steersman run is not ready: {process.returncode}") from None
            time.sleep(0.05)


def get(url: str) -> bytes:
    """Fetch a page."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return bytes(answer.read())


def cpu(pid: int) -> float:
    """Seconds of CPU so far, with children that ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int, field: str = "VmRSS") -> float:
    """MB of a process, by a field of its status: VmRSS now, VmHWM at the most."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"no {field} in /proc/{pid}/status")
