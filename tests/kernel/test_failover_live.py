"""An endpoint that does not answer gets no new connections: a real process, real packets."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import yaml
from demo_cluster import POD_CIDR, Cluster

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.kernel, pytest.mark.slow(seconds=25)]
VIP = "10.96.0.10"
MODES = [
    ("nftables",),
    ("iptables", "--iptables-variant=nft"),
    ("iptables", "--iptables-variant=legacy"),
    ("ebpf",),
    ("userspace",),
]
STEERSMAN = (sys.executable, "-m", "steersman")
LONGEST = 60.0


class Node:
    """node-a, which ejects endpoints; pod-3 runs on node-b."""

    def __init__(self, cluster: Cluster, log: Path, manifests: Path) -> None:
        self.cluster, self._log, self._manifests = cluster, log, manifests

    @property
    def log(self) -> str:
        return self._log.read_text()

    def nft(self, where: str, rule: str) -> None:
        text = "table inet fault {\nchain incoming { type filter hook input priority 0;\n"
        text += f"tcp dport 8080 {rule}\n}}\n}}\n"
        argv = self.cluster.argv(where, ["nft", "-f", "-"])
        subprocess.run(argv, input=text, text=True, check=True)

    def heal(self, where: str) -> None:
        argv = self.cluster.argv(where, ["nft", "delete", "table", "inet", "fault"])
        subprocess.run(argv, check=True)

    def annotate(self, **annotations: str) -> None:
        """Give every Service annotations of steersman."""
        for path in self._manifests.iterdir():
            objects = list(yaml.safe_load_all(path.read_text()))
            for each in objects:
                if each["kind"] == "Service":
                    named = {f"steersman/{name}": text for name, text in annotations.items()}
                    each["metadata"]["annotations"] = named
            new = path.with_suffix(".new")
            new.write_text(yaml.safe_dump_all(objects))
            new.rename(path)

    def command(self, *words: str) -> str:
        argv = self.cluster.argv("node-a", [*STEERSMAN, *words])
        return subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT).stdout

    def reached(self, number: int = 40) -> set[str]:
        """The pods that answer many connections at once, from two clients; and errors.

        What one client finds silent is not believed before the node has probed the endpoint once.
        """
        with ThreadPoolExecutor(2) as clients:
            connect = partial(connect_all, number // 2)
            found = clients.map(lambda pod: self.cluster.inside(pod, connect), ("pod-1", "pod-2"))
            return set().union(*found)

    def send_signal(self, pod: str, number: signal.Signals) -> None:
        """Send a signal to what a pod runs."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.cluster.netns(pod)], capture_output=True, check=True
        )
        for pid in listed.stdout.split():
            os.kill(int(pid), number)

    def until(self, true: Callable[[], bool]) -> None:
        wait_until(true, lambda: self.log)


def connect_all(number: int) -> set[str]:
    """Open many connections at once; return who answered them, and the names of errors."""
    found = set()
    with ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(number)]
        for sock in socks:
            sock.setblocking(False)
            sock.connect_ex((VIP, 80))
        for sock in socks:
            sock.settimeout(LONGEST)
            try:
                found.add(sock.recv(64).decode().split()[0])
            except OSError as error:
                found.add(type(error).__name__)
    return found


@pytest.fixture(params=MODES, ids=lambda words: "-".join(words).replace("--iptables-variant=", ""))
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    manifests, log = tmp_path / "manifests", tmp_path / "log"
    manifests.mkdir()
    for path in (ROOT / "demo").glob("*.yaml"):
        (manifests / path.name).write_text(path.read_text())
    cluster = Cluster()
    node = Node(cluster, log, manifests)
    mode, *more = request.param
    try:
        cluster.build()
        words = [*STEERSMAN, "run", f"--proxy-mode={mode}", *more, f"--manifests={manifests}"]
        words += ["--hostname-override=node-a", f"--cluster-cidr={POD_CIDR}"]
        with log.open("wb") as file:
            cluster.start(
                "node-a", "steersman", [*words, "--eject-failing-endpoints", "-v=2"], file
            )
        node.until(lambda: "sync 1 (start)" in node.log)
        node.until(lambda: node.reached() == {"pod-1", "pod-2", "pod-3"})
        yield node
    finally:
        cluster.close()


