"""Events decoded, compiled and rendered in a fresh process: seconds and resident memory."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import world
from benchmarks.figures import Figure, figure


def measure(path: Path, services: int) -> tuple[float, float]:
    """Run in the fresh process: (seconds, MB resident at the end)."""
    from steersman.compile.planner import Planner  # noqa: PLC0415 - imports count as memory only here
    from steersman.host.exec import SubprocessExec  # noqa: PLC0415
    from steersman.model.findings import Finding  # noqa: PLC0415
    from steersman.model.inputs import HostFacts, NodeConfig  # noqa: PLC0415
    from steersman.modes.iptables.mode import IptablesMode  # noqa: PLC0415
    from steersman.run.process.memory import collect_rarely  # noqa: PLC0415
    from steersman.source.objects import decode_object  # noqa: PLC0415
    from steersman.source.store import Store  # noqa: PLC0415

    collect_rarely()
    config = NodeConfig(node_name=world.NODE, cluster_cidrs=(world.CLUSTER_CIDR,))
    mode = IptablesMode(SubprocessExec())
    begun = time.perf_counter()
    store = Store(world.NODE)
    with path.open("rb") as events:  # a line at a time, as from a watch
        for number, line in enumerate(events):
            obj = decode_object("EndpointSlice" if number % 2 else "Service", line)
            assert not isinstance(obj, Finding)
            store.upsert(obj)
    planner = Planner(config, mode.traits)
    planner.update(store.snapshot, HostFacts())
    plan = planner.plan
    want = {key: mode.render_service(each, plan.settings) for key, each in plan.services.items()}
    seconds = time.perf_counter() - begun
    assert len(want) == services
    return seconds, _resident()


def _resident() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def run(quick: bool) -> list[Figure]:
    """Measure 10,000 Services (1,000 when quick), medians of fresh processes."""
    services = 1000 if quick else 10000
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "events"
        with path.open("wb") as events:
            for number in range(services):
                events.write(world.service(number) + b"\n")
                events.write(world.endpoint_slice(number, world.pods(number)) + b"\n")
        argv = [sys.executable, "-m", "benchmarks.memory", str(path), str(services)]
        outputs = [
            subprocess.run(argv, check=True, capture_output=True, text=True).stdout
            for _ in range(3)
        ]
    results = sorted(tuple(map(float, output.split())) for output in outputs)
    seconds, megabytes = results[1]
    return [
        figure("decode, compile, render", "iptables", services, (seconds, "s")),
        figure("the same: resident memory", "iptables", services, (megabytes, "MB")),
    ]


if __name__ == "__main__":
    print(*measure(Path(sys.argv[1]), int(sys.argv[2])))
