"""Where a packet leaves the way that the plan predicts: a fault each, named with its object."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from steersman.host.exec import SubprocessExec
from steersman.host.libbpf import call
from steersman.model.names import Protocol
from steersman.modes.ebpf.bpf import TCX_EGRESS, TCX_INGRESS, Link
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.result import CheckResult, Verdict
from steersman.operate.doctor.where import where_lost
from steersman.operate.trace_question import TraceQuestion
from tests.support.builders import nftables_plans as make
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.ebpf import compiled
from tests.support.lab.switches import CLIENT, ENDS, NODE, OUTSIDE, mode_of
from tests.support.lab.traced import (
    FRONTENDS,
    PATIENCE,
    VIP,
    Traced,
    inside,
    service_lab,
    serving,
)

pytestmark = [pytest.mark.kernel, pytest.mark.slow(seconds=60)]
END = ENDS[0]
SERVICE = make.port([0], frontends=FRONTENDS)
OTHER = ENDS[1]


@pytest.fixture(autouse=True, scope="module")
def programs_are_compiled() -> None:
    compiled()


@pytest.fixture
def lab() -> Iterator[Lab]:
    with service_lab() as lab:
        yield lab


def lost(
    node: Traced,
    source: str = CLIENT,
    to: tuple[str, int] = (VIP, 80),
    timeout: float = 0.7,
    protocol: Protocol = Protocol.TCP,
) -> CheckResult | None:
    """Follow a packet to the Service."""
    context = Context(node.world, execute=SubprocessExec(), mode=node.mode)
    netns = Path(node.lab.netns(source).path) if source else None
    question = TraceQuestion(*to, protocol, source, netns, timeout=timeout)
    found = inside(node.lab, where_lost(context, question))
    print(found)
    return found


def within(lab: Lab, address: str, *argv: str, stdin: str = "") -> None:
    """Run a command in the namespace of an address."""
    argv = ("nsenter", f"--net={lab.netns(address).path}", *argv)
    done = subprocess.run(argv, input=stdin, text=True, capture_output=True, check=False)
    assert not done.returncode, done.stderr


def device_of(lab: Lab, address: str) -> str:
    """The node's interface to a pod."""
    words = lab.run("ip", "route", "get", address).split()
    return words[words.index("dev") + 1]


def chain(lab: Lab, hook: str, *rules: str, table: str = "ip other") -> None:
    """A chain of another program on the node."""
    lines = "\n".join(rules)
    lab.run(*("nft", "-f", "-"), stdin=f"table {table} {{ chain c {{ type {hook};\n{lines}\n}}\n}}")


def earlier_dnat(lab: Lab) -> None:
    rule = f"ip daddr {VIP} tcp dport 80 dnat to {OTHER}:8080"
    chain(lab, "nat hook prerouting priority -150", rule)


def host_port(lab: Lab) -> None:
    lab.run("iptables", "-t", "nat", "-N", "CNI-HOSTPORT-DNAT")
    rule = "-p tcp --dport 30080 -j DNAT --to-destination"
    lab.run(*f"iptables -t nat -A CNI-HOSTPORT-DNAT {rule} {OTHER}:8080".split())
    lab.run(*["iptables", "-t", "nat", "-I", "PREROUTING", "-j", "CNI-HOSTPORT-DNAT"])


def cleared_mark(lab: Lab) -> None:
    rule = "meta mark set meta mark & 0xffffbfff"
    chain(lab, "filter hook postrouting priority -200", rule)


def no_track(lab: Lab) -> None:
    chain(lab, "filter hook prerouting priority -300", f"ip daddr {VIP} notrack")


def early_accept(lab: Lab) -> None:
    lab.run(*f"iptables -t nat -I PREROUTING -d {VIP} -j ACCEPT".split())


def drop_all(lab: Lab, device: str, side: int) -> None:
    """Attach a program of tc that drops every packet; the device keeps it for its life."""
    code = b"\xb7\0\0\0\2\0\0\0\x95\0\0\0\0\0\0\0"  # r0 = TCX_DROP; exit
    program = call("bpf_prog_load", 3, b"sm_test", b"GPL", code, 2, None)  # of SCHED_CLS

    def attach() -> None:
        _links.append(Link.attach(program, socket.if_nametoindex(device), side))

    lab.node.call(attach)
    os.close(program)


