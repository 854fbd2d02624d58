"""UDP clients that never pause, while type, ports and endpoints of their Service change.

The order is that of upstream's end-to-end test "should be able to change the type and ports of a
UDP service". Its clients make a new socket for each question; here others keep theirs, so that
their entries in conntrack never end by themselves.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.lab.cluster import Lab
from tests.support.lab.udp_cluster import (
    CLIENT,
    CLIENT6,
    ENDS,
    ENDS6,
    LB,
    LB6,
    NODE,
    NODE6,
    OUTSIDE,
    OUTSIDE6,
    VIP,
    VIP6,
    UdpCluster,
)
from tests.support.lab.udp_flows import Flows, Way


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


def _is_refused(lab: Lab, way: Way) -> bool:
    return lab.probe(*way, "UDP").kind == "refused"


def follow_every_change(lab: Lab, folder: Path, mode: str) -> None:
    """Change type, ports and endpoints, and assert that all clients get the right answers.

    Args:
        lab: that of `udp_lab`.
        folder: empty, for files of the process.
        mode: of the process.
    """
    cluster = UdpCluster(lab, folder, mode)
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
                cluster.until(partial(_is_refused, lab, way))
    finally:
        flows.close()
        cluster.close()
