"""A cluster for faults: a node with a bridge and three pods, a pod elsewhere, a client outside.

    outside ---- eth0 node eth1 ---- remote ---- pod 10.244.1.7
                       |
             cni0 (bridge): pod0 10.244.0.5, pod1 10.244.0.6, pod3 10.244.0.9

Neighbours on the bridge are resolved by ARP, as in a real cluster. The Service shop/web has three
endpoints; pod3 is only a client.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.support.builders import kube
from tests.support.lab.cluster import GATEWAY4
from tests.support.lab.faulty_node import (
    CLIENT,
    ENDS,
    NODE,
    NODE_PORT,
    OUTSIDE,
    VIP,
    FaultyNode,
    Object,
    endpoint,
)
from tests.support.lab.sockets import Outcome, printed

LOCAL = (*ENDS[:2], CLIENT)
"""Addresses of the pods on the bridge."""
BRIDGE_MAC = "02:00:00:00:00:03"
LARGE = 4000
"""Bytes that a client sends after the server has answered; they need several packets."""


class Way(NamedTuple):
    """A connection that works if nothing is wrong."""

    source: str
    """Who connects; "" for the node."""
    address: str
    port: int
    protocol: str = "TCP"
    masqueraded: bool = False
    """Whether the server sees an address of the node."""
    large: bool = False
    """Send large packets, too."""


FROM_POD = Way(CLIENT, VIP, 80)
FROM_NODE = Way("", VIP, 80)
FROM_OUTSIDE = Way(OUTSIDE, NODE, NODE_PORT, masqueraded=True)
UDP_FROM_POD = Way(CLIENT, VIP, 81, "UDP")
LARGE_FROM_POD = FROM_POD._replace(large=True)
WAYS = (FROM_POD, FROM_NODE, FROM_OUTSIDE, UDP_FROM_POD, LARGE_FROM_POD)


def world() -> list[Object]:
    """The Service in good health: three endpoints, a cluster IP, TCP with a node port, and UDP."""
    ports = [
        {"name": "http", "port": 80, "protocol": "TCP", "nodePort": NODE_PORT},
        {"name": "log", "port": 81, "protocol": "UDP", "nodePort": NODE_PORT + 1},
    ]
    slice_ports = [
        {"name": "http", "port": 8080, "protocol": "TCP"},
        {"name": "log", "port": 8081, "protocol": "UDP"},
    ]
    return [
        kube.service("web", VIP, ports=ports, type="NodePort", selector={"app": "web"}),
        kube.endpoint_slice("web-1", "web", *map(endpoint, ENDS), ports=slice_ports),
        kube.node("node-a", NODE, zone="a"),
    ]


class Cluster(FaultyNode):
    """The lab, and steersman in it; a context manager."""

    def __init__(self, folder: Path, mode: str, *flags: str) -> None:
        super().__init__(folder, mode, *flags, bridge="cni0", healthy=world)

    def __enter__(self) -> Self:
        super().__enter__()
        for address in LOCAL:
            self.inside(NODE, "ip", "neigh", "del", address, "dev", "cni0")
        return self

    def serve(self) -> None:
        """Start the servers of all endpoints."""
        super().serve()
        for address in ENDS:
            self.lab.serve(address, 8081, "UDP")

    def wrong(self, way: Way, tries: int = 8, seconds: float = 1.0) -> str:
        """Connect some times; describe the first bad one, "" if all work."""
        for _ in range(tries):
            if said := self._judge(way, self._connect(way, seconds)):
                return said
        return ""

    def _connect(self, way: Way, seconds: float) -> Outcome:
        if way.large:
            return self._connect_large(way, seconds)
        return self.lab.probe(way.source, way.address, way.port, way.protocol, timeout=seconds)

    def _connect_large(self, way: Way, seconds: float) -> Outcome:
        """See that the server hangs up when it has got large packets."""
        with self.lab.socket(way.source, way.protocol) as sock:
            try:
                sock.settimeout(seconds)
                if way.source:
                    sock.bind((way.source, 0))
                sock.connect((way.address, way.port))
                name, _, seen = sock.recv(200).decode().partition(" ")
                sock.send(b"x" * LARGE)
                with contextlib.suppress(ConnectionError):
                    sock.recv(1)
            except TimeoutError:
                return Outcome("large packets are lost")
            except OSError as error:
                return Outcome(str(error))
        return Outcome("answered", name, seen)

    def _judge(self, way: Way, found: Outcome) -> str:
        port = 8080 if way.protocol == "TCP" else 8081
        if found.kind != "answered":
            return found.kind
        if found.endpoint not in {printed(address, port) for address in ENDS}:
            return f"{found.endpoint} answered"
        expected = self.lab.node_addresses if way.masqueraded else {way.source}
        if way.source and found.source not in expected:
            return f"{found.endpoint} saw {found.source}"
        return ""

    @contextlib.contextmanager
    def run(self, where: str, plant: str, undo: str) -> Iterator[None]:
        """Run commands in the namespace of an address; afterwards others, which may fail."""
        try:
            self.inside(where, "sh", "-ec", plant)
            yield
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):
                self.inside(where, "sh", "-c", undo)

    def clear(self) -> None:
        """Forget what connections and faults have left."""
        self.inside(NODE, "conntrack", "-F")
        self.inside(NODE, "ip", "neigh", "flush", "dev", "cni0")
        for address in LOCAL:  # a device that was down has lost its permanent neighbours
            words = f"neigh replace {GATEWAY4} lladdr {BRIDGE_MAC} dev eth0 nud permanent"
            self.inside(address, "ip", *words.split())


def replace_endpoints(slice_: Object, *endpoints: Any) -> None:
    """Give an EndpointSlice other endpoints."""
    slice_["endpoints"] = list(endpoints)
