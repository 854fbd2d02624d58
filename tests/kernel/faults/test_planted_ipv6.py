"""Planted faults of IPv6 are named first: the tables of faults are about IPv4."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.builders import kube
from tests.support.lab.faulty_node import Addresses, FaultyNode, Object
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.kernel, pytest.mark.slow(seconds=150)]

AT = Addresses(
    "2001:db8::1", "2001:db8:9::9", ("fd00:10::5", "fd00:10::6", "fd00:11::7"), "fd00:10::9"
)
VIP, NOBODY = "fd00:96::10", "fd00:10::99"
DROPPED, TAKEN = "filter hook forward priority 0", "nat hook prerouting priority -110"
FAULTS = {
    "a firewall drops forwarded packets": (
        f"nft 'add table ip6 other; add chain ip6 other c {{ type {DROPPED}; }};"
        " add rule ip6 other c tcp dport 8080 drop'",
        "nft delete table ip6 other",
        "table ip6 other",
    ),
    "a foreign nat chain before ours takes the cluster IP": (
        f"nft 'add table ip6 other; add chain ip6 other c {{ type {TAKEN}; }};"
        f" add rule ip6 other c ip6 daddr {VIP} dnat to {NOBODY}'",
        "nft delete table ip6 other",
        "table ip6 other",
    ),
    "the node does not forward": (
        "echo 0 >/proc/sys/net/ipv6/conf/all/forwarding",
        "echo 1 >/proc/sys/net/ipv6/conf/all/forwarding",
        "does not forward IPv6 packets",
    ),
    "the route to one pod leads nowhere": (
        f"ip -6 route add unreachable {AT.ends[0]}/128 metric 1",
        f"ip -6 route del unreachable {AT.ends[0]}/128 metric 1",
        f"no route .*{AT.ends[0]}",
    ),
    "the device of a pod is down": (
        "ip link set pod0 down",
        f"ip link set pod0 up; ip -6 route add {AT.ends[0]}/128 dev pod0;"
        f" ip neigh replace {AT.ends[0]} lladdr 02:00:00:01:00:10 dev pod0 nud permanent",
        "pod0|" + AT.ends[0],
    ),
}


def endpoint(address: str) -> Object:
    return {"addresses": [address], "nodeName": "node-b" if address == AT.ends[2] else "node-a"}


def world() -> list[Object]:
    """A Service of IPv6 with three endpoints."""
    ports = [{"name": "http", "port": 80, "protocol": "TCP"}]
    families: Object = {"ipFamilies": ["IPv6"], "clusterIPs": [VIP], "selector": {"app": "web"}}
    slice_ports = [{"name": "http", "port": 8080, "protocol": "TCP"}]
    ends = map(endpoint, AT.ends)
    return [
        kube.service("web", VIP, ports=ports, **families),
        kube.endpoint_slice("web-1", "web", *ends, family="IPv6", ports=slice_ports),
        kube.node("node-a", AT.node, zone="a"),
    ]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyNode]:
    folder = tmp_path_factory.mktemp("ipv6")
    flags = ("--cluster-cidr=fd00:10::/31",)
    with FaultyNode(folder, "nftables", *flags, healthy=world, addresses=AT) as running:
        found = running.doctor("shop/web")
        assert (found.status, found.cause) == (0, ""), found
        yield running


def fails(node: FaultyNode, seconds: float) -> bool:
    """Whether a connection of a pod to the Service fails, whichever endpoint it meets."""
    tries = (node.lab.probe(AT.client, VIP, 80, timeout=seconds) for _ in range(20))
    return any(each.kind != "answered" for each in tries)


@pytest.mark.parametrize("name", FAULTS)
def test_it_is_named_first(node: FaultyNode, name: str) -> None:
    plant, undo, cause = FAULTS[name]
    node.inside(AT.node, "sh", "-ec", plant)
    try:
        assert fails(node, 1.0), "the fault breaks nothing"
        found = node.doctor("shop/web")
    finally:
        node.inside(AT.node, "sh", "-c", undo)
    assert found.status == 1
    assert re.search(cause, found.cause), found
    wait_until(lambda: not fails(node, 5.0))
