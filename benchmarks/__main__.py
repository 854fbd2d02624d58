"""`make bench`: run the benchmarks (ONLY=name for one, QUICK=1 for short runs)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import (
    change,
    churn,
    cold,
    draw,
    ebpf,
    failover_cost,
    fleet,
    footprint,
    http2,
    idle,
    memory,
    nftables,
    operate,
    packets,
    path,
    proxy,
    rollout,
    scale,
    scrape,
    start,
    stream,
    udp,
    ui,
    wire,
)
from benchmarks.figures import Figure, table

BENCHMARKS: dict[str, Callable[[bool], list[Figure]]] = {
    "memory": memory.run,
    "cold": cold.run,
    "change": change.run,
    "packets": packets.run,
    "path": path.run,
    "nftables": nftables.run,
    "ebpf": ebpf.run,
    "idle": idle.run,
    "churn": churn.run,
    "rollout": rollout.run,
    "start": start.run,
    "footprint": footprint.run,
    "proxy": proxy.run,
    "scale": scale.run,
    "scrape": scrape.run,
    "operate": operate.run,
    "stream": stream.run,
    "ui": ui.run,
    "wire": wire.run,
    "http2": http2.run,
    "failover": failover_cost.run,
    "udp": udp.run,
    "fleet": fleet.run,
}
NEED_ROOT = set(BENCHMARKS) - {"memory", "proxy", "ui", "wire", "http2", "fleet"}


def main() -> int:
    """Run the benchmarks asked for; print a table, write build/bench.json and its drawings."""
    only, quick = os.environ.get("ONLY", ""), os.environ.get("QUICK", "") not in ("", "0")
    if only and only not in BENCHMARKS:
        print(f"ONLY={only}: there is {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    figures: list[Figure] = []
    for name, run in BENCHMARKS.items():
        if only in ("", name) and (os.geteuid() == 0 or name not in NEED_ROOT):
            print(f"{name} ...", file=sys.stderr, flush=True)
            figures += run(quick)
    if os.geteuid() != 0:
        print(f"left out, they need root: {', '.join(sorted(NEED_ROOT))}", file=sys.stderr)
    print(table(figures))
    build = Path(__file__).parents[1] / "build"
    build.mkdir(exist_ok=True)
    (build / "bench.json").write_bytes(draw.encoded(figures))
    for name, drawn in draw.made(figures).items():
        (build / name).write_text(drawn)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
