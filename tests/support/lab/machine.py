"""A process of ours on a node, under old and new connections of every kind."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support.builders import kube
from tests.support.lab.cluster import Lab
from tests.support.lab.mounts import Mounts, ebpf_mounts
from tests.support.lab.sockets import CGROUPS
from tests.support.lab.switches import ENDS, WAYS, Clients, ask, connected
from tests.support.waiting import wait_until

MODES = ("iptables", "nftables", "ebpf", "userspace")
"""Those that the kernel of a developer's machine has; ipvs needs tests/vm."""
PROGRAM = (sys.executable, "-m", "steersman")
WAIT = 60.0
ATTEMPTS = 5


class Machine:
    """A process of ours on the node, in a mount namespace and a cgroup of the test."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab, self.directory = lab, directory
        self.cgroup, script = ebpf_mounts(lab)
        self.mounts = Mounts(script)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.log = directory / "log"
        ports = [{"port": 80, "targetPort": 8080, "nodePort": 30080}]
        objects = [
            kube.service(
                cluster_ip="10.96.0.10",
                ports=ports,
                type="NodePort",
                externalIPs=["198.51.100.1"],
            ),
            # Pods of this node: a pod that meets itself is masqueraded by every mode.
            kube.endpoint_slice(
                "web", "web", *({"addresses": [end], "nodeName": "here"} for end in ENDS)
            ),
        ]
        (directory / "objects").mkdir()
        (directory / "objects" / "web.yaml").write_text(yaml.safe_dump_all(objects))

    def argv(self, *command: str) -> list[str]:
        """The command line of a command on the node, in its mounts and its cgroup."""
        into = f'echo 0 > {self.cgroup}/cgroup.threads && exec "$@"'
        return self.lab.exec_argv(["sh", "-c", into, "sh", *self.mounts.argv(*command)])

    def start(
        self, mode: str, *flags: str, program: Sequence[str] = PROGRAM
    ) -> subprocess.Popen[bytes]:
        """Start a process and wait until every way is served by it."""
        command = [
            *(*program, "run", f"--manifests={self.directory}/objects"),
            *(f"--proxy-mode={mode}", "--cluster-cidr=10.244.0.0/16", "--hostname-override=here"),
            *("--conntrack-max-per-core=0", "--nodeport-addresses=192.0.2.0/24", *flags),
        ]
        said = f"Using {mode} Proxier"
        before = self.log.read_text().count(said) if self.log.exists() else 0
        with self.log.open("ab") as log:
            process = subprocess.Popen(self.argv(*command), stdout=log, stderr=log)
        self.processes.append(process)
        self.until(lambda: self.log.read_text().count(said) > before)
        self.until(lambda: not any(ask(self.lab.socket(way[0], "TCP"), way) for way in WAYS))
        return process

    def until(self, true: Callable[[], bool]) -> None:
        wait_until(true, lambda: [*map(self.rules, MODES), self.log.read_text()])

    def steersman(self, *words: str) -> tuple[int, Any, str]:
        argv = self.lab.exec_argv([sys.executable, "-m", "steersman", *words, "-o", "json"])
        done = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT, check=False)
        return done.returncode, json.loads(done.stdout or "null"), done.stderr

    def switch(self, to: str, *words: str) -> dict[str, Any]:
        status, answer, errors = self.steersman("switch", to, "--watch-for=500ms", *words)
        assert answer, (errors, self.log.read_text())
        assert status == (answer["result"]["outcome"] not in ("switched", "checked")), answer
        assert isinstance(answer, dict)
        return answer

    def rules(self, mode: str) -> bool:
        """Whether the kernel has objects of a mode."""
        match mode:
            case "iptables":
                return "KUBE-SERVICES" in self.lab.run("iptables-save")
            case "nftables":
                return "table ip kube-proxy\n" in self.lab.run("nft", "list", "tables")
            case "ebpf":
                return self.mounts.path("/sys/fs/bpf/steersman").exists()
            case _:
                return "KUBE-PORTALS" in self.lab.run("iptables-save")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.mounts.close()
        del CGROUPS[self.lab.node.path]


def open_connections(lab: Lab) -> list[socket.socket]:
    """Connections of every kind, by a mode that serves alone."""
    live: list[socket.socket] = []
    for way in WAYS:
        for attempt in range(ATTEMPTS):
            try:
                live.append(connected(lab.socket(way[0], "TCP"), *way))
                break
            except TimeoutError:  # a packet was sent again: a busy machine stood still
                assert attempt < ATTEMPTS - 1, way
    return live


def failed(clients: Clients) -> list[str]:
    """New connections that were not made, or carried no data."""
    # One whose packet was sent again was made. On a busy machine TCP does so without any loss;
    # that no step of a switch loses one is shown step by step in test_switch.py.
    return [text for text in clients.failed if "packets were sent again" not in text]


def still_carry(live: list[socket.socket]) -> None:
    for way, sock in zip(WAYS, live, strict=True):
        sock.sendall(b"live")
        assert sock.recv(9) == b"live", way
