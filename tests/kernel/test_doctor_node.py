"""What doctor says of the kernel, compared with what the kernel does to real packets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from steersman.compile.conntrack import served_ports, stale
from steersman.host.echo import answers_echo
from steersman.host.link_state import list_links
from steersman.model.names import Family, Protocol
from steersman.netfilter.conntrack.stale import find_stale
from steersman.netfilter.firewall.packet_filter import Packet, met
from steersman.netfilter.firewall.read import Firewall, read_firewall, rule_text
from steersman.netfilter.nft.tables import list_tables
from steersman.operate.trace_lookups import look_up
from tests.support.builders.objects import endpoint, plan_of, port, service, slice_, snapshot
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.conntrack_flows import FlowEntry, add_entries
from tests.support.lab.inside import Inside
from tests.support.lab.namespace import in_namespace, sh
from tests.support.modes.flows import DROP_TIMEOUT

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

POD, OUTSIDE = "10.244.1.5", "203.0.113.9"
LAYOUT = Layout({"eth0": ("192.168.0.2/24",)}, (OUTSIDE,), (Pod(POD),))
NEW = Packet(
    Family.IPV4,
    Protocol.TCP,
    POD,
    8080,
    source=OUTSIDE,
    came_in="eth0",
    goes_out="pod0",
    mark=0,
    translated=False,
)
ANSWER = Packet(
    Family.IPV4,
    Protocol.TCP,
    OUTSIDE,
    0,
    source=POD,
    came_in="pod0",
    goes_out="eth0",
    mark=0,
    translated=False,
    answer=True,
)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(LAYOUT) as running:
        running.serve(POD, 8080, "TCP", "it")
        yield running


def read(lab: Lab, root: Path) -> Firewall:
    # /proc/net is that of the reader's namespace, not of the lab's.
    names = root / "proc/net/ip_tables_names"
    names.parent.mkdir(parents=True, exist_ok=True)
    names.write_text(lab.run("cat", "/proc/net/ip_tables_names"))
    execute = Inside(lab.node.path)
    look = read_firewall(
        execute, (Family.IPV4,), frozenset(), root, lambda: lab.node.call(list_tables)
    )
    return asyncio.run(look)


def agrees(lab: Lab, root: Path, rules: str) -> None:
    """What the rules are said to do is what the kernel does; a text says which rules."""
    firewall = read(lab, root)
    assert firewall.notes == ()
    said = met(firewall.tables, "forward", NEW) + met(firewall.tables, "forward", ANSWER)
    patience = DROP_TIMEOUT if said else 60.0  # a machine under load answers late
    found = lab.probe(OUTSIDE, POD, 8080, timeout=patience, at_once=True).kind
    if not said:
        assert found == "answered", rules
    elif any(drop.certain for drop in said):
        assert found != "answered", rules
        text = asyncio.run(rule_text(Inside(lab.node.path), said[0]))
        assert "drop" in text.lower() or "reject" in text.lower(), rules


IPTABLES = (
    "-j DROP",
    "-s 203.0.113.0/24 -j REJECT",
    "! -s 203.0.113.0/24 -j DROP",
    "-i eth0 -o pod+ -p tcp -m tcp --dport 8000:8100 -j DROP",
    "-i eth1 -j DROP",
    "-p udp -j DROP",
    "-p tcp -m multiport --dports 80,8080 -j DROP",
    "-p tcp -m multiport ! --dports 80,8080 -j DROP",
    "-m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT; -m conntrack --ctstate NEW -j DROP",
    "-m conntrack --ctstate INVALID -j DROP",
    "-m mark --mark 0x4000/0x4000 -j DROP",
    "-m mark ! --mark 0x4000/0x4000 -j DROP",
    "-p tcp -j ACCEPT; -j DROP",
    "-m addrtype --dst-type LOCAL -j DROP",
    "-m limit --limit 1/hour --limit-burst 1 -j RETURN; -j DROP",
    "-j LOG; -m conntrack ! --ctstate DNAT -j DROP",
)


@pytest.mark.parametrize("tool", ["iptables-nft", "iptables-legacy"])
def test_what_iptables_does(lab: Lab, tool: str, tmp_path: Path) -> None:
    for rules in IPTABLES:
        try:
            for rule in rules.split("; "):
                lab.run(tool, "-A", "FORWARD", *rule.split())
            agrees(lab, tmp_path, f"{tool} {rules}")
        finally:
            lab.run(tool, "-F", "FORWARD")
    lab.run(tool, "-P", "FORWARD", "DROP")
    try:
        agrees(lab, tmp_path, f"{tool} -P DROP")
    finally:
        lab.run(tool, "-P", "FORWARD", "ACCEPT")


NFT = (
    "drop",
    "ip saddr 203.0.113.0/24 reject",
    "ip saddr != 203.0.113.0/24 drop",
    "ip daddr { 10.244.1.4, 10.244.1.5 } tcp dport { 80, 8000-8100 } counter drop",
    'iifname "eth0" oifname "pod*" drop',
    'iifname { "eth1", "eth2" } drop',
    "udp dport != 53 drop",
    "tcp dport != 53 drop",
    "meta l4proto { tcp, udp } drop",
    "ip protocol udp drop",
    "ip6 daddr ::/0 drop",
    "ct state { established, related } accept; ct state new drop",
    "ct state invalid drop",
    "ct state vmap { new : drop, established : accept }",
    "tcp dport vmap { 80 : drop, 8080 : jump other }",
    "ct status dnat drop",
    "meta mark & 0x4000 == 0x4000 drop",
    "meta mark & 0x4000 != 0x4000 drop",
    "meta nfproto ipv6 drop",
    "tcp dport 8080 accept; drop",
    "jump other; drop",
    "goto other; drop",
    "limit rate 1/hour accept; drop",
    "fib daddr type local drop",
    "tcp flags syn / syn,ack drop",
    "log; counter; drop",
)


@pytest.mark.parametrize("policy", ["accept", "drop"])
def test_what_nft_does(lab: Lab, policy: str, tmp_path: Path) -> None:
    for rules in NFT:
        lines = "\n".join(rules.split("; "))
        table = (
            "table inet sm-firewall {\nchain other {\ntcp dport 8080 accept\n}\n"
            f"chain forward_1 {{\ntype filter hook forward priority 0; policy {policy};\n"
            f"{lines}\n}}\n}}\n"
        )
        lab.run("nft", "-f", "-", stdin=table)
        try:
            agrees(lab, tmp_path, f"nft {rules} (policy {policy})")
        finally:
            lab.run("nft", "delete", "table", "inet", "sm-firewall")


def test_links_and_ways() -> None:
    async def look() -> None:
        sh("ip link add br0 type bridge && ip link set br0 up && ip addr add 10.1.0.1/24 dev br0")
        sh("ip link add v0 type veth peer name v1 && ip link set v0 master br0 mtu 1400 up")
        sh("ip link set v0 type bridge_slave hairpin on && ip link set v1 up")
        sh("ip link add v2 type veth peer name v3 && ip link set v2 master br0 up")
        sh("ip link set v2 type bridge_slave learning off flood off")
        sh("ip link add x0 mtu 1350 type vxlan id 7 dstport 4789 dev br0")
        sh("ip route add 10.9.0.0/16 via 10.1.0.7 mtu 1300")
        sh("ip route add blackhole 10.8.0.0/16 && ip route add unreachable 10.7.0.0/16")
        links = list_links()
        assert (links["br0"].driver, links["br0"].up, links["br0"].hairpin) == (
            "bridge",
            True,
            None,
        )
        assert (links["v0"].master, links["v0"].mtu, links["v0"].hairpin) == ("br0", 1400, True)
        assert links["v2"].hairpin is False
        assert (links["v0"].learns, links["v0"].floods) == (True, True)
        assert (links["v2"].learns, links["v2"].floods) == (False, False)
        assert (links["v1"].master, links["v1"].hairpin) == ("", None)
        assert (links["x0"].driver, links["x0"].below, links["x0"].mtu) == ("vxlan", "br0", 1350)
        direct, far = look_up("10.1.0.9"), look_up("10.9.1.1")
        assert (direct.device, direct.gateway, direct.mtu) == ("br0", "", 0)
        assert (far.device, far.gateway, far.mtu) == ("br0", "10.1.0.7", 1300)
        assert look_up("10.1.0.1").local
        assert look_up("10.8.1.1").trouble == "a blackhole route"
        assert look_up("10.7.1.1").trouble == "No route to host"
        assert look_up("11.0.0.1").trouble == "Network is unreachable"
        assert look_up("::1").local

    in_namespace(look)


def test_large_packets_that_vanish(lab: Lab) -> None:
    async def both() -> tuple[bool, bool]:
        return await answers_echo(POD, 56), await answers_echo(POD, 1472, tries=1)

    assert lab.node.call(lambda: asyncio.run(both())) == (True, True)
    # The pod's end of the veth takes less than the node's end sends.
    lab.run("nsenter", f"--net={lab.netns(POD).path}", "ip", "link", "set", "eth0", "mtu", "1300")
    try:
        assert lab.node.call(lambda: asyncio.run(both())) == (True, False)
    finally:
        lab.run(
            "nsenter", f"--net={lab.netns(POD).path}", "ip", "link", "set", "eth0", "mtu", "1500"
        )


def test_stale_entries_are_found_and_left_alone() -> None:
    dns = service(ports=[port("dns", 53, protocol="UDP")])
    ends = slice_(endpoint("10.0.0.5"), ports=[port("dns", 5353, protocol="UDP")])
    plan, world = plan_of(dns, ends), snapshot(dns, ends)
    described = stale(
        Family.IPV4, tuple(served_ports(dns.metadata.object_name, plan, world, Family.IPV4))
    )

    async def look() -> None:
        sh("ip addr add 192.0.2.1/24 dev lo")
        flows = [
            FlowEntry(17, "192.0.2.1", 1000 + number, "10.96.0.10", 53, source, 5353)
            for number, source in enumerate(("10.0.0.5", "10.0.0.9"))
        ]
        add_entries(flows)
        for _ in range(2):  # looking deletes nothing
            found = find_stale(described)
            assert len(found) == 1
            assert found[0][1].startswith(bytes((10, 0, 0, 9)))

    in_namespace(look)


def test_json_of_the_tool_is_as_expected(lab: Lab) -> None:
    """`parse_ruleset` relies on numbers for states and protocols (-nn)."""
    lab.run("nft", "add", "table", "inet", "sm-json")
    try:
        lab.run("nft", "add", "chain", "inet", "sm-json", "c")
        lab.run("nft", "add", "rule", "inet", "sm-json", "c", "ct", "state", "new", "drop")
        listed = json.loads(lab.run("nft", "-j", "-nn", "list", "table", "inet", "sm-json"))
        (rule,) = [each["rule"] for each in listed["nftables"] if "rule" in each]
        assert rule["expr"][0]["match"]["right"] == 8
    finally:
        lab.run("nft", "delete", "table", "inet", "sm-json")
