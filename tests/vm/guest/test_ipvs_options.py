"""What may be set about the ipvs mode, as the kernel has it; what else there is on its node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from msgspec.structs import replace

from steersman.host.netlink import NETLINK_GENERIC, Netlink
from steersman.host.nlmsg import Request, attributes
from steersman.model.plan import Scheduling, ServicePlan
from steersman.modes.ipvs.wire import Command, resolve
from steersman.modes.specs import IpvsOptions
from tests.support.builders.plans import cluster_ip, endpoints, key, node_port, plan
from tests.support.lab.ipvs_node import BOTH, ONE, OTHER, VIP, Node, node, of, table
from tests.support.lab.sockets import Netns
from tests.support.modes.ipvs import call
from tests.vm.guest.ipvs import only_with_all

__all__ = ["node"]
OWN = "10.250.1.2"
"""The address of the node in tests.support.builders.plans."""
_ESTABLISHED = ("-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT")


@contextmanager
def inside(node: Node) -> Iterator[Netns]:
    netns = Netns(f"/run/netns/{node.name}")
    try:
        yield netns
    finally:
        netns.close()


def weighed(*weights: int) -> ServicePlan:
    chosen = zip(BOTH, weights, strict=True)
    return replace(
        of(*BOTH),
        scheduling=Scheduling(weights=tuple((ip, 8080, weight) for ip, weight in chosen)),
    )


def test_weights(node: Node) -> None:
    node.again(IpvsOptions(scheduler="wrr"))
    node.bring(weighed(7, 1))
    assert (node.servers()[VIP].targets, node.servers()[VIP].weights) == ((ONE, OTHER), (7, 1))
    node.bring(weighed(2, 3))
    assert node.servers()[VIP].weights == (2, 3)
    assert "Masq    2" in table(node)
    node.bring(of(*BOTH))
    assert table(node).count("Masq    1") == 2


@only_with_all
@pytest.mark.parametrize(
    ("scheduler", "words", "flags"), [("mh", ("none",), 8), ("sh", ("sh-port", "sh-fallback"), 24)]
)
def test_flags(node: Node, scheduler: str, words: tuple[str, ...], flags: int) -> None:
    node.again(IpvsOptions(scheduler=scheduler, scheduler_flags=words))
    node.bring(of(ONE[0]))
    assert node.servers()[VIP].flags == flags


def test_timeouts_and_switches(node: Node) -> None:
    node.again(IpvsOptions(tcp_timeout=100, tcp_fin_timeout=20, udp_timeout=30, strict_arp=True))
    node.bring(of(ONE[0]))
    with inside(node) as netns, netns.call(lambda: Netlink(NETLINK_GENERIC)) as netlink:
        family = resolve(netlink)
        (reply,) = netlink.request(Request(family, bytes((Command.GET_CONFIG, 1, 0, 0))))
        idle = attributes(reply.payload, 4)
        assert [idle[kind][0] for kind in (4, 5, 6)] == [100, 20, 30], "TCP, FIN, UDP"
    names = ("conntrack", "expire_nodest_conn", "expire_quiescent_template")
    paths = [f"net/ipv4/vs/{name}" for name in names]
    paths += ["net/ipv4/conf/all/arp_ignore", "net/ipv4/conf/all/arp_announce"]
    values = node.sh("cat", *(f"/proc/sys/{path}" for path in (*paths, "net/ipv4/ip_forward")))
    assert values.split() == ["1", "1", "1", "1", "2", "1"]


def test_a_look_for_drift(node: Node) -> None:
    node.bring(of(*BOTH))

    def token() -> object:
        return call(node.mode, node.mode.fingerprint)

    first = token()
    assert first is not None
    assert token() == first
    seen = {first}
    for command in (
        "ipset add KUBE-IPVS-PORTS 10.96.0.9,6:80",
        "iptables -t nat -A KUBE-IPVS-SERVICES -j RETURN",
        "ip addr add 10.96.0.9/32 dev kube-ipvs0",
    ):
        node.sh(*command.split())
        seen.add(token())
    node.apply(of(*BOTH), plan(key("ns/b:p"), cluster_ip("10.96.0.2")))
    seen.add(token())
    assert len(seen) == 5
    node.apply(of(ONE[0]))
    assert token() is None  # something is drained, and to be deleted by `read`
    assert node.servers()[VIP].targets == (ONE,)
    assert token() is not None


@contextmanager
def listening(node: Node, address: str, *ports: int) -> Iterator[Netns]:
    """Listeners on the node, which take what comes."""
    with inside(node) as netns, ExitStack() as sockets:
        for port in ports:
            sock = sockets.enter_context(netns.socket(address, "TCP"))
            sock.bind((address, port))
            sock.listen()
        yield netns


def outcome(netns: Netns, address: str, port: int) -> str:
    sock = netns.socket(address, "TCP")
    with sock:
        sock.settimeout(2.0)
        try:
            sock.connect((address, port))
        except OSError as error:
            return type(error).__name__
    return "connected"


def test_health_checks_are_let_in(node: Node) -> None:
    node.bring(replace(of(ONE[0]), health_check_node_port=32000))
    node.sh("iptables", "-P", "INPUT", "DROP")
    node.sh("iptables", "-A", "INPUT", *_ESTABLISHED)
    with listening(node, "0.0.0.0", 32000, 32001) as netns:
        assert outcome(netns, "127.0.0.1", 32000) == "connected"
        assert outcome(netns, "127.0.0.1", 32001) == "TimeoutError"
        assert outcome(netns, VIP.address, 32000) == "connected"
        assert outcome(netns, VIP.address, 32001) == "ConnectionRefusedError"
    node.bring(of(ONE[0]))
    assert "32000" not in node.sh("ipset", "save")


def test_an_address_of_the_node_that_the_interface_holds(node: Node) -> None:
    node.sh("ip", "link", "add", "eth0", "up", "type", "dummy")
    node.sh("ip", "addr", "add", f"{OWN}/24", "dev", "eth0")
    port = plan(key("ns/n:p"), node_port(30080), cluster=endpoints(*BOTH))
    node.bring(of(ONE[0]))
    node.sh("ip", "addr", "add", f"{OWN}/32", "dev", "kube-ipvs0")  # as other programs did
    with listening(node, "0.0.0.0", 7777) as netns:
        node.bring(of(ONE[0]), port)
        assert outcome(netns, OWN, 7777) == "connected"
        node.sh("ip", "addr", "add", f"{OWN}/32", "dev", "kube-ipvs0")
        node.sh("ipset", "add", "KUBE-IPVS-ADDRESSES", OWN)
        assert outcome(netns, OWN, 7777) == "ConnectionRefusedError"
        assert node.bring(of(ONE[0]), port) > 0
        assert outcome(netns, OWN, 7777) == "connected"
    assert "0AFA0102:7580" in table(node)
    assert OWN not in node.sh("ip", "addr", "show", "kube-ipvs0")
