"""What a scrape and a probe cost: bytes, series and CPU of the pages of the whole process."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import world
from benchmarks.churn_load import ask
from benchmarks.churn_place import in_ebpf_place
from benchmarks.ebpf_place import Place as EbpfPlace
from benchmarks.figures import Figure, figure
from benchmarks.footprint import objects
from benchmarks.node import Netns
from benchmarks.process import ROOT, api_server, get, steersman, wait_ready
from steersman.model.names import Family, PlanKey, Protocol, ServicePortName
from steersman.model.plan import Action, Endpoint, Frontend, FrontendKind, ServicePlan, Verdict
from steersman.model.stats import ConnectionStats
from steersman.run.observe.mode_metrics import counts_of
from steersman.run.observe.prometheus import exposition
from steersman.run.observe.service_metrics import Ledger, ServiceFilter

MODES = ("iptables", "nftables", "ebpf")
_PAGES = ("metrics", "metrics/services", "state")
_ROUNDS, _TOGETHER = 5, 5
_METRICS = "http://127.0.0.1:10249"
_HEALTH_PORT = 10256
_PROBE, _PROBES = f"http://127.0.0.1:{_HEALTH_PORT}/healthz", 200
_ATTACKERS, _ATTACK_PROBES, _PER_SECOND = 240, 1200, 60
_FOREIGN_RULES, _COMMITS = 40_000, 10


@contextmanager
def running(mode: str, services: int) -> Iterator[int]:
    """Run the process until its rules are in; its number."""
    with ExitStack() as stack:
        netns = Netns()
        stack.callback(netns.close)
        netns.enter()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        before: list[str] = []
        if mode == "ebpf":
            place = EbpfPlace()
            stack.callback(place.close)
            before = in_ebpf_place([], place.cgroup)
        url = stack.enter_context(api_server(objects(services), folder))
        flags = ("--master", url, "--proxy-mode", mode)
        process = stack.enter_context(steersman(*flags, before=before))
        wait_ready(process)
        yield process.pid


def cpu(pid: int) -> float:
    """Seconds of CPU of all threads so far, finer than by ticks."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def of_pages(mode: str, services: int) -> Iterator[Figure]:
    """Measure each page, in turn, again and again."""
    sizes: dict[str, bytes] = {}
    spent: dict[str, list[float]] = {page: [] for page in _PAGES}
    with running(mode, services) as pid:
        for _ in range(_ROUNDS):
            for page in _PAGES:
                begun = cpu(pid)
                for _ in range(_TOGETHER):
                    sizes[page] = get(f"{_METRICS}/{page}")
                spent[page].append((cpu(pid) - begun) / _TOGETHER * 1e3)
        begun = cpu(pid)
        for _ in range(_PROBES):
            get(_PROBE)
        probe = (cpu(pid) - begun) / _PROBES * 1e3
        took, unhealthy = under_attack()
        beside, _ = beside_commits()
    name = "iptables-nft" if mode == "iptables" else mode
    yield figure("/healthz: CPU of a probe", name, services, (probe, "ms"))
    yield figure("  p99, 240 slow clients", name, services, (took, "ms"))
    yield figure("  probes without a 200", name, services, (unhealthy, ""))
    yield figure("  p99, beside commits of 40,000 rules", name, services, (beside, "ms"))
    for page in _PAGES:
        yield figure(f"/{page}: CPU", name, services, (statistics.median(spent[page]), "ms"))
        yield figure("  size", name, services, (len(sizes[page]) / 1e3, "kB"))
        if page != "state":
            series = sum(1 for line in sizes[page].splitlines() if not line.startswith(b"#"))
            yield figure("  series", name, services, (series, ""))


def under_attack() -> tuple[float, int]:
    """Probe beside slow clients; p99 in ms, and the answers that are not 200."""
    argv = [sys.executable, "-m", "benchmarks.slow_clients", str(_HEALTH_PORT), str(_ATTACKERS)]
    attack = subprocess.Popen(argv, cwd=ROOT)
    try:
        time.sleep(2)  # until all are connected
        return _probes(iter(range(_ATTACK_PROBES)))
    finally:
        attack.terminate()
        attack.wait()


def beside_commits() -> tuple[float, int]:
    """Probe while another program replaces 40,000 rules of its own, again and again."""
    lines = [f"ip saddr 198.51.100.{n % 250} tcp dport {n}" for n in range(_FOREIGN_RULES)]
    head = ["table ip bench {}", "delete table ip bench", "table ip bench {", "chain c {"]
    with tempfile.NamedTemporaryFile("w", suffix=".nft") as script:
        script.write("\n".join([*head, *lines, "}", "}", ""]))
        script.flush()
        argv = ["sh", "-ec", f"for _ in $(seq {_COMMITS}); do nft -f {script.name}; done"]
        with subprocess.Popen(argv) as commits:
            answered = _probes(iter(lambda: commits.poll() is None, False))
        if commits.returncode:
            raise RuntimeError("nft could not commit the rules")
        return answered


def _probes(turns: Iterator[object]) -> tuple[float, int]:
    """Probe 60 times a second, once for each turn; p99 in ms, and the answers that are not 200."""
    took, unhealthy = [], 0
    due = time.monotonic()
    for _ in turns:
        time.sleep(max(0.0, due - time.monotonic()))
        begun = time.perf_counter()
        try:
            status, _ = ask(_HEALTH_PORT, "/healthz")
        except OSError:
            status = 0
        took.append((time.perf_counter() - begun) * 1e3)
        unhealthy += status != 200
        due += 1 / _PER_SECOND
    return sorted(took)[int(len(took) * 0.99)], unhealthy


def of_a_busy_cluster(services: int) -> Figure:
    """Measure the work in the process if every endpoint has counted since the last scrape."""
    plans = [_plan(number) for number in range(services)]
    ledger, spent = Ledger(), []
    for scrape in range(1, _ROUNDS + 1):
        ends = {(plan.key.name, str(end)): scrape for plan in plans for end in plan.reachable}
        made = ConnectionStats(
            {(plan.key.name, "10.96.0.1:80"): 3 * scrape for plan in plans}, ends
        )
        begun = time.thread_time()
        ledger.update(counts_of(made))
        metrics = ledger.view(ServiceFilter()).metrics(plans, ledger.counts)
        b"".join(exposition(metrics))
        spent.append((time.thread_time() - begun) * 1e3)
    return figure("/metrics/services: all have traffic", "any", services, (min(spent), "ms"))


def _plan(number: int) -> ServicePlan:
    name = ServicePortName("bench", f"service-{number}", "http", Protocol.TCP)
    action = Action(Verdict.FORWARD)
    front = Frontend(FrontendKind.CLUSTER_IP, "10.96.0.1", 80, action, action, action)
    ends = tuple(Endpoint(address, 8080) for address in world.pods(number))
    return ServicePlan(PlanKey(name, Family.IPV4), (front,), reachable=ends)


def run(quick: bool) -> list[Figure]:
    """Measure 10,000 Services of three endpoints (500 when quick)."""
    size = 500 if quick else 10_000
    figures = [of_a_busy_cluster(size)]
    for mode in MODES:
        print(f"  {mode} ...", file=sys.stderr, flush=True)
        figures += of_pages(mode, size)
    return figures
