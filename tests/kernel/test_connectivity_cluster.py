"""`steersman connectivity --master`: pods of a cluster of one node, in namespaces."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.apiserver.world import Object
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.waiting import wait_until

pytestmark = pytest.mark.kernel
NODE = "192.0.2.1"
PODS = ("10.244.0.1", "10.244.0.2", "10.244.0.3")
PORT = 6443
URL = f"http://127.0.0.1:{PORT}"
INSIDE = f"{URL}/api/v1/namespaces/steersman-connectivity"
WAIT = 60.0
TRIED = {
    *("pod to pod, TCP", "pod to pod, UDP"),
    *("pod to cluster IP, TCP", "pod to cluster IP, UDP"),
    *("node to cluster IP, TCP", "node to cluster IP, UDP"),
    *("node to node port, TCP", "node to node port, UDP"),
    *("pod to itself by its Service", "session affinity", "internal policy Local"),
}


class Cluster:
    """The API server, the kubelet, and steersman on a node of namespaces."""

    def __init__(self, lab: Lab, folder: Path, mode: str) -> None:
        self.lab = lab
        self._processes: list[subprocess.Popen[bytes]] = []
        self._log = folder / "log"
        places = [f"{lab.netns(address).path}={address}" for address in PODS]
        self._start("tests.support.lab.kubelet", str(PORT), f"here={NODE}", *places)
        self.until(lambda: "listening" in self._log.read_text())
        self._start(
            *("steersman", "run", f"--master={URL}", f"--proxy-mode={mode}"),
            *("--cluster-cidr=10.244.0.0/16", "--hostname-override=here"),
            "--conntrack-max-per-core=0",
        )
        self.until(lambda: f"Using {mode} Proxier" in self._log.read_text())

    def _start(self, *words: str) -> None:
        with self._log.open("ab") as log:
            argv = self.lab.exec_argv([sys.executable, "-m", *words])
            self._processes.append(subprocess.Popen(argv, stdout=log, stderr=log))

    def until(self, true: Callable[[], bool]) -> None:
        wait_until(true, self._log.read_text)

    def command(self) -> subprocess.Popen[str]:
        words = ("steersman", "connectivity", f"--master={URL}", "--image=any", "-o", "json")
        argv = self.lab.exec_argv([sys.executable, "-m", *words])
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def ask(self) -> tuple[int, dict[str, dict[str, Any]]]:
        """The exit status, and what was tried."""
        with self.command() as command:
            out, errors = command.communicate(timeout=300)
        assert out, (errors, self._log.read_text())
        return command.returncode, {each["what"]: each for each in json.loads(out)["tried"]}

    def objects(self, kind: str) -> list[Object]:
        """The objects of a kind that the API server has."""
        body = json.dumps({"op": "objects", "kind": kind})
        argv = ["curl", "--silent", "--noproxy", "*", "--data", body, f"{URL}/__control__"]
        found: list[Object] = json.loads(self.lab.run(*argv))["result"]
        return found

    def close(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            process.wait(WAIT)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(Layout({"eth0": (f"{NODE}/24",)}, (), tuple(map(Pod, PODS)))) as lab:
        yield lab


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_a_cluster_that_serves_passes(lab: Lab, tmp_path: Path, mode: str) -> None:
    cluster = Cluster(lab, tmp_path, mode)
    try:
        status, tried = cluster.ask()
        assert {what: tried[what]["result"] for what in TRIED} == dict.fromkeys(TRIED, "ok"), tried
        policy = tried["external policy Local, client seen"]
        assert (policy["result"], policy["reason"]) == ("not tried", "this needs two nodes")
        assert status == 0
        assert cluster.objects("Namespace") == cluster.objects("Pod") == []
    finally:
        cluster.close()


@pytest.mark.slow(seconds=80)
def test_a_firewall_and_runs_that_are_ended(lab: Lab, tmp_path: Path) -> None:
    cluster = Cluster(lab, tmp_path, "nftables")
    try:
        # One that is ended removes everything.
        with cluster.command() as ended:
            cluster.until(lambda: bool(cluster.objects("Pod")))
            ended.send_signal(signal.SIGTERM)
            ended.communicate(timeout=WAIT)
        assert cluster.objects("Namespace") == cluster.objects("Pod") == []

        # What a killed one leaves is removed by the next.
        with cluster.command() as killed:
            cluster.until(lambda: bool(cluster.objects("Pod")))
            killed.kill()
            killed.communicate(timeout=WAIT)
        assert cluster.objects("Namespace")

        rules = "table ip firewall { chain forward { type filter hook forward priority -10\n"
        lab.run("nft", "-f", "-", stdin=f"{rules}udp dport 8080 drop\n}}\n}}\n")
        status, tried = cluster.ask()
        failed = {
            what: each["reason"].partition(": ")[2] or each["reason"]
            for what, each in tried.items()
            if each["reason"]
        }
        assert failed == {
            "pod to pod, UDP": "no answer within 3 s",
            "pod to cluster IP, UDP": "no answer within 3 s",
            "external policy Local, client seen": "this needs two nodes",
        }
        assert status == 1
        assert cluster.objects("Namespace") == cluster.objects("Pod") == []
    finally:
        cluster.close()
