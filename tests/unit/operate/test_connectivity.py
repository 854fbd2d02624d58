"""`steersman connectivity` without a kernel: its objects, leftovers, and why it cannot run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from steersman.model.names import Family
from steersman.operate.answer import Line, QuestionError, Table
from steersman.operate.client import Client
from steersman.operate.connectivity.answer import NAMESPACE, Connectivity, Tried
from steersman.operate.connectivity.node import (
    find_folder,
    new_services,
    objects_of,
    pod_addresses,
    remove_leftovers,
)
from steersman.operate.places import Place
from tests.support.builders.asked import DEMO, asked


class Configured(Client):
    """A process with this part of a configuration."""

    def __init__(self, section: Mapping[str, object], pid: int = 0) -> None:
        super().__init__()
        self._section, self._pid = section, pid

    def get(self, path: str) -> bytes:
        assert path == "/configz"
        return json.dumps({"kubeproxy": self._section}).encode()

    def server_pid(self) -> int:
        return self._pid


def test_the_directory_is_that_of_the_process(tmp_path: Path) -> None:
    process = Configured({"steersman": {"manifests": [str(tmp_path)]}})
    assert find_folder((), process) == tmp_path
    assert find_folder((str(tmp_path),), Configured({})) == tmp_path
    relative = find_folder(("tests",), Configured({}, os.getpid()))
    assert relative.is_dir()
    with pytest.raises(QuestionError, match="reads an API server"):
        find_folder((), Configured({}))
    with pytest.raises(QuestionError, match="is not a directory that is seen from here"):
        find_folder(("/no/such",), Configured({}, os.getpid()))


def test_only_files_of_processes_that_ended_are_removed(tmp_path: Path) -> None:
    mine = tmp_path / f"{NAMESPACE}-{os.getpid()}.yaml"
    old = tmp_path / f"{NAMESPACE}-4194999.yaml"  # above the largest pid of Linux
    other = tmp_path / f"{NAMESPACE}-notes.yaml"
    for path in (mine, old, other):
        path.write_text("")
    assert remove_leftovers([tmp_path]) == [old]
    assert sorted(tmp_path.iterdir()) == sorted([mine, other])


def test_nobody_else_has_the_addresses() -> None:
    world = asked(*DEMO)
    pods = pod_addresses(world)
    addresses = {address for pod in pods for address in pod.values()}
    assert len(addresses) == len(pods) * len(world.plan.settings.families)
    assert all(pod[Family.IPV4].startswith("10.244.") for pod in pods)
    own = new_services(world, Family.IPV4)
    assert len({own.plain, own.sticky, own.local}) == 3
    assert 30080 not in {own.node_port, own.local_node_port}

    one, two = (Place("pod", "", None, pod) for pod in pods[:2])
    objects = list(objects_of(own, Family.IPV4, "node-a", one, two))
    later = asked(*DEMO, *objects)
    assert not [each for each in later.findings if NAMESPACE in each.object]
    served = {key.name.service for key in later.plan.services if key.name.namespace == NAMESPACE}
    assert served == {"plain-ipv4", "sticky-ipv4", "local-ipv4"}


def test_one_failure_is_enough_for_the_exit_status() -> None:
    fine = Tried("pod to cluster IP, TCP", "IPv4", "ok")
    answer = Connectivity(node="a", mode="memory", tried=(fine,))
    assert answer.exit_code == 0
    broken = Tried("session affinity", "IPv4", "failed", "two pods answered")
    worse = Connectivity(node="a", mode="memory", tried=(fine, broken))
    assert worse.exit_code == 1
    *_, verdict = worse.blocks(wide=False)
    assert verdict == Line("1 ok, 1 failed, 0 not tried", "bad")


def test_nodes_with_the_same_result_share_a_row() -> None:
    what, family = "pod to cluster IP, TCP", "IPv4"
    tried = [Tried(what, family, "ok", node=node) for node in ("a", "b", "c")]
    fine = Connectivity(tried=tuple(tried))
    title, table, _ = fine.blocks(wide=False)
    assert title == Line("3 nodes", "title")
    title, *_ = Connectivity(tried=tuple(tried[:1])).blocks(wide=False)
    assert title == Line("Node a", "title")
    assert isinstance(table, Table)
    assert table.rows == [(what, family, "all", ("ok", "good"), "")]

    tried[1] = Tried(what, family, "failed", "no answer", "b")
    _, table, verdict = Connectivity(tried=tuple(tried)).blocks(wide=False)
    assert isinstance(table, Table)
    assert table.rows == [
        (what, family, "a c", ("ok", "good"), ""),
        (what, family, "b", ("failed", "bad"), "no answer"),
    ]
    assert verdict == Line("2 ok, 1 failed, 0 not tried", "bad")
