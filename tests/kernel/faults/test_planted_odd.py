"""On healthy nodes that look odd, doctor finds no error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.faults.cluster import WAYS, Cluster
from tests.kernel.faults.judge import PATIENCE, healthy_cluster
from tests.kernel.faults.odd import ODDITIES, Oddity

pytestmark = [pytest.mark.kernel, pytest.mark.slow(seconds=400)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with healthy_cluster(tmp_path_factory.mktemp("odd"), "nftables") as running:
        yield running


@pytest.mark.parametrize("oddity", ODDITIES, ids=lambda oddity: oddity.name)
def test_it_is_no_error(cluster: Cluster, oddity: Oddity) -> None:
    cluster.clear()
    with oddity.plant(cluster):
        for way in WAYS:
            assert not cluster.wrong(way, tries=4, seconds=PATIENCE), way
        found = cluster.doctor("shop/web")
    assert [each for each in found.results if each["verdict"] == "error"] == []
