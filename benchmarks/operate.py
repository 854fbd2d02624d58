"""What the commands cost: tracing, for the connections of a node; questions, for its process."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.churn import holds
from benchmarks.figures import Figure, figure
from benchmarks.path import Client, Plot, node_with
from benchmarks.process import environment, get
from benchmarks.scrape import cpu, running
from steersman.model.names import Protocol
from steersman.model.tracing import WatchedFlow
from steersman.operate.client import Client as ControlClient

TRACED_MODES = ("iptables-nft", "nftables", "ebpf")
_METRICS = "http://127.0.0.1:10249/metrics"
_ELSEWHERE = WatchedFlow(Protocol.TCP, "10.255.255.254", 80, "10.255.255.253", 4321)
"""A flow that never comes: the measured one is among many others."""
_ROUNDS = 7
_ANSWERED = (0, 1)  # exit codes; 1 means that something is wrong
_PAGES = ("world", "stats", "status", "names?kind=service")


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


def of_command(*argv: str) -> float:
    """Milliseconds of CPU that a command takes, its children included."""
    process = subprocess.Popen(
        [sys.executable, "-m", "steersman", *argv],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in _ANSWERED:
        raise RuntimeError(f"steersman {' '.join(argv)} ended with {process.returncode}")
    return (used.ru_utime + used.ru_stime) * 1e3


def of_questions(mode: str, services: int) -> Iterator[Figure]:
    """Measure commands beside the running process, and what they cost that process."""
    commands = (
        ("version",),
        ("status",),
        ("services",),
        ("endpoints", "bench/service-0"),
        ("explain", "bench/service-0"),
        ("doctor", "bench/service-0"),
    )
    with running(mode, services) as pid:
        for argv in commands:
            spent = statistics.median(of_command(*argv) for _ in range(_ROUNDS))
            yield figure(f"steersman {argv[0]}: CPU", mode, services, (spent, "ms"))
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


def run(quick: bool) -> list[Figure]:
    """Trace in three modes; ask a process with 10,000 Services (500 when quick)."""
    figures: list[Figure] = []
    for mode in TRACED_MODES:
        print(f"  {mode} ...", file=sys.stderr, flush=True)
        figures += of_tracing(mode, 10 if quick else 100)
    return [*figures, *of_questions("nftables", 500 if quick else 10_000)]
