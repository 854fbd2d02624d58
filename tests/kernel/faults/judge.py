"""Plant a fault, see that it breaks a connection, and judge what doctor says of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kernel.faults.cluster import WAYS, Cluster
from tests.kernel.faults.table import FAULTS, Fault

PATIENCE = 60.0
"""Seconds for a connection that has to work: a machine under load stands still for some."""

_FEWEST = 40
_LENGTH = 400
"""Characters of the report of a missed fault."""
_IN_A_POD = (
    *("unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-ec"),
    'mount -t tmpfs none /run/netns; exec "$@"',
    "sh",
)
"""What sees the processes of a container of its own only, and no network namespaces by name."""


@contextmanager
def working_cluster(folder: Path, mode: str) -> Iterator[Cluster]:
    """A cluster whose connections work."""
    with Cluster(folder, mode) as running:
        for way in WAYS:
            assert not running.wrong(way, seconds=PATIENCE), way
        yield running


@contextmanager
def healthy_cluster(folder: Path, mode: str) -> Iterator[Cluster]:
    """A cluster of which doctor says nothing bad."""
    with working_cluster(folder, mode) as running:
        found = running.doctor("shop/web")
        assert (found.status, found.cause) == (0, ""), found
        yield running


def most_are_named_first(cluster: Cluster, mode: str) -> None:
    """Check that doctor names nine of ten faults of a mode first.

    Which of two symptoms a client meets first is up to timing, so single ones are missed now and
    then; all are reported.
    """
    faults = [fault for fault in FAULTS if mode in fault.modes]
    missed = []
    for fault in faults:
        try:
            named_first(cluster, fault)
        except AssertionError as error:
            missed.append(f"{fault.name}: {error}"[:_LENGTH])
            cluster.clear()
    for line in missed:
        print(line)
    assert len(faults) >= _FEWEST
    assert len(missed) <= len(faults) // 10, missed


def some_are_never_called_fine(cluster: Cluster, mode: str, first: int) -> None:
    """Check every fourth fault, asked in a pod without hostPID: doctor never finds all well there.

    Args:
        cluster: the cluster.
        mode: of steersman.
        first: the number of the first of them.
    """
    for fault in FAULTS[first::4]:
        if mode in fault.modes:
            never_called_fine(cluster, fault)


def never_called_fine(cluster: Cluster, fault: Fault) -> None:
    """Check that doctor, asked in a pod that sees no other, does not say that all is well."""
    cluster.clear()
    with fault.plant(cluster):
        found = cluster.doctor("shop/web", through=_IN_A_POD)
    assert found.status, (fault.name, found)
    cluster.clear()


def named_first(cluster: Cluster, fault: Fault) -> None:
    """Check that doctor names a fault first, and that nothing of it is left afterwards."""
    cluster.clear()
    with fault.plant(cluster):
        assert cluster.wrong(fault.breaks, tries=40), "the fault breaks nothing"
        found = cluster.doctor("shop/web")
    assert re.search(fault.cause, found.cause), found
    cluster.clear()
    assert not cluster.wrong(fault.breaks, seconds=PATIENCE)
