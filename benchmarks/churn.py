"""A busy node: pods come and go, endpoints change, kubelet and Prometheus ask.

What the daemon costs then, and how late it is, in every mode. Anything else that serves Services
can be measured from outside in the same way:

    python -m benchmarks.churn --services 30 -- kube-proxy --kubeconfig {kubeconfig} \\
        --hostname-override {node} --cluster-cidr {cidr} --proxy-mode nftables

A change is in force when a connection from outside is led to the new endpoint, whatever the mode;
it is counted from the moment at which the API server has it and has told nobody.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from benchmarks import world
from benchmarks.churn_load import (
    Prober,
    Seen,
    Server,
    Writer,
    ask,
    poll_health,
    scrape,
    steady,
    wait_reachable,
)
from benchmarks.churn_place import Place, forget_soon, in_ebpf_place
from benchmarks.ebpf_place import Place as EbpfPlace
from benchmarks.figures import Figure, figure, table
from benchmarks.process import api_server, environment, memory

MODES = ("iptables-nft", "iptables-legacy", "nftables", "ebpf")
_PROMPT = ("iptables-nft/50ms", "iptables-legacy/50ms")
"""By default, as upstream, iptables modes sync once a second, so that a change waits for its turn:
in large worlds they are measured without that wait, too."""
_SMALL = 100
"""Services up to which a world is a small cluster's: one endpoint changes a second, not twenty."""
_CHANGES = 20.0
_HEALTH_PORT, _METRICS_PORT = 10256, 10249
_SETTLE = 4.0
_TICKS = os.sysconf("SC_CLK_TCK")
_KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{{name: bench, cluster: {{server: "{server}"}}}}]
contexts: [{{name: bench, context: {{cluster: bench, user: bench}}}}]
users: [{{name: bench, user: {{}}}}]
current-context: bench
"""


class Load(NamedTuple):
    """How much there is, and for how long."""

    services: int
    seconds: float

    @property
    def changes(self) -> float:
        """Endpoint changes a second, beside those that pods make."""
        return _CHANGES if self.services > _SMALL else 1.0

    @property
    def probed(self) -> int:
        """Services of one endpoint that are watched."""
        return 64 if self.services > _SMALL else 4


class Cpu(NamedTuple):
    """Seconds of CPU so far."""

    own: float
    children: float

    @classmethod
    def of(cls, pid: int) -> Cpu:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        user, system, child_user, child_system = map(int, fields[11:15])
        return cls((user + system) / _TICKS, (child_user + child_system) / _TICKS)


class Measured(NamedTuple):
    """All that came of a run."""

    cpu: Cpu
    seconds: float
    seen: Seen
    resident: float
    log_lines: int
    start: Cpu
    """What it took until its rules were there."""
    before: bytes
    after: bytes
    """The metrics' pages at both ends."""


def objects(load: Load) -> list[bytes]:
    """Each Service and its slice."""
    found = []
    for number in range(load.services):
        found.append(b'{"kind": "Service", ' + world.service(number)[1:])
        endpoints = steady(number, number >= load.services - load.probed)
        slice_ = world.endpoint_slice(number, endpoints)
        found.append(b'{"kind": "EndpointSlice", ' + slice_[1:])
    return found


def own_command(mode: str) -> list[str]:
    """The daemon in a mode: `name`, `name-variant` or `name-variant/least time between syncs`."""
    kind, _, period = mode.partition("/")
    name, _, variant = kind.partition("-")
    return [
        *(sys.executable, "-m", "steersman", "run", "--master", "{server}"),
        *("--hostname-override", "{node}", "--cluster-cidr", "{cidr}", "--proxy-mode", name),
        *(("--iptables-variant", variant) if variant else ()),
        *(("--min-sync-period", period) if period else ()),
    ]


