"""A lab whose node has the ebpf mode, in a cgroup and with pins of its own."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import shutil
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from steersman.model.plan import NodePlan
from steersman.model.ruleset import diff
from steersman.modes.base import release
from steersman.modes.ebpf.datapath import EbpfOptions
from steersman.modes.ebpf.mode import EbpfMode
from tests.support.builders.ebpf_node_plan import LAYOUT, LOOKER, bring
from tests.support.lab import ebpf
from tests.support.lab import sockets as lab_sockets
from tests.support.lab.cluster import Lab

WAIT = 60.0
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17  # linux/sockios.h, linux/ethtool.h
MARKS = [
    pytest.mark.kernel,
    pytest.mark.skipif(
        not shutil.which("clang") and not ebpf.compiled().exists(),
        reason="no compiled object, no clang",
    ),
]
"""Of tests that load the programs."""


class Node:
    """A lab whose node has the mode."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.cgroup = ebpf.new_cgroup(ebpf.next_number())
        self.pins = ebpf.bpffs() / self.cgroup.name
        self.options = EbpfOptions(self.pins, self.cgroup, file=ebpf.compiled())
        lab_sockets.CGROUPS[lab.node.path] = self.cgroup
        self.modes: list[EbpfMode] = []

    def mode(self) -> EbpfMode:
        """Another process, as it were."""
        self.modes.append(ebpf.mode_in(self.lab.node.path, self.options))
        return self.modes[-1]

    def socket(self, address: str, kind: str = "TCP", at: str = LOOKER) -> socket.socket:
        """A socket of the node or of a pod on it, to talk to `address`."""
        sock = self.lab.netns(at).socket(address, kind, self.cgroup)
        sock.settimeout(WAIT)
        return sock

    def close(self) -> None:
        for mode in self.modes:
            asyncio.run(release(mode))
        shutil.rmtree(self.pins, ignore_errors=True)
        del lab_sockets.CGROUPS[self.lab.node.path]


@contextmanager
def serving(*protocols: str) -> Iterator[Lab]:
    """A lab whose pods answer on port 8080."""
    with Lab(LAYOUT) as lab:
        for pod in LAYOUT.pods:
            for protocol in protocols:
                lab.serve(pod.address, 8080, protocol)
        yield lab


@contextmanager
def programmed(lab: Lab, plan: NodePlan) -> Iterator[Node]:
    """A node that carries out a plan."""
    node = Node(lab)
    asyncio.run(bring(node.mode(), plan))
    try:
        yield node
    finally:
        node.close()


def compute_checksums(device: str, *, on: bool) -> None:
    """Have a device of this network namespace compute the checksums of what it sends, or not."""
    value = struct.pack("=II", ETHTOOL_STXCSUM, on)
    buffer = ctypes.create_string_buffer(value, len(value))
    request = struct.pack("16sP16x", device.encode(), ctypes.addressof(buffer))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCETHTOOL, request)


def replace_programs(node: Node) -> None:
    """As an upgrade does: a new process brings other programs."""
    asyncio.run(release(node.modes[-1]))
    mode = node.mode()
    have = asyncio.run(mode.worker.do(mode.read))
    want = {**have, b"A": len(node.modes).to_bytes(16, "big")}
    assert diff(have, want)
    asyncio.run(mode.worker.do(mode.apply, diff(have, want)))
    assert asyncio.run(mode.worker.do(mode.read)) == want
