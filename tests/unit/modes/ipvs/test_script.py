"""Diffs as input of ipset, ip and ipvsadm."""

from __future__ import annotations

from typing import Any

from steersman.model.names import Protocol
from steersman.model.ruleset import Diff, diff
from steersman.modes.ipvs.mode import IpvsMode
from steersman.modes.ipvs.objects import DEVICE, DeviceKey, MemberKey, Server, ServerKey, SetKey
from steersman.modes.ipvs.scripts import scripts
from tests.support.modes.scripted import Scripted

WEB = ServerKey(Protocol.TCP, "10.96.0.1", 80)
DNS = ServerKey(Protocol.UDP, "fd00::53", 53)
PORT = ServerKey(Protocol.TCP, "192.0.2.1", 30080)
ONE, TWO = ("10.244.0.5", 8080), ("10.244.0.6", 8080)
SET = SetKey("KUBE-IPVS-ADDRESSES")
BASE: dict[Any, Any] = {DeviceKey(DEVICE): "dummy", SET: "hash:ip family inet"}


def lines(have: dict[Any, Any], want: dict[Any, Any]) -> dict[str, list[str]]:
    """The lines of each program; of the two runs of ipset together."""
    found: dict[str, list[str]] = {}
    for script in scripts(have, diff(have, want), "iptables"):
        found.setdefault(script.tool, []).extend(script.text.splitlines())
    return found


def servers(have: dict[Any, Any], want: dict[Any, Any]) -> list[str]:
    return lines(have, want)["ipvsadm"]


def test_everything_is_made_and_removed_in_order() -> None:
    want = {
        **BASE,
        MemberKey("KUBE-IPVS-PORTS", "10.96.0.1,6:80"): "",
        WEB: Server("rr", targets=(ONE, TWO), weights=(1, 3)),
        PORT: Server("sh", 0x10, assigned=False, targets=(ONE,)),
        DNS: Server("rr", 0x1, timeout=10800),
    }
    made = lines({}, want)
    assert [*made] == ["ipset", "ip", "ipvsadm"]
    assert made["ipset"][0].startswith("create KUBE-IPVS-ADDRESSES hash:ip family inet maxelem")
    assert "add KUBE-IPVS-ADDRESSES 10.96.0.1" in made["ipset"]
    assert made["ip"] == [
        "link add kube-ipvs0 type dummy",
        "address add 10.96.0.1/32 dev kube-ipvs0",
        "address add fd00::53/128 dev kube-ipvs0",
    ]
    assert made["ipvsadm"] == [
        "-A -t 10.96.0.1:80 -s rr",
        "-a -t 10.96.0.1:80 -r 10.244.0.5:8080 -m -w 1",
        "-a -t 10.96.0.1:80 -r 10.244.0.6:8080 -m -w 3",
        "-A -t 192.0.2.1:30080 -s sh -b flag-2",
        "-a -t 192.0.2.1:30080 -r 10.244.0.5:8080 -m -w 1",
        "-A -u [fd00::53]:53 -s rr -p 10800",
    ]
    gone = lines(want, {})
    assert [*gone] == ["ip", "ipvsadm", "ipset"]
    assert gone["ipvsadm"] == [
        "-D -t 10.96.0.1:80",
        "-D -t 192.0.2.1:30080",
        "-D -u [fd00::53]:53",
    ]
    assert gone["ip"] == ["link delete kube-ipvs0"]
    ports = "del KUBE-IPVS-PORTS 10.96.0.1,6:80"
    assert gone["ipset"] == [ports, "destroy KUBE-IPVS-ADDRESSES"]


def test_endpoints_of_tcp_drain_and_those_of_udp_go() -> None:
    old, new = Server("rr", targets=(ONE, TWO)), Server("rr", targets=(TWO,), weights=(5,))
    assert servers({**BASE, WEB: old}, {**BASE, WEB: new}) == [
        "-e -t 10.96.0.1:80 -r 10.244.0.6:8080 -m -w 5",
        "-e -t 10.96.0.1:80 -r 10.244.0.5:8080 -m -w 0",
    ]
    udp, less = Server("rr", targets=(ONE,)), Server("rr")
    assert servers({DNS: udp}, {DNS: less}) == ["-d -u [fd00::53]:53 -r 10.244.0.5:8080"]


def test_another_scheduler_changes_the_server() -> None:
    sctp = ServerKey(Protocol.SCTP, "10.96.0.9", 99)
    old, new = Server("rr", targets=(ONE,)), Server("mh", 0x8, targets=(ONE,))
    assert servers({sctp: old}, {sctp: new}) == ["-E --sctp-service 10.96.0.9:99 -s mh -b flag-1"]


def test_an_address_goes_with_its_last_server() -> None:
    other = ServerKey(Protocol.TCP, "10.96.0.1", 443)
    both = {**BASE, WEB: Server("rr"), other: Server("rr")}
    one = {**BASE, WEB: Server("rr")}
    assert [*lines(both, one)] == ["ipvsadm"]
    gone = lines(one, BASE)
    assert gone["ip"] == ["address delete 10.96.0.1/32 dev kube-ipvs0"]
    assert gone["ipset"] == ["del KUBE-IPVS-ADDRESSES 10.96.0.1"]


def test_orphans_go_and_sets_without_lines_are_no_script() -> None:
    orphan = MemberKey("KUBE-IPVS-ADDRESSES", "10.96.0.7")
    have = {**BASE, orphan: ""}
    assert lines(have, BASE)["ip"] == ["address delete 10.96.0.7/32 dev kube-ipvs0"]
    mode = IpvsMode(Scripted())
    tools = [each.tool for each in mode.words.scripts(have, diff(have, BASE))]
    assert tools == ["ip", "ipset"]
    rules = Diff(added={(4, "nat", "KUBE-IPVS-SERVICES", ""): "-A KUBE-IPVS-SERVICES -j RETURN"})
    (script,) = mode.words.scripts({}, rules)
    assert script.argv == ("iptables-restore", "--noflush")
    assert "-A KUBE-IPVS-SERVICES -j RETURN" in script.text
