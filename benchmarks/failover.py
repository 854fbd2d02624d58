"""Endpoints that fail, with ejection and without: how many connections fail, and for how long.

    python -m benchmarks.failover --modes nftables,iptables --seconds 20 --rate 100

Two nodes and three pods in network namespaces (scripts/demo_cluster.py). steersman runs on node-a;
clients in pod-1 connect to the Service all the time. After some seconds something fails: of the
connections that begin from then on, the share that fails or takes a second or more, the time from
the fault to the beginning of the last one that failed, and the endpoints that were ejected wrongly.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from demo_cluster import POD_CIDR, PODS, Cluster  # noqa: E402

BEFORE = 3.0  # seconds of quiet before the fault
VIP = "10.96.0.10"

# Opens connections at a steady rate and prints [seconds of its beginning, outcome, duration].
CLIENT = """
import asyncio, json, random, sys, time
address, rate, seconds = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
async def connect(found):
    began = time.time()
    try:
        async with asyncio.timeout(6):
            reader, writer = await asyncio.open_connection(address, 80)
            outcome = "answered" if await reader.read(64) else "empty"
            writer.close()
    except (OSError, TimeoutError) as error:
        outcome = type(error).__name__
    found.append((began, outcome, time.time() - began))
async def main():
    found, tasks, end = [], set(), time.time() + seconds
    while time.time() < end:
        task = asyncio.create_task(connect(found))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(random.expovariate(rate))
    await asyncio.gather(*tasks)
    print(json.dumps(found))
asyncio.run(main())
"""


class Fault(NamedTuple):
    """Something that breaks."""

    name: str
    begin: Callable[[Cluster], object]
    dead: frozenset[str] = frozenset({"10.244.2.13"})
    """Endpoints that are rightly ejected."""


def _nft(cluster: Cluster, name: str, rules: str) -> None:
    text = f"table inet fault {{\n{rules}\n}}\n"
    subprocess.run(cluster.argv(name, ["nft", "-f", "-"]), input=text, text=True, check=True)


def _input(cluster: Cluster, name: str, rule: str) -> None:
    _nft(cluster, name, f"chain incoming {{ type filter hook input priority 0;\n{rule}\n}}")


def _forward(cluster: Cluster, name: str, rule: str) -> None:
    _nft(cluster, name, f"chain forwarding {{ type filter hook forward priority 0;\n{rule}\n}}")


def _link_down(cluster: Cluster) -> None:
    argv = ["ip", "-n", cluster.netns("client"), "link", "set", "to-node-b", "down"]
    subprocess.run(argv, check=True)


def _all_dead(cluster: Cluster) -> None:
    for pod in PODS:
        _input(cluster, pod.name, "tcp dport 8080 drop")


def _loss(percent: int) -> Callable[[Cluster], None]:
    rule = f"numgen random mod 100 < {percent} drop"
    return lambda cluster: _forward(cluster, "node-a", rule)


NOBODY: frozenset[str] = frozenset()
FAULTS = (
    Fault("link of a node goes down", _link_down),
    Fault("node drops silently", lambda c: _forward(c, "node-b", "drop")),
    Fault("process stops (RST)", lambda c: c.stop("pod-3")),
    Fault("firewall drops one endpoint", lambda c: _input(c, "pod-3", "tcp dport 8080 drop")),
    Fault("1 % loss everywhere", _loss(1), NOBODY),
    Fault("5 % loss everywhere", _loss(5), NOBODY),
    Fault("all endpoints dead", _all_dead, NOBODY),
)


class Result(NamedTuple):
    """What clients met after a fault."""

    failed: float
    """Share of connections."""
    slow: float
    """Share that took a second or more, or failed."""
    last: float
    """Seconds from the fault to the beginning of the last failed connection; 0 if none failed."""
    wrong: int
    """Endpoints that were ejected although they were well."""
    log: str


def run(mode: str, fault: Fault, seconds: float, rate: float, eject: bool) -> Result:
    """Let something fail on a fresh cluster, and measure."""
    cluster = Cluster()
    with tempfile.TemporaryDirectory() as folder:
        manifests, log = Path(folder, "manifests"), Path(folder, "log")
        manifests.mkdir()
        for path in (ROOT / "demo").glob("*.yaml"):
            (manifests / path.name).write_text(path.read_text())
        try:
            cluster.build()
            words = [sys.executable, "-m", "steersman", "run", f"--manifests={manifests}"]
            words += [f"--proxy-mode={mode}", "--hostname-override=node-a"]
            words += [
                f"--cluster-cidr={POD_CIDR}",
                f"--eject-failing-endpoints={str(eject).lower()}",
            ]
            with log.open("wb") as file:
                cluster.start("node-a", "steersman", words, file)
            _wait_for_rules(cluster)
            argv = [sys.executable, "-c", CLIENT, VIP, str(rate), str(BEFORE + seconds)]
            client = cluster.start("pod-1", "load", argv)
            time.sleep(BEFORE)
            at = time.time()
            fault.begin(cluster)
            out, _ = client.communicate(timeout=seconds + 60)
            found = [each for each in json.loads(out) if each[0] > at]
            text = log.read_text()
        finally:
            cluster.close()
    failed = [each for each in found if each[1] != "answered"]
    slow = [each for each in found if each[1] != "answered" or each[2] >= 1]
    ejected = {line.split("endpoint ")[1].split(":")[0] for line in _ejections(text)}
    last = max((each[0] - at for each in failed), default=0.0)
    return Result(
        len(failed) / len(found), len(slow) / len(found), last, len(ejected - fault.dead), text
    )


def _ejections(log: str) -> list[str]:
    return [line for line in log.splitlines() if "is ejected" in line and "endpoint " in line]


def _wait_for_rules(cluster: Cluster) -> None:
    ask = f"import socket; socket.create_connection(({VIP!r}, 80), 1)"
    deadline = time.monotonic() + 60
    while subprocess.run(
        cluster.argv("pod-1", [sys.executable, "-c", ask]), capture_output=True, check=False
    ).returncode:
        if time.monotonic() > deadline:
            raise TimeoutError("the Service is not served")
    time.sleep(1)  # first probes of the endpoints


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--modes", default="nftables,iptables")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rate", type=float, default=100)
    parser.add_argument("--only", default="", help="part of a fault's name")
    parser.add_argument("--log", action="store_true", help="print the log of steersman")
    options = parser.parse_args(argv)
    print("mode, fault, ejection | failed % | slow % | last failure s | wrong")
    for mode in options.modes.split(","):
        for fault in (each for each in FAULTS if options.only in each.name):
            for eject in (True, False):
                found = run(mode, fault, options.seconds, options.rate, eject)
                word = "with" if eject else "without"
                print(
                    f"{mode:9} {fault.name:28} {word:7} | {found.failed * 100:5.2f} |"
                    f" {found.slow * 100:5.2f} | {found.last:5.2f} | {found.wrong}",
                    flush=True,
                )
                if options.log:
                    print(found.log)


if __name__ == "__main__":
    main()
