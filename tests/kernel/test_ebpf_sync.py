"""The ebpf mode under the sync loop: from Kubernetes objects to connections, changes and drift."""

from __future__ import annotations

import asyncio
import errno
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from steersman.compile.planner import Planner
from steersman.model.inputs import HostFacts, NodeConfig
from steersman.model.names import Family
from steersman.model.ruleset import diff
from steersman.modes.base import release
from steersman.modes.ebpf.datapath import EbpfOptions
from steersman.modes.ebpf.mode import EbpfMode
from steersman.run.sync.sync import Sync
from steersman.source.store import Store
from tests.support.builders.ebpf_node_plan import LAYOUT, LOOKER, NODE, OTHER, POD, VIP
from tests.support.builders.store import replace_objects, service, slice_
from tests.support.lab import ebpf
from tests.support.lab.cluster import Lab
from tests.support.lab.ebpf_node import MARKS
from tests.support.lab.sockets import CGROUPS

pytestmark = MARKS
FACTS = HostFacts("me", {"lo": ("127.0.0.1/8",), "eth0": (f"{NODE}/24",)}, ipv6=False)
CONFIG = NodeConfig(node_name="me", families=(Family.IPV4,), cluster_cidrs=("10.244.0.0/16",))


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(LAYOUT) as made:
        for pod in (POD, OTHER):
            made.serve(pod, 8080, "TCP")
        yield made


@pytest.fixture
def mode(lab: Lab) -> Iterator[EbpfMode]:
    cgroup = ebpf.new_cgroup(ebpf.next_number())
    CGROUPS[lab.node.path] = cgroup
    options = EbpfOptions(ebpf.bpffs() / cgroup.name, cgroup, file=ebpf.compiled())
    made = ebpf.mode_in(lab.node.path, options)
    yield made
    asyncio.run(release(made))
    shutil.rmtree(options.pins, ignore_errors=True)
    del CGROUPS[lab.node.path]


def pins(mode: EbpfMode) -> Path:
    return mode.datapath.pins.root


def world(ip: str) -> Store:
    store = Store("me", facts=FACTS)
    replace_objects(store, "Service", [service(clusterIP=VIP)])
    replace_objects(store, "EndpointSlice", [slice_(ips=(ip,))])
    return store


async def test_what_the_next_process_cannot_change_stays(
    lab: Lab, mode: EbpfMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    await Sync(world(POD), Planner(CONFIG, mode.traits), mode).run()
    assert mode.datapath.tables
    mode.datapath.tables.node.programs = bytes(15) + b"1"  # of an older version
    await release(mode)
    again = ebpf.mode_in(lab.node.path, mode.datapath.options)

    def refuse() -> None:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(again.datapath, "write_devices", refuse)
    report = await Sync(world(OTHER), Planner(CONFIG, again.traits), again).run()
    assert report
    result = report.result
    assert result
    assert result.refused == 1
    assert pins(again).exists()
    assert lab.probe(LOOKER, VIP, 80).endpoint == f"{OTHER}:8080"
    await release(again)


async def test_where_a_bpffs_was_unmounted_another_one_is_mounted(
    lab: Lab, mode: EbpfMode, tmp_path: Path
) -> None:
    """Ordinary directories were left, in which the kernel refuses pins."""
    (tmp_path / "pins/maps").mkdir(parents=True)
    options = replace(mode.datapath.options, pins=tmp_path / "pins")
    made = ebpf.mode_in(lab.node.path, options)
    try:
        report = await Sync(world(POD), Planner(CONFIG, made.traits), made).run()
        assert report
        assert report.result
        assert report.result.refused == 0
        assert lab.probe(LOOKER, VIP, 80).endpoint == f"{POD}:8080"
    finally:
        await release(made)
        subprocess.run(["umount", "--lazy", tmp_path], check=False)  # noqa: ASYNC221


async def test_objects_become_connections(lab: Lab, mode: EbpfMode) -> None:
    store = world(POD)
    assert (await mode.worker.do(mode.probe)).usable
    sync = Sync(store, Planner(CONFIG, mode.traits), mode)

    report = await sync.run()
    assert report
    first = report.result
    assert first
    assert (first.refused, first.removed) == (0, 0)
    assert lab.probe(LOOKER, VIP, 80).endpoint == f"{POD}:8080"

    store.upsert(slice_(ips=(OTHER,)))
    report = await sync.run()
    assert report
    second = report.result
    assert second
    assert (second.added, second.changed, second.removed) == (0, 1, 0)
    assert lab.probe(LOOKER, VIP, 80).endpoint == f"{OTHER}:8080"

    report = await sync.check()
    assert report
    assert report.result is None, "what this process writes is no reason to read everything"
    for name in ("sm_connect4", "sm_connect6"):
        (pins(mode) / "links" / name).unlink()
    report = await sync.check()
    assert report
    repaired = report.result
    assert repaired
    assert repaired.reason == "drift"
    assert lab.probe(LOOKER, VIP, 80).endpoint == f"{OTHER}:8080"

    replace_objects(store, "Service", [])
    await sync.run()
    assert lab.probe(NODE, VIP, 80, timeout=0.4).kind != "answered"
    await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), {}))
    assert not pins(mode).exists()
