"""Doctor tries every way with real packets: no false alarm, few packets, nothing left behind."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.builders import kube
from tests.support.lab.faulty_node import (
    CLIENT,
    ENDS,
    NODE,
    NODE_PORT,
    VIP,
    Diagnosed,
    FaultyNode,
    Object,
    endpoint,
)
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.kernel, pytest.mark.slow(seconds=90)]

BALANCER, EXTERNAL = "198.51.100.1", "198.51.100.2"
MOST = 200


def world() -> list[Object]:
    """A Service with every kind of frontend, for TCP and UDP."""
    ports = [
        {"name": "http", "port": 80, "protocol": "TCP", "nodePort": NODE_PORT},
        {"name": "log", "port": 81, "protocol": "UDP"},
    ]
    slice_ports = [
        {"name": "http", "port": 8080, "protocol": "TCP"},
        {"name": "log", "port": 8081, "protocol": "UDP"},
    ]
    selector = {"app": "web"}
    service = kube.service(
        *("web", VIP), ports=ports, selector=selector, type="LoadBalancer", externalIPs=[EXTERNAL]
    )
    service["status"] = {"loadBalancer": {"ingress": [{"ip": BALANCER}]}}
    ends = map(endpoint, ENDS)
    return [
        service,
        kube.endpoint_slice("web-1", "web", *ends, ports=slice_ports),
        kube.node("node-a", NODE, zone="a"),
    ]


@pytest.fixture(scope="module", params=["nftables", "iptables"])
def node(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultyNode]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    flags = ("--cluster-cidr=10.244.0.0/16",)
    with FaultyNode(folder, request.param, *flags, healthy=world) as running:
        for address in ENDS:
            running.lab.serve(address, 8081, "UDP")
        yield running


def tried(found: Diagnosed, verdict: str) -> list[Object]:
    return [r for r in found.results if (r["check"], r["verdict"]) == ("tries", verdict)]


def devices(node: FaultyNode) -> set[str]:
    return node.lab.node.call(lambda: {name for _, name in socket.if_nameindex()})


def test_every_kind_of_frontend_is_tried_and_works(node: FaultyNode) -> None:
    before = devices(node)
    found = node.doctor("shop/web")
    assert found.status == 0, found
    (good,) = tried(found, "ok")
    ways = "\n".join(good["evidence"])
    for target in (
        f"{VIP}:80",
        f"{BALANCER}:80",
        f"{EXTERNAL}:80",
        str(NODE_PORT),
        f"{VIP}:81/UDP",
    ):
        assert target in ways
    for place in ("this node", f"the pod {CLIENT}", f"the pod {ENDS[0]}", "a client outside"):
        assert place in ways
    assert devices(node) == before


def test_a_source_range_is_no_false_alarm(node: FaultyNode) -> None:
    def restrict(objects: list[Object]) -> None:
        objects[0]["spec"]["loadBalancerSourceRanges"] = ["203.0.113.0/24"]

    with node.objects(restrict):
        found = node.doctor("shop/web")
    assert found.status == 0, found
    (good,) = tried(found, "ok")
    assert not any(line.startswith(f"{BALANCER}:80") for line in good["evidence"])


def test_few_packets_reach_an_endpoint(node: FaultyNode) -> None:
    """The kernel counts the packets that open connections; a health check opens one a second."""
    table = """table inet count {
        counter opened { }
        chain c { type filter hook input priority -500;
            tcp flags & (syn | ack) == syn counter name opened
            udp dport 8081 counter name opened
        }
    }"""
    for address in ENDS:
        node.inside(address, "nft", "-f", "-", stdin=table)
    try:
        assert node.doctor("shop/web").status == 0
        total = 0
        for address in ENDS:
            words = ["nsenter", f"--net={node.lab.netns(address).path}", "nft", "-j"]
            listed = subprocess.check_output([*words, "list", "counters"], text=True)
            (count,) = re.findall(r'"packets": (\d+)', listed)
            assert int(count) > 0
            total += int(count)
        assert total <= MOST
    finally:
        for address in ENDS:
            node.inside(address, "nft", "delete", "table", "inet", "count")


def test_nothing_is_dialled_if_that_is_asked_for(node: FaultyNode) -> None:
    found = node.doctor("shop/web", "--no-dial")
    assert not tried(found, "ok")
    (skipped,) = tried(found, "skipped")
    assert skipped["untried"] == ["connections (--no-dial)"]


def test_a_connection_that_fails_is_found(node: FaultyNode) -> None:
    rule = f"chain c {{ type filter hook forward priority 0; ip daddr {ENDS[0]} drop; }}"
    with node.rules(NODE, rule):
        found = node.doctor("shop/web")
    assert found.status == 1
    texts = [result["text"] for result in tried(found, "error")]
    assert any("does not work from the pod" in text for text in texts), texts


def test_policy_local_that_hides_clients_is_an_error(node: FaultyNode) -> None:
    """Connections work, but the endpoints do not see the address that the policy is for."""

    def local(objects: list[Object]) -> None:
        objects[0]["spec"]["externalTrafficPolicy"] = "Local"

    hiding = "chain c { type nat hook postrouting priority 90; ip daddr 10.244.0.0/16 masquerade; }"
    with node.objects(local):
        found = node.doctor("shop/web")
        assert found.status == 0, found
        with node.rules(NODE, hiding):
            found = node.doctor("shop/web")
    assert found.status == 1
    assert re.search("gives packets of .*clients outside another source: table inet", found.cause)
    assert any("from a client outside" in each["text"] for each in tried(found, "error"))


def test_a_killed_doctor_leaves_nothing(node: FaultyNode) -> None:
    before = devices(node)
    argv = node.exec_argv([sys.executable, "-m", "steersman", "doctor", "shop/web", "-o", "json"])
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: devices(node) != before or process.poll() is not None)
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: devices(node) == before)
    left = json.loads(node.lab.run("nft", "-j", "list", "tables"))
    assert "trace" not in json.dumps(left)
