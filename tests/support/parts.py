"""The quick part of the tests, and what may be skipped in a run of all of them.

`make test` runs the quick part. `FULL=1 make test` runs everything, and fails if a test is skipped
that is not listed here: a tool that is missing must not pass for a success.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ONLY_FULL = (
    *(f"tests/{part}/" for part in ("browser", "packaging", "soak", "upgrade", "windows")),
    *(f"tests/e2e/test_{name}.py" for name in ("chaos", "image", "leaks", "returning_nodes")),
    "tests/e2e/test_hostile_machine.py::test_a_lock_that_is_held_for_ever",
    "tests/e2e/test_resilience.py::test_half_an_hour_of_faults",
    *(
        f"tests/kernel/faults/test_planted_{name}.py"
        for name in ("ebpf", "iptables", "ipv6", "nftables", "odd", "pod")
    ),
    *(
        f"tests/kernel/test_{name}.py"
        for name in ("demo", "doctor_faults", "night", "questions", "userspace_soak")
    ),
    "tests/kernel/test_connectivity_cluster.py::test_a_firewall",
    "tests/kernel/test_doctor_node.py::test_what_nft_does[drop]",
    "tests/kernel/test_conntrack.py::test_a_full_table_is_cleaned",
    "tests/kernel/test_dump.py::test_the_answer_comes_while_others_change",
    "tests/kernel/test_failover_families.py::test_an_endpoint_of_ipv6_that_fails_is_left",
    "tests/kernel/test_iptables_kernel.py::test_killed_between_any_two_commands",
    "tests/kernel/test_iptables_process.py::test_killed_at_any_command",
    "tests/kernel/test_switching_live.py::test_a_mode_in_which_connections_fail",
    "tests/kernel/test_trace_process.py::test_a_second_trace_of_legacy_rules",
    "tests/monitoring/test_prometheus.py",
    "tests/sim/test_seeds.py::test_an_old_defect_is_found",
    "tests/unit/run/test_hostile_clients.py::test_ten_thousand_connections",
    "tests/vm/test_machine.py::test_everything_inside",
)
"""Tests that take long, by how their node ids begin: other kernels, Windows, packages, the image,
browsers, churn, many faults, pages of the docs that are made anew.
"""

OTHER_MODES = ("ebpf", "iptables", "userspace")
OTHER_VARIANTS = ("legacy", "userspace-nftables", "portals=nftables")
FURTHER = (
    ("tests/conformance/test_flows.py::test_packets", OTHER_MODES),
    ("tests/e2e/", ("legacy",)),
    ("tests/e2e/test_apiserver_faults.py", ("HTTP/1.1",)),
    ("tests/e2e/test_apiserver_source.py", ("HTTP/1.1",)),
    ("tests/e2e/test_service_page.py::test_kernel_objects", OTHER_MODES),
    ("tests/kernel/", OTHER_VARIANTS),
    ("tests/kernel/test_connectivity_cluster.py", OTHER_MODES),
    ("tests/kernel/test_doctor_modes.py", ("iptables", "userspace-nft")),
    ("tests/kernel/test_doctor_tries.py", OTHER_MODES),
    ("tests/kernel/test_doctor_where.py::test_a_fault", ("ebpf-", "iptables-")),
    ("tests/kernel/test_failover_ebpf.py", ("far-", "host-", "node6", "outside6")),
    ("tests/kernel/test_failover_live.py::test_a_check", OTHER_MODES),
    ("tests/kernel/test_failover_live.py::test_a_pod_that_hangs", OTHER_MODES),
    ("tests/kernel/test_failover_live.py::test_if_no_endpoint_answers", OTHER_MODES),
    ("tests/kernel/test_random_worlds.py", ("iptables", "userspace")),
    ("tests/kernel/test_traffic.py", ("ebpf", "iptables")),
    ("tests/kernel/test_udp_changes.py", OTHER_MODES),
    ("tests/sim/test_seeds.py::test_nodes_survive_their_lives", ("20", "40", "60", "80")),
    ("tests/test_cases.py::test_packets", OTHER_VARIANTS),
    ("tests/test_cases.py::test_endpoints_are_equally_likely", OTHER_VARIANTS),
    ("tests/upstream/test_packets.py", ("iptables",)),
    ("tests/unit/failover/test_simulation.py", ("30-1-0", "6-1-True", "0-0-False")),
    ("tests/upstream/", tuple(f"{number}-" for number in (102, 202, 203, 205, 208, 209, 210, 211))),
)
"""Tests whose quick part is one mode or variant: how their node ids begin, and words in the
parameters of those that only the full part has.
"""


EXAMPLES = int(os.environ.get("EXAMPLES", "0"))
"""How many new examples each property has in `make properties`; else 0."""
QUICK = False
"""Whether the quick part runs; tests/conftest.py knows it before test modules are imported."""


def examples(number: int) -> int:
    """Return how many random examples a test tries: so many; in the quick part a fourth."""
    return EXAMPLES or (number // 4 if QUICK else number)


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
    parameters = test.partition("[")[2]
    return not test.startswith(ONLY_FULL) and not any(
        test.startswith(start) and any(word in parameters for word in words)
        for start, words in FURTHER
    )


def unexpected(skipped: Iterable[tuple[str, str]]) -> Sequence[str]:
    """Return a line for each skipped test, given with its reason, that must not be skipped."""
    return sorted(
        f"{test}: {reason}"
        for test, reason in skipped
        if not any(test.startswith(m.test) and reason.startswith(m.reason) for m in MAY_SKIP)
    )
