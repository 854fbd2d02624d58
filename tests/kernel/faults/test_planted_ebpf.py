"""Some planted faults are named first in the ebpf mode, whose packets take another way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.faults.cluster import Cluster
from tests.kernel.faults.judge import named_first, working_cluster
from tests.kernel.faults.table import fault_named
from tests.support.lab.ebpf_node import MARKS
from tests.support.lab.faulty_node import CLIENT

pytestmark = [*MARKS, pytest.mark.slow(seconds=120)]

NAMES = (
    "a policy drops forwarded packets",
    "a program at tc drops what goes to a pod",
    "the device of a pod is down",
    "a rule drops the answers",
    "the pod has no route back",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with working_cluster(tmp_path_factory.mktemp("ebpf"), "ebpf") as running:
        # A warning is that the lab's cgroup is not the root.
        assert running.doctor("shop/web").status == 0
        yield running


SOURCES = (
    "a foreign rule masquerades what pods send to endpoints",
    "a foreign rule gives a wrong source",
)


@pytest.mark.parametrize("name", SOURCES)
def test_another_source_is_seen(cluster: Cluster, name: str) -> None:
    """Connections work, so it is no error."""
    cluster.clear()
    with fault_named(name).plant(cluster):
        found = cluster.doctor("shop/web")
    cluster.clear()
    said = [(each["check"], each["verdict"], each["text"]) for each in found.results]
    assert [
        text
        for check, verdict, text in said
        if (check, verdict) == ("tries", "warning")
        if f"instead of the client {CLIENT}" in text
    ], said
    assert [text for check, _, text in said if check == "rule-changes" and "table ip other" in text]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_named_first(cluster: Cluster, name: str) -> None:
    named_first(cluster, fault_named(name))
