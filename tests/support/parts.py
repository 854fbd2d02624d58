"""The quick part of the tests, and what may be skipped in a run of all of them.

`make test` runs the quick part. `FULL=1 make test` runs everything, and fails if a test is skipped
that is not listed here: a tool that is missing must not pass for a success.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

ONLY_FULL = (
    *(f"tests/{part}/" for part in ("browser", "packaging", "soak", "upgrade", "windows")),
    "tests/e2e/test_image.py",
    *(f"tests/kernel/faults/test_planted_{mode}.py" for mode in ("iptables", "nftables", "pod")),
    "tests/vm/test_machine.py::test_everything_inside",
    # More of what the quick part does once: other variants of a mode, other seeds.
    *(
        f"tests/test_cases.py::test_packets[{variant}-"
        for variant in ("iptables-legacy", "userspace-legacy", "userspace-nftables")
    ),
    "tests/upstream/test_packets.py::test_packets[iptables-",
    "tests/sim/test_seeds.py::test_nodes_survive_their_lives[50]",
    "tests/sim/test_seeds.py::test_an_old_defect_is_found",
    "tests/kernel/test_failover_families.py::test_an_endpoint_of_ipv6_that_fails_is_left",
    "tests/kernel/test_iptables_kernel.py::test_killed_between_any_two_commands_"
    "the_next_start_repairs[legacy]",
)
"""Tests that take minutes: other kernels, Windows, packages, the image, browsers, churn, depth."""


class MaySkip(NamedTuple):
    """A test that cannot run everywhere."""

    test: str
    """How its node id begins."""
    reason: str
    """How the reason that it gives begins."""


MAY_SKIP = (
    MaySkip("tests/cluster/", "no real cluster"),
    MaySkip("tests/conformance/", "the conformance data is not beside the project"),
    MaySkip("tests/unit/netfilter/test_names.py::", "no conformance data beside the project"),
    MaySkip("tests/packaging/test_wheel.py::", "there is no CPython 3."),
    MaySkip("tests/windows/", "Windows' Python cannot be had"),
    MaySkip("tests/upgrade/", "there is no release and no history"),
    # Debian's kernels have it, and the virtual machine runs these tests for IPVS.
    MaySkip("tests/kernel/test_doctor_faults.py::", "no IPVS here"),
    MaySkip("tests/unit/proxy/test_dials.py::", "needs IP_LOCAL_PORT_RANGE"),
)


def is_quick(test: str) -> bool:
    """Whether a test, given by its node id, belongs to the quick part."""
    return not test.startswith(ONLY_FULL)


def unexpected(skipped: Iterable[tuple[str, str]]) -> Sequence[str]:
    """Return a line for each skipped test, given with its reason, that must not be skipped."""
    return sorted(
        f"{test}: {reason}"
        for test, reason in skipped
        if not any(test.startswith(m.test) and reason.startswith(m.reason) for m in MAY_SKIP)
    )
