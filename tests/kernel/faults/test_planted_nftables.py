"""Every planted fault is named first in the nftables mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.faults.cluster import Cluster
from tests.kernel.faults.judge import healthy_cluster, named_first
from tests.kernel.faults.table import FAULTS, Fault

pytestmark = [pytest.mark.kernel, pytest.mark.slow(seconds=500)]
MODE = "nftables"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with healthy_cluster(tmp_path_factory.mktemp("faults"), MODE) as running:
        yield running


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if MODE in fault.modes], ids=lambda fault: fault.name
)
def test_it_is_named_first(cluster: Cluster, fault: Fault) -> None:
    named_first(cluster, fault)
