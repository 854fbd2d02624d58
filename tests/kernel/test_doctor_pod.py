"""doctor in a pod without hostPID: what it cannot see there is unknown, never ok."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.lab.faulty_node import LOCK, NODE, Diagnosed, FaultyNode

pytestmark = [pytest.mark.kernel, pytest.mark.slow]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyNode]:
    folder = tmp_path_factory.mktemp("pod")
    Path(LOCK).touch()  # writers of rules make it
    with FaultyNode(folder, "iptables", "--iptables-variant=legacy", pod=True) as running:
        yield running


def verdicts(found: Diagnosed, check: str) -> set[str]:
    return {result["verdict"] for result in found.results if result["check"] == check}


def test_a_healthy_node_in_a_pod_has_no_false_alarm(node: FaultyNode) -> None:
    found = node.doctor("shop/web")
    assert (found.status, found.cause) == (0, "")
    assert verdicts(found, "other-proxy") == {"unknown"}
    assert verdicts(found, "lock") == {"ok"}
    assert verdicts(found, "process") == {"ok"}


def test_another_proxy_of_the_node_is_never_denied(node: FaultyNode) -> None:
    path = node.folder / "rival" / "kube-proxy"
    path.parent.mkdir()
    path.symlink_to("/bin/sleep")
    with subprocess.Popen(node.lab.exec_argv([str(path), "600"])) as process:
        assert verdicts(node.doctor(), "other-proxy") == {"unknown"}
        # Who sees the processes of the node names it, and not our own of the same name.
        found = node.doctor(outside=True)
        rivals = [r["text"] for r in found.results if r["check"] == "other-proxy"]
        assert len(rivals) == 1
        assert f"kube-proxy (pid {process.pid})" in rivals[0]
        process.kill()
    assert verdicts(node.doctor(outside=True), "other-proxy") == {"ok"}


def test_another_proxy_that_listens_is_suspected(node: FaultyNode) -> None:
    node.lab.serve(NODE, 10249, "TCP")
    try:
        found = node.doctor()
    finally:
        node.lab.servers.silence(NODE)
    assert verdicts(found, "other-proxy") == {"warning", "unknown"}
    assert "a process that cannot be seen listens on 10249" in found.cause


def test_a_lock_that_somebody_outside_keeps_is_seen(node: FaultyNode) -> None:
    with (node.folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = node.doctor("shop/web")
    assert (found.status, verdicts(found, "lock")) == (1, {"error"})
    assert "kept locked by a process that cannot be seen from here" in found.cause
