"""Places to send packets from: pods are found, and a client outside leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from steersman.host.netns import call_inside, linked_namespaces
from steersman.model.names import Family
from steersman.operate.places import client_outside, find_pods, uplink
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.waiting import wait_until

pytestmark = pytest.mark.kernel

NODE, NODE6, POD, OTHER = "192.0.2.1", "2001:db8::1", "10.244.0.5", "10.244.0.6"
_CLIENT = """
import asyncio
from steersman.operate.places import client_outside

async def main():
    async with client_outside() as place:
        print(place.device, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    pods = (Pod(POD), Pod(OTHER), Pod("10.244.1.7", local=False))
    with Lab(Layout({"eth0": (f"{NODE}/24", f"{NODE6}/64")}, pods=pods)) as lab:
        yield lab


def here() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def test_the_pods_of_the_node_are_found(lab: Lab) -> None:
    found = lab.node.call(find_pods)
    pods = [place for place in found.found if place.device.startswith("pod")]
    assert [place.addresses[Family.IPV4] for place in pods] == [POD, OTHER]
    for place in pods:
        assert place.netns is not None
        expected = os.stat(lab.netns(place.addresses[Family.IPV4]).path).st_ino
        assert place.netns.stat().st_ino == expected
        assert place.has(Family.IPV4)
        assert not place.has(Family.IPV6)


def test_namespaces_that_cannot_be_seen_are_counted(lab: Lab) -> None:
    every, unseen = lab.node.call(linked_namespaces)
    assert unseen == 0
    assert lab.node.call(lambda: linked_namespaces(())) == ({}, len(every))


def test_a_client_outside_reaches_the_node_and_goes(lab: Lab) -> None:
    for address in (NODE, NODE6):
        lab.serve(address, 8080, "TCP")
    before = lab.node.call(here)

    async def connect() -> None:
        async with client_outside() as place:
            assert here() - before == {place.device}
            for node in (NODE, NODE6):
                source = place.addresses[Family.IPV6 if ":" in node else Family.IPV4]

                def dial(node: str = node, source: str = source) -> str:
                    address = (source, 0)
                    with socket.create_connection((node, 8080), 60, source_address=address) as sock:
                        return str(sock.getsockname()[0])

                assert call_inside(place.netns, dial) == source

    lab.node.call(lambda: asyncio.run(connect()))
    assert lab.node.call(here) == before


def test_packets_of_a_client_outside_come_in_by_the_uplink(lab: Lab) -> None:
    """A rule about that device counts, and answers reach the client."""
    lab.serve(NODE, 8090, "TCP")
    rule = 'type filter hook input priority 0\niifname "eth0" counter'

    async def connect() -> None:
        assert uplink(["198.51.100.9"]) == ""
        async with client_outside(uplink([NODE])) as place:
            assert place.device == "eth0"
            source = (place.addresses[Family.IPV4], 0)

            def dial() -> None:
                socket.create_connection((NODE, 8090), 60, source_address=source).close()

            call_inside(place.netns, dial)

    before = lab.node.call(here)
    lab.run("nft", "-f", "-", stdin=f"table inet other {{ chain c {{ {rule}\n}}\n}}\n")
    try:
        lab.node.call(lambda: asyncio.run(connect()))
        assert "packets 0" not in lab.run("nft", "list", "table", "inet", "other")
    finally:
        lab.run("nft", "delete table inet other")
    assert lab.node.call(here) == before


def test_a_strict_uplink_is_left_alone(lab: Lab) -> None:
    async def device() -> str:
        async with client_outside("eth0") as place:
            return place.device

    lab.sysctl("ipv4/conf/eth0/rp_filter", "1")
    try:
        assert lab.node.call(lambda: asyncio.run(device())) != "eth0"
    finally:
        lab.sysctl("ipv4/conf/eth0/rp_filter", "0")


def test_the_kernel_removes_the_client_of_a_killed_process(lab: Lab) -> None:
    before = lab.node.call(here)
    argv = lab.exec_argv([sys.executable, "-c", _CLIENT])
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        device = process.stdout.readline().strip()
        assert lab.node.call(here) - before == {device}
        process.kill()
    wait_until(lambda: lab.node.call(here) == before)
    left = json.loads(lab.run("ip", "-j", "route"))
    assert not [route for route in left if route["dev"] == device]