_links: list[Link] = []
"""Programs stay attached as long as these are open."""


@pytest.fixture(autouse=True)
def detach() -> Iterator[None]:
    yield
    while _links:
        _links.pop().close()


def tc_drop(lab: Lab) -> None:
    drop_all(lab, device_of(lab, CLIENT), TCX_INGRESS)


def tc_drop_at_the_endpoint(lab: Lab) -> None:
    drop_all(lab, device_of(lab, END), TCX_EGRESS)


def blackhole_queue(lab: Lab) -> None:
    lab.run(*f"tc qdisc add dev {device_of(lab, END)} root blackhole".split())


def netdev_drop(lab: Lab) -> None:
    hook = f'filter hook ingress device "{device_of(lab, CLIENT)}" priority 0'
    chain(lab, hook, f"ip saddr {CLIENT} drop", table="netdev guard")


def netdev_drop_of_answers(lab: Lab) -> None:
    hook = f'filter hook ingress device "{device_of(lab, END)}" priority 0'
    chain(lab, hook, f"ip saddr {END} drop", table="netdev guard")


def drop_in_the_pod(lab: Lab) -> None:
    within(lab, END, "nft", "add table inet pod; add chain inet pod i { type filter hook input"
           " priority 0; }; add rule inet pod i tcp dport 8080 drop")  # fmt: skip


def blackhole_in_the_pod(lab: Lab) -> None:
    within(lab, END, "ip", "route", "add", "blackhole", f"{CLIENT}/32")


def no_route_in_the_pod(lab: Lab) -> None:
    within(lab, END, "ip", "route", "del", "default")


def no_route_in_the_client(lab: Lab) -> None:
    within(lab, CLIENT, "ip", "route", "del", "default")


def blackhole_on_the_node(lab: Lab) -> None:
    lab.run("ip", "route", "replace", "blackhole", f"{END}/32")


def strict_rp_filter(lab: Lab) -> None:
    device = device_of(lab, CLIENT)
    lab.run("ip", "route", "replace", f"{CLIENT}/32", "dev", "eth1")
    lab.sysctl(f"ipv4/conf/{device}/rp_filter", "1")


def failed_neighbour(lab: Lab) -> None:
    device = device_of(lab, END)
    lab.run("ip", "neigh", "del", END, "dev", device)
    within(lab, END, "ip", "link", "set", "eth0", "arp", "off")


def silent_gateway(lab: Lab) -> None:
    within(lab, CLIENT, "ip", "neigh", "del", "169.254.1.1", "dev", "eth0")
    lab.run("ip", "link", "set", device_of(lab, CLIENT), "arp", "off")


def policy_rule(lab: Lab) -> None:
    chain(lab, "filter hook prerouting priority -140", f"ip saddr {CLIENT} meta mark set 0x77")
    lab.run(*["ip", "route", "add", "unreachable", "default", "table", "777"])
    lab.run(*["ip", "rule", "add", "fwmark", "0x77", "lookup", "777", "priority", "100"])


def policy_rule_to_another_device(lab: Lab) -> None:
    lab.run(
        *[
            "ip",
            "route",
            "add",
            "default",
            "dev",
            "eth1",
            "via",
            "169.254.1.1",
            "onlink",
            "table",
            "778",
        ]
    )
    lab.run(*f"ip rule add from {CLIENT} lookup 778 priority 100".split())


def two_pods(lab: Lab) -> None:
    within(lab, OTHER, "ip", "addr", "add", f"{END}/32", "dev", "eth0")
    lab.run("ip", "route", "replace", f"{END}/32", "dev", device_of(lab, OTHER))
    mac = lab.run("ip", "neigh", "show", OTHER).split()
    lab.run(*f"ip neigh replace {END} lladdr {mac[mac.index('lladdr') + 1]}".split(),
            "dev", device_of(lab, OTHER), "nud", "permanent")  # fmt: skip
    lab.servers.silence(OTHER)


def other_source(lab: Lab) -> None:
    within(lab, END, "ip", "addr", "add", "10.244.0.99/32", "dev", "eth0")
    within(lab, END, "nft", "add table ip pod; add chain ip pod p { type filter hook output"
           " priority 0; }; add rule ip pod p ip saddr 10.244.0.0 ip saddr set 10.244.0.99"
           )  # fmt: skip


