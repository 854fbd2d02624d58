"""What all tests share: kernel tests run as root, and say why where they cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache

import pytest

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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
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
