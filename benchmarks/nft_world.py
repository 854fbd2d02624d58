"""The same cluster as upstream's nftables mode programs it, through `nft -f`: the yardstick."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Sequence

from benchmarks import world
from benchmarks.node import Netns

_TABLE = "ip kube-proxy"
_TYPE = "type ipv4_addr . inet_proto . inet_service : verdict ;"
_SERVICE = "ip daddr . meta l4proto . th dport"
_BASE = (
    ("filter-prerouting-pre-dnat", "filter", "prerouting", -110, ("firewall-check",)),
    ("filter-output-pre-dnat", "filter", "output", -110, ("firewall-check",)),
    ("filter-input", "filter", "input", 0, ("nodeport-check", "service-check")),
    ("filter-forward", "filter", "forward", 0, ("service-check", "cluster-ips-check")),
    ("filter-output", "filter", "output", 0, ("service-check", "cluster-ips-check")),
    ("nat-prerouting", "nat", "prerouting", -100, ("services",)),
    ("nat-output", "nat", "output", -100, ("services",)),
    ("nat-postrouting", "nat", "postrouting", 100, ("masquerading",)),
)
_RULES = {
    "firewall-check": (f"{_SERVICE} vmap @firewall-ips",),
    "service-check": (f"{_SERVICE} vmap @no-endpoint-services",),
    "nodeport-check": (
        "ip daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports",
    ),
    "cluster-ips-check": ("ip daddr @cluster-ips reject", "ip daddr { 10.128.0.0/9 } drop"),
    "services": (
        f"ip daddr @cluster-ips ip saddr != {world.CLUSTER_CIDR} meta mark set meta mark or 0x4000",
        f"{_SERVICE} vmap @service-ips",
        "ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports",
    ),
    "masquerading": (
        "meta mark & 0x4000 != 0 meta mark set meta mark xor 0x4000 masquerade fully-random",
        "ct status dnat ip saddr . ip daddr . meta l4proto . th dport @hairpin-connections "
        "masquerade fully-random",
    ),
}


def _fixed() -> Iterator[str]:
    """What upstream always has."""
    yield f"add table {_TABLE}"
    for name in ("service-ips", "firewall-ips", "no-endpoint-services"):
        yield f"add map {_TABLE} {name} {{ {_TYPE} }}"
    for name in ("service-nodeports", "no-endpoint-nodeports"):
        yield f"add map {_TABLE} {name} {{ type inet_proto . inet_service : verdict ; }}"
    for name in ("cluster-ips", "nodeport-ips"):
        yield f"add set {_TABLE} {name} {{ type ipv4_addr ; }}"
    pair = "type ipv4_addr . ipv4_addr . inet_proto . inet_service ;"
    yield f"add set {_TABLE} hairpin-connections {{ {pair} }}"
    for name, rules in _RULES.items():
        yield f"add chain {_TABLE} {name}"
        yield from (f"add rule {_TABLE} {name} {rule}" for rule in rules)
    for name, kind, hook, priority, jumps in _BASE:
        yield f"add chain {_TABLE} {name} {{ type {kind} hook {hook} priority {priority} ; }}"
        state = "" if kind == "nat" else "ct state new "
        yield from (f"add rule {_TABLE} {name} {state}jump {jump}" for jump in jumps)


def _chain(number: int) -> str:
    return f"service-ABCDEFGH-bench/service-{number}/tcp/http"


def _rule(number: int, addresses: Sequence[str]) -> str:
    slots = ", ".join(f"{slot} : {address} . 8080" for slot, address in enumerate(addresses))
    return (
        f"add rule {_TABLE} {_chain(number)} meta l4proto tcp dnat ip to "
        f"numgen random mod {len(addresses)} map {{ {slots} }}"
    )


def service(number: int, addresses: Sequence[str]) -> Iterator[str]:
    """A Service that was not there."""
    vip = world.cluster_ip(number)
    yield f"add chain {_TABLE} {_chain(number)}"
    yield _rule(number, addresses)
    yield f"add element {_TABLE} cluster-ips {{ {vip} }}"
    yield f"add element {_TABLE} service-ips {{ {vip} . tcp . 80 : goto {_chain(number)} }}"


def endpoints(number: int, addresses: Sequence[str]) -> Iterator[str]:
    """Other endpoints of a Service."""
    yield f"flush chain {_TABLE} {_chain(number)}"
    yield _rule(number, addresses)


class NftFlat:
    """A node with upstream's rules."""

    def __init__(self, services: int) -> None:
        self.netns = Netns()
        chunk = 1000  # how they got there is not measured
        self.load(_fixed())
        for first in range(0, services, chunk):
            numbers = range(first, min(first + chunk, services))
            self.load(line for n in numbers for line in service(n, world.pods(n)))

    def load(self, lines: Iterable[str]) -> None:
        self.netns.enter()
        text = "\n".join(lines) + "\n"
        subprocess.run(["nft", "-f", "-"], input=text.encode(), check=True)

    def close(self) -> None:
        self.netns.close()
