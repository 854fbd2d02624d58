"""What the ipvs mode leaves in the kernel: draining, schedulers, others' servers, cleaning up."""

from __future__ import annotations

import shutil

import pytest

from steersman.host.netlink import NETLINK_GENERIC, Netlink
from steersman.model.names import Protocol
from steersman.model.ruleset import Diff, diff
from steersman.modes.ipvs.probe import check_scheduler
from steersman.modes.ipvs.wire import resolve
from steersman.modes.specs import IpvsOptions
from tests.support.lab.ipvs_node import BOTH, ONE, OTHER, VIP, Node, node, of, table
from tests.support.lab.sockets import Netns
from tests.support.modes.ipvs import call
from tests.vm.guest.ipvs import only_with_all

__all__ = ["node"]

SCHEDULERS = ("rr", "wrr", "lc", "wlc", "sh", "dh", "sed", "nq", "mh", "lblc", "lblcr", "fo", "ovf")

needs_ipvsadm = pytest.mark.skipif(
    shutil.which("ipvsadm") is None, reason="ipvsadm is not installed: apt-get install ipvsadm"
)


def test_a_removed_endpoint_drains_at_weight_zero(node: Node) -> None:
    node.bring(of(ONE[0], OTHER[0]))
    node.apply(of(ONE[0]))
    assert "0AF40002:1F90      Masq    0" in table(node)
    node.again()
    assert node.servers()[VIP].targets == (ONE,)  # and, without connections, it is gone
    assert "0AF40002" not in table(node)


def test_an_endpoint_that_returns_while_it_drains(node: Node) -> None:
    node.bring(of(ONE[0], OTHER[0]))
    node.apply(of(ONE[0]))
    call(node.mode, node.mode.apply, diff(node.rendered(of(ONE[0])), node.rendered(of(*BOTH))))
    assert node.servers()[VIP].targets == (ONE, OTHER)
    assert table(node).count("Masq    1") == 2


@only_with_all
def test_udp_is_removed_at_once(node: Node) -> None:
    node.bring(of(*BOTH, protocol=Protocol.UDP))
    node.apply(of(ONE[0], protocol=Protocol.UDP))
    assert "0AF40002" not in table(node)


def test_every_scheduler(node: Node) -> None:
    netns = Netns(f"/run/netns/{node.name}")
    with netns.call(lambda: Netlink(NETLINK_GENERIC)) as netlink:
        family = resolve(netlink)
        wrong = {s: check_scheduler(netlink, family, s) for s in SCHEDULERS}
    assert not any(wrong.values()), wrong
    netns.close()


@only_with_all
def test_the_flags_of_a_scheduler(node: Node) -> None:
    node.again(IpvsOptions(scheduler="mh"))
    node.bring(of(ONE[0]))
    assert (node.servers()[VIP].scheduler, node.servers()[VIP].flags) == ("mh", 0x18)


@only_with_all
def test_an_unknown_scheduler_is_named(node: Node) -> None:
    mode = node.again(IpvsOptions(scheduler="dice"))
    support = call(mode, mode.probe)
    assert not support.usable
    assert "modprobe ip_vs_dice" in " ".join(support.missing)


@needs_ipvsadm
def test_servers_of_others(node: Node) -> None:
    node.sh("ipvsadm", "-A", "-t", "192.0.2.1:80", "-s", "rr")
    assert node.servers() == {}  # nothing is ours before our interface is there
    node.again(IpvsOptions(exclude_cidrs=("192.0.2.0/24",)))
    node.bring(of(ONE[0]))
    assert "C0000201:0050" in table(node)
    node.again()
    node.bring(of(ONE[0]))
    assert "C0000201:0050" not in table(node)


@needs_ipvsadm
def test_servers_of_ours_where_others_have_theirs(node: Node) -> None:
    """Node ports on the addresses of a network in which somebody else balances, too."""
    options = IpvsOptions(exclude_cidrs=("10.96.0.0/16",))
    node.sh("ipvsadm", "-A", "-t", "10.96.0.1:443", "-s", "rr")
    node.sh("ipvsadm", "-a", "-t", "10.96.0.1:443", "-r", "10.244.0.9:443", "-m", "-w", "0")
    node.again(options)
    node.bring(of(*BOTH))
    assert call(node.mode, node.mode.fingerprint) is not None, "what others drain is theirs"
    assert node.bring(of(*BOTH)) == 0
    node.again(options)
    node.apply(of(OTHER[0]))  # while no process was there, an endpoint has gone
    assert "0AF40001:1F90      Masq    1" not in table(node)
    assert node.bring(of(OTHER[0])) == 0
    assert "0A600001:01BB" in table(node)
    assert "0AF40009:01BB      Masq    0" in table(node)


@needs_ipvsadm
def test_drift_is_mended(node: Node) -> None:
    node.bring(of(ONE[0]))
    node.sh("ip", "addr", "del", "10.96.0.1/32", "dev", "kube-ipvs0")
    node.sh("ipset", "flush", "KUBE-IPVS-PORTS")
    node.sh("iptables", "-t", "nat", "-F", "KUBE-IPVS-SERVICES")
    node.sh("ipvsadm", "-d", "-t", "10.96.0.1:80", "-r", "10.244.0.1:8080")
    assert node.bring(of(ONE[0])) == 4  # the server, its address, the entry, the chain
    node.sh("ip", "link", "del", "kube-ipvs0")
    assert node.bring(of(ONE[0])) > 0
    assert "10.96.0.1/32" in node.sh("ip", "addr", "show", "kube-ipvs0")


def test_nothing_is_left(node: Node) -> None:
    node.bring(of(ONE[0]))
    assert IpvsOptions().scheduler in table(node)
    call(node.mode, node.mode.apply, diff(call(node.mode, node.mode.read), {}))
    assert "0A600001" not in table(node)
    assert node.sh("ipset", "save") == ""
    assert "KUBE" not in node.sh("iptables-save") + node.sh("ip6tables-save")
    assert "kube-ipvs0" not in node.sh("ip", "link")


@needs_ipvsadm
def test_the_tools_carry_out_the_scripts_of_a_change(node: Node) -> None:
    node.bring(of(ONE[0]))
    have = call(node.mode, node.mode.read)
    want = node.rendered(of(*BOTH))
    scripts = node.mode.words.scripts(have, diff(have, want))
    assert {script.tool for script in scripts} >= {"ipvsadm"}
    for script in scripts:
        text = script.text.replace("'", "")
        node.sh("sh", "-c", f"printf '%s' '{text}' | {' '.join(script.argv)}")
    assert diff(call(node.mode, node.mode.read), want) == Diff()