@contextmanager
def _process(argv: Sequence[str], url: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(_KUBECONFIG.format(server=url))
    words = {"kubeconfig": kubeconfig, "server": url, "node": world.NODE}
    filled = [word.format(cidr=world.CLUSTER_CIDR, **words) for word in argv]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(filled, stdout=log, stderr=log, env=environment())
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def measure(argv: Sequence[str], load: Load, *, ebpf: bool = False) -> Measured:
    """Run a command on a busy node."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if ebpf:
            own = EbpfPlace()
            stack.callback(own.close)
            argv = in_ebpf_place(argv, own.cgroup)
        place = stack.enter_context(Place())
        url = stack.enter_context(api_server(objects(load), folder))
        process = stack.enter_context(_process(argv, url, folder))
        last = load.services - 1
        alive = lambda: process.poll() is None  # noqa: E731
        try:
            wait_reachable(place, world.cluster_ip(last), steady(last, True)[0], alive)
            return _measure(process, load, place, url, folder / "log")
        except Exception:
            sys.stderr.write((folder / "log").read_text()[-4000:])
            raise


def _measure(
    process: subprocess.Popen[bytes], load: Load, place: Place, url: str, log: Path
) -> Measured:
    start = Cpu.of(process.pid)
    forget_soon()
    stop, seen = threading.Event(), Seen()
    prober = Prober(place, seen)
    writer = Writer(
        load.services,
        load.probed,
        load.changes,
        server=Server(url),
        place=place,
        prober=prober,
        seen=seen,
    )
    threads = [
        threading.Thread(target=prober.run, args=(stop,)),
        threading.Thread(target=writer.run, args=(stop,)),
        threading.Thread(target=poll_health, args=(stop, seen, _HEALTH_PORT)),
        threading.Thread(target=scrape, args=(stop, seen, _METRICS_PORT)),
    ]
    for thread in threads:
        thread.start()
    try:
        time.sleep(_SETTLE)
        before = _page(process)
        time.sleep(0.5)
        first, lines = Seen(seen.writes), _lines(log)
        for each in (seen.latencies, seen.health, seen.scrapes):
            each.clear()
        cpu, began = Cpu.of(process.pid), time.monotonic()
        while time.monotonic() - began < load.seconds and process.poll() is None:
            time.sleep(0.1)
        now, seconds = Cpu.of(process.pid), time.monotonic() - began
        lines = _lines(log) - lines
        writes = seen.writes - first.writes
        resident = memory(process.pid)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    after = _page(process)
    seen.writes = writes
    used = Cpu(now.own - cpu.own, now.children - cpu.children)
    return Measured(used, seconds, seen, resident, lines, start, before, after)


def _page(process: subprocess.Popen[bytes]) -> bytes:
    if process.poll() is not None:
        raise RuntimeError(f"the process ended with status {process.returncode}")
    return ask(_METRICS_PORT, "/metrics")[1]


def _lines(log: Path) -> int:
    return log.read_bytes().count(b"\n")


def _total(page: bytes, name: str) -> float:
    """The sum of a metric's series."""
    return sum(
        float(line.rpartition(" ")[2])
        for line in page.decode().splitlines()
        if line.startswith((f"{name}{{", f"{name} "))
    )


def figures(mode: str, load: Load, got: Measured) -> list[Figure]:
    """The table's lines of one run."""
    seen, seconds, size = got.seen, got.seconds, load.services
    rows: list[tuple[str, float, str]] = [
        ("CPU, thousandths of a core", 1e3 * sum(got.cpu) / seconds, ""),
        ("  of it children", 1e3 * got.cpu.children / seconds, ""),
        *_times("event to kernel", seen.latencies),
        *_times("/healthz", seen.health),
        ("/healthz not 200", seen.unhealthy, ""),
        ("/metrics, longest", max(seen.scrapes, default=0.0) * 1e3, "ms"),
        ("/metrics, size", len(got.after) / 1e3, "kB"),
        ("resident memory", got.resident, "MB"),
        ("writes a second", seen.writes / seconds, "/s"),
        ("log lines a second", got.log_lines / seconds, "/s"),
        ("CPU of the start", sum(got.start), "s"),
    ]
    name = "kubeproxy_sync_proxy_rules_duration_seconds_count"
    syncs = _total(got.after, name) - _total(got.before, name)
    families = 2 if b'ip_family="IPv6"' in got.after else 1
    rows.insert(-2, ("syncs a second", syncs / families / (seconds + 0.5), "/s"))
    rows += holds(got.before, got.after)
    return [figure(f"churn: {name}", mode, size, (value, unit)) for name, value, unit in rows]


def _times(name: str, values: list[float]) -> list[tuple[str, float, str]]:
    if len(values) < 2:
        return []
    parts = statistics.quantiles(values, n=100, method="inclusive")
    found = (("p50", parts[49]), ("p99", parts[98]), ("max", max(values)))
    return [(f"{name}, {word}", value * 1e3, "ms") for word, value in found]


def holds(page_before: bytes, page_after: bytes) -> list[tuple[str, float, str]]:
    """How long the event loop was held at the most between two scrapes, as the daemon says."""
    before, after = _buckets(page_before), _buckets(page_after)
    found = []
    for clock, word in (("wall", "longest hold, at most"), ("cpu", "  of CPU time, at most")):
        counts = {
            bound: count - before[name, bound]
            for (name, bound), count in after.items()
            if name == clock
        }
        if counts:
            all_of_them = max(counts.values())
            most = min(bound for bound, count in counts.items() if count == all_of_them)
            found.append((word, most * 1e3, "ms"))
    return found


def _buckets(page: bytes) -> dict[tuple[str, float], float]:
    """Counts of the event loop's holds by clock and upper bound."""
    name = b'steersman_event_loop_hold_seconds_bucket{clock="'
    found = {}
    for line in page.splitlines():
        if line.startswith(name):
            clock, bound = line.removeprefix(name).decode().split('"')[::2][:2]
            found[clock, float(bound)] = float(line.rpartition(b" ")[2])
    return found


def run(quick: bool) -> list[Figure]:
    """Worlds of 30, 5,000 and 10,000 Services (30 when quick), 60 s in every mode (5)."""
    sizes, seconds = ((30,), 5.0) if quick else ((30, 5_000, 10_000), 60.0)
    asked = tuple(filter(None, os.environ.get("MODES", "").split(",")))
    found = []
    for size in sizes:
        for mode in asked or (*MODES, *(_PROMPT if size > _SMALL else ())):
            load = Load(size, seconds)
            found += figures(mode, load, measure(own_command(mode), load, ebpf=mode == "ebpf"))
    return found


def main(words: Sequence[str]) -> int:
    """Measure what the command line says: some modes, or any command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.churn", description=__doc__)
    parser.add_argument("--services", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--modes", default="nftables", help="of ours, by commas")
    parser.add_argument("--name", default="command", help="of the command, for the table")
    parser.add_argument("command", nargs="*", help="with {kubeconfig}, {server}, {node}, {cidr}")
    asked = parser.parse_args(words)
    signal.signal(signal.SIGTERM, _terminated)
    load = Load(asked.services, asked.seconds)
    if asked.command:
        print(table(figures(asked.name, load, measure(asked.command, load))))
        return 0
    for mode in asked.modes.split(","):
        got = measure(own_command(mode), load, ebpf=mode == "ebpf")
        print(table(figures(mode, load, got)), flush=True)
    return 0


def _terminated(*_: Any) -> NoReturn:
    raise SystemExit(143)  # so that everything is removed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
