"""Resident memory of the whole process, all its servers on, with an API server behind it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks import world
from benchmarks.figures import Figure, figure
from benchmarks.node import Netns
from benchmarks.process import api_server, get, memory, steersman, wait_ready

_PAGES = ("metrics", "state", "configz")


def objects(services: int) -> list[bytes]:
    """Each Service and its slice, with their kinds, which lists leave out."""
    found = []
    for number in range(services):
        found.append(b'{"kind": "Service", ' + world.service(number)[1:])
        slice_ = world.endpoint_slice(number, world.pods(number))
        found.append(b'{"kind": "EndpointSlice", ' + slice_[1:])
    return found


def measured(mode: str, services: int) -> tuple[float, float, float]:
    """MB resident when all rules are in, after each page was served once, and at the most."""
    netns = Netns()
    netns.enter()
    with tempfile.TemporaryDirectory() as directory:  # noqa: SIM117 - the flag needs its URL
        with api_server(objects(services), Path(directory)) as url:
            with steersman("--master", url, "--proxy-mode", mode) as process:
                wait_ready(process)
                first = memory(process.pid)
                for page in _PAGES:
                    get(f"http://127.0.0.1:10249/{page}")
                now, most = memory(process.pid), memory(process.pid, "VmHWM")
    netns.close()
    return first, now, most


def run(quick: bool) -> list[Figure]:
    """Measure 5,000 Services with iptables and 10,000 with nftables (500 when quick)."""
    figures = []
    for mode, services in (("iptables", 5_000), ("nftables", 10_000)):
        size = 500 if quick else services
        name = "iptables-nft" if mode == "iptables" else mode
        empty, _, _ = measured(mode, 0)
        first, now, most = measured(mode, size)
        figures += [
            figure("the process: resident memory", name, size, (first, "MB")),
            figure("  after metrics and state", name, size, (now, "MB")),
            figure("  at the most", name, size, (most, "MB")),
            figure("  without any Service", name, 0, (empty, "MB")),
        ]
    return figures