def test_a_silent_endpoint_is_left_and_used_again(node: Node) -> None:
    node.nft("pod-3", "drop")
    # Every connection is answered: those that wait are moved to another endpoint.
    assert node.reached() == {"pod-1", "pod-2", "pod-3"} - {"pod-3"}
    ejected = "endpoint 10.244.2.13:8080 of Service shop/web is ejected"
    node.until(lambda: ejected in node.log)  # userspace has dialled the next one before
    assert node.reached() == {"pod-1", "pod-2"}
    explained = node.command("explain", "shop/web")
    assert "out: ejected: it has not answered connections" in explained
    node.heal("pod-3")
    node.until(lambda: "endpoint 10.244.2.13:8080 of Service shop/web answers again" in node.log)
    node.until(lambda: "pod-3" in node.reached())
    assert "ejected" not in node.command("explain", "shop/web")


def test_a_check_ejects_without_any_connection(node: Node) -> None:
    node.annotate(probe="tcp", **{"probe-interval": "1s"})
    node.nft("pod-3", "drop")
    ejected = "endpoint 10.244.2.13:8080 of Service shop/web is ejected"
    node.until(lambda: ejected in node.log)
    assert node.reached() == {"pod-1", "pod-2"}
    [port] = json.loads(node.command("services", "shop/web", "-o", "json"))["ports"]
    [out] = [each for each in port["endpoints"] if not each["used"]]
    assert out["address"] == "10.244.2.13:8080"
    assert "ejected: it has not answered" in out["why"]
    node.heal("pod-3")
    node.until(lambda: "endpoint 10.244.2.13:8080 of Service shop/web answers again" in node.log)


def test_a_process_that_stops_is_left(node: Node) -> None:
    node.cluster.stop("pod-3")
    ejected = "endpoint 10.244.2.13:8080 of Service shop/web is ejected: it has refused connections"

    node.until(lambda: node.reached() == {"pod-1", "pod-2"})
    node.until(lambda: ejected in node.log)


def test_a_pod_that_hangs_is_left_until_it_goes_on(node: Node) -> None:
    """Its process accepts nothing, and its backlog is full: the node's probes are dropped, too."""

    def fill_backlog() -> list[socket.socket]:
        socks = [socket.socket() for _ in range(600)]
        for sock in socks:
            sock.setblocking(False)
            sock.connect_ex(("10.244.2.13", 8080))
        return socks

    node.send_signal("pod-3", signal.SIGSTOP)
    waiting = node.cluster.inside("pod-3", fill_backlog)
    try:
        assert node.reached() == {"pod-1", "pod-2"}
        ejected = "endpoint 10.244.2.13:8080 of Service shop/web is ejected: it has not"
        node.until(lambda: ejected in node.log)
        assert node.reached() == {"pod-1", "pod-2"}
    finally:
        node.send_signal("pod-3", signal.SIGCONT)
        for sock in waiting:
            sock.close()
    node.until(lambda: "endpoint 10.244.2.13:8080 of Service shop/web answers again" in node.log)
    node.until(lambda: "pod-3" in node.reached())


def test_if_no_endpoint_answers_none_is_ejected(node: Node) -> None:
    for pod in ("pod-1", "pod-2", "pod-3"):
        node.nft(pod, "drop")

    def answered(seconds: float = 2.5) -> str:
        try:
            with socket.create_connection((VIP, 80), seconds) as sock:
                return sock.recv(64).decode().split()[0]
        except OSError:
            return ""

    assert [node.cluster.inside("pod-1", answered) for _ in range(4)] == [""] * 4
    assert "is ejected" not in node.log
    node.heal("pod-1")
    soon = partial(answered, 1.0)
    node.until(lambda: node.cluster.inside("pod-1", soon) == "pod-1")
