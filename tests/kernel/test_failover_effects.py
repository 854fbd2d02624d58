"""What an ejection changes for clients, and what it leaves alone: a real process, real packets."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.builders import kube
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.ebpf_node import MARKS
from tests.support.lab.mounts import ebpf_mounts
from tests.support.lab.sockets import CGROUPS, printed
from tests.support.processes.steersman import manifests
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.kernel
LONGEST = 60.0
IMPATIENT = 1.5
"""Seconds in which a client sends its first SYN twice: that is what shows an endpoint as silent."""

# In each of these modes, every test. A mode of more words is that mode with flags.
MODES = [
    "nftables",
    "iptables --iptables-variant=nft",
    "iptables --iptables-variant=legacy",
    "userspace --userspace-portals=iptables --iptables-variant=nft",
    "userspace --userspace-portals=iptables --iptables-variant=legacy",
    "userspace --userspace-portals=nftables",
    pytest.param("ebpf", marks=MARKS),
]

NODE, CLIENT, BALANCER = "192.0.2.1", "10.244.7.7", "198.51.100.1"
NODE6, CLIENT6 = "fd00:192::1", "fd00:244:7::7"
OUTSIDE = tuple(f"203.0.113.{n}" for n in range(1, 61))
OUTSIDE6 = tuple(f"fd00:113::{n:x}" for n in range(1, 61))
FORMER = 30  # clients that connect before an ejection: one of three is sent to each endpoint
# Endpoints of a Service: the first ones are on the node, the last one is not. Each test has its
# own, as an ejection lasts.
STICKY = ("10.244.0.1", "10.244.0.2", "10.244.3.1")
STICKY6 = ("fd00:244::1", "fd00:244::2", "fd00:244:3::1")
KEPT = ("10.244.0.3", "10.244.3.3")
KEPT6 = ("fd00:244::3", "fd00:244:3::3")
HERE = ("10.244.0.4", "10.244.3.4")
LEAVING = ("10.244.0.5", "10.244.0.6", "10.244.3.5")
NAMES = ("10.244.0.7", "10.244.3.7")
PODS = (*STICKY, *STICKY6, *KEPT, *KEPT6, *HERE, *LEAVING, *NAMES)
CONFIG = """
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: {}
clusterCIDR: 10.244.0.0/16,fd00:244::/32
conntrack: {{maxPerCore: 0}}
steersman: {{failover: {{hold: 1s}}}}
"""
SILENT, REFUSING = "drop", "reject with tcp reset"


def remote(address: str) -> bool:
    return address.startswith(("10.244.3.", "fd00:244:3:"))


def slice_of(service: str, addresses: tuple[str, ...], **more: Any) -> kube.Object:
    endpoints = [
        {"addresses": [a], "nodeName": "node-b" if remote(a) else "node-a"} for a in addresses
    ]
    family = "IPv6" if ":" in addresses[0] else "IPv4"
    return kube.endpoint_slice(f"{service}-{family}", service, *endpoints, family=family, **more)


def world() -> list[kube.Object]:
    local: dict[str, Any] = {"type": "LoadBalancer", "externalTrafficPolicy": "Local"}

    def ports(node_port: int, protocol: str = "TCP") -> list[kube.Object]:
        return [{"port": 80, "protocol": protocol, "nodePort": node_port}]

    def both(ip: str, ip6: str) -> dict[str, Any]:
        return {"clusterIPs": [ip, ip6], "ipFamilies": ["IPv4", "IPv6"]}

    leaving = slice_of("leaving", LEAVING)
    leaving["endpoints"][1]["conditions"] = {"ready": False, "serving": True, "terminating": True}
    return [
        kube.node("node-a", NODE, NODE6),
        kube.service(
            "sticky",
            "10.96.0.1",
            ports=ports(30001),
            type="NodePort",
            sessionAffinity="ClientIP",
            **both("10.96.0.1", "fd00:96::1"),
        ),
        slice_of("sticky", STICKY),
        slice_of("sticky", STICKY6),
        kube.service("plain", "10.96.0.6", **both("10.96.0.6", "fd00:96::6")),
        slice_of("plain", STICKY),
        slice_of("plain", STICKY6),
        kube.service("kept", "10.96.0.2", **both("10.96.0.2", "fd00:96::2")),
        slice_of("kept", KEPT),
        slice_of("kept", KEPT6),
        kube.service(
            "here",
            "10.96.0.3",
            ports=ports(30003),
            ingress=[{"ip": BALANCER}],
            internalTrafficPolicy="Local",
            healthCheckNodePort=32003,
            **local,
        ),
        slice_of("here", HERE),
        kube.service(
            "leaving", "10.96.0.4", ports=ports(30004), healthCheckNodePort=32004, **local
        ),
        leaving,
        kube.service("names", "10.96.0.5", ports=ports(30005, "UDP"), type="NodePort"),
        slice_of("names", NAMES, ports=[{"name": "", "port": 8080, "protocol": "UDP"}]),
    ]


class Node:
    """The lab's node, on which steersman ejects endpoints."""

    def __init__(self, lab: Lab, log: Path) -> None:
        self.lab, self._log = lab, log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def says(self, text: str) -> bool:
        return text in self.log

    def until(self, true: Callable[[], bool]) -> None:
        wait_until(true, lambda: self.log)

    def reached(
        self,
        source: str,
        address: str,
        port: int = 80,
        protocol: str = "TCP",
        patience: float = LONGEST,
    ) -> str:
        """Who answers a new connection, without its port; otherwise the kind of failure."""
        outcome = self.lab.probe(source, address, port, protocol, timeout=patience)
        return outcome.endpoint.rpartition(":")[0].strip("[]") or outcome.kind

    def tried(self, source: str, address: str, port: int = 80, protocol: str = "TCP") -> str:
        """The same, of a client that gives up soon: an endpoint may be silent."""
        return self.reached(source, address, port, protocol, patience=IMPATIENT)

    def all_try(self, sources: tuple[str, ...], address: str, port: int = 80) -> None:
        for source in sources:
            self.tried(source, address, port)

    def reaches(self, ends: tuple[str, ...], source: str, address: str, port: int = 80) -> bool:
        return self.tried(source, address, port) in ends

    def fails(self, pod: str, how: str) -> None:
        """Let a pod take no new connections."""
        rules = "table inet fault { chain input { type filter hook input priority 0; "
        rules += f"tcp dport 8080 tcp flags & (syn | ack) == syn {how}; }}; }}"
        self._nft(pod, rules)

    def heals(self, pod: str) -> None:
        self._nft(pod, "delete table inet fault")

    def _nft(self, pod: str, text: str) -> None:
        argv = ["nsenter", f"--net={self.lab.netns(pod).path}", "nft", "-f", "-"]
        subprocess.run(argv, input=text, text=True, check=True)

    def eject(self, pod: str, connect: Callable[[], object]) -> None:
        """Connect until an endpoint that fails is ejected, and no client is sent there."""

        def is_ejected() -> bool:
            connect()
            return self.says(f" -{printed(pod, 8080)}")

        self.until(is_ejected)

    def health(self, port: int) -> tuple[int, dict[str, Any]]:
        """What a load balancer sees at a health check node port."""
        connection = http.client.HTTPConnection(NODE, port, timeout=LONGEST)
        with self.lab.socket(OUTSIDE[0], "TCP") as sock:
            sock.settimeout(LONGEST)
            sock.connect((NODE, port))
            connection.sock = sock
            connection.request("GET", "/")
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())


