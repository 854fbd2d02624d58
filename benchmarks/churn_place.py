"""A node for the churn bench: it, a client outside and a machine that runs all other pods.

    outside ---- eth0 node eth1 ---- remote
                      | veth per pod that starts here

The namespaces are named sm-PID-churn-*; they go when the place is closed, and the next one removes
what a killed bench left. Packets to any endpoint arrive at `remote`, which only looks at them.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from steersman.modes.ebpf.probe import cgroup_root
from tests.support.lab.cluster import PREFIX, RUN, ip, remove_leftovers
from tests.support.lab.sockets import CLONE_NEWNET, _libc

NODE_ADDRESS, CLIENT = "192.0.2.1", "192.0.2.2"
_GATEWAY = "169.254.1.1"
_MAC = "02:00:00:00:00:{:02x}"
_ETH_P_IP = 0x0800
_SYN = 0x02
_SYSCTLS = {
    "ipv4/ip_forward": "1",
    "ipv4/conf/all/rp_filter": "0",
    "ipv4/conf/default/rp_filter": "0",
}
_SYN_SENT = "netfilter/nf_conntrack_tcp_timeout_syn_sent"


class Place:
    """The namespaces; a context manager. The caller's main thread is moved into the node's."""

    def __init__(self) -> None:
        self._tag = f"{PREFIX}{os.getpid()}-churn-"
        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self._batches: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        remove_leftovers()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything that is there."""
        for batch in self._batches.values():
            assert batch.stdin is not None
            with contextlib.suppress(OSError):
                batch.stdin.close()
            batch.wait()
        _enter(self._home)
        os.close(self._home)
        for name in ("node", "outside", "remote"):
            argv = ["ip", "netns", "del", self._tag + name]
            subprocess.run(argv, check=False, capture_output=True)

    def enter(self, name: str) -> None:
        """Move this thread into a namespace."""
        descriptor = os.open(RUN / (self._tag + name), os.O_RDONLY)
        try:
            _enter(descriptor)
        finally:
            os.close(descriptor)

    def do(self, name: str, *lines: str) -> None:
        """Run `ip` commands inside, in a process that stays; their failures do not matter."""
        batch = self._batches.get(name)
        if batch is None:
            argv = ["ip", "-n", self._tag + name, "-force", "-batch", "-"]
            batch = subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
            self._batches[name] = batch
        assert batch.stdin is not None
        batch.stdin.write("".join(f"{line}\n" for line in lines).encode())
        batch.stdin.flush()

    def start_pod(self, number: int, address: str) -> None:
        """Give a pod its veth, as a network plugin that routes does."""
        device, remote = f"v{number}", self._tag + "remote"
        self.do(
            "node",
            f"link add {device} type veth peer name {device} netns {remote}",
            f"link set {device} up",
            f"route add {address}/32 dev {device}",
        )
        self.do("remote", f"link set {device} up")

    def stop_pod(self, number: int) -> None:
        """Take its veth away."""
        self.do("node", f"link del v{number}")

    def _build(self) -> None:
        ip("", [f"netns add {self._tag}{name}" for name in ("node", "outside", "remote")])
        ip("", [self._link("eth0", "outside", 2), self._link("eth1", "remote", 4)])
        ip(
            self._tag + "outside",
            [*_up(f"{CLIENT}/24"), f"route add default via {NODE_ADDRESS}"],
        )
        # What arrives is looked at and goes nowhere: there is no route, and no forwarding.
        ip(self._tag + "remote", ["link set lo up", "link set eth0 up"])
        ip(
            self._tag + "node",
            [
                *_up(f"{NODE_ADDRESS}/24"),
                "link set eth1 up",
                f"neigh add {_GATEWAY} lladdr {_MAC.format(5)} dev eth1 nud permanent",
                f"route add default via {_GATEWAY} dev eth1 onlink",
            ],
        )
        self.enter("node")
        for name, value in _SYSCTLS.items():
            Path("/proc/sys/net", name).write_text(value)

    def _link(self, device: str, other: str, number: int) -> str:
        return (
            f"link add {device} netns {self._tag}node address {_MAC.format(number)} type veth "
            f"peer name eth0 netns {self._tag}{other} address {_MAC.format(number + 1)}"
        )


def _up(address: str) -> list[str]:
    return ["link set lo up", f"addr add {address} dev eth0", "link set eth0 up"]


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET):
        raise OSError("setns failed")


def forget_soon() -> None:
    """Have connections that are never answered leave conntrack after a second."""
    with contextlib.suppress(FileNotFoundError):  # nobody tracks connections yet
        Path("/proc/sys/net", _SYN_SENT).write_text("1")


def in_ebpf_place(argv: Sequence[str], cgroup: Path) -> list[str]:
    """A command line with a bpffs and a cgroup root of its own."""
    mounts = f"mount --bind {cgroup} {cgroup_root()} && mount -t bpf bpf /sys/fs/bpf"
    return ["unshare", "-m", "sh", "-c", f'{mounts} && exec "$@"', "sh", *argv]


class Wire:
    """Connects from outside, and sees which endpoint a connection is led to."""

    def __init__(self, place: Place) -> None:
        """Move this thread to the client outside, for good."""
        place.enter("remote")
        self._seen = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ETH_P_IP))
        self._seen.bind(("eth0", _ETH_P_IP))
        self._seen.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._seen, selectors.EVENT_READ)
        place.enter("outside")

    def connect(self, address: str, port: int = 80) -> None:
        """Send the first packet of a connection."""
        with socket.socket() as client:
            client.setblocking(False)
            client.connect_ex((address, port))

    def arrived(self, seconds: float) -> list[str]:
        """Wait so long for a packet; the destinations of all that came."""
        self._selector.select(seconds)
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = self._seen.recv(2048)
                header = 4 * (packet[0] & 15)
                if packet[9] == socket.IPPROTO_TCP and packet[header + 13] == _SYN:
                    found.append(socket.inet_ntoa(struct.unpack_from("4s", packet, 16)[0]))
        return found

    def close(self) -> None:
        self._selector.close()
        self._seen.close()
