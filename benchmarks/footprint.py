"""Resident memory of the whole process, all its servers on, with an API server behind it."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

import steersman as package
from benchmarks import world
from benchmarks.churn_place import in_ebpf_place
from benchmarks.ebpf_place import Place
from benchmarks.figures import Figure, figure
from benchmarks.node import Netns
from benchmarks.process import api_server, environment, get, memory, steersman, wait_ready
from steersman.host.peers import CONTROL

_PAGES = ("metrics", "metrics/services", "state", "configz")
_ANSWERS = ("world", "state", "names", "stats", "status", "node", "history", "digests", "top")

_CONFIG = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
_KUBECONFIG = """current-context: x
contexts: [{name: x, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "https://10.9.0.1"}}]
users: [{name: u, user: {token: x}}]
"""


def objects(services: int) -> list[bytes]:
    """Each Service and its slice, with their kinds, which lists leave out."""
    found = []
    for number in range(services):
        found.append(b'{"kind": "Service", ' + world.service(number)[1:])
        slice_ = world.endpoint_slice(number, world.pods(number))
        found.append(b'{"kind": "EndpointSlice", ' + slice_[1:])
    return found


def measured(mode: str, services: int) -> tuple[float, float, float, float]:
    """MB resident when all rules are in, those of no file, after each answer, and at the most."""
    netns = Netns()
    netns.enter()
    place = Place() if mode == "ebpf" else None
    before = in_ebpf_place([], place.cgroup) if place else ()
    with tempfile.TemporaryDirectory() as directory:  # noqa: SIM117 - the flag needs its URL
        with api_server(objects(services), Path(directory)) as url:
            with steersman("--master", url, "--proxy-mode", mode, before=before) as process:
                wait_ready(process)
                first = _settled(process.pid)
                anonymous = memory(process.pid, "RssAnon")
                for page in _PAGES:
                    get(f"http://127.0.0.1:10249/{page}")
                for page in _ANSWERS:
                    _ask(page)
                now, most = _settled(process.pid), memory(process.pid, "VmHWM")
    if place:
        place.close()
    netns.close()
    return first, anonymous, now, most


def _settled(pid: int) -> float:
    """MB resident once they have stopped changing: memory is given back after the first sync."""
    seen: list[float] = []
    while len(seen) < 100 and (len(seen) < 8 or max(seen[-8:]) - min(seen[-8:]) > 1):
        time.sleep(0.25)
        seen.append(memory(pid))
    return seen[-1]


def _ask(page: str) -> None:
    """Ask the process on its local socket, as commands do."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(f"\0{CONTROL}")
        sock.sendall(f"GET /{page} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        status = sock.recv(1 << 16)
        assert status.startswith(b"HTTP/1.1 200"), status
        while sock.recv(1 << 16):
            pass


def _imports(mode: str, *options: str) -> float:
    """MB resident of a fresh process with the modules of a mode and its two files, in YAML.

    It is isolated, as in the image: what a machine's own packages import at the start of every
    Python (`.pth` files) is not counted. The first of two processes may have to compile modules.
    """
    paths = [str(Path(module.__file__ or "").parents[1]) for module in (package, msgspec)]
    with tempfile.TemporaryDirectory() as directory:
        kubeconfig, config = Path(directory, "kubeconfig"), Path(directory, "config.yaml")
        kubeconfig.write_text(_KUBECONFIG)
        config.write_text(f"{_CONFIG}clientConnection: {{kubeconfig: {kubeconfig}}}\n")
        code = (
            f"import sys, site; sys.path[:0] = {paths}; "
            "import steersman.cli.main; steersman.cli.main.import_msgspec(); "
            "import steersman.config, steersman.source.kubeconfig as access; "
            f"steersman.config.parse_command_line(['--config={config}']); "
            f"access.load_cluster_access('{kubeconfig}'); "
            "import steersman.cli.commands.run, steersman.run.process.assemble; "
            f"import steersman.modes.{mode}.mode; "
            "print(*[line for line in open('/proc/self/status') if line.startswith('VmRSS')])"
        )
        argv = [sys.executable, "-IS", *options, "-c", code]
        for _ in range(2):
            done = subprocess.run(
                argv, check=True, capture_output=True, text=True, env=environment()
            )
    return int(done.stdout.split()[1]) * 1024 / 1e6


def run(quick: bool) -> list[Figure]:
    """Measure without Services, with 10,000 and with 50,000 (500 when quick)."""
    figures = []
    for mode in ("nftables", "iptables", "ebpf", "userspace", "ipvs"):
        name = "iptables-nft" if mode == "iptables" else mode
        figures.append(figure("imports: resident memory", name, 0, (_imports(mode), "MB")))
        with tempfile.TemporaryDirectory() as cache:
            image = _imports(mode, "-OO", "-X", f"pycache_prefix={cache}")
        figures.append(figure("  in the image (-OO)", name, 0, (image, "MB")))
        if mode in ("userspace", "ipvs"):
            continue
        for size in (0, 500) if quick else (0, 10_000, 50_000):
            first, anonymous, now, most = measured(mode, size)
            figures += [
                figure("the process: resident memory", name, size, (first, "MB")),
                figure("  of which no file", name, size, (anonymous, "MB")),
                figure("  after each answer", name, size, (now, "MB")),
                figure("  at the most", name, size, (most, "MB")),
            ]
    return figures
