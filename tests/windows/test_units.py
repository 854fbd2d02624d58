"""The unit tests of the proxy and of the userspace modes, on Windows' Python."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.windows.node import ROOT, Node, on_a_node

SUITES = ("tests/unit/proxy", "tests/unit/modes/userspace")
NEEDS_LINUX = {
    "sockets are handed over in messages of Unix sockets": (
        "tests/unit/proxy/test_handoff.py",
        "tests/unit/proxy/test_udp.py::test_datagrams_sent_before_a_hand_off_are_answered",
        "tests/unit/proxy/test_tcp.py::test_a_port_is_taken_over_while_the_old_process_drains",
    ),
    "epoll, poll and readers, which Windows' event loop does not have": (
        "tests/unit/proxy/test_tcp_accept.py::test_accepting_is_resumed_when_there_are_descriptors_again",
        "tests/unit/proxy/test_tcp_accept.py::test_a_mistake_in_one_connection_is_reported_and_others_are_served",
        "tests/unit/proxy/test_engine.py::test_a_client_reset_before_it_is_served_leaves_nothing",
        "tests/unit/proxy/test_engine.py::test_a_connection_to_an_endpoint_removed_during_the_dial_is_reset",
        "tests/unit/proxy/test_engine.py::test_clients_waiting_to_be_accepted_are_reset_if_no_endpoint_is_left",
        # A task that waits to send does not see that the other end has been reset.
        "tests/unit/proxy/test_tcp.py::test_a_reset_is_noticed_while_the_endpoint_takes_no_more",
    ),
    "the kernel tells where a datagram came in": (
        "tests/unit/proxy/test_udp.py::test_answers_come_from_the_address_that_was_asked",
        "tests/unit/proxy/test_udp.py::test_pods_are_detected_by_their_interface",
    ),
    "a reset is told apart from an end, which Wine does not do": (
        "tests/unit/proxy/test_tcp.py::test_a_reset_is_passed_on_as_a_reset",
        "tests/unit/proxy/test_tcp.py::test_a_reset_by_the_endpoint_resets_the_client",
    ),
    "/proc": ("tests/unit/modes/userspace/test_relay_tracer.py",),
}
"""Tests that cannot pass on Windows, by what they need."""
_BY_EPOLL = "not copied and not spliced"
"""Windows relays by tasks; the other ways would be the same once more."""


def test_what_needs_linux_exists() -> None:
    for tests in NEEDS_LINUX.values():
        for test in tests:
            path, _, name = test.partition("::")
            tree = ast.parse((ROOT / path).read_text())
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            names = {node.name for node in ast.walk(tree) if isinstance(node, functions)}
            assert not name or name in names, test


@pytest.mark.kernel
@pytest.mark.slow(seconds=120)
def test_the_unit_tests_pass_on_windows(tmp_path: Path) -> None:
    left_out = [f"--deselect={test}" for tests in NEEDS_LINUX.values() for test in tests]
    # conftest.py imports what runs tests side by side, which is not there.
    flags = ("-q", "--noconftest", "-p", "no:cacheprovider", "--hypothesis-profile=ci")

    async def body(node: Node) -> None:
        words = ("-m", "pytest", *flags, *left_out, "-k", _BY_EPOLL, *SUITES)
        async with node.python(*words) as process:
            status = await process.ended(minutes=8)
            failed = re.findall("^(?:FAILED|ERROR) .*", process.log, re.MULTILINE)
            assert status == 0, "\n".join((*failed, process.log[-10_000:]))
            passed = process.log.rpartition(" passed")[0].split()[-1]
            assert int(passed) > 150, "few of them were collected"

    on_a_node(tmp_path, body)
