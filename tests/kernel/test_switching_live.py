"""`steersman switch` on a running process: every pair of modes, under new and old connections."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from steersman.modes.ebpf.probe import cgroup_root
from tests.support.builders import kube
from tests.support.lab import ebpf
from tests.support.lab.cluster import Lab
from tests.support.lab.ebpf_node import MARKS
from tests.support.lab.sockets import CGROUPS
from tests.support.lab.switches import ENDS, WAYS, Clients, ask, connected, lab

__all__ = ["lab"]  # a fixture
pytestmark = MARKS

MODES = ("iptables", "nftables", "ebpf", "userspace")
TOUR = (0, 1, 0, 2, 0, 3, 1, 2, 1, 3, 2, 3, 0)
"""Every ordered pair of modes once."""
WAIT = 60.0
ATTEMPTS = 5


class Machine:
    """A process of ours on the node, in a mount namespace and a cgroup of the test."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab, self.directory = lab, directory
        self.cgroup = ebpf.new_cgroup(ebpf.next_number())
        CGROUPS[lab.node.path] = self.cgroup
        # The program looks for the cgroup2 root and a bpffs; here both are of this test only.
        mounts = f"mount --bind {self.cgroup} {cgroup_root()} && mount -t bpf bpf /sys/fs/bpf"
        argv = ["unshare", "-m", "sh", "-c", f"{mounts} && echo mounted && exec sleep 3600"]
        self.keeper = subprocess.Popen(argv, stdout=subprocess.PIPE)
        assert self.keeper.stdout
        assert self.keeper.stdout.readline() == b"mounted\n"
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

    def start(self, mode: str) -> subprocess.Popen[bytes]:
        inside = ["nsenter", f"--mount=/proc/{self.keeper.pid}/ns/mnt"]
        into = f'echo 0 > {self.cgroup}/cgroup.threads && exec "$@"'
        command = [
            *(sys.executable, "-m", "steersman", "run", f"--manifests={self.directory}/objects"),
            *(f"--proxy-mode={mode}", "--cluster-cidr=10.244.0.0/16", "--hostname-override=here"),
            *("--conntrack-max-per-core=0", "--nodeport-addresses=192.0.2.0/24"),
        ]
        argv = self.lab.exec_argv(["sh", "-c", into, "sh", *inside, *command])
        with self.log.open("ab") as log:
            process = subprocess.Popen(argv, stdout=log, stderr=log)
        self.processes.append(process)
        self.until(lambda: f"Using {mode} Proxier" in self.log.read_text())
        self.until(lambda: not any(ask(self.lab.socket(way[0], "TCP"), way) for way in WAYS))
        return process

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT
        while not true():
            assert time.monotonic() < end, [*map(self.rules, MODES), self.log.read_text()]
            time.sleep(0.05)

    def steersman(self, *words: str) -> tuple[int, Any, str]:
        argv = self.lab.exec_argv([sys.executable, "-m", "steersman", *words, "-o", "json"])
        done = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT, check=False)
        return done.returncode, json.loads(done.stdout or "null"), done.stderr

    def switch(self, to: str, *words: str) -> dict[str, Any]:
        status, answer, errors = self.steersman("switch", f"--to={to}", "--watch-for=500ms", *words)
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
                return Path(f"/proc/{self.keeper.pid}/root/sys/fs/bpf/steersman").exists()
            case _:
                return "KUBE-PORTALS" in self.lab.run("iptables-save")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.keeper.kill()
        self.keeper.wait()
        assert self.keeper.stdout
        self.keeper.stdout.close()
        del CGROUPS[self.lab.node.path]


@pytest.fixture
def machine(lab: Lab, tmp_path: Path) -> Iterator[Machine]:
    made = Machine(lab, tmp_path)
    yield made
    made.close()


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


def test_no_connection_is_lost_between_any_two_modes(machine: Machine) -> None:
    process = machine.start(MODES[0])
    clients = Clients(machine.lab)
    try:
        for old, new in pairwise(MODES[number] for number in TOUR):
            live = open_connections(machine.lab)
            answer = machine.switch(new)
            result = answer["result"]
            assert (result["outcome"], result["mode"]) == ("switched", new), answer
            assert result["failedDials"] == 0, answer  # none took three seconds
            assert result["dials"] > 0
            before = clients.opened
            while clients.opened < before + 2 * len(WAYS):
                clients.pause()
            assert failed(clients) == [], (old, new, answer, machine.log.read_text())
            still_carry(live)
            for sock in live:
                sock.close()
            machine.until(lambda mode=new: machine.rules(mode))  # type: ignore[misc]
    finally:
        clients.close()
    assert len(clients.failed) <= len(TOUR), "packets sent again"
    # What the other modes left is gone once their connections have ended.
    for mode in MODES[1:]:
        machine.until(lambda mode=mode: not machine.rules(mode))  # type: ignore[misc]
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT) == 0


@pytest.mark.parametrize(("old", "new"), [("iptables", "nftables"), ("nftables", "userspace")])
def test_a_process_killed_in_the_middle_is_healed_by_the_next(
    machine: Machine, old: str, new: str
) -> None:
    process = machine.start(old)
    argv = [sys.executable, "-m", "steersman", "switch", f"--to={new}", "--watch-for=1m"]
    with subprocess.Popen(machine.lab.exec_argv(argv), stdout=subprocess.PIPE) as switch:
        assert switch.stdout
        for line in switch.stdout:
            if b"serves beside" in line:
                break
        process.kill()
        process.wait()
        switch.stdout.read()
    assert switch.returncode == 2
    machine.log.write_text("")
    machine.start(old)
    machine.until(lambda: machine.rules(old) and not machine.rules(new))


def test_a_mode_in_which_connections_fail_is_left_again(machine: Machine) -> None:
    """A firewall lets only translated packets reach the endpoints: sockets are not enough."""
    machine.start("nftables")
    machine.lab.run(
        "nft",
        "-f",
        "-",
        stdin="table ip firewall { chain out { type filter hook output priority 200;\n"
        "ip daddr 10.244.0.0/16 tcp dport 8080 ct status ! dnat drop\n}\n}\n",
    )
    answer = machine.switch("ebpf", "--watch-for=1m")
    assert answer["result"]["outcome"] == "back", answer
    assert answer["result"]["mode"] == "nftables"
    (why, *_) = [step["text"] for step in answer["steps"] if step["name"] == "back"]
    assert "new connections fail to shop/web" in why
    assert machine.rules("nftables")
    machine.until(lambda: not machine.rules("ebpf"))
    assert [way for way in WAYS if ask(machine.lab.socket(way[0], "TCP"), way)] == []


def test_a_second_switch_is_refused_and_a_dry_run_changes_nothing(machine: Machine) -> None:
    machine.start("iptables")
    answer = machine.switch("nftables", "--dry-run")
    assert answer["result"]["outcome"] == "checked"
    assert not machine.rules("nftables")
    argv = [sys.executable, "-m", "steersman", "switch", "--to=nftables", "--watch-for=30s"]
    with subprocess.Popen(machine.lab.exec_argv(argv), stdout=subprocess.PIPE) as switch:
        assert switch.stdout
        assert switch.stdout.readline()
        status, answer, errors = machine.steersman("switch", "--to=userspace")
        assert (status, answer) == (2, None)
        assert "another switch is under way" in errors
        switch.kill()
    machine.until(lambda: machine.rules("nftables") and not machine.rules("iptables"))
