"""The text of portal rules for nft, and how nft is called."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from steersman.host.exec import Result
from steersman.model.errors import BusyError
from steersman.model.names import Family, Protocol
from steersman.model.plan import LocalDetector, Verdict
from steersman.modes.userspace.nft_portals import NftPortals
from steersman.modes.userspace.nft_rules import (
    Chain,
    Element,
    change,
    objects,
    parse,
    remove,
)
from steersman.modes.userspace.render import Portal
from steersman.proxy.listeners import PORTAL, FrontendKey

SERVICE = FrontendKey(PORTAL, Family.IPV4, Protocol.TCP, "198.51.100.1", 80)
AT_NODE_PORT = FrontendKey(PORTAL, Family.IPV4, Protocol.TCP, "192.168.0.2", 80, True)


def nft(portal: Portal, node_port: bool = False) -> tuple[list[str], list[str]]:
    """Its elements, and the rules of its own chain."""
    where = AT_NODE_PORT if node_port else SERVICE
    found = objects(where, portal, 0 if node_port else 4711)
    elements = [f"{each.map}: {each.text}" for each in found if isinstance(each, Element)]
    return sorted(elements), [r for each in found if isinstance(each, Chain) for r in each.rules]


def test_leads_and_guards() -> None:
    portal = Portal("shop/cart:http", Verdict.FORWARD, "192.168.0.2")
    leads = "portals: 198.51.100.1 . 6 . 80 : 192.168.0.2 . 4711"
    guard = "guards: 192.168.0.2 . 6 . 4711 : goto "
    assert nft(portal) == ([f"{guard}proxied", leads], [])
    ranges = ("203.0.113.0/24", "203.0.113.0/25", "10.0.0.1/32")
    pods = LocalDetector(cidr="10.244.0.0/16")
    fenced = replace(portal, internal_only=pods, source_ranges=ranges)
    assert nft(fenced) == (
        [f"{guard}to-tcp-192.168.0.2-4711", leads],
        [
            "ct status & dnat != dnat drop",
            "ip saddr != 10.244.0.0/16 fib saddr type != local drop",
            "ip saddr != { 10.0.0.1/32, 203.0.113.0/24 } drop",
        ],
    )


def test_pods_by_interface_and_none_at_all() -> None:
    node_port = Portal("shop/cart:http", Verdict.FORWARD)
    found = [
        nft(replace(node_port, internal_only=LocalDetector(**how)), True)[1]
        for how in ({"interface": "cni0"}, {"interface_prefix": "veth"}, {})
    ]
    rest = "fib saddr type != local drop"
    assert found == [[f'iifname != "cni0" {rest}'], [f'iifname != "veth*" {rest}'], [rest]]
    assert nft(node_port, True) == ([], [])


def test_refusals_and_removal() -> None:
    for verdict, word in ((Verdict.DROP, "drop"), (Verdict.REJECT, "goto refuse")):
        portal = Portal("shop/cart:http", verdict)
        assert nft(portal) == ([f"guards: 198.51.100.1 . 6 . 80 : {word}"], [])
    assert remove(Family.IPV6) == "table ip6 kube-portals\ndelete table ip6 kube-portals\n"


def test_writes_only_what_differs() -> None:
    where = SERVICE
    portal = Portal("shop/cart:http", Verdict.FORWARD, "192.168.0.2")
    old, new = objects(where, portal, 4711), objects(where, portal, 4712)
    assert change(Family.IPV4, old, old) == ""
    assert change(Family.IPV4, old, new).splitlines() == [
        "delete element ip kube-portals guards { 192.168.0.2 . 6 . 4711 }",
        "delete element ip kube-portals portals { 198.51.100.1 . 6 . 80 }",
        "add element ip kube-portals guards { 192.168.0.2 . 6 . 4712 : goto proxied }",
        "add element ip kube-portals portals { 198.51.100.1 . 6 . 80 : 192.168.0.2 . 4712 }",
    ]
    one, two = (
        objects(where, replace(portal, source_ranges=(cidr,)), 4711)
        for cidr in ("10.0.0.1/32", "10.0.0.2/32")
    )
    chain = "chain ip kube-portals to-tcp-192.168.0.2-4711"
    assert [
        line.partition(" comment")[0] for line in change(Family.IPV4, one, two).splitlines()
    ] == [
        f"add {chain}",
        f"flush {chain}",
        f"add rule{chain.removeprefix('chain')} ct status & dnat != dnat drop",
        f"add rule{chain.removeprefix('chain')} ip saddr != {{ 10.0.0.2/32 }} drop",
    ]
    assert change(Family.IPV4, two, old).splitlines()[-2:] == [f"flush {chain}", f"delete {chain}"]


def test_reads_what_it_lists() -> None:
    listed = """table ip kube-portals {
\tmap portals {
\t\ttype ipv4_addr . inet_proto . inet_service : ipv4_addr . inet_service
\t}

\tmap guards {
\t\ttype ipv4_addr . inet_proto . inet_service : verdict
\t\telements = { 1.1.1.1 . 17 . 3 : drop,
\t\t\t     192.168.0.2 . 6 . 30009 : goto refuse }
\t}

\tchain input {
\t\ttype filter hook input priority 0; policy accept;
\t\tct state 0x8 jump firewall comment "w"
\t\ttcp dport 1 drop
\t}
}
"""
    assert parse(listed) == {
        Element("guards", "1.1.1.1 . 17 . 3 : drop"),
        Element("guards", "192.168.0.2 . 6 . 30009 : goto refuse"),
        Chain("input", ("w", "")),
    }


class Recorded:
    """Records commands."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.commands: list[list[str]] = []

    def __call__(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0) -> Result:
        self.commands.append(list(argv))
        return self.result


@pytest.mark.parametrize(("status", "usable"), [(0, True), (1, False)])
def test_nft_is_tried_without_reading_the_rules_of_others(status: int, usable: bool) -> None:
    """Any list of tables makes nft 1.0 read every rule and set, until nobody changes them."""
    execute = Recorded(Result(status, b"", b"Operation not permitted"))
    support = NftPortals(execute).probe()
    assert support.usable is usable
    assert all("Operation not permitted" in sentence for sentence in support.missing)
    assert not any("list" in command for command in execute.commands)


def test_only_a_missing_table_means_that_there_are_no_portals() -> None:
    """Otherwise all portals would be written again after a moment of contention."""
    missing = Recorded(Result(1, b"", b"Error: No such file or directory\nlist table ip x"))
    assert NftPortals(missing).read({}) == {}
    busy = Recorded(Result(1, b"", b"Error: cache initialization failed: Interrupted system call"))
    with pytest.raises(BusyError, match="Interrupted system call"):
        NftPortals(busy).read({})