class Fault(NamedTuple):
    """Something on the way, and what names it."""

    do: Callable[[Lab], None]
    text: str
    """In the result."""
    shows: str
    """In the command that shows it."""
    to: tuple[str, int] = (VIP, 80)
    modes: tuple[str, ...] = ("nftables",)
    """Elsewhere than in the rules, one mode is like another; ebpf has a tracer of its own."""


RULES, TRACERS = ("iptables", "nftables"), ("nftables", "ebpf")
MODES = ("iptables", "nftables", "ebpf")
FAULTS = (
    Fault(
        earlier_dnat,
        f"the packet went to {OTHER}:8080 instead of to {END}:8080, by a rule of"
        " another program in chain c of table ip other",
        "nft -a list chain ip other c",
        modes=RULES,
    ),
    Fault(
        host_port,
        f"the packet went to {OTHER}:8080 instead of to {END}:8080, by a rule of a CNI"
        " plugin in chain CNI-HOSTPORT-DNAT",
        "-t nat -S CNI-HOSTPORT-DNAT",
        (NODE, 30080),
        RULES,
    ),
    Fault(
        cleared_mark,
        "as the packet's mark is changed by a rule of another program in chain c",
        "nft -a list chain ip other c",
        (NODE, 30080),
        RULES,
    ),
    Fault(
        no_track,
        "it is not tracked, by a rule of another program in chain c of table ip other",
        "nft -a list chain ip other c",
        modes=RULES,
    ),
    Fault(
        early_accept,
        "it does not reach the Service's rules, by a rule of another program in chain"
        " PREROUTING of table ip nat",
        "iptables -t nat -S PREROUTING",
        modes=("iptables",),
    ),
    Fault(
        tc_drop,
        "dropped by a filter or program of tc at the ingress of pod2 of this node",
        "tc filter show dev pod2 ingress",
        modes=TRACERS,
    ),
    Fault(
        tc_drop_at_the_endpoint,
        "by a filter or program of tc at the egress of pod0 of this",
        "tc filter show dev pod0 egress",
        modes=TRACERS,
    ),
    Fault(
        blackhole_queue,
        "dropped by the queueing discipline (qdisc) of pod0 of this node",
        "tc -s qdisc show dev pod0",
    ),
    Fault(
        netdev_drop,
        "dropped at pod2 of this node by a rule of another program in chain c of"
        " table netdev guard",
        "nft -a list ruleset",
    ),
    Fault(
        netdev_drop_of_answers,
        "the answer was dropped at pod0 of this node by a rule of another"
        " program in chain c of table netdev guard",
        "nft -a list ruleset",
        modes=TRACERS,
    ),
    Fault(
        drop_in_the_pod,
        f"dropped at eth0 of the namespace of {END} by a rule of another program"
        " in chain i of table inet pod",
        "nft -a list ruleset",
    ),
    Fault(
        blackhole_in_the_pod,
        f"the packet arrived at eth0 of the namespace of {END}, which has"
        f" no route back to {CLIENT}: a blackhole route",
        f"ip route get {CLIENT}",
    ),
    Fault(
        no_route_in_the_pod,
        f"has no route back to {CLIENT}: Network is unreachable",
        f"ip route get {CLIENT}",
        modes=TRACERS,
    ),
    Fault(
        no_route_in_the_client,
        "the client's namespace cannot send the packet: Network is",
        "ip route",
    ),
    Fault(
        blackhole_on_the_node,
        f"no route for the packet to {END}: a blackhole route",
        f"ip route get {END}",
        modes=TRACERS,
    ),
    Fault(
        strict_rp_filter,
        "by rp_filter (net.ipv4.conf.pod2.rp_filter=1): the way back to"
        f" {CLIENT} is eth1, not pod2",
        f"ip route get {CLIENT}",
    ),
    Fault(
        failed_neighbour,
        f"the next hop {END} on pod0 of this node does not answer ARP",
        f"ip neigh show {END}",
        modes=TRACERS,
    ),
    Fault(
        silent_gateway,
        "the next hop 169.254.1.1 on eth0 of the client's namespace does not answer ARP",
        "ip neigh show 169.254.1.1",
    ),
    Fault(policy_rule, "by the policy rule '100: from all fwmark 0x77 lookup 777'", "ip rule"),
    Fault(
        policy_rule_to_another_device,
        "left this node by eth1, and nothing came back; the policy"
        f" rule '100: from {CLIENT}/32 lookup 778' chose this way",
        "ip rule",
        modes=TRACERS,
    ),
    Fault(other_source, f"the endpoint {END}:8080 answers from 10.244.0.99:8080, by eth0", ""),
    Fault(two_pods, f"{END} is an address of 2 pods of this node", f"ip neigh show {END}"),
)


