"""UDP clients that never pause, while type, ports and endpoints of their Service change.

The order is that of upstream's end-to-end test "should be able to change the type and ports of a
UDP service". Its clients make a new socket for each question; here others keep theirs, so that
their entries in conntrack never end by themselves.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.builders import kube
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.udp_flows import Flows, Way

pytestmark = pytest.mark.kernel

NODE, NODE6, OUTSIDE, OUTSIDE6 = "192.0.2.1", "2001:db8::1", "203.0.113.9", "2001:db8:9::9"
CLIENT, CLIENT6 = "10.244.7.7", "fd00:10:244::7"
ENDS, ENDS6 = ("10.244.0.1", "10.244.0.2"), ("fd00:10:244::1", "fd00:10:244::2")
VIP, VIP6, LB, LB6 = "10.96.0.10", "fd00:10:96::10", "198.51.100.1", "2001:db8:51::1"
WAIT = 60.0


class Cluster:
    """A node with a process of ours, and a Service whose form changes."""

    def __init__(self, lab: Lab, folder: Path, mode: str) -> None:
        self.lab, self.folder = lab, folder
        self.log = folder / "log"
        (folder / "objects").mkdir()
        self.apply([], [])
        command = [
            *(sys.executable, "-m", "steersman", "run", f"--manifests={folder}/objects"),
            *(f"--proxy-mode={mode}", "--hostname-override=here", "--conntrack-max-per-core=0"),
            "--cluster-cidr=10.244.0.0/16,fd00:10:244::/64",
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(lab.exec_argv(command), stdout=log, stderr=log)

    def apply(self, ends: Sequence[str], ends6: Sequence[str], **service: Any) -> None:
        """Replace the objects by others."""
        port = {"protocol": "UDP", "targetPort": 5300, **service.pop("port", {"port": 53})}
        both: dict[str, Any] = {"clusterIPs": [VIP, VIP6], "ipFamilies": ["IPv4", "IPv6"]}
        listens: list[dict[str, Any]] = [{"name": "", "port": 5300, "protocol": "UDP"}]
        objects = [
            kube.service("dns", VIP, ports=[port], **both, **service),
            kube.endpoint_slice("dns-4", "dns", *ends, ports=listens),
            kube.endpoint_slice("dns-6", "dns", *ends6, ports=listens, family="IPv6"),
        ]
        new = self.folder / "new"
        new.write_text(yaml.safe_dump_all(objects))
        new.replace(self.folder / "objects" / "dns.yaml")

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT
        while not true():
            entries = self.lab.run("conntrack", "-L") if time.monotonic() > end else ""
            assert not entries, (self.log.read_text(), entries)
            time.sleep(0.02)


@pytest.fixture
def lab() -> Iterator[Lab]:
    pods = tuple(map(Pod, (*ENDS, *ENDS6, CLIENT, CLIENT6)))
    interfaces = {"eth0": (f"{NODE}/24", f"{NODE6}/64")}
    with Lab(Layout(interfaces, (OUTSIDE, OUTSIDE6), pods)) as made:
        for end in (*ENDS, *ENDS6):
            made.serve(end, 5300, "UDP", end)
        yield made


def cluster_ips(port: int) -> list[Way]:
    return [Way(CLIENT, VIP, port), Way(CLIENT6, VIP6, port)]


def balancers(port: int) -> list[Way]:
    return [Way(OUTSIDE, LB, port), Way(OUTSIDE6, LB6, port)]


def node_ports(port: int) -> list[Way]:
    ways = [Way(source, NODE, port) for source in (OUTSIDE, CLIENT)]
    return ways + [Way(source, NODE6, port) for source in (OUTSIDE6, CLIENT6)]


INGRESS = {"ingress": [{"ip": LB}, {"ip": LB6}], "type": "LoadBalancer"}
FIRST, OLD, NEW = {"port": 53}, {"port": 53, "nodePort": 30053}, {"port": 53, "nodePort": 30054}
LATER = {"port": 54, "nodePort": 30054}
STEPS: list[tuple[dict[str, Any], list[Way]]] = [
    ({"port": FIRST}, cluster_ips(53)),
    ({"port": OLD, "type": "NodePort"}, cluster_ips(53) + node_ports(30053)),
    ({"port": OLD, **INGRESS}, cluster_ips(53) + node_ports(30053) + balancers(53)),
    ({"port": NEW, **INGRESS}, cluster_ips(53) + node_ports(30054) + balancers(53)),
    ({"port": LATER, **INGRESS}, cluster_ips(54) + node_ports(30054) + balancers(54)),
    # The type comes first; the controller takes the load balancer away later.
    ({"port": FIRST, "ingress": INGRESS["ingress"]}, cluster_ips(53) + balancers(53)),
    ({"port": FIRST}, cluster_ips(53)),
]


def _are_right(flows: Flows, want: dict[Way, str]) -> bool:
    since = time.monotonic()
    time.sleep(0.2)
    return all(flows.answer(way, since) == who for way, who in want.items())


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_clients_follow_every_change_of_type_and_ports(lab: Lab, tmp_path: Path, mode: str) -> None:
    cluster = Cluster(lab, tmp_path, mode)
    flows = Flows(lambda source: lab.socket(source, "UDP"))
    everywhere = sorted({way for _, ways in STEPS for way in ways})
    try:
        for number, (service, served) in enumerate(STEPS):
            end, end6 = ENDS[number % 2], ENDS6[number % 2]
            cluster.apply([end], [end6], **service)
            flows.add(everywhere)  # those that are not served yet ask, too

            want = {way: (end6 if ":" in way.source else end) for way in served}
            cluster.until(partial(_are_right, flows, {**dict.fromkeys(everywhere, ""), **want}))
            for way in everywhere:  # clients with a new socket
                asked = lab.probe(*way, "UDP", timeout=5.0 if way in served else 0.2)
                assert asked.endpoint == want.get(way, ""), (number, way)
            # Without endpoints new clients are refused; the others keep theirs (behaviour 12).
            cluster.apply([], [], **service)
            for way in served:
                cluster.until(lambda way=way: lab.probe(*way, "UDP").kind == "refused")  # type: ignore[misc]
    finally:
        flows.close()
        cluster.process.kill()
        cluster.process.wait()
