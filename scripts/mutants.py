"""Plant defects in pure modules one at a time, and show which tests find them.

    python scripts/mutants.py [--sample N] [--seed N] [--jobs N] [GROUP...]

Each mutant differs from the tree in one comparison, constant, condition, operator, returned value
or statement. The tests of its group run against it in a copy of the tree. Printed are the mutants
that no test finds, and for each test how long it takes with all its parameters, how many mutants it
finds, and how many only it finds. One that finds nothing alone may test what another one tests.
Some mutants change nothing that can be observed, so not all can be found. Tests with packets are
left out: they would find most of what is sought here, in minutes each.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PACKAGE = "src/steersman"
GROUPS = {
    "compile": (
        ["compile/*.py"],
        [
            "tests/unit/compile",
            "tests/properties/test_compile.py",
            "tests/properties/test_digest.py",
            "tests/test_golden_world.py",
        ],
    ),
    **{
        mode: (
            [f"modes/{mode}/render.py"],
            [f"tests/unit/modes/{mode}", "tests/test_cases.py", "-k", mode],
        )
        for mode in ("iptables", "nftables", "ipvs", "ebpf", "userspace")
    },
    "ledger": (
        ["run/sync/ledger.py"],
        [
            "tests/properties/test_ledger.py",
            "tests/properties/test_sync.py",
            "tests/unit/run/test_sync.py",
        ],
    ),
}
"""Modules, and the arguments of pytest for the tests that should find what is wrong with them."""
LEFT_OUT = (".git", ".venv", "build", "__pycache__", ".*_cache", ".hypothesis")
PATIENCE = 4
"""A mutant may take so many times as long as the tree; then it counts as found."""

SWAPPED: dict[type[ast.AST], type[Any]] = {}
for one, other in (
    (ast.Eq, ast.NotEq),
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.In, ast.NotIn),
    (ast.Is, ast.IsNot),
    (ast.And, ast.Or),
    (ast.Add, ast.Sub),
    (ast.BitAnd, ast.BitOr),
):
    SWAPPED |= {one: other, other: one}


class Mutant(NamedTuple):
    """One change of a module."""

    module: str
    site: int
    """The number of the place that is changed, in the order of the syntax tree."""
    change: str = ""
    """The line, and what is there instead."""


class Mutator(ast.NodeTransformer):
    """Changes the syntax tree at one site, and counts the sites."""

    def __init__(self, site: int = -1) -> None:
        self.site = site
        self.sites = 0
        self.change = ""

    def visit(self, node: ast.AST) -> ast.AST:
        """Change this node if it is the site, else what is below it."""
        if isinstance(node, ast.arg):  # its annotation has no effect
            return node
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                value = self.visit(node.value)
                assert isinstance(value, ast.expr)
                node.value = value
            return node
        changed = mutated(node)
        if changed is not None:
            self.sites += 1
            if self.sites - 1 == self.site:
                ast.copy_location(changed, node)
                ast.fix_missing_locations(changed)
                line = getattr(node, "lineno", 0)
                self.change = f"line {line}: {ast.unparse(node)} -> {ast.unparse(changed)}"
                return changed
        return self.generic_visit(node)


def mutated(node: ast.AST) -> ast.AST | None:
    """Return what may stand in the place of a node; None if it stays."""
    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in SWAPPED:
            return ast.Compare(left, [SWAPPED[type(operator)]()], [right])
        case ast.BoolOp(operator, values):
            return ast.BoolOp(SWAPPED[type(operator)](), values)
        case ast.BinOp(left, operator, right) if type(operator) in SWAPPED:
            return ast.BinOp(left, SWAPPED[type(operator)](), right)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Constant(bool() as value):
            return ast.Constant(not value)
        case ast.Constant(int() as value):
            return ast.Constant(value + 1)
        case ast.If(ast.Name() | ast.Attribute() | ast.Call() as test, body, orelse):
            return ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Return(value) if value is not None and not isinstance(value, ast.Constant):
            return ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call()) | ast.AugAssign():
            return ast.Pass()
    return None


def sites_of(module: Path) -> int:
    """Count the places at which a module can be changed."""
    mutator = Mutator()
    mutator.visit(ast.parse(module.read_text()))
    return mutator.sites


def plant(tree: Path, mutant: Mutant) -> str:
    """Write a mutant into a copy of the tree; return what it changes."""
    mutator = Mutator(mutant.site)
    changed = mutator.visit(ast.parse((ROOT / mutant.module).read_text()))
    (tree / mutant.module).write_text(ast.unparse(changed))
    return mutator.change


class Run(NamedTuple):
    """The result of the tests of a group."""

    failed: frozenset[str]
    """Tests that failed, without their parameters."""
    seconds: dict[str, float]
    """By test."""


def run_tests(tree: Path, tests: Sequence[str], timeout: float | None) -> Run:
    """Run tests in a copy of the tree."""
    report = tree / "report.xml"
    report.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    argv += ["-m", "not kernel"]
    paths = os.pathsep.join(str(tree / name) for name in ("src", "", "scripts"))
    try:
        subprocess.run(
            [*argv, "--maxfail=200", "-o", "junit_family=xunit1", f"--junitxml={report}", *tests],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Run(frozenset({"(too slow)"}), {})
    if not report.exists():
        return Run(frozenset({"(no test could be collected)"}), {})
    failed: set[str] = set()
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        module = case.get("file") or case.get("classname", "").replace(".", "/") + ".py"
        test = f"{module}::{case.get('name', '').partition('[')[0]}"
        seconds[test] += float(case.get("time", 0))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(test)
    return Run(frozenset(failed), seconds)


def sample(modules: Sequence[str], number: int, seed: int) -> Iterator[Mutant]:
    """Choose mutants of modules."""
    every = [
        Mutant(str(path.relative_to(ROOT)), site)
        for pattern in modules
        for path in sorted((ROOT / PACKAGE).glob(pattern))
        for site in range(sites_of(path))
    ]
    print(f"{len(every)} mutants, {min(number, len(every))} of them are tried")
    yield from random.Random(seed).sample(every, min(number, len(every)))


def judge(group: str, number: int, seed: int, jobs: int) -> None:
    """Try mutants of a group, and print what was found."""
    modules, tests = GROUPS[group]
    print(f"## {group}", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(jobs):
            tree = Path(folder, str(job))
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
            trees.put(tree)
        tree, started = trees.get(), time.monotonic()
        whole = run_tests(tree, tests, None)
        patience = PATIENCE * (time.monotonic() - started) * jobs
        trees.put(tree)
        if whole.failed:
            raise SystemExit(f"tests fail without a mutant: {', '.join(sorted(whole.failed))}")

        def attempt(mutant: Mutant) -> tuple[Mutant, Run]:
            tree = trees.get()
            try:
                change = plant(tree, mutant)
                return mutant._replace(change=change), run_tests(tree, tests, patience)
            finally:
                shutil.copyfile(ROOT / mutant.module, tree / mutant.module)
                trees.put(tree)

        with ThreadPoolExecutor(jobs) as pool:
            runs = list(pool.map(attempt, sample(modules, number, seed)))
    finds = Counter(test for _, run in runs for test in run.failed)
    alone = Counter(*[[next(iter(run.failed)) for _, run in runs if len(run.failed) == 1]])
    for mutant, run in runs:
        if not run.failed:
            print(f"not found: {mutant.module.removeprefix(PACKAGE + '/')} {mutant.change}")
    print(f"{sum(1 for _, run in runs if run.failed)} of {len(runs)} found")
    for test in sorted({*whole.seconds, *finds}, key=lambda each: (-alone[each], -finds[each])):
        seconds = whole.seconds.get(test, 0.0)
        print(f"{seconds:7.1f} s {finds[test]:4} found {alone[test]:4} alone  {test}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("groups", nargs="*", default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--sample", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    for name in options.groups:
        judge(name, options.sample, options.seed, options.jobs)
