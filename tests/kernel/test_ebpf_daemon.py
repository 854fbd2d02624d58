"""`steersman run --proxy-mode ebpf` in a mount namespace of its own, killed and started again.

There its cgroup root is a threaded cgroup of the test, and /sys/fs/bpf a bpffs that goes with it.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.builders import kube
from tests.support.builders.ebpf_node_plan import (
    CLIENT,
    LAYOUT,
    LOOKER,
    NODE,
    NODE_PORT,
    OTHER,
    POD,
    VIP,
)
from tests.support.lab.cluster import Lab
from tests.support.lab.ebpf_node import MARKS
from tests.support.lab.mounts import Mounts, ebpf_mounts
from tests.support.lab.sockets import CGROUPS

pytestmark = MARKS
WAIT = 60.0
FLAGS = ("--proxy-mode=ebpf", "--cluster-cidr=10.244.0.0/16", "--hostname-override=me")


def manifests(endpoint: str) -> str:
    ports = [{"port": 80, "targetPort": 8080, "nodePort": NODE_PORT}]
    web = kube.service(cluster_ip=VIP, ports=ports, type="NodePort")
    return yaml.safe_dump_all([web, kube.endpoint_slice("web", "web", endpoint)])


class Machine:
    """A node with mounts of its own, which stay when the program is killed."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab, self.directory = lab, directory
        self.mounts = Mounts(ebpf_mounts(lab)[1])

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "steersman", "run", "--manifests", str(self.directory)]
        with (self.directory.parent / "log").open("ab") as log:
            argv = self.lab.exec_argv(self.mounts.argv(*command, *FLAGS))
            return subprocess.Popen(argv, stdout=log, stderr=log)

    def serve(self, endpoint: str) -> None:
        new = self.directory.parent / "new"
        new.write_text(manifests(endpoint))
        new.rename(self.directory / "web.yaml")

    def close(self) -> None:
        self.mounts.close()
        del CGROUPS[self.lab.node.path]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    (tmp_path / "manifests").mkdir()
    with Lab(LAYOUT) as lab:
        for pod in (POD, OTHER):
            lab.serve(pod, 8080, "TCP")
        made = Machine(lab, tmp_path / "manifests")
        yield made
        made.close()


async def reaches(lab: Lab, endpoint: str) -> None:
    """Wait until a pod and a client outside reach an endpoint."""
    async with asyncio.timeout(WAIT):
        for source, address, port in ((LOOKER, VIP, 80), (CLIENT, NODE, NODE_PORT)):
            while lab.probe(source, address, port, timeout=0.3).endpoint != f"{endpoint}:8080":  # noqa: ASYNC110 - the kernel sends no event
                await asyncio.sleep(0.02)


async def test_it_serves_is_killed_and_serves_on(machine: Machine) -> None:
    machine.serve(POD)
    process = machine.start()
    try:
        await reaches(machine.lab, POD)
        process.send_signal(signal.SIGKILL)
        process.wait()
        await reaches(machine.lab, POD)
        process = machine.start()
        machine.serve(OTHER)
        await reaches(machine.lab, OTHER)
        process.terminate()
        assert process.wait(WAIT) == 0
        await reaches(machine.lab, OTHER)
    finally:
        process.kill()
        process.wait()


async def test_a_second_one_of_another_network_namespace_is_told_who_has_the_maps(
    machine: Machine, tmp_path: Path
) -> None:
    machine.serve(POD)
    first = machine.start()
    second = None
    try:
        await reaches(machine.lab, POD)
        inside = machine.mounts.argv("unshare", "--net")
        argv = [sys.executable, "-m", "steersman", "run", f"--manifests={machine.directory}"]
        with (tmp_path / "second").open("ab") as log:
            second = subprocess.Popen([*inside, *argv, *FLAGS], stdout=log, stderr=log)  # noqa: ASYNC220
        said = f"/sys/fs/bpf/steersman is held by pid {first.pid} "
        async with asyncio.timeout(WAIT):
            while said not in (tmp_path / "second").read_text():
                assert second.poll() is None
                await asyncio.sleep(0.02)
        second.terminate()
        assert second.wait(WAIT) == 0
        assert "Traceback" not in (tmp_path / "second").read_text()
        await reaches(machine.lab, POD)
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.wait()


@pytest.mark.parametrize("client", ["node", LOOKER])
async def test_trace_beside_the_process(machine: Machine, client: str) -> None:
    machine.serve(POD)
    process = machine.start()
    try:
        await reaches(machine.lab, POD)
        words = ["trace", "--from", client, "--to", "shop/web:80", "-o", "json"]
        if client == LOOKER:  # other labs may have the address, too
            words += ["--netns", machine.lab.netns(LOOKER).path]
        argv = machine.lab.exec_argv(machine.mounts.argv(sys.executable, "-m", "steersman", *words))
        child = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        out, _ = await child.communicate()
        answer = json.loads(out)
        assert child.returncode == 0, answer
        assert answer["endpoint"] == f"{POD}:8080"
        assert answer["reply"]["text"] == "SYN-ACK"
        steps = [shown["step"] for shown in answer["steps"]]
        # The command itself is not in the cgroup of this lab, so its packets are rewritten.
        chosen = {"node": ("egress", "sm_egress"), LOOKER: ("ingress", "sm_ingress")}[client]
        assert [(step["hook"], step["chain"]) for step in steps if step["endpoint"]] == [chosen]
        assert process.poll() is None
        await reaches(machine.lab, POD)
    finally:
        process.kill()
        process.wait()


MOUNT = """
from pathlib import Path
from steersman.modes.ebpf.probe import can_mount_bpffs, is_bpffs, mount_bpffs
place = Path("/sys/fs/bpf")
before = is_bpffs(place), can_mount_bpffs(place)
mount_bpffs(place)
mount_bpffs(place)
print(*before, is_bpffs(place / "steersman"), can_mount_bpffs(place))
"""


def in_private(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a mount namespace of its own, without a bpffs."""
    script = 'while umount -l /sys/fs/bpf 2>/dev/null; do :; done; exec "$@"'
    argv = ["unshare", "--mount", "--net", "sh", "-c", script, "", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_a_bpffs_is_mounted_without_a_program() -> None:
    done = in_private("env", "PATH=/nowhere", sys.executable, "-c", MOUNT)
    assert done.stdout == "False True True True\n", done.stderr


def test_where_no_bpffs_may_be_mounted_the_start_says_so() -> None:
    without = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-all")
    argv = (sys.executable, "-m", "steersman", "run", "--manifests=/nowhere", *FLAGS)
    done = in_private(*without, *argv)
    assert done.returncode == 1
    assert "ebpf mode cannot run here: " in done.stderr
    assert "No bpffs is mounted at /sys/fs/bpf, and this process may not mount one" in done.stderr
    assert "Traceback" not in done.stderr