def with_cgroup(lab: Lab, words: list[str]) -> list[str]:
    """Run a command where a cgroup of the lab is the root, and bpffs goes with the command."""
    _, script = ebpf_mounts(lab)
    return ["unshare", "--mount", "sh", "-ec", f'{script}; exec "$@"', "sh", *words]


class Talkers:
    """Endpoints that answer each message with their name, for as long as a connection lasts."""

    def __init__(self, lab: Lab, addresses: tuple[str, ...]) -> None:
        self.met = set[str]()
        """Those that somebody has connected to."""
        self._sockets = []
        for address in addresses:
            server = lab.netns(address).socket(address, "TCP")
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((address, 8080))
            server.listen(64)
            self._sockets.append(server)
            threading.Thread(target=self._accept, args=(server, address), daemon=True).start()

    def _accept(self, server: socket.socket, address: str) -> None:
        with suppress(OSError):
            while True:
                client, _ = server.accept()
                self.met.add(address)
                threading.Thread(target=self._talk, args=(client, address), daemon=True).start()

    @staticmethod
    def _talk(client: socket.socket, address: str) -> None:
        with client, suppress(OSError):
            while client.recv(100):
                client.sendall(address.encode())

    def close(self) -> None:
        for server in self._sockets:
            server.shutdown(socket.SHUT_RDWR)
            server.close()


