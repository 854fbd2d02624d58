"""Figures of the ipvs mode beside `ipvsadm -R` and `ipset restore`, in the same run.

Inside the machine: `python -m tests.vm -- .venv/bin/python -m tests.vm.guest.bench_ipvs [NUMBER]`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from steersman.host.exec import SubprocessExec
from steersman.host.netlink import NETLINK_GENERIC, Netlink
from steersman.model.names import Protocol
from steersman.model.plan import NodePlan
from steersman.model.ruleset import diff
from steersman.modes.ipvs.mode import IpvsMode
from steersman.modes.ipvs.objects import ServerKey
from steersman.modes.ipvs.wire import Command, destination, resolve
from tests.support.builders.plans import SETTINGS, simple
from tests.support.lab.namespace import in_namespace, sh
from tests.support.modes.registry import render

SERVICES, TIMES = int(sys.argv[1]) if len(sys.argv) > 1 else 1000, 200
PLANS = [simple(number) for number in range(SERVICES)]
WHOLE = NodePlan(SETTINGS, {plan.key: plan for plan in PLANS})


def places() -> list[tuple[str, list[str]]]:
    return [(plan.frontends[0].address, [e.ip for e in plan.cluster]) for plan in PLANS]


def servers() -> str:
    lines = []
    for vip, ends in places():
        lines.append(f"-A -t {vip}:80 -s rr")
        lines += [f"-a -t {vip}:80 -r {end}:8080 -m -w 1" for end in ends]
    return "\n".join([*lines, ""])


def sets() -> str:
    """Entries as upstream's mode has them: clusterIP, hairpin and address."""
    lines = ["create A hash:ip,port", "create B hash:ip,port,ip", "create C hash:ip"]
    for vip, ends in places():
        lines += [f"add A {vip},6:80", f"add C {vip}"]
        lines += [f"add B {end},6:8080,{end}" for end in ends]
    return "\n".join([*lines, ""])


def reference() -> float:
    started = time.perf_counter()
    subprocess.run(["ipvsadm", "-R"], input=servers(), text=True, check=True)
    subprocess.run(["ipset", "restore"], input=sets(), text=True, check=True)
    seconds = time.perf_counter() - started
    sh("ipvsadm -C; ipset destroy")
    return seconds


def took(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


async def body() -> None:
    mode = IpvsMode(SubprocessExec())
    assert mode.probe().usable
    theirs = reference()
    empty = NodePlan(SETTINGS, {})
    mode.apply(diff(mode.read(), render(empty, mode)))
    nothing, everything = render(empty, mode), render(WHOLE, mode)
    cold = took(lambda: mode.apply(diff(nothing, everything)))
    reading = took(mode.read)
    looking = took(mode.fingerprint)
    change = one_change(mode)
    trip = round_trip()
    print(f"cold start {SERVICES} x 3: {cold:.2f} s, ipvsadm -R and ipset restore {theirs:.2f} s")
    print(f"  ratio {cold / theirs:.2f} (to be 1.5 at most); read back {reading:.2f} s")
    print(f"look for drift where nothing changed: {looking:.2f} s")
    print(f"one endpoint: {change * 1e3:.2f} ms, one raw round trip {trip * 1e3:.2f} ms")
    print(f"  ratio {change / trip:.2f} (to be 5 at most)")


def one_change(mode: IpvsMode) -> float:
    """Median of the whole change: render, diff, apply. The current state is known, as always."""
    plans = simple(7), simple(7, count=2)
    have, times = mode.render_service(plans[0], SETTINGS), []
    for turn in range(TIMES):
        started = time.perf_counter()
        want = mode.render_service(plans[turn % 2 == 0], SETTINGS)
        mode.apply(diff(have, want))
        times.append(time.perf_counter() - started)
        have = want
    return statistics.median(times)


def round_trip() -> float:
    key = ServerKey(Protocol.TCP, PLANS[9].frontends[0].address, 80)
    end = (PLANS[9].cluster[0].ip, 8080)
    times = []
    with Netlink(NETLINK_GENERIC) as netlink:
        family = resolve(netlink)
        for turn in range(TIMES):
            request = destination(family, Command.SET_DEST, key, end, weight=1 + turn % 2)
            started = time.perf_counter()
            netlink.request(request)
            times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    in_namespace(body)
