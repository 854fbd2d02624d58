"""Run seeds: one with its history, or many in several processes; a failure names its seed."""

from __future__ import annotations

import argparse
import gc
import os
import random
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from tests.sim.clocks import START, cpu_time
from tests.sim.failing import FAILURES
from tests.sim.kernel import Violation
from tests.sim.life import Life
from tests.sim.mutations import MUTATIONS
from tests.sim.node import Node
from tests.sim.trouble import TROUBLES
from tests.sim.universe import Process, SimTask, Spinning, Universe

MODES = ("iptables", "nftables", "ebpf")
_TAIL = 60
_ENVIRONMENT = ("PATH", "PYTHONPATH", "HOME", "TMPDIR", "LANG")
"""What simulated processes have of the environment: no proxies."""


class Outcome:
    """What became of a seed."""

    def __init__(self, seed: int, hours: float, only: frozenset[str] = frozenset()) -> None:
        self.seed = seed
        self.hours = 0.0
        self.problem = ""
        SimTask.number = Process.number = 0
        random.seed(seed)
        with tempfile.TemporaryDirectory(dir=_memory()) as folder:
            self.universe = Universe(seed)
            mode = self.universe.dice.choice(MODES)
            node = Node(self.universe, Path(folder), mode)
            troubles = (*TROUBLES, *FAILURES) if node.ejects else TROUBLES
            troubles = tuple(each for each in troubles if each.__name__ in only) or troubles
            self.life = Life(self.universe, node, hours, troubles)
            try:
                self.life.live()
            except (Violation, Spinning) as error:
                self.problem = str(error)
            self.hours = (self.universe.now - START) / 3600

    @property
    def digest(self) -> str:
        return self.universe.digest


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def run_some(
    seeds: list[int],
    hours: float,
    *,
    tail: int,
    stop: bool = False,
    only: frozenset[str] = frozenset(),
) -> list[int]:
    """Run seeds one after the other; return those that fail.

    Args:
        seeds: their numbers.
        hours: of each life.
        tail: lines of history that a failure shows.
        stop: end with the first that fails.
        only: names of the troubles that lives have, if any of them can happen; all if empty.
    """
    gc.disable()
    gc.freeze()  # modules live as long as the process
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda _: None  # of coroutines of dead processes
    failed: list[int] = []
    lived, began = 0.0, cpu_time()
    for number, seed in enumerate(seeds, 1):
        if failed and stop:
            break
        outcome = Outcome(seed, hours, only)
        lived += outcome.hours
        if outcome.problem:
            failed.append(seed)
            print(f"seed {seed} FAILED after {outcome.hours:.2f} h: {outcome.problem}")
            for line in list(outcome.universe.history)[-tail:] if tail else ():
                print(f"    {line}")
            more = f" --troubles {','.join(sorted(only))}" if only else ""
            replay = f"python -m tests.sim --seed {seed} --hours {hours:g}{more}"
            print(f"    replay: {replay}", flush=True)
        elif len(seeds) == 1:
            print(f"seed {seed}: {outcome.digest}, {outcome.hours:.2f} h")
        del outcome
        if number % 10 == 0:
            print(f"{number} of {len(seeds)} seeds, {lived:.0f} node-hours", flush=True)
        gc.collect()
    spent = cpu_time() - began
    rate = lived / spent if spent else 0.0
    print(
        f"{len(seeds)} seeds, {lived:.1f} node-hours in {spent:.1f} s of CPU ({rate:.1f} h/s), "
        f"{len(failed)} failed",
        flush=True,
    )
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("--seed", type=int, help="run this one, and print its history")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--tail", type=int, default=_TAIL)
    parser.add_argument("--mutation", choices=tuple(MUTATIONS), help="put an old defect back")
    parser.add_argument("--troubles", default="", help="only these, by name, with commas")
    parser.add_argument("--stop", action="store_true", help="end with the first seed that fails")
    parser.add_argument("-j", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        argv = [sys.executable, "-m", "tests.sim", *sys.argv[1:]]
        kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        os.execve(sys.executable, argv, {**kept, "PYTHONHASHSEED": "0"})
    if options.mutation:
        MUTATIONS[options.mutation]()
    only = frozenset(filter(None, options.troubles.split(",")))
    if options.seed is not None:
        return 1 if run_some([options.seed], options.hours, tail=options.tail, only=only) else 0
    seeds = range(options.first, options.first + options.seeds)
    if options.j <= 1:
        failed = run_some(
            list(seeds), options.hours, tail=options.tail, stop=options.stop, only=only
        )
        return 1 if failed else 0
    return _in_parallel(list(seeds), options)


def _in_parallel(seeds: list[int], options: argparse.Namespace) -> int:
    share = -(-len(seeds) // options.j)
    children = []
    for start in range(0, len(seeds), share):
        words = ["--first", seeds[start], "--seeds", len(seeds[start : start + share])]
        words += ["--mutation", options.mutation] if options.mutation else []
        words += ["--troubles", options.troubles] if options.troubles else []
        words += ["--hours", options.hours, "--tail", options.tail, "-j", 1]
        argv = [sys.executable, "-m", "tests.sim", *map(str, words)]
        children.append(subprocess.Popen(argv))
    return max(child.wait() for child in children)
