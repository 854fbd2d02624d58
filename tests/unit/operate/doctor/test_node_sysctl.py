"""Doctor's checks of the kernel's network settings, on a fake /proc/sys and fake interfaces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steersman.compile.trace import Flow
from steersman.host.link_state import Link
from steersman.model.names import Family
from steersman.model.plan import Traits
from steersman.modes.base import Requirements
from steersman.netfilter.firewall.read import BRIDGE_SETTING
from steersman.operate.doctor import node_sysctl
from steersman.operate.doctor.check import Check
from steersman.operate.doctor.context import Question
from steersman.operate.doctor.result import CheckResult, Verdict
from steersman.operate.trace_loss import Hop
from tests.support.builders.doctor import CART, FakeNetwork, context_of, named, only
from tests.support.builders.objects import IPTABLES, endpoint, port, service, slice_
from tests.support.modes.memory import MemoryMode

FORWARDING, REVERSE, LOOPBACK, PORTS, BRIDGES, HAIRPIN = named(
    "forwarding", "rp-filter", "route-localnet", "ephemeral-ports", "bridge-netfilter", "hairpin"
)
THINGS = service(), slice_(endpoint("10.0.0.5"))
POD = Hop(device="pod1")
CONF = "proc/sys/net/ipv4/conf"
GOOD = {
    "proc/sys/net/ipv4/ip_forward": "1\n",
    "proc/sys/net/ipv6/conf/all/forwarding": "1\n",
    f"{CONF}/all/rp_filter": "0",
    f"{CONF}/all/route_localnet": "1",
    f"{CONF}/lo/forwarding": "0",
    f"{CONF}/lo/rp_filter": "0",
    f"{CONF}/pod1/forwarding": "1",
    f"{CONF}/pod1/rp_filter": "0",
    f"{CONF}/eth0/forwarding": "1",
    f"{CONF}/eth0/rp_filter": "0",
}


def ask(
    check: Check,
    root: Path,
    *things: Any,
    way: Hop = POD,
    links: tuple[Link, ...] = (Link("pod1", driver="veth"),),
    files: dict[str, str] | None = None,
    **more: Any,
) -> CheckResult:
    network = FakeNetwork(*links, ways={"10.0.0.5": way, "198.51.100.9": Hop(device="eth1")})
    found = {name: text for name, text in (GOOD | (files or {})).items() if text}
    return only(
        check, context_of(*(things or THINGS), root=root, files=found, network=network, **more)
    )


def test_packets_must_be_forwarded(tmp_path: Path) -> None:
    assert ask(FORWARDING, tmp_path).verdict is Verdict.OK
    off = {"proc/sys/net/ipv4/ip_forward": "0"}
    result = ask(FORWARDING, tmp_path, files=off)
    assert result.verdict is Verdict.ERROR
    assert "/proc/sys/net/ipv4/ip_forward is 0" in result.text
    assert result.remedy.startswith("`sysctl -w net.ipv4.ip_forward=1`")
    # An endpoint in the node's own network needs no forwarding.
    assert ask(FORWARDING, tmp_path, files=off, way=Hop(device="lo", local=True)).verdict is (
        Verdict.WARNING
    )


def test_an_interface_may_forward_nothing(tmp_path: Path) -> None:
    result = ask(FORWARDING, tmp_path, files={f"{CONF}/pod1/forwarding": "0"})
    assert (result.verdict, result.evidence) == (
        Verdict.ERROR,
        (f"/{CONF}/pod1/forwarding is 0",),
    )
    other = ask(FORWARDING, tmp_path / "b", files={f"{CONF}/eth0/forwarding": "0"})
    assert other.verdict is Verdict.WARNING


def test_an_interface_that_goes_meanwhile_is_left_out(tmp_path: Path) -> None:
    (tmp_path / CONF / "gone").mkdir(parents=True)
    assert ask(FORWARDING, tmp_path).verdict is Verdict.OK
    assert ask(REVERSE, tmp_path).verdict is Verdict.OK


def netstat(*dropped: int) -> str:
    return f"TcpExt: SyncookiesSent IPReversePathFilter\nTcpExt: 3 {dropped[0]}\n"


def test_the_reverse_path_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_sysctl, "_COUNTED", 0.0)
    strict = {f"{CONF}/all/rp_filter": "1", "proc/net/netstat": netstat(0)}
    assert ask(REVERSE, tmp_path).text == "no interface filters strictly by the reverse path"
    quiet = ask(REVERSE, tmp_path, files=strict)
    assert quiet.text == "rp_filter is strict on eth0, pod1, and dropped nothing so far"
    dropped = ask(REVERSE, tmp_path, files=strict | {"proc/net/netstat": netstat(7)})
    assert dropped.verdict is Verdict.OK
    assert "dropped 7 packets since the start" in dropped.text
    counts = iter((7, 9, 9))
    monkeypatch.setattr(node_sysctl, "_dropped", lambda _: next(counts))
    now = ask(REVERSE, tmp_path, files=strict)
    assert now.verdict is Verdict.WARNING
    assert now.text.startswith("the reverse path filter dropped 2 packets")


def test_the_reverse_path_of_a_connection(tmp_path: Path) -> None:
    flow = Flow("198.51.100.9", "10.96.0.10", 80, interface="eth0")
    files = {f"{CONF}/eth0/rp_filter": "1", "proc/net/netstat": ""}
    question = Question(CART, flow=flow)
    result = ask(REVERSE, tmp_path, files=files, question=question)
    assert result.verdict is Verdict.ERROR
    assert "the way back is by eth1" in result.text


NODE_PORT = service(type="NodePort", ports=[port(nodePort=30080)]), THINGS[1]


def test_node_ports_on_loopback(tmp_path: Path) -> None:
    of_rules: dict[str, Any] = {"traits": IPTABLES}
    off = {f"{CONF}/all/route_localnet": "0"}
    assert ask(LOOPBACK, tmp_path).verdict is Verdict.SKIPPED
    assert ask(LOOPBACK, tmp_path, *NODE_PORT, world=of_rules).verdict is Verdict.OK
    bad = ask(LOOPBACK, tmp_path, *NODE_PORT, world=of_rules, files=off)
    assert bad.verdict is Verdict.WARNING
    question = Question(CART, flow=Flow("127.0.0.1", "127.0.0.1", 30080))
    asked = ask(LOOPBACK, tmp_path, *NODE_PORT, world=of_rules, files=off, question=question)
    assert asked.verdict is Verdict.ERROR
    relay: dict[str, Any] = {"traits": Traits(localhost_node_ports=True, relays_localhost=True)}
    assert ask(LOOPBACK, tmp_path, *NODE_PORT, world=relay, files=off).verdict is Verdict.OK


class OnBridges(MemoryMode):
    def requirements(self) -> Requirements:
        return Requirements(bridge_netfilter=True)


BRIDGE = Link("cni0", driver="bridge")
PORT = Link("veth1", driver="veth", master="cni0", hairpin=True)


def test_netfilter_must_see_packets_on_bridges(tmp_path: Path) -> None:
    behind: dict[str, Any] = {
        "way": Hop(device="cni0"),
        "links": (BRIDGE, PORT),
        "mode": OnBridges(),
    }
    assert (
        ask(BRIDGES, tmp_path, way=Hop(device="cni0"), links=(BRIDGE,)).verdict is Verdict.SKIPPED
    )
    assert ask(BRIDGES, tmp_path, mode=OnBridges()).verdict is Verdict.SKIPPED
    missing = ask(BRIDGES, tmp_path, **behind)
    assert missing.verdict is Verdict.WARNING
    assert missing.text.endswith("the module br_netfilter is not loaded")
    setting = BRIDGE_SETTING[Family.IPV4]
    assert "modprobe br_netfilter" in missing.remedy
    assert ask(BRIDGES, tmp_path, files={setting: "0"}, **behind).text.endswith("is 0")
    assert ask(BRIDGES, tmp_path, files={setting: "1"}, **behind).verdict is Verdict.OK


def test_ports_of_bridges_need_hairpin_mode(tmp_path: Path) -> None:
    way = Hop(device="cni0")
    off = Link("veth2", driver="veth", master="cni0", hairpin=False)
    other = Link("veth3", driver="veth", master="docker0", hairpin=False)
    assert ask(HAIRPIN, tmp_path).verdict is Verdict.SKIPPED
    assert ask(HAIRPIN, tmp_path, way=way, links=(BRIDGE, PORT, other)).verdict is Verdict.OK
    wrong = ask(HAIRPIN, tmp_path, way=way, links=(BRIDGE, PORT, off, other))
    assert (wrong.verdict, wrong.evidence) == (Verdict.WARNING, ("veth2: hairpin off",))
    promiscuous = Link("cni0", driver="bridge", promiscuous=True)
    assert ask(HAIRPIN, tmp_path, way=way, links=(promiscuous, off)).verdict is Verdict.OK


def test_without_proc_sys_nothing_is_said() -> None:
    assert only(FORWARDING, context_of(*THINGS)).verdict is Verdict.SKIPPED


@pytest.mark.parametrize(
    ("span", "reserved", "verdict"),
    [
        ("32768\t60999", "", Verdict.OK),
        ("1024\t65535", "", Verdict.NOTICE),
        ("1024\t65535", "8080,30000-32767", Verdict.OK),
        ("1024\t65535", "30000-30079,30081", Verdict.NOTICE),
        ("30080\t30080", "", Verdict.NOTICE),
    ],
)
def test_node_ports_may_be_ephemeral_ports(
    tmp_path: Path, span: str, reserved: str, verdict: Verdict
) -> None:
    files = {
        "proc/sys/net/ipv4/ip_local_port_range": span + "\n",
        "proc/sys/net/ipv4/ip_local_reserved_ports": reserved + "\n",
    }
    result = ask(PORTS, tmp_path, *NODE_PORT, files=files)
    assert result.verdict is verdict
    assert ("30080" in result.text) is (verdict is Verdict.NOTICE)


def test_a_service_without_node_port_has_no_ephemeral_one(tmp_path: Path) -> None:
    assert ask(PORTS, tmp_path).verdict is Verdict.SKIPPED
