"""A node in a lab that runs steersman, to which faults are done and of which doctor is asked."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from steersman.model.world import Origin, World
from steersman.operate.answer import QuestionError
from steersman.operate.client import Client
from steersman.operate.world_reader import decode_world
from tests.support.builders import kube
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.mounts import Mounts, ebpf_mounts
from tests.support.lab.sockets import CGROUPS
from tests.support.processes.steersman import FLAGS, manifests

NODE, OUTSIDE = "192.0.2.1", "203.0.113.9"
ENDS = ("10.244.0.5", "10.244.0.6", "10.244.1.7")
"""The last one is on another node."""
CLIENT = "10.244.0.9"
VIP, NODE_PORT = "10.96.0.10", 30080
PATIENCE = 60.0
"""Seconds for what takes milliseconds on an idle machine."""

Object = dict[str, Any]
LOCK = "/run/xtables.lock"
DOCTOR = (sys.executable, "-m", "tests.support.processes.patient_doctor", "doctor")


class Addresses(NamedTuple):
    """The addresses of a lab, of one family."""

    node: str = NODE
    outside: str = OUTSIDE
    ends: tuple[str, str, str] = ENDS
    client: str = CLIENT

    @property
    def layout(self) -> Layout:
        """Its node, client outside and pods, without a bridge; the last endpoint is elsewhere."""
        length = 64 if ":" in self.node else 24
        pods = (Pod(each, local=each != self.ends[2]) for each in (*self.ends, self.client))
        interfaces = {"eth0": (f"{self.node}/{length}",), "lo": ()}
        return Layout(interfaces, (self.outside,), tuple(pods))


IPV4 = Addresses()


class Diagnosed(NamedTuple):
    """What doctor printed."""

    status: int
    cause: str
    results: list[Object]
    seconds: float


def endpoint(address: str, **more: Any) -> Object:
    node = "node-b" if address == ENDS[2] else "node-a"
    return {"addresses": [address], "nodeName": node, **more}


def world() -> list[Object]:
    """A Service in good health: three endpoints, a cluster IP and a node port."""
    port = {"name": "http", "port": 80, "protocol": "TCP", "nodePort": NODE_PORT}
    slice_port = {"name": "http", "port": 8080, "protocol": "TCP"}
    return [
        kube.service("web", VIP, ports=[port], type="NodePort", selector={"app": "web"}),
        kube.endpoint_slice("web-1", "web", *map(endpoint, ENDS), ports=[slice_port]),
        kube.node("node-a", NODE, zone="a"),
    ]


class FaultyNode:
    """The lab, and the process in it; a context manager.

    It has a mount namespace, too: the pins of the ebpf mode and the lock of iptables are the
    machine's, and other tests use them at the same time. As a pod it has a pid namespace as well,
    and its process the name that it has in the image.
    """

    def __init__(
        self,
        folder: Path,
        mode: str,
        *flags: str,
        bridge: str = "",
        pod: bool = False,
        healthy: Callable[[], list[Object]] = world,
        addresses: Addresses = IPV4,
    ) -> None:
        self.folder = folder
        self.healthy = healthy
        self.pod = pod
        self.mode = mode
        self.flags = (f"--proxy-mode={mode}", *flags)
        self.cgroup: Path | None = None
        self.ends = addresses.ends
        self.lab = Lab(replace(addresses.layout, bridge=bridge))
        self.process: subprocess.Popen[bytes] | None = None
        self._serial = 0

    def __enter__(self) -> Self:
        self.lab.__enter__()
        (self.folder / "lock").touch()
        mounts = "mount -t tmpfs none /sys/fs/bpf"
        if self.mode == "ebpf":
            self.cgroup, mounts = ebpf_mounts(self.lab)
        self.mounts = Mounts(
            f"{mounts}\n[ ! -e {LOCK} ] || mount --bind {self.folder / 'lock'} {LOCK}",
            pid=self.pod,
        )
        self.serve()
        self.write(self.healthy())
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGKILL)
        self.mounts.close()
        CGROUPS.pop(self.lab.node.path, None)
        self.lab.close()

    def exec_argv(self, argv: Sequence[str]) -> list[str]:
        """A command line that runs on the node."""
        words = self.mounts.argv(*argv)
        if self.cgroup is not None:
            into = f'echo 0 > {self.cgroup}/cgroup.threads && exec "$@"'
            words = ["sh", "-c", into, "sh", *words]
        return self.lab.exec_argv(words)

    def start(self, *flags: str) -> None:
        program = [sys.executable, "-m", "steersman"]
        if self.pod:  # the kernel names a script by its file
            script = self.folder / "kube-proxy"
            text = f"#!{sys.executable}\nimport runpy\n"
            script.write_text(f"{text}runpy.run_module('steersman', run_name='__main__')\n")
            script.chmod(0o755)
            program = [str(script)]
        words = [*program, "run", *FLAGS, *self.flags, *flags]
        words.append(f"--manifests={self.folder / 'objects'}")
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.exec_argv(words), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        self.wait(lambda found: found.process is not None and found.process.synced_at > 0)

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(PATIENCE)
        self.process = None

    def wait(self, true: Callable[[World], bool]) -> None:
        """Wait until it is true of the World of the process."""
        end = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(QuestionError):
                data = self.lab.node.call(lambda: Client().get("/world"))
                found = decode_world(data, Origin("process", ""))
                if true(found):
                    return
            assert time.monotonic() < end, (self.folder / "log").read_text()
            time.sleep(0.05)

    def serve(self) -> None:
        """Start the servers of all endpoints."""
        for address in self.ends:
            self.lab.serve(address, 8080, "TCP")

    def write(self, objects: Sequence[Object]) -> None:
        """Replace the objects of the cluster, and wait until a running process has synced them."""
        self._serial += 1
        marker = f"version-{self._serial}"
        last = kube.service(marker, f"10.96.255.{self._serial % 200}", namespace="versions")
        manifests(self.folder / "objects", *objects, last)
        if self.process is not None:
            self.wait(
                lambda found: (
                    found.process is not None
                    and not found.process.owes
                    and any(key.name.service == marker for key in found.plan.services)
                )
            )

    @contextlib.contextmanager
    def objects(self, change: Callable[[list[Object]], None]) -> Iterator[None]:
        """Change the objects of the cluster for a while."""
        changed = self.healthy()
        change(changed)
        self.write(changed)
        try:
            yield
        finally:
            self.write(self.healthy())

    @contextlib.contextmanager
    def sysctl(self, name: str, value: str, usual: str) -> Iterator[None]:
        """Set a sysctl of the node for a while: a path below /proc/sys/net."""
        self.lab.sysctl(name, value)
        try:
            yield
        finally:
            self.lab.sysctl(name, usual)

    def inside(self, address: str, *argv: str, stdin: str = "") -> None:
        """Run a command in the namespace that has an address."""
        words = ["nsenter", f"--net={self.lab.netns(address).path}", *argv]
        subprocess.run(words, input=stdin, text=True, check=True, capture_output=True)

    @contextlib.contextmanager
    def rules(self, where: str, text: str) -> Iterator[None]:
        """Add a table of nftables of someone else for a while, where an address is."""
        self.inside(where, "nft", "-f", "-", stdin=f"table inet other {{ {text}\n }}")
        try:
            yield
        finally:
            self.inside(where, "nft", "delete table inet other")

    @property
    def from_manifests(self) -> tuple[str, ...]:
        """The flags by which doctor reads the objects itself, as without a process."""
        return (*self.flags, *FLAGS, f"--manifests={self.folder / 'objects'}")

    def doctor(self, *words: str, through: Sequence[str] = (), outside: bool = False) -> Diagnosed:
        """Ask, `through` a command that changes what doctor sees, or from outside of the pod."""
        argv = [*through, *DOCTOR, *words, "-o", "json"]
        argv = self.lab.exec_argv(argv) if outside else self.exec_argv(argv)
        began = time.monotonic()
        done = subprocess.run(argv, capture_output=True, text=True, check=False, env=os.environ)
        seconds = time.monotonic() - began
        if done.returncode == 2:  # the question itself is wrong, and says so
            cause = done.stderr.removeprefix("steersman doctor: ").strip()
            return Diagnosed(2, cause, [], seconds)
        assert done.stdout, done.stderr
        answer = json.loads(done.stdout)
        return Diagnosed(done.returncode, answer["cause"], answer["results"], seconds)
