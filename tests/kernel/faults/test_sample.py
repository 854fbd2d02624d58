"""Some planted faults are named first: the full part of the tests has all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.faults.cluster import Cluster
from tests.kernel.faults.judge import healthy_cluster, named_first, never_called_fine
from tests.kernel.faults.table import fault_named

pytestmark = [pytest.mark.kernel, pytest.mark.slow(seconds=100)]
SAMPLE = (
    "a chain of the bridge family drops",
    "the device of a pod is down",
    "two pods have one address",
    "the program of a pod listens on loopback only",
    "steersman is stopped and does not know of a pod's end",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with healthy_cluster(tmp_path_factory.mktemp("faults"), "nftables") as running:
        yield running


@pytest.mark.parametrize("name", SAMPLE)
def test_it_is_named_first(cluster: Cluster, name: str) -> None:
    named_first(cluster, fault_named(name))


def test_a_pod_that_sees_no_other_is_not_told_that_all_is_well(cluster: Cluster) -> None:
    never_called_fine(cluster, fault_named("a filter in the client's pod"))
