"""`steersman run --proxy-mode ebpf` in a mount namespace of its own, killed and started again.

There its cgroup root is a threaded cgroup of the test, and /sys/fs/bpf a bpffs that goes with it.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from steersman.modes.ebpf.probe import cgroup_root
from tests.kernel import ebpf
from tests.kernel.ebpf_node import MARKS
from tests.kernel.ebpf_plan import CLIENT, LAYOUT, LOOKER, NODE, NODE_PORT, OTHER, POD, VIP
from tests.lab import Lab
from tests.lab_sockets import CGROUPS

pytestmark = MARKS
WAIT = 30.0
META = {"namespace": "shop", "name": "web"}
FLAGS = ("--proxy-mode=ebpf", "--cluster-cidr=10.244.0.0/16", "--hostname-override=me")


def manifests(endpoint: str) -> str:
    labels = {"kubernetes.io/service-name": "web"}
    ports: list[dict[str, Any]] = [{"port": 80, "targetPort": 8080, "nodePort": NODE_PORT}]
    return yaml.safe_dump_all(
        [
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": META,
                "spec": {"type": "NodePort", "clusterIP": VIP, "ports": ports},
            },
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {**META, "labels": labels},
                "addressType": "IPv4",
                "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
                "endpoints": [{"addresses": [endpoint]}],
            },
        ]
    )


class Machine:
    """A mount namespace, kept by a process that sleeps in it."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab, self.directory = lab, directory
        self.cgroup = ebpf.new_cgroup(ebpf.next_number())
        CGROUPS[lab.node.path] = self.cgroup
        mounts = f"mount --bind {self.cgroup} {cgroup_root()} && mount -t bpf bpf /sys/fs/bpf"
        argv = ["unshare", "-m", "sh", "-c", f"{mounts} && echo mounted && exec sleep 600"]
        self.keeper = subprocess.Popen(argv, stdout=subprocess.PIPE)
        assert self.keeper.stdout
        assert self.keeper.stdout.readline() == b"mounted\n"

    def start(self) -> subprocess.Popen[bytes]:
        inside = ["nsenter", f"--mount=/proc/{self.keeper.pid}/ns/mnt"]
        command = [sys.executable, "-m", "steersman", "run", "--manifests", str(self.directory)]
        with (self.directory.parent / "log").open("ab") as log:
            argv = self.lab.exec_argv([*inside, *command, *FLAGS])
            return subprocess.Popen(argv, stdout=log, stderr=log)

    def serve(self, endpoint: str) -> None:
        new = self.directory.parent / "new"
        new.write_text(manifests(endpoint))
        new.rename(self.directory / "web.yaml")

    def close(self) -> None:
        self.keeper.kill()
        self.keeper.wait()
        assert self.keeper.stdout
        self.keeper.stdout.close()
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
