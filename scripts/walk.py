"""How far one endpoint change walks: from the line of a watch to the kernel, in nftables mode.

    python scripts/walk.py                 files and functions that it passes through (root)
    python scripts/walk.py --source DIR    of another tree
    python scripts/walk.py --list          every function, by file

A daemon and a test API server run in their own network namespace. A profile function counts the
distinct functions of steersman that run from the added endpoint to its element in the kernel; what
follows from a sync that has been written (metrics, pages, logs) is not part of the walk. Generator
expressions and comprehensions belong to the function around them.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
ADDRESS = "10.244.9.9"
CLONE_NEWNET = 0x40000000
WRITTEN = "Sync._publish"
"""The first function after the kernel has everything."""


def daemon(source: Path, flags: list[str], result: Path) -> None:
    """Run steersman; record its functions between SIGUSR1 and SIGUSR2."""
    seen: set[CodeType] = set()
    counting = False

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal counting
        if frame.f_code.co_qualname == WRITTEN:
            counting = False
        if counting and event == "call" and frame.f_code.co_filename.startswith(str(source)):
            seen.add(frame.f_code)

    def start(*_: object) -> None:
        nonlocal counting
        counting = True
        sys.setprofile(profile)

    def stop(*_: object) -> None:
        nonlocal counting
        counting = False
        sys.setprofile(None)
        found = [
            (str(Path(code.co_filename).relative_to(source)), code.co_qualname)
            for code in seen
            if not code.co_name.startswith("<")
        ]
        result.write_text(json.dumps(sorted(set(found))))
        signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGUSR1, start)
    signal.signal(signal.SIGUSR2, stop)
    threading.setprofile(profile)  # threads of executors
    sys.path.insert(0, str(source))
    sys.argv = ["steersman", "run", *flags]
    runpy.run_module("steersman", run_name="__main__")


async def measure(source: Path, folder: Path) -> list[tuple[str, str]]:
    """Return file and name of each function that one more endpoint passes through."""
    from tests.support.apiserver.server import ApiServer  # noqa: PLC0415 - not in the daemon
    from tests.support.builders import kube  # noqa: PLC0415

    node = kube.node("walker", "192.0.2.1")
    objects = [kube.service("web"), kube.endpoint_slice("web-1", "web", "10.244.9.1"), node]
    result = folder / "functions.json"
    async with ApiServer(objects) as server:
        flags = [
            *("--proxy-mode=nftables", "--cluster-cidr=10.244.0.0/16"),
            *("--hostname-override=walker", "--conntrack-max-per-core=0", f"--master={server.url}"),
            *("--healthz-bind-address=", "--metrics-bind-address="),
        ]
        argv = [sys.executable, __file__, "--source", str(source), "--daemon", str(result), *flags]
        process = await asyncio.create_subprocess_exec(*argv, stderr=subprocess.DEVNULL)
        try:
            await until_in_kernel("10.244.9.1", process)
            await asyncio.sleep(3)  # what follows the start is not part of the walk
            process.send_signal(signal.SIGUSR1)
            server.add(kube.endpoint_slice("web-1", "web", "10.244.9.1", ADDRESS))
            await until_in_kernel(ADDRESS, process)
            process.send_signal(signal.SIGUSR2)
            await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
    return [(file, name) for file, name in json.loads(result.read_text())]


async def until_in_kernel(text: str, process: asyncio.subprocess.Process) -> None:
    """Wait until the rules contain a text."""
    end = time.monotonic() + 60
    while time.monotonic() < end and process.returncode is None:
        listing = await asyncio.create_subprocess_exec(
            *("nft", "list", "ruleset"), stdout=-1, stderr=-3
        )
        if text.encode() in (await listing.communicate())[0]:
            return
    raise RuntimeError(f"{text} did not reach the kernel (steersman: {process.returncode})")


def main() -> None:
    """Measure in a network namespace, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="a tree's src folder")
    parser.add_argument("--list", action="store_true", help="print every function")
    parser.add_argument("--daemon", type=Path, help=argparse.SUPPRESS)
    arguments, flags = parser.parse_known_args()
    source = arguments.source.resolve()
    if arguments.daemon:
        daemon(source, flags, arguments.daemon)
        return
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        sys.exit("needs root: no network namespace can be made")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        functions = asyncio.run(measure(source, Path(folder)))
    files: defaultdict[str, list[str]] = defaultdict(list)
    for file, name in functions:
        files[file].append(name)
    if arguments.list:
        for file, names in sorted(files.items()):
            print(f"{file}: {', '.join(names)}")
    print(f"{len(files)} files, {len(functions)} functions")


if __name__ == "__main__":
    main()
