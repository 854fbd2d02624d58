"""`python -m tests.cluster`: see `tests.cluster`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.cluster.run import FOCUS, Cluster, MissingError, Result, programs, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--image", type=Path, required=True, help="archive that `make image` wrote")
    parser.add_argument(
        "--image-name", default="localhost/steersman:0.1.0", help="name and tag in it"
    )
    parser.add_argument("--modes", default="nftables,iptables,ebpf")
    parser.add_argument("--focus", default=FOCUS, help="regular expression of tests")
    parser.add_argument("--out", type=Path, default=Path("build/cluster"))
    args = parser.parse_args()
    try:
        tools = programs(os.environ)
    except MissingError as error:
        print(f"not run: {error}", file=sys.stderr)
        return 2
    results: dict[str, list[Result]] = {}
    for mode in args.modes.split(","):
        folder = args.out / mode
        folder.mkdir(parents=True, exist_ok=True)
        cluster = Cluster(tools, f"steersman-{mode}", folder)
        with cluster.running():
            cluster.deploy(args.image, args.image_name, mode)
            results[mode] = cluster.test(folder / "report", args.focus)
    text = table(results)
    (args.out / "results.md").write_text(text + "\n")
    print(text)
    return int(any(each.outcome == "failed" for found in results.values() for each in found))


if __name__ == "__main__":
    raise SystemExit(main())
