"""What the commands cost: tracing, for the connections of a node; questions, for its process.

Also whether they answer about a node that syncs all the time.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks import world
from benchmarks.churn import holds
from benchmarks.figures import Figure, figure
from benchmarks.footprint import objects
from benchmarks.node import Netns
from benchmarks.path import Client, Plot, node_with
from benchmarks.process import api_server, environment, get, steersman, wait_ready
from benchmarks.scrape import cpu, running
from steersman.model.names import Protocol
from steersman.model.tracing import WatchedFlow
from steersman.operate.client import Client as ControlClient
from tests.support.apiserver.remote import control

TRACED_MODES = ("iptables-nft", "nftables", "ebpf")
_METRICS = "http://127.0.0.1:10249/metrics"
_ELSEWHERE = WatchedFlow(Protocol.TCP, "10.255.255.254", 80, "10.255.255.253", 4321)
"""A flow that never comes: the measured one is among many others."""
_ROUNDS = 7
_ANSWERED = (0, 1, 3)  # exit codes; 1: something is wrong, 3: a check had no result
_RATE = 25
"""Changes a second of a busy node; each is a sync."""
_SYNCS = re.compile(r"^kubeproxy_sync_proxy_rules_duration_seconds_(sum|count)\S* (\S+)", re.M)
_PAGES = ("world", "stats", "status", "names?kind=service")
_QUESTIONS = (
    *("version", "status", "problems", "explain --problems", "explain bench/service-0"),
    *("explain --from pod --to bench/service-0", "services", "services -o wide"),
    *("services -o json", "endpoints", "endpoints -o json", "nodeports", "drift", "plan"),
    *("dump bench/service-0", "doctor", "doctor bench/service-0"),
    *("trace node bench/service-0", "connections bench/service-0", "top --once", "nodes"),
)


class _Way:
    """A node with one Service, and a client of it."""

    def __init__(self, mode: str) -> None:
        self.node, address = node_with(mode, 1)
        self.plot = Plot(self.node.netns)
        self.node.look()
        self.node.sync()
        self.address = address
        self.client = Client(self.plot, self.plot.pod, (address, 80), self.node.place)

    def close(self) -> None:
        self.plot.close()
        self.node.close()


def of_tracing(mode: str, rounds: int) -> Iterator[Figure]:
    """Measure connections to a Service: on a node that never traced, and on one beside it.

    Two equal nodes differ, too. So the ratio is that of the two nodes, compared with their ratio
    before either had traced anything.
    """
    never, other = _Way(mode), _Way(mode)
    ratios = {}
    p50s: dict[str, tuple[float, float]] = {}

    def measure(name: str) -> None:
        for way in (never, other):
            way.client.times.clear()
        for _ in range(rounds):
            for way in (never, other):
                way.client.round()
        ratios[name] = other.client.ratio(never.client)
        p50s[name] = other.client.p50, never.client.p50

    measure("warm")
    measure("before")
    with other.node.traced(WatchedFlow(Protocol.TCP, other.address, 80)):
        other.client.round()
    measure("after a trace")
    with other.node.traced(_ELSEWHERE):
        measure("while one is traced")
    for way in (never, other):
        way.close()
    for name in ("after a trace", "while one is traced"):
        value, reference = p50s[name]
        yield Figure(
            *(f"connection, {name}", mode, 1, round(value, 1), "us", round(reference, 1)),
            round(ratios[name] / ratios["before"], 3),
        )


_MEASURE = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
_, status, used = os.wait4(process.pid, 0)
print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss)
"""
"""Runs a command. The memory of a new process begins with that of the one that starts it, so it is
not this one, which has thousands of Services."""


class Spent(NamedTuple):
    """What a command took, its children included."""

    seconds: float
    cpu: float
    """Milliseconds."""
    memory: float
    """MB at the most, of one process."""


def of_command(*argv: str) -> Spent:
    """Run a command."""
    begun = time.monotonic()
    words = [sys.executable, "-c", _MEASURE, sys.executable, "-m", "steersman", *argv]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment())
    status, seconds, kilobytes = done.stdout.split()
    if int(status) not in _ANSWERED:
        raise RuntimeError(f"steersman {' '.join(argv)} ended with {status}")
    took = time.monotonic() - begun
    return Spent(took, float(seconds) * 1e3, int(kilobytes) * 1024 / 1e6)