@pytest.fixture(scope="module", params=MODES)
def node(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    tmp = tmp_path_factory.mktemp("node")
    pods = (
        *(Pod(address, local=not remote(address)) for address in PODS),
        Pod(CLIENT),
        Pod(CLIENT6),
    )
    layout = Layout({"eth0": (f"{NODE}/24", f"{NODE6}/64")}, (*OUTSIDE, *OUTSIDE6), pods)
    mode, *flags = request.param.split()
    (tmp / "config.yaml").write_text(CONFIG.format(mode))
    words = [sys.executable, "-m", "steersman", "run", f"--config={tmp / 'config.yaml'}", *flags]
    words += [f"--manifests={manifests(tmp / 'manifests', *world())}", "-v=2"]
    words += ["--hostname-override=node-a", "--eject-failing-endpoints"]
    with Lab(layout) as lab, (tmp / "log").open("wb") as log:
        for pod in set(PODS) - {*KEPT, *KEPT6}:
            lab.serve(pod, 8080, "UDP" if pod in NAMES else "TCP")
        if mode == "ebpf":
            words = with_cgroup(lab, words)
        talkers = Talkers(lab, (*KEPT, *KEPT6))
        node = Node(lab, tmp / "log")
        process = subprocess.Popen(lab.exec_argv(words), cwd=ROOT, stdout=log, stderr=log)
        try:
            node.until(lambda: "sync 1 (start)" in node.log or process.poll() is not None)
            # What one client finds silent counts only after a probe of the node was answered.
            node.until(lambda: talkers.met == {*KEPT, *KEPT6} or process.poll() is not None)
            assert process.poll() is None, node.log
            node.until(lambda: node.tried(CLIENT, "10.96.0.3") == HERE[0])
            yield node
        finally:
            process.terminate()
            process.wait(LONGEST)
            talkers.close()
            CGROUPS.pop(lab.node.path, None)


class Client(NamedTuple):
    """A client of Service `sticky`, and how it comes there."""

    source: str
    address: str
    port: int


def sticky_clients(vip: str, pod: str, outside: tuple[str, ...]) -> list[Client]:
    node_address = NODE6 if ":" in vip else NODE
    return [Client(pod, vip, 80), *(Client(source, node_address, 30001) for source in outside)]


@pytest.mark.slow(seconds=120)
def test_affinity_to_an_ejected_endpoint_ends(node: Node) -> None:
    """The rules name the ejected endpoint first: an old entry for it would be found first."""
    ways = [
        (STICKY, sticky_clients("10.96.0.1", CLIENT, OUTSIDE), "10.96.0.6", SILENT),
        (STICKY6, sticky_clients("fd00:96::1", CLIENT6, OUTSIDE6), "fd00:96::6", REFUSING),
    ]
    for ends, every, plain, how in ways:
        clients, newcomers = every[:FORMER], every[FORMER:]
        before = {client: node.reached(*client) for client in clients}
        assert {client: node.reached(*client) for client in clients} == before
        assert set(before.values()) == set(ends)
        # Clients of another Service find out that it fails. Then its own go elsewhere, and those of
        # other endpoints stay where they are.
        node.fails(ends[0], how)
        others = (every[0].source, every[1].address)  # the pod, and the node itself
        node.eject(ends[0], partial(node.all_try, others, plain))
        for client in [client for client, end in before.items() if end == ends[0]]:
            node.until(partial(node.reaches, ends[1:], *client))
        during = {client: node.reached(*client) for client in clients}
        kept = {client: end for client, end in before.items() if end != ends[0]}
        assert kept.items() <= during.items()
        assert set(during.values()) == set(ends[1:])
        # It is back: new clients are sent there, and all others stay where they went.
        node.heals(ends[0])
        node.until(partial(node.says, f" +{printed(ends[0], 8080)}"))
        assert ends[0] in {node.reached(*client) for client in newcomers}
        assert {client: node.reached(*client) for client in clients} == during


def says(sock: socket.socket) -> str:
    sock.sendall(b"who are you?")
    return sock.recv(100).decode()


@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize(
    ("ends", "clients", "vip", "how"),
    [
        (KEPT, (CLIENT, NODE), "10.96.0.2", REFUSING),
        (KEPT6, (CLIENT6, NODE6), "fd00:96::2", SILENT),
    ],
    ids=["IPv4", "IPv6"],
)
def test_established_connections_to_an_ejected_endpoint_stay(
    node: Node, ends: tuple[str, ...], clients: tuple[str, ...], vip: str, how: str
) -> None:
    with ExitStack() as stack:

        def connect(client: str, patience: float = LONGEST) -> socket.socket:
            sock = stack.enter_context(node.lab.socket(client, "TCP"))
            sock.settimeout(patience)
            sock.connect((vip, 80))
            sock.settimeout(LONGEST)
            return sock

        def reached(client: str) -> str:
            """Who answers a client that gives up soon.

            A connection that waits is not moved to an endpoint to which the client has another one
            from the same port, and the kernel may choose a port for both.
            """
            try:
                with connect(client, IMPATIENT) as sock:
                    return says(sock)
            except OSError as error:
                return repr(error)

        held: list[tuple[socket.socket, str]] = []
        while {end for _, end in held} != set(ends):
            sock = connect(clients[0])
            held.append((sock, says(sock)))
        node.fails(ends[0], how)
        # Of two clients: one alone is not believed if the node's own first probe got no answer in
        # time, as on a machine that stood still for a second.
        node.eject(ends[0], lambda: [reached(each) for each in clients])
        node.until(lambda: {reached(each) for each in clients * 5} == {ends[1]})
        assert [says(sock) for sock, _ in held] == [end for _, end in held]


@pytest.mark.slow(seconds=60)
def test_local_traffic_is_dropped_without_its_only_endpoint(node: Node) -> None:
    """As if the endpoint were not ready; load balancers still hear that its pod is."""
    inside, outside = (CLIENT, "10.96.0.3"), (OUTSIDE[0], BALANCER)
    assert {node.reached(*way) for way in (inside, outside) * 3} == {HERE[0]}
    health = node.health(32003)
    assert health[0] == 200
    assert health[1]["localEndpoints"] == 1
    node.fails(HERE[0], REFUSING)
    # Of two clients: the endpoint may have failed before the node's first probe of it, and then one
    # client is not believed.
    node.eject(HERE[0], lambda: [node.tried(*way) for way in (outside, inside)])
    node.until(lambda: [node.tried(*way) for way in (inside, outside)] == ["timeout"] * 2)
    # A pod of this node uses a node port as a cluster IP of policy Cluster.
    assert {node.reached(CLIENT, NODE, 30003) for _ in range(5)} == {HERE[1]}
    assert node.health(32003) == health


@pytest.mark.slow(seconds=60)
def test_local_traffic_goes_to_an_endpoint_that_terminates(node: Node) -> None:
    way = (OUTSIDE[0], NODE, 30004)
    assert {node.reached(*way) for _ in range(5)} == {LEAVING[0]}
    health = node.health(32004)
    assert health[1]["localEndpoints"] == 1
    node.fails(LEAVING[0], REFUSING)
    node.eject(LEAVING[0], lambda: [node.tried(each, *way[1:]) for each in OUTSIDE[:2]])
    node.until(lambda: node.tried(*way) == LEAVING[1])
    assert {node.reached(*way) for _ in range(5)} == {LEAVING[1]}
    assert node.health(32004) == health


@pytest.mark.slow(seconds=60)
def test_an_endpoint_whose_udp_port_is_closed_is_ejected(node: Node) -> None:
    ways = [(CLIENT, "10.96.0.5", 80, "UDP"), (OUTSIDE[0], NODE, 30005, "UDP")]
    node.until(lambda: {node.tried(*way) for way in ways * 4} == set(NAMES))
    node.lab.servers.silence(NAMES[0])
    node.eject(NAMES[0], lambda: [node.tried(*way) for way in ways])
    # So many that it is not chance, as the log has the ejection before the kernel.
    node.until(lambda: {node.tried(*way) for way in ways * 10} == {NAMES[1]})
