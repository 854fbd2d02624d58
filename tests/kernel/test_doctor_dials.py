"""Doctor's dials tell apart what happens to packets; its lists name who connects and listens."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from steersman.host.listening import listening_sockets
from steersman.model.names import Family, Protocol
from steersman.netfilter.conntrack.flows import Tracked, tracked
from steersman.operate.doctor.processes import socket_owners
from steersman.operate.doctor.traffic_dial import Dial, Target, dial
from tests.support.lab.cluster import Lab, Layout, Pod

pytestmark = pytest.mark.kernel

NODE, POD, POD6, CLIENT = "192.0.2.1", "10.244.0.5", "fd00:10:244::5", "10.244.0.9"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    pods = (Pod(POD), Pod(POD6), Pod(CLIENT), Pod("fd00:10:244::9"))
    with Lab(Layout({"eth0": (f"{NODE}/24", "2001:db8::1/64")}, pods=pods)) as lab:
        for address in (POD, POD6):
            lab.serve(address, 8080, "TCP")
            lab.serve(address, 8080, "UDP")
        yield lab


@pytest.fixture
def firewall(lab: Lab) -> Iterator[None]:
    """Refuses and drops, on the node, packets forwarded to some ports."""
    lab.run(
        *("nft", "-f", "-"),
        stdin="""table inet other { chain forward {
        type filter hook forward priority 0
        meta l4proto { tcp, udp } th dport 81 reject with icmpx admin-prohibited
        meta l4proto { tcp, udp } th dport 82 reject with icmpx port-unreachable
        tcp dport 83 drop
        }
        }
        """,
    )
    yield
    lab.run("nft", "delete", "table", "inet", "other")


def dialled(lab: Lab, address: str, port: int, protocol: str = "TCP") -> Dial:
    source = CLIENT if ":" not in address else "fd00:10:244::9"
    path = Path(lab.netns(source).path)
    silent = port == 83 or protocol == "UDP"  # where no answer is the answer
    timeout = 1.5 if silent else 60.0
    return asyncio.run(dial(Target(address, port, Protocol(protocol)), path, timeout=timeout))


@pytest.mark.parametrize("address", [POD, POD6])
def test_outcomes_of_tcp(lab: Lab, address: str, firewall: None) -> None:
    node = NODE if address == POD else "2001:db8::1"
    found = {port: dialled(lab, address, port) for port in (8080, 80, 81, 82, 83)}
    assert {port: each.outcome for port, each in found.items()} == {
        8080: "connected",
        80: "refused",
        81: "unreachable",
        82: "refused",
        83: "timeout",
    }
    assert found[8080].good
    assert 0 < found[8080].seconds < 60
    assert not found[80].by
    assert str(found[80]) == "refused with a reset: no process listens there"
    assert found[81].by == node
    assert found[82].by == node
    assert str(found[82]) == f"refused by {node} (ICMP), as a REJECT rule does"
    assert "something drops the packets" in str(found[83])


@pytest.mark.parametrize("address", [POD, POD6])
def test_udp_only_knows_errors(lab: Lab, address: str, firewall: None) -> None:
    assert dialled(lab, address, 8080, "UDP").good
    found = dialled(lab, address, 80, "UDP")
    assert (found.outcome, found.by) == ("refused", address)
    assert dialled(lab, address, 82, "UDP").outcome == "refused"


def test_what_cannot_be_dialled_says_why(lab: Lab) -> None:
    sctp = dialled(lab, POD, 8080, "SCTP")
    assert (sctp.outcome, str(sctp)) == ("failed", "not tried: doctor does not speak SCTP")
    gone = asyncio.run(dial(Target(POD, 80), Path("/run/netns/sm-no-such")))
    assert gone.outcome == "failed"
    assert "no socket in /run/netns/sm-no-such: No such file" in str(gone)


def test_an_address_without_a_route_is_unreachable(lab: Lab) -> None:
    lab.run("ip", "route", "add", "unreachable", "198.18.0.1")
    found = asyncio.run(dial(Target("198.18.0.1", 80), Path(lab.node.path)))
    assert found.outcome == "unreachable"
    assert not found.by


def test_tracked_connections_say_who_connects(lab: Lab) -> None:
    lab.run(
        *("nft", "-f", "-"),
        stdin=f"""table ip other {{ chain pre {{
        type nat hook prerouting priority -100
        ip daddr 10.96.0.10 tcp dport 80 dnat to {POD}:8080
        }}
        }}
        """,
    )
    sock = lab.socket(CLIENT, "TCP")
    sock.settimeout(60)
    sock.bind((CLIENT, 0))
    sock.connect(("10.96.0.10", 80))
    sock.recv(100)
    everything = lab.node.call(lambda: tracked(Family.IPV4, [("10.96.0.10", 80), ("", 9)]))
    number = sock.getsockname()[1]
    sock.close()
    (entry,) = [each for each in everything if each.client_port == number]
    assert entry == Tracked(
        *(Protocol.TCP, CLIENT, number, "10.96.0.10", 80, POD, 8080),
        *(CLIENT, number, True, "ESTABLISHED", entry.seconds_left),
        assured=True,
    )
    assert entry.seconds_left > 60
    assert not lab.node.call(lambda: tracked(Family.IPV4, [("10.96.0.10", 81)]))
    assert not lab.node.call(lambda: tracked(Family.IPV6, [("10.96.0.10", 80)]))


def test_the_owner_of_a_listening_socket_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = {key: inode for key, inode in listening_sockets().items() if key.port == port}
        (inode,) = found.values()
        owner = socket_owners(frozenset((inode,)))[inode]
    assert owner.pid == os.getpid()
    words = Path("/proc/self/cmdline").read_text().split("\0")
    assert owner.command.startswith(words[0])
    assert socket_owners(frozenset()) == {}