def of_questions(mode: str, services: int) -> Iterator[Figure]:
    """Measure commands beside the running process, and what they cost that process."""
    with running(mode, services) as pid:
        for line in _QUESTIONS:
            rounds = [of_command(*line.split()) for _ in range(_ROUNDS)]
            seconds, used, memory = map(statistics.median, zip(*rounds, strict=True))
            yield figure(f"steersman {line}", mode, services, (seconds, "s"))
            yield figure("  CPU", mode, services, (used, "ms"))
            yield figure("  memory", mode, services, (memory, "MB"))
        client = ControlClient()
        before = get(_METRICS)
        for page in _PAGES:
            begun, size = cpu(pid), 0
            for _ in range(_ROUNDS):
                size = len(client.get(f"/{page}"))
            spent = (cpu(pid) - begun) / _ROUNDS * 1e3
            yield figure(f"/{page}: CPU", mode, services, (spent, "ms"))
            yield figure("  size", mode, services, (size / 1e3, "kB"))
        for name, value, unit in holds(before, get(_METRICS)):
            yield figure(f"  {name}", mode, services, (value, unit))


def mixed(services: int) -> list[bytes]:
    """A quarter of the Services has session affinity, a quarter node ports, half of these Local."""
    made = []
    for raw in objects(services):
        each = json.loads(raw)
        if each["kind"] == "Service":
            number = int(each["metadata"]["name"].rpartition("-")[2])
            spec = each["spec"]
            if number % 4 == 1:
                spec["sessionAffinity"] = "ClientIP"
            if number % 4 == 2:
                spec["type"], spec["ports"][0]["nodePort"] = "NodePort", 20_000 + number
            if number % 8 == 2:
                spec["externalTrafficPolicy"] = "Local"
        made.append(json.dumps(each).encode())
    return made


class Churn(threading.Thread):
    """Replaces an endpoint of some Service 25 times a second, from `go` on."""

    def __init__(self, url: str, services: int) -> None:
        super().__init__(daemon=True)
        self.go, self.stop = threading.Event(), threading.Event()
        self._url, self._services = url, services

    def run(self) -> None:
        self.go.wait()
        begun, sent = time.monotonic(), 0
        while not self.stop.is_set():
            sent += 1
            number = 7 * sent % (self._services - 1) + 1  # not that of the question
            slice_ = json.loads(world.endpoint_slice(number, world.pods(number, sent)))
            control(self._url, "apply", object={"kind": "EndpointSlice", **slice_})
            self.stop.wait(begun + sent / _RATE - time.monotonic())


def of_busy_node(services: int) -> Iterator[Figure]:
    """Measure `dump` and `doctor` on an idle and on a busy node, and the syncs meanwhile."""
    with ExitStack() as stack:
        netns = Netns()
        stack.callback(netns.close)
        netns.enter()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(api_server(mixed(services), folder))
        flags = ("--master", url, "--proxy-mode", "nftables")
        process = stack.enter_context(steersman(*flags))
        wait_ready(process)
        churn = Churn(url, services)
        churn.start()
        stack.callback(churn.stop.set)
        for name in ("idle", "busy"):
            if name == "busy":
                churn.go.set()
            for argv in (("dump", "bench/service-0"), ("doctor", "bench/service-0"), ("doctor",)):
                took, spent = list[float](), list[float]()
                before = syncs()
                for _ in range(_ROUNDS):
                    begun = time.monotonic()
                    spent.append(of_command(*argv).cpu)
                    took.append(time.monotonic() - begun)
                after = syncs()
                what = f"steersman {argv[0]}{' SERVICE' * (len(argv) > 1)}, {name} node"
                value = (statistics.median(took), "s")
                yield figure(what, "nftables", services, value)
                yield figure("  CPU", "nftables", services, (statistics.median(spent), "ms"))
                if count := after[1] - before[1]:
                    mean = ((after[0] - before[0]) / count * 1e3, "ms")
                    yield figure("  a sync meanwhile", "nftables", services, mean)
                    yield figure("  syncs", "nftables", services, (count / sum(took), "/s"))


def syncs() -> tuple[float, float]:
    """Return the seconds of all syncs of the process so far, and their number."""
    found = dict(_SYNCS.findall(get(_METRICS).decode()))
    return float(found["sum"]), float(found["count"])


def run(quick: bool) -> list[Figure]:
    """Trace in three modes; ask a process with 10,000 Services (500 when quick)."""
    figures: list[Figure] = []
    for mode in TRACED_MODES:
        print(f"  {mode} ...", file=sys.stderr, flush=True)
        figures += of_tracing(mode, 10 if quick else 100)
    services = 500 if quick else 10_000
    return [*figures, *of_questions("nftables", services), *of_busy_node(services)]
