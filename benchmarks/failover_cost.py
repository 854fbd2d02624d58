"""What watching for failing connections costs while none fails: CPU, and time to connect.

One node in the nftables mode, with 100,000 entries in its conntrack table. Its process runs without
failover, and with it. The time to connect is measured with a process of its own that watches or
not, in turn.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import world
from benchmarks.figures import Figure, figure
from benchmarks.footprint import objects
from benchmarks.node import Netns
from benchmarks.process import api_server, cpu, environment, wait_ready
from steersman.failover.watch import FailureWatch
from steersman.host.worker import KernelWorker
from steersman.netfilter.failure_log import FailureLog
from tests.support.lab.conntrack_flows import FlowEntry, add_entries

_WAYS = ("off", "packets")
_RATE = 200  # connections a second while the CPU time is measured
_ROUND, _FIRST = 500, 500  # connections of a round, and those before that are not counted
_QUIET = 0.05  # share of a core below which the process has probed all endpoints once
_LONGEST = 300.0
_ANSWERED = "10.200.0.1", 80, "10.9.0.1", 8080  # of each entry


def _config(eject: bool) -> str:
    """The configuration: endpoints are probed as fast as possible at the start, to wait less."""
    steersman = {
        "ejectFailingEndpoints": eject,
        "failover": {"firstProbes": 100, "firstInterval": "100ms"},
    }
    head = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
    return json.dumps(
        {**head, "mode": "nftables", "clusterCIDR": world.CLUSTER_CIDR, "steersman": steersman}
    )


@contextmanager
def _process(url: str, folder: Path, eject: bool) -> Iterator[subprocess.Popen[bytes]]:
    config, log = folder / "config.json", folder / "log"
    config.write_text(_config(eject))
    argv = [sys.executable, "-m", "steersman", "run", f"--config={config}", f"--master={url}"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*argv, f"--hostname-override={world.NODE}"],
            stdout=file,
            stderr=file,
            env=environment(),
        )
    try:
        wait_ready(process)
        yield process
    finally:
        process.terminate()
        process.wait()


class _Place:
    """A client, a node and, behind it, every endpoint: three network namespaces."""

    def __init__(self, entries: int) -> None:
        self.client, self.ends, self.node = Netns(), Netns(), Netns()
        for netns, name, network in ((self.client, "out", "192.0.2"), (self.ends, "in", "192.0.3")):
            self.node.enter()
            _ip(f"link add {name} type veth peer name eth0 netns {netns.path}")
            _ip(f"addr add {network}.1/24 dev {name}", f"link set {name} up")
            netns.enter()
            _ip(f"addr add {network}.2/24 dev eth0", "link set eth0 up")
            _ip(f"route add default via {network}.1")
        _ip(f"route add local {world.CLUSTER_CIDR} dev lo")
        code = "import socket\nserver = socket.create_server(('', 8080), backlog=4096)\n"
        code += "print(flush=True)\nwhile True: server.accept()[0].close()"
        self.server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert self.server.stdout
        self.server.stdout.readline()
        self.node.enter()
        _ip(f"route add {world.CLUSTER_CIDR} via 192.0.3.2")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        add_entries(
            FlowEntry(6, f"100.64.{n >> 8 & 255}.{n & 255}", 1024 + (n >> 16), *_ANSWERED)
            for n in range(entries)
        )

    def connect(self, address: str) -> float:
        """Connect to a Service once; return the seconds that took."""
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            begun = time.perf_counter()
            client.connect((address, 80))
            return time.perf_counter() - begun

    def close(self) -> None:
        self.server.kill()
        self.server.wait()
        assert self.server.stdout
        self.server.stdout.close()
        for netns in (self.client, self.ends, self.node):
            netns.close()


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


def _share(place: _Place, pid: int, seconds: float, services: int) -> float:
    """Return the share of a core that a process takes, while clients connect all the time."""
    place.client.enter()
    began, before, number = time.monotonic(), cpu(pid), 0
    while (passed := time.monotonic() - began) < seconds:
        place.connect(world.cluster_ip(number % services))
        number += 1
        time.sleep(max(0.0, number / _RATE - passed))
    place.node.enter()
    return (cpu(pid) - before) / passed


def _cpu(place: _Place, url: str, way: str, services: int, seconds: float) -> float:
    """Return the share of a core that the process takes when it watches in a way."""
    place.node.enter()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        process = stack.enter_context(_process(url, folder, eject=way != "off"))
        # First, each endpoint is probed once.
        end = time.monotonic() + _LONGEST
        while _share(place, process.pid, 3.0, services) > _QUIET:
            if time.monotonic() > end:
                raise RuntimeError("the process does not come to rest")
        tables = subprocess.run(["nft", "list", "tables"], capture_output=True, check=True)
        assert (b"steersman-failures" in tables.stdout) == (way == "packets")
        return _share(place, process.pid, seconds, services)


async def _watch() -> None:
    """Watch in the way that each line of the input names; for the time to connect."""
    worker = KernelWorker()
    watch: FailureWatch | None = None
    task: asyncio.Task[object] | None = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        if watch and task:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await watch.aclose()
        watch = await worker.do(FailureLog, worker) if line.strip() == "packets" else None
        task = asyncio.create_task(watch.receive()) if watch else None
        print("watching", flush=True)


def _times(place: _Place, rounds: int, services: int) -> list[float]:
    """Return the median time to connect in each way, in microseconds; the ways take turns.

    The rules are those that the process has left behind.
    """
    place.node.enter()
    watcher = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.failover_cost"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watcher.stdin
    assert watcher.stdout
    place.client.enter()
    address = world.cluster_ip(services - 1)
    times: dict[str, list[float]] = {way: [] for way in _WAYS}
    try:
        for number in range(rounds):
            for way in _WAYS if number % 2 else reversed(_WAYS):
                print(way, file=watcher.stdin, flush=True)
                assert watcher.stdout.readline() == "watching\n"
                # The kernel works on for a while after a change of rules.
                for _ in range(_FIRST):
                    place.connect(address)
                times[way].append(statistics.median(place.connect(address) for _ in range(_ROUND)))
    finally:
        watcher.stdin.close()
        watcher.wait()
        watcher.stdout.close()
    return [statistics.median(found) * 1e6 for found in times.values()]


def run(quick: bool) -> list[Figure]:
    """Measure 10,000 Services and 100,000 entries (500 and 5,000 when quick)."""
    services, entries, seconds, rounds = (500, 5_000, 5, 9) if quick else (10_000, 100_000, 40, 60)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        place = _Place(entries)
        stack.callback(place.close)
        url = stack.enter_context(api_server(objects(services), Path(directory)))
        shares = [_cpu(place, url, way, services, seconds) for way in _WAYS]
        times = _times(place, rounds, services)
    figures = []
    for index, way in enumerate(_WAYS[1:], 1):
        figures += [
            figure(
                f"failover by {way}: CPU of one core",
                *("nftables", services, (100 * shares[index], "%")),
                100 * shares[0],
            ),
            figure("  time to connect", "nftables", services, (times[index], "us"), times[0]),
        ]
    return figures


if __name__ == "__main__":
    asyncio.run(_watch())
