"""Endpoints that fail, with ejection and without: how many connections fail, and for how long.

    python -m benchmarks.failover                                        the table, 15 minutes
    python -m benchmarks.failover --modes nftables --scenarios "link" --seconds 20 --rate 50

For each scenario a lab is built (failover_lab.py) with two proxying nodes for each mode: one ejects
endpoints, the other does not. A client in a pod of each connects to the ClusterIP, one outside to
the node port, half of the connections by IPv6, all together `--rate` a second for each node. After
some seconds something fails, for all nodes at once. Of the connections that begin in the 60 s from
then on: the share that fails (refused, unreachable, no answer within 6 s) or takes a second or
more, the time from the fault to the beginning of the last one that failed, and the endpoints that
were ejected wrongly. 40 s after the fault Kubernetes notices, as far as it does: the endpoints are
not ready any more.

The ipvs mode runs in the virtual machine, with fewer connections:

    python -m tests.vm --timeout 3600 -- python -m benchmarks.failover --modes ipvs --rate 20
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from signal import SIGUSR1
from typing import NamedTuple

from benchmarks.failover_lab import B_PODS, NODE_PORT, VIPS, Lab, Pod, missing, node_addresses

MODES = {
    "nftables": ("--proxy-mode=nftables",),
    "iptables": ("--proxy-mode=iptables", "--iptables-variant=nft"),
    "iptables-legacy": ("--proxy-mode=iptables", "--iptables-variant=legacy"),
    "ebpf": ("--proxy-mode=ebpf",),
    "userspace": ("--proxy-mode=userspace",),
    "ipvs": ("--proxy-mode=ipvs",),
}
BEFORE = 5.0  # seconds of quiet before the fault
NOTICE = 40.0  # seconds until Kubernetes says that the pods of a dead node are not ready
OUTSIDE = 0.25  # share of the connections that come from outside
_EJECTED = re.compile(r"endpoint (\S+):\d+ of Service \S+ is ejected")


def _flap(lab: Lab) -> Iterator[float]:
    """Three seconds down, three seconds up."""
    while True:
        lab.drop("b1", "tcp dport 8080 drop")
        yield 3.0
        lab.heal("b1")
        yield 3.0


def _all_dead(lab: Lab) -> None:
    lab.drop_at_once([pod.name for pod in lab.pods], "tcp dport 8080 drop")


def _lose(lab: Lab, percent: int) -> None:
    """Lose packets at each node, pod and client, in both directions."""
    rule = f"meta l4proto tcp numgen random mod 100 < {percent} drop"
    nodes = [proxy.name for proxy in lab.proxies]
    clients = ["lan", *(proxy.client.name for proxy in lab.proxies)]
    for name in (*nodes, *clients, *(pod.name for pod in lab.pods)):
        lab.drop(name, rule)


class Scenario(NamedTuple):
    """Something that breaks."""

    name: str
    begin: Callable[[Lab], object]
    """May return an iterator that goes on when so many seconds have passed as it yields."""
    dead: tuple[Pod, ...] = B_PODS[:1]
    """Pods that are rightly ejected."""
    noticed: bool = True
    """Whether Kubernetes takes them out some time later."""


SCENARIOS = (
    Scenario("nothing fails", lambda _: None, (), noticed=False),
    Scenario("link of a node goes down", lambda lab: lab.link_down("b"), B_PODS),
    Scenario(
        "node drops silently", lambda lab: lab.drop("b", "drop", ("input", "forward")), B_PODS
    ),
    Scenario("process stops (RST)", lambda lab: lab.stop("b1")),
    Scenario("pod hangs, backlog full", lambda lab: lab.signal("b1", SIGUSR1)),
    Scenario(
        "firewall drops one endpoint",
        lambda lab: lab.drop("b1", "tcp dport 8080 drop"),
        noticed=False,
    ),
    Scenario("1 % loss everywhere", lambda lab: _lose(lab, 1), (), noticed=False),
    Scenario("5 % loss everywhere", lambda lab: _lose(lab, 5), (), noticed=False),
    Scenario("all endpoints dead", _all_dead, (), noticed=False),
    Scenario("flapping, 3 s down, 3 s up", _flap, noticed=False),
)


class Result(NamedTuple):
    """What clients of a node met after a fault."""

    connections: int
    failed: float
    """Share of connections."""
    slow: float
    """Share that took a second or more, or failed."""
    last: float
    """Seconds from the fault to the beginning of the last failed connection; 0 if none failed."""
    wrong: tuple[str, ...]
    """Endpoints that were ejected although they were well."""
    log: str


class Connection(NamedTuple):
    began: float
    target: int
    outcome: str
    took: float


def measure(
    scenario: Scenario, modes: Sequence[str], seconds: float, rate: float
) -> dict[tuple[str, bool], Result]:
    """Let something fail in a fresh lab; return the result by mode and whether it ejects."""
    kinds = [(mode, eject) for mode in modes for eject in (True, False)]
    words = [
        (*MODES[mode], f"--eject-failing-endpoints={str(eject).lower()}") for mode, eject in kinds
    ]
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(words, Path(folder))
        try:
            lab.build()
            lab.start_proxies()
            _wait_for_rules(lab)
            at, found = _load(lab, scenario, seconds, rate)
            logs = [proxy.log.read_text() for proxy in lab.proxies]
        finally:
            lab.close()
    return {
        kind: _result(scenario, [each for each in some if each.began > at], at, log)
        for kind, some, log in zip(kinds, found, logs, strict=True)
    }


def _targets(lab: Lab) -> list[tuple[str, int]]:
    """The node ports of each proxying node."""
    return [(at, NODE_PORT) for proxy in lab.proxies for at in node_addresses(proxy.number)]


def _load(
    lab: Lab, scenario: Scenario, seconds: float, rate: float
) -> tuple[float, list[list[Connection]]]:
    """Run the clients, and begin the fault; return when, and the connections by node."""
    long = BEFORE + seconds
    inside = [
        lab.start_client(
            *(proxy.client.name, [(vip, 80) for vip in VIPS], rate * (1 - OUTSIDE), long),
            proxy.cgroup,
        )
        for proxy in lab.proxies
    ]
    outside = lab.start_client("lan", _targets(lab), rate * OUTSIDE * len(lab.proxies), long)
    time.sleep(BEFORE)
    at = time.time()
    steps = scenario.begin(lab)
    if isinstance(steps, Iterator):
        for wait in steps:
            if time.time() + wait > at + seconds:
                break
            time.sleep(wait)
    if scenario.noticed and seconds > NOTICE:
        time.sleep(max(0.0, at + NOTICE - time.time()))
        _notice(lab, scenario)
    found = [_connections(client) for client in inside]
    for each in _connections(outside):
        found[each.target // 2].append(each)
    return at, found


def _notice(lab: Lab, scenario: Scenario) -> None:
    """Kubernetes says that the dead pods are not ready."""
    for proxy in lab.proxies:
        proxy.write({pod.name for pod in scenario.dead})


def _connections(client: subprocess.Popen[bytes]) -> list[Connection]:
    out, errors = client.communicate(timeout=600)
    if client.returncode:
        raise RuntimeError(f"a client ended: {errors.decode()}")
    return [Connection(*each) for each in json.loads(out)]


def _result(scenario: Scenario, found: Sequence[Connection], at: float, log: str) -> Result:
    failed = [each for each in found if each.outcome != "answered"]
    slow = [each for each in found if each.took >= 1 or each.outcome != "answered"]
    dead = {address for pod in scenario.dead for address in pod.addresses}
    ejected = {address.strip("[]") for address in _EJECTED.findall(log)}
    last = max((each.began - at for each in failed), default=0.0)
    number = len(found)
    return Result(
        number, len(failed) / number, len(slow) / number, last, (*sorted(ejected - dead),), log
    )


def _wait_for_rules(lab: Lab) -> None:
    """Wait until a pod of each node and the client outside reach the Service."""
    ask = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1)"
    wanted = [("lan", target) for target in _targets(lab)]
    wanted += [(proxy.client.name, (vip, 80)) for proxy in lab.proxies for vip in VIPS]
    deadline = time.monotonic() + 120
    for name, (address, port) in wanted:
        argv = lab.argv(name, sys.executable, "-c", ask, address, str(port))
        while subprocess.run(argv, capture_output=True, check=False).returncode:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody answers at {address} port {port} for {name}")
            time.sleep(0.2)


# The table


def table(found: dict[str, dict[tuple[str, bool], Result]], modes: Sequence[str]) -> str:
    """Return results by scenario as Markdown."""
    columns = [f"{mode} | without" for mode in modes]
    lines = [f"| scenario | {' | '.join(columns)} |", f"| --- |{' --- |' * (2 * len(modes))}"]
    for name, results in found.items():
        cells = [_cell(results[mode, eject]) for mode in modes for eject in (True, False)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(result: Result) -> str:
    """Such as `0.3 %, 1.2 s; 5 % slow`."""
    text = _percent(result.failed)
    if result.failed:
        text += f", {result.last:.1f} s"
    text += f"; {_percent(result.slow)} slow"
    return f"{text}; wrong: {len(result.wrong)}" if result.wrong else text


def _percent(share: float) -> str:
    percent = share * 100
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failover")
    parser.add_argument("--modes", default=",".join(m for m in MODES if m != "ipvs"))
    parser.add_argument("--scenarios", default="", help="parts of names, separated by commas")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=float, default=200, help="connections a second and node")
    parser.add_argument("--log", action="store_true", help="print the logs of steersman")
    options = parser.parse_args(argv)
    if why := missing():
        parser.error(why)
    modes = options.modes.split(",")
    parts = options.scenarios.split(",")
    results: dict[str, dict[tuple[str, bool], Result]] = {}
    for scenario in SCENARIOS:
        if not any(part in scenario.name for part in parts):
            continue
        found = results[scenario.name] = measure(scenario, modes, options.seconds, options.rate)
        for (mode, eject), result in found.items():
            word = "with" if eject else "without"
            print(
                f"{scenario.name:28} {mode:15} {word:7} {result.connections:6} connections: "
                f"{_cell(result)}; {len(result.log.splitlines())} lines of log",
                file=sys.stderr,
                flush=True,
            )
            if options.log:
                print(result.log, file=sys.stderr)
    print("\nShare of connections that failed, when the last of them began, and share that took")
    print("a second or more (failed ones included):\n")
    print(table(results, modes))
    wrong = [
        f"{name}, {mode}: {', '.join(result.wrong)}"
        for name, found in results.items()
        for (mode, _), result in found.items()
        if result.wrong
    ]
    print(f"\nEndpoints ejected wrongly: {'; '.join(wrong) or 'none'}.")


if __name__ == "__main__":
    main()
