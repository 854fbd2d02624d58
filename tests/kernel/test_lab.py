"""The lab itself: it tells apart what it must tell apart, and leaves nothing behind."""

from __future__ import annotations

import os
import select
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.lab.cluster import RUN, Lab, Layout, Pod, remove_leftovers
from tests.support.lab.sockets import see_at_once
from tests.support.modes.flows import FlowCase, by_packets, compare

pytestmark = pytest.mark.kernel

INTERFACES = {"eth0": ("192.168.0.2/24", "2001:db8::2/64")}
POD, FAR, POD6 = "10.244.1.5", "10.244.2.5", "fd00:10:244:1::5"
OUTSIDE, OUTSIDE6 = "203.0.113.9", "2001:db8:99::9"
LAYOUT = Layout(INTERFACES, (OUTSIDE, OUTSIDE6), (Pod(POD), Pod(FAR, local=False), Pod(POD6)))
PROTOCOLS = ("TCP", "UDP", "SCTP")


@pytest.fixture(scope="module")
def shared() -> Iterator[Lab]:
    with Lab(LAYOUT) as lab:
        yield lab


@pytest.fixture
def lab(shared: Lab) -> Iterator[Lab]:
    yield shared
    shared.run("iptables", "-F")
    shared.run("iptables", "-t", "nat", "-F")
    shared.silence()


def ours() -> set[str]:
    return {path.name for path in RUN.glob(f"sm-{os.getpid()}-*")}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("source", "target"),
    [(OUTSIDE, POD), (POD, FAR), (FAR, POD), ("192.168.0.2", FAR), (OUTSIDE6, POD6)],
)
def test_everyone_reaches_everyone(lab: Lab, source: str, target: str, protocol: str) -> None:
    lab.serve(target, 80, protocol, "it")
    outcome = lab.probe(source, target, 80, protocol)
    assert (outcome.kind, outcome.endpoint, outcome.source) == ("answered", "it", source)