@pytest.mark.parametrize("name", MODES)
def test_a_packet_that_goes_as_predicted_is_not_lost(lab: Lab, name: str) -> None:
    assert lost(serving(lab, mode_of(lab, name, "nft"), SERVICE), timeout=20.0) is None


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(name, fault, id=f"{name}-{fault.do.__name__}")
        for fault in FAULTS
        for name in fault.modes
    ],
)
def test_a_fault_is_named_with_its_object(lab: Lab, name: str, fault: Fault) -> None:
    node = serving(lab, mode_of(lab, name, "nft"), SERVICE)
    fault.do(lab)
    source = OUTSIDE if fault.to[1] == 30080 else CLIENT
    found = lost(node, source, fault.to)
    assert found is not None
    assert found.verdict is Verdict.ERROR
    assert fault.text in found.text
    assert "steersman drift" not in found.text
    assert fault.shows in found.remedy


def test_a_neighbour_that_fails_while_the_packet_is_followed(lab: Lab) -> None:
    """The ICMP error that the node sends then is not the packet, which has not left."""
    node = serving(lab, mode_of(lab, "ebpf", "nft"), SERVICE)
    failed_neighbour(lab)
    found = lost(node, timeout=PATIENCE)
    assert found is not None
    assert f"the next hop {END} on pod0 of this node does not answer ARP" in found.text


def test_a_node_without_a_route_to_the_address_itself(lab: Lab) -> None:
    node = serving(lab, mode_of(lab, "nftables", "nft"), SERVICE)
    lab.run("ip", "route", "del", "default")
    found = lost(node, source="")
    assert found is not None
    assert found.text == "this node cannot send the packet: Network is unreachable"


@pytest.mark.parametrize("fault", [blackhole_in_the_pod, two_pods])
def test_a_packet_to_an_endpoint_itself(lab: Lab, fault: Callable[[Lab], None]) -> None:
    known = {each.do: each for each in FAULTS}[fault]
    node = serving(lab, mode_of(lab, "nftables", "nft"), SERVICE)
    fault(lab)
    found = lost(node, to=(END, 8080))
    assert found is not None
    assert known.text in found.text


@pytest.mark.parametrize("fault", [tc_drop_at_the_endpoint, blackhole_in_the_pod])
def test_a_datagram_is_followed(fault: Callable[[Lab], None]) -> None:
    known = {each.do: each for each in FAULTS}[fault]
    with service_lab() as lab:
        udp = make.port([0], of=make.key(protocol=Protocol.UDP), frontends=FRONTENDS)
        node = serving(lab, mode_of(lab, "nftables", "nft"), udp)
        assert lost(node, protocol=Protocol.UDP, timeout=20.0) is None
        fault(lab)
        found = lost(node, protocol=Protocol.UDP)
    assert found is not None
    assert known.text in found.text


def test_an_answer_that_bypasses_the_node_comes_untranslated() -> None:
    pods = (Pod(END), Pod(CLIENT))
    layout = Layout({"eth0": (f"{NODE}/24",)}, (OUTSIDE,), pods, bridge="cni0")
    with Lab(layout) as lab:
        lab.serve(END, 8080, "TCP")
        with suppress(FileNotFoundError):  # without br_netfilter it is so anyway
            lab.sysctl("bridge/bridge-nf-call-iptables", "0")
        node = serving(lab, mode_of(lab, "nftables", "nft"), SERVICE)
        words = lab.run("ip", "neigh", "show", CLIENT).split()
        mac = words[words.index("lladdr") + 1]
        within(lab, END, *f"ip neigh add {CLIENT} lladdr {mac} dev eth0 nud permanent".split())
        within(lab, END, *f"ip route add {CLIENT}/32 dev eth0".split())
        found = lost(node)
    assert found is not None
    assert found.text.startswith(
        f"the answer reached eth0 of the client's namespace from {END}:8080 instead of {VIP}:80"
    )
