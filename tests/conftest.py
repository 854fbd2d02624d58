"""What all tests share: kernel tests run as root, and say why where they cannot.

`make test` runs them in several processes (pytest-xdist). A module's tests stay together, since
many share a fixture; the modules that take longest begin first.
"""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from tests.support import parts
from tests.support.ending import ENDING

# The same examples each time, so that a change is judged by what it changes; `make properties`
# draws others. How fast they are made is the machine's affair.
settings.register_profile(
    "steersman",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not parts.EXAMPLES,
    max_examples=parts.EXAMPLES or 100,
)
settings.load_profile("steersman")

SETTINGS = pytest.StashKey[dict[str, str]]()
CHANGED = pytest.StashKey[list[str]]()
SKIPPED = pytest.StashKey[Sequence[str]]()
"""The tests that were skipped though they must run, in a run of everything."""
COVERED = pytest.StashKey[bool]()
"""Whether coverage was measured in the last test."""
BROWSER = "tests/browser/"
APART = {
    "tests/sim/test_seeds.py",
    *(f"tests/kernel/test_{name}.py" for name in ("conntrack", "doctor_faults", "iptables_kernel")),
}
"""Long modules whose tests share nothing: they need not stay in one process."""
COVERING = (
    *(
        f"tests/unit/{part}/"
        for part in ("compile", "config", "failover", "host", "model", "modes", "netfilter")
    ),
    *(f"tests/unit/{part}/" for part in ("operate", "proxy", "run", "source", "ui")),
    *(f"tests/properties/test_{name}.py" for name in ("ledger", "nftables", "sync")),
    "tests/e2e/test_events.py",
)
"""Tests that together reach every branch of the pure modules, without root. Coverage is measured in
these only: it more than doubles the CPU time of what runs in the process of pytest. The cases, the
conformance data and the other properties reach no branch that these do not.
"""
BY_MODE = {f"tests/kernel/test_failover_{name}.py" for name in ("effects", "families", "live")}
TOOLS = ("ip", "iptables", "ip6tables", "iptables-restore", "nft", "conntrack", "unshare")


@cache
def missing_for_kernel_tests() -> str:
    """Why kernel tests cannot run here; "" where they can."""
    if os.geteuid() != 0:
        return "kernel tests need root"
    if tools := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"kernel tests need {', '.join(tools)}: `make setup` as root installs them"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without searching for cycles, and leave what was collected out of later searches.

    That is a million objects, all of which stay: two fifths of the time of a collection.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--part") == "quick":
        left_out = [item for item in items if not parts.is_quick(item.nodeid)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if parts.is_quick(item.nodeid)]
    for item in items:
        if item.get_closest_marker("kernel") and (reason := missing_for_kernel_tests()):
            item.add_marker(pytest.mark.skip(reason=reason))
        if not item.nodeid.startswith(COVERING):
            item.add_marker(pytest.mark.no_cover)
    longest_first(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let what a test calls run, where coverage is measured, instead of a cached answer.

    Tests without it, which ran before in the same process, have filled the caches.
    """
    covered = item.get_closest_marker("no_cover") is None
    if covered and not item.config.stash.get(COVERED, False):
        for name, module in list(sys.modules.items()):
            if name.startswith("steersman."):
                for each in vars(module).values():
                    if isinstance(each, functools._lru_cache_wrapper):
                        each.cache_clear()
    item.config.stash[COVERED] = covered


def longest_first(items: list[pytest.Item]) -> None:
    """Sort modules by their length in half minutes; those of equal length stay shuffled."""
    seconds = {item: length(item) for item in items}
    modules: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        modules[item.path] += seconds[item]
    items.sort(key=lambda item: (-(modules[item.path] // 30), -(seconds[item] // 300)))


def length(item: pytest.Item) -> float:
    """Return about how many seconds a test may take."""
    if slow := item.get_closest_marker("slow"):
        return float(slow.kwargs.get("seconds", 20))
    return 1.0 if item.get_closest_marker("kernel") else 0.02


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return Together(config, log)


class Together(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a process all tests of a module; one of them gets all that use a browser.

    A long module may be split (APART). Of modules that wait for minutes it gets those of one
    mode, which is the parameter.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(BROWSER):
            return BROWSER
        module, _, test = nodeid.partition("::")
        if module in APART:
            return nodeid
        if module not in BY_MODE:
            return module
        return module + test.partition("[")[2].partition("-IPv")[0]


def is_worker(config: pytest.Config) -> bool:
    """Whether this is one of several processes that another one started to run tests."""
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    parts.QUICK = config.getoption("--part") == "quick"
    if is_worker(config):
        os.environ.pop("COLUMNS", None)  # of xdist: programs would not look at their terminals
    os.environ.pop("PYTHONUNBUFFERED", None)  # of the caller: programs run as those of users do
    # A shell starts background jobs with SIGINT ignored, and so would be what the tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


MACHINE = (
    "net/ipv4/conf/all/route_localnet",
    "net/ipv4/ip_forward",
    "net/netfilter/nf_conntrack_max",
    "net/netfilter/nf_conntrack_tcp_timeout_established",
)
"""Settings of the machine's own network that the program under test would change."""


def machine_settings() -> dict[str, str]:
    """Read what tests must leave alone."""
    paths = {name: Path("/proc/sys", name) for name in MACHINE}
    return {name: path.read_text() for name, path in paths.items() if path.exists()}


def pytest_sessionstart(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not is_worker(session.config):
        session.config.pluginmanager.register(FailuresAtOnce(reporter))
    session.config.stash[SETTINGS] = machine_settings()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if is_worker(session.config):
        return
    before, after = session.config.stash[SETTINGS], machine_settings()
    changed = [name for name, value in before.items() if after.get(name) != value]
    if changed:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session.config.stash[CHANGED] = changed
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and session.config.getoption("--part") == "full":
        skipped = [
            (report.nodeid, report.longrepr[2].removeprefix("Skipped: "))
            for report in reporter.stats.get("skipped", ())
        ]
        if unexpected := parts.unexpected(skipped):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            session.config.stash[SKIPPED] = unexpected


def pytest_unconfigure() -> None:
    ENDING.close()


class FailuresAtOnce:
    """Prints a line when a test fails, so that a run which is stopped has said what failed."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self.reporter = reporter

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = str(crash.message if crash else report.longrepr).strip().partition("\n")[0]
            place = f" ({report.when})" if report.when != "call" else ""
            self.reporter.write_line("")
            self.reporter.write_line(f"FAILED {report.nodeid}{place}: {why[:200]}", red=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name in terminalreporter.config.stash.get(CHANGED, []):
        terminalreporter.write_line(f"A TEST CHANGED THE MACHINE'S OWN NETWORK: {name}")
    for line in terminalreporter.config.stash.get(SKIPPED, []):
        terminalreporter.write_line(f"SKIPPED, BUT IT MUST RUN: {line}")
    if any(
        "kernel tests need" in str(r.longrepr) for r in terminalreporter.stats.get("skipped", ())
    ):
        terminalreporter.write_line(f"KERNEL TESTS DID NOT RUN: {missing_for_kernel_tests()}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update", action="store_true", help="rewrite golden files, for review with git diff"
    )
    parser.addoption(
        "--part",
        choices=("quick", "full"),
        help="quick: leave out what takes minutes; full: a test that is skipped is a failure"
        " (tests/support/parts.py)",
    )


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update"))
