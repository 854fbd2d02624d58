"""Connections of the ipvs mode that fail: seen, begun again elsewhere, and the endpoint ejected."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from steersman.failover.watch import Failure, FailureWatch
from steersman.model.failover import Backend, Observation
from steersman.model.names import Family, Protocol
from steersman.model.plan import NodePlan, Scheduling, ServicePlan
from steersman.modes.base import release
from steersman.modes.ipvs.mode import IpvsMode
from tests.support.builders.kube import endpoint_slice, service
from tests.support.builders.plans import SETTINGS, cluster_ip, endpoints, key, node_port, plan
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.inside import Inside
from tests.support.lab.ipvs_node import bring
from tests.support.lab.switches import CLIENT, NODE, OUTSIDE
from tests.support.lab.traced import inside
from tests.support.modes.ipvs import call, mode_behind
from tests.support.processes.steersman import manifests, steersman
from tests.support.waiting import until

LONGEST = 120.0
"""Seconds; an emulated machine takes many."""
DEAD, OTHER = "10.244.0.1", "10.244.0.2"
DEAD6, CLIENT6 = "fd00:10:244::1", "fd00:10:244::77"
VIP, VIP6 = "10.96.0.1", "fd00:96::1"
BACKEND = Backend(DEAD, 8080, Protocol.TCP)


@dataclass
class Node:
    """A lab, and the mode that programs its node."""

    lab: Lab
    mode: IpvsMode

    def serve(self, *plans: ServicePlan) -> None:
        settings = replace(SETTINGS, ipv4=replace(SETTINGS.ipv4, local_addresses=(NODE,)))
        bring(NodePlan(settings, {each.key: each for each in plans}), self.mode)

    @contextmanager
    def fault(self, pod: str, action: str, protocol: str = "tcp") -> Iterator[None]:
        """A pod that treats connections to its port in some way, for a while."""
        rules = "table inet pod { chain input { type filter hook input priority 0; "
        rules += f"{protocol} dport 8080 {action}; }}; }}"
        enter = ["nsenter", f"--net={self.lab.netns(pod).path}", "nft"]
        subprocess.run([*enter, "-f", "-"], input=rules, text=True, check=True)
        try:
            yield
        finally:
            subprocess.run([*enter, "delete", "table", "inet", "pod"], check=True)

    @contextmanager
    def connecting(self, number: int, source: str = CLIENT, to: str = VIP) -> Iterator[Connections]:
        with ExitStack() as stack:
            sockets = [stack.enter_context(self.lab.socket(source, "TCP")) for _ in range(number)]
            for sock in sockets:
                sock.setblocking(False)
                sock.bind((source, 0))
                sock.connect_ex((to, 80))
            yield Connections(sockets)


@dataclass
class Connections:
    """Connections that were begun together."""

    sockets: list[socket.socket]

    def answers(self) -> list[str]:
        """Who answers each, in the end; or the name of an error."""
        return [answer(sock) for sock in self.sockets]

    def end(self) -> None:
        """Hang up; the servers do the same, if the connections are still theirs."""
        for sock in self.sockets:
            sock.settimeout(LONGEST)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(100) == b""


def answer(sock: socket.socket) -> str:
    sock.settimeout(LONGEST)
    try:
        return sock.recv(100).decode().split()[0]
    except OSError as error:
        return type(error).__name__


async def failures(watch: FailureWatch) -> list[Failure]:
    async with asyncio.timeout(LONGEST):
        while not (found := await watch.receive()):
            pass
    return found


def of(*addresses: str, **more: Any) -> ServicePlan:
    frontends = cluster_ip(VIP), node_port(30080)
    return plan(key("ns/a:p"), *frontends, cluster=endpoints(*addresses), **more)


def serve(lab: Lab) -> None:
    for address in (DEAD, OTHER, DEAD6):
        lab.serve(address, 8080, "TCP", address)
    lab.serve(DEAD, 8080, "UDP")


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    addresses = DEAD, OTHER, DEAD6, CLIENT, CLIENT6
    pods = tuple(Pod(address) for address in addresses)
    with Lab(Layout({"eth0": (f"{NODE}/24",)}, (OUTSIDE,), pods)) as lab:
        serve(lab)
        mode = mode_behind(Inside(lab.node.path))
        assert call(mode, mode.probe).usable
        yield Node(lab, mode)
        asyncio.run(release(mode))


SOURCES = ((CLIENT, VIP, 80), ("", VIP, 80), (OUTSIDE, NODE, 30080), (CLIENT6, VIP6, 80))
"""A pod, the node itself, somebody outside, and a pod with IPv6."""


def test_failing_connections_are_seen(node: Node) -> None:
    six = plan(key("ns/a:p", family=Family.IPV6), cluster_ip(VIP6), cluster=endpoints(DEAD6))
    node.serve(of(DEAD), six)
    both = {BACKEND, Backend(DEAD6, 8080, Protocol.TCP)}

    async def seen(action: str) -> set[Failure]:
        """The failures that are seen until every probe of all sources has ended."""
        watch, found = await node.mode.worker.do(node.mode.watch_failures), set[Failure]()

        async def follow() -> None:
            while True:
                found.update(await watch.receive())

        following = asyncio.create_task(follow())
        try:
            with node.fault(DEAD, action), node.fault(DEAD6, action):
                probes = (
                    asyncio.to_thread(node.lab.probe, *source, timeout=4.0) for source in SOURCES
                )
                assert "answered" not in {each.kind for each in await asyncio.gather(*probes)}

                async def complete() -> bool:
                    return {each.backend for each in found} == both

                await until(complete, LONGEST)
        finally:
            following.cancel()
            await watch.aclose()
        return found

    silent = inside(node.lab, seen("drop"))
    assert {each.observation for each in silent} == {Observation.SILENT}
    assert {each.client for each in silent} >= {CLIENT, OUTSIDE, CLIENT6}
    reset = inside(node.lab, seen("reject with tcp reset"))
    assert {each.observation for each in reset} == {Observation.REFUSED}
    unreachable = inside(node.lab, seen("reject with icmpx type host-unreachable"))
    assert Observation.UNREACHABLE in {each.observation for each in unreachable}
    assert Failure(BACKEND, Observation.UNREACHABLE, CLIENT) in unreachable


def test_an_endpoint_on_the_node_itself_is_seen(node: Node) -> None:
    """It gets its packets in the hook input, behind IPVS."""
    node.serve(of(NODE))

    async def body() -> list[Failure]:
        watch = await node.mode.worker.do(node.mode.watch_failures)
        try:
            with node.lab.node.socket(NODE, "TCP") as server:
                server.bind((NODE, 8080))
                server.listen(0)  # the queue of a process that hangs: full with one connection
                with node.connecting(4):
                    return await failures(watch)
        finally:
            await watch.aclose()

    silent = Failure(Backend(NODE, 8080, Protocol.TCP), Observation.SILENT, CLIENT)
    assert set(inside(node.lab, body())) == {silent}


def test_healthy_connections_are_not_seen_and_udp_if_it_is_refused(node: Node) -> None:
    udp = key("ns/a:u", Protocol.UDP)
    node.serve(of(DEAD, OTHER), plan(udp, cluster_ip(VIP, port=53), cluster=endpoints(DEAD)))

    async def body() -> list[Failure]:
        watch = await node.mode.worker.do(node.mode.watch_failures)
        try:
            with node.connecting(20) as connections:
                assert set(connections.answers()) == {DEAD, OTHER}
            assert node.lab.probe(CLIENT, VIP, 53, "UDP").kind == "answered"
            with node.fault(DEAD, "reject with icmpx type port-unreachable", "udp"):
                assert node.lab.probe(CLIENT, VIP, 53, "UDP").kind == "refused"
                return await failures(watch)
        finally:
            await watch.aclose()

    backend = Backend(DEAD, 8080, Protocol.UDP)
    assert inside(node.lab, body()) == [Failure(backend, Observation.REFUSED, CLIENT)]


def test_what_waits_begins_again_and_what_is_established_stays(node: Node) -> None:
    """With the scheduler that leaves an endpoint of weight 0 only if a flag tells it to."""
    hashed = Scheduling("sh", scheduler_flags=("sh-port",))
    node.serve(of(DEAD, OTHER, scheduling=hashed))

    def serve_again(plan: ServicePlan) -> None:
        mode = mode_behind(Inside(node.lab.node.path))  # of this thread's loop
        assert call(mode, mode.probe).usable
        Node(node.lab, mode).serve(plan)
        asyncio.run(release(mode))

    async def body() -> None:
        watch = await node.mode.worker.do(node.mode.watch_failures)
        try:
            with ExitStack() as stack:
                live = stack.enter_context(node.connecting(12))
                names = live.answers()
                assert set(names) == {DEAD, OTHER}
                await watch.cut([BACKEND])  # attempts of earlier tests, which last two minutes
                stack.enter_context(node.fault(DEAD, "ct state new drop"))
                waiting = stack.enter_context(node.connecting(12))
                await failures(watch)
                # Conntrack forgets them; for IPVS they still are that endpoint's.
                assert 0 < await watch.cut([BACKEND]) <= 12
                await asyncio.to_thread(serve_again, of(OTHER, scheduling=hashed))
                cut, began = await watch.cut([BACKEND]), time.monotonic()
                assert set(await asyncio.to_thread(waiting.answers)) == {OTHER}
                print(f"{cut} cut again, all answered {time.monotonic() - began:.1f} s later")
                live.end()
        finally:
            await watch.aclose()

    inside(node.lab, body())


def test_affinity_to_an_ejected_endpoint_ends(node: Node) -> None:
    node.serve(of(DEAD, OTHER, affinity=300))
    first = node.lab.probe(CLIENT, VIP, 80).endpoint
    assert {node.lab.probe(CLIENT, VIP, 80).endpoint for _ in range(4)} == {first}
    (other,) = {DEAD, OTHER} - {first}
    node.serve(of(other, affinity=300))
    assert {node.lab.probe(CLIENT, VIP, 80).endpoint for _ in range(4)} == {other}


def test_the_process_ejects_an_endpoint_until_it_answers(node: Node, tmp_path: Path) -> None:
    """With connections that wait meanwhile, and established ones."""
    slices = endpoint_slice("web-1", "web", DEAD, OTHER)
    folder = manifests(tmp_path / "objects", service("web", VIP), slices)
    flags = ("--proxy-mode=ipvs", f"--manifests={folder}", "--eject-failing-endpoints")
    lab = node.lab
    through = tuple(lab.exec_argv(()))

    async def reached(number: int) -> set[str]:
        # What one client finds silent is believed only of an endpoint that was probed before.
        with node.connecting(number) as near, node.connecting(number, NODE) as here:
            found = [await asyncio.to_thread(each.answers) for each in (near, here)]
            return set().union(*found)

    async def body() -> None:
        async with (
            asyncio.timeout(4 * LONGEST),
            steersman(tmp_path, *flags, through=through) as process,
        ):
            await process.said("sync 1 (start)", LONGEST)
            with node.connecting(4) as live:
                assert set(live.answers()) == {DEAD, OTHER}
                with node.fault(DEAD, "ct state new drop"):
                    assert await reached(10) == {OTHER}
                    ejected = f"endpoint {DEAD}:8080 of Service shop/web is ejected"
                    await process.said(ejected, LONGEST)
                    assert await reached(4) == {OTHER}
                    live.end()
                await process.said(f"endpoint {DEAD}:8080 of Service shop/web answers", LONGEST)

                async def both() -> bool:
                    return await reached(4) == {DEAD, OTHER}

                await until(both, LONGEST)
            lab.servers.silence(DEAD)
            assert await reached(4) == {OTHER, "ConnectionRefusedError"}
            await process.said("it has refused connections", LONGEST)

    try:
        node.serve()  # the process makes it all again
        asyncio.run(body())
    finally:
        serve(lab)