@pytest.mark.parametrize("chain", ["FORWARD", "OUTPUT"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_rejected_packet_is_refused(lab: Lab, protocol: str, chain: str) -> None:
    lab.serve(FAR, 80, protocol)
    lab.run("iptables", "-A", chain, "-d", FAR, "-j", "REJECT")
    source = "192.168.0.2" if chain == "OUTPUT" else OUTSIDE
    assert lab.probe(source, FAR, 80, protocol).kind == "refused"


@pytest.mark.parametrize("chain", ["FORWARD", "OUTPUT"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_dropped_packet_times_out(lab: Lab, protocol: str, chain: str) -> None:
    lab.serve(FAR, 80, protocol)
    lab.run("iptables", "-A", chain, "-d", FAR, "-j", "DROP")
    source = "192.168.0.2" if chain == "OUTPUT" else OUTSIDE
    assert lab.probe(source, FAR, 80, protocol, timeout=0.4).kind == "timeout"


def test_where_nobody_listens_the_stack_refuses(lab: Lab) -> None:
    assert lab.probe(OUTSIDE, "192.168.0.2", 81).kind == "refused"


@pytest.mark.parametrize("address", ["198.51.100.1", "192.168.0.2", "2001:db8:100::1"])
def test_an_untouched_packet_is_seen_to_arrive(lab: Lab, address: str) -> None:
    source = OUTSIDE6 if ":" in address else OUTSIDE
    with lab.sentinel(address, 80, "TCP"):
        assert lab.probe(source, address, 80).endpoint == "untouched"
    assert lab.probe(source, address, 80, timeout=0.4).kind != "answered"


def flow(kind: str, *endpoints: str, masquerade: bool = False) -> FlowCase:
    named = frozenset(endpoints)
    return FlowCase("f", OUTSIDE, "198.51.100.1", 80, "TCP", kind, named, masquerade)


def dnat(lab: Lab, *options: str, to: str = POD) -> None:
    rule = ("-d", "198.51.100.1", "-p", "tcp", *options, "-j", "DNAT", "--to", f"{to}:80")
    lab.run("iptables", "-t", "nat", "-A", "PREROUTING", *rule)
    lab.serve(to, 80, "TCP")


def test_the_check_notices_what_is_wrong(lab: Lab) -> None:
    half = ("-m", "statistic", "--mode", "random", "--probability", "0.5")
    dnat(lab, *half)
    dnat(lab, to=FAR)
    both = flow("forward", f"{POD}:80", f"{FAR}:80")
    assert compare(both, by_packets(lab, both)) == ""
    for wrong in (
        flow("forward", f"{POD}:80"),  # one too many is seen
        flow("forward", f"{POD}:80", f"{FAR}:80", masquerade=True),
        flow("drop"),
        flow("reject"),
        flow("untouched"),
    ):
        assert compare(wrong, by_packets(lab, wrong)) != ""


def test_the_check_notices_that_an_endpoint_is_never_chosen(lab: Lab) -> None:
    dnat(lab)
    lab.serve(FAR, 80, "TCP")
    both = flow("forward", f"{POD}:80", f"{FAR}:80")
    assert compare(both, by_packets(lab, both)) != ""


def test_the_check_notices_masquerading(lab: Lab) -> None:
    dnat(lab)
    lab.run("iptables", "-t", "nat", "-A", "POSTROUTING", "-d", POD, "-j", "MASQUERADE")
    kept, hidden = flow("forward", f"{POD}:80"), flow("forward", f"{POD}:80", masquerade=True)
    assert compare(hidden, by_packets(lab, hidden)) == ""
    assert compare(kept, by_packets(lab, kept)) != ""


def test_the_check_notices_a_client_that_does_not_stick(lab: Lab) -> None:
    half = ("-m", "statistic", "--mode", "nth", "--every", "2", "--packet", "0")
    dnat(lab, *half)
    dnat(lab, to=FAR)
    names = frozenset({f"{POD}:80", f"{FAR}:80"})
    sticky = FlowCase("f", OUTSIDE, "198.51.100.1", 80, "TCP", "forward", names, sticky=True)
    assert compare(sticky, by_packets(lab, sticky)) != ""


def test_pods_on_a_bridge_come_in_by_the_bridge() -> None:
    with Lab(Layout(INTERFACES, (OUTSIDE,), (Pod(POD), Pod("10.244.1.6")), bridge="cbr0")) as lab:
        lab.serve("10.244.1.6", 80, "TCP")
        assert lab.probe(POD, "10.244.1.6", 80).source == POD
        lab.run("iptables", "-A", "FORWARD", "-i", "cbr0", "-j", "DROP")
        assert lab.probe(POD, "10.244.1.6", 80, timeout=0.4).kind == "timeout"


def test_nothing_is_left_after_a_failure() -> None:
    before = ours()

    def fail() -> None:
        with Lab(LAYOUT):
            assert len(ours()) == len(before) + 6
            raise RuntimeError("a test fails")

    with pytest.raises(RuntimeError):
        fail()
    assert ours() == before


def test_nothing_is_left_where_it_cannot_be_built() -> None:
    before = ours()
    with pytest.raises(RuntimeError, match="ip "), Lab(Layout({"eth0": ("no address",)})):
        pass
    assert ours() == before


def test_what_dead_processes_left_is_removed_and_nothing_else() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = [f"sm-{dead.pid}-1-node", f"sm-{os.getpid()}-x", f"sm-{dead.pid}x-y"]
    for name in names:
        # The first one may be removed while it is made: each Lab of another test looks for such.
        subprocess.run(["ip", "netns", "add", name], check=name is not names[0])
    try:
        remove_leftovers()
        assert [Path(RUN, name).exists() for name in names] == [False, True, True]
    finally:
        for name in names[1:]:
            subprocess.run(["ip", "netns", "del", name], check=True)


def test_what_tcp_had_to_send_again_is_told() -> None:
    with socket.socket() as server, socket.socket() as filler, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        filler.connect(server.getsockname())
        see_at_once(filler)
        client.setblocking(False)
        client.connect_ex(server.getsockname())  # there is no place for it
        server.accept()[0].close()
        assert select.select([], [client], [], 20)[1]
        with pytest.raises(TimeoutError, match="again: "):
            see_at_once(client)
