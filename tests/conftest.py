"""What all tests share: kernel tests run as root, and say why where they cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("steersman", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steersman")  # how fast examples are made is the machine's affair

SETTINGS = pytest.StashKey[dict[str, str]]()
CHANGED = pytest.StashKey[list[str]]()
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("kernel") and (reason := missing_for_kernel_tests()):
            item.add_marker(pytest.mark.skip(reason=reason))


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
    session.config.stash[SETTINGS] = machine_settings()


def pytest_sessionfinish(session: pytest.Session) -> None:
    before, after = session.config.stash[SETTINGS], machine_settings()
    changed = [name for name, value in before.items() if after.get(name) != value]
    if changed:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session.config.stash[CHANGED] = changed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name in terminalreporter.config.stash.get(CHANGED, []):
        terminalreporter.write_line(f"A TEST CHANGED THE MACHINE'S OWN NETWORK: {name}")
    if any(
        "kernel tests need" in str(r.longrepr) for r in terminalreporter.stats.get("skipped", ())
    ):
        terminalreporter.write_line(f"KERNEL TESTS DID NOT RUN: {missing_for_kernel_tests()}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update", action="store_true", help="rewrite golden files, for review with git diff"
    )


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update"))
