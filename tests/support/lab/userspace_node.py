"""A userspace mode in a network namespace: its rules read back, and damaged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from steersman.model.names import Family, Protocol
from steersman.model.plan import (
    Action,
    Endpoint,
    FamilySettings,
    Frontend,
    FrontendKind,
    NodeSettings,
    ServicePlan,
    Verdict,
)
from steersman.model.ruleset import Ruleset, diff
from steersman.modes.userspace.core import UserspaceMode
from tests.support.lab.namespace import in_namespace, sh
from tests.support.modes.userspace_proxy import answering, cart, endpoint, owner

VARIANTS = pytest.mark.parametrize("variant", ["nft", "legacy", "nftables"])


HOST, VIP, PORT, NODE_PORT = "192.168.77.2", "10.96.0.10", 80, 30080


SETTINGS = NodeSettings(
    families=tuple(Family),
    ipv4=FamilySettings(
        node_ip=HOST, local_addresses=("127.0.0.1", HOST), localhost_node_ports=True
    ),
)


def served(
    *endpoints: Endpoint, verdict: Verdict = Verdict.FORWARD, name: str = "cart"
) -> ServicePlan:
    at, of = (VIP, PORT), owner(name=name)
    return cart(*endpoints, at=at, node_port=NODE_PORT, verdict=verdict, of=of)


def rendered(mode: UserspaceMode, *plans: ServicePlan) -> Ruleset:
    want = dict(mode.render_node(SETTINGS))
    for each in plans:
        want.update(mode.render_service(each, SETTINGS))
    return want


async def become(mode: UserspaceMode, *plans: ServicePlan) -> None:
    await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), rendered(mode, *plans)))


def on_a_node(body: Callable[[Endpoint], Awaitable[None]]) -> None:
    """Run a test where there is a node with an address, and an endpoint on it."""

    async def inside() -> None:
        sh(f"ip link add eth0 type bridge && ip link set eth0 up && ip addr add {HOST}/24 dev eth0")
        sh("ip route add default dev eth0")
        async with endpoint(answering(b"one")) as one:
            await body(one)

    in_namespace(inside)


def rules(variant: str) -> str:
    if variant == "nftables":
        return sh("nft list ruleset")
    return sh(f"iptables-{variant}-save; ip6tables-{variant}-save")


def damages(variant: str) -> tuple[str, ...]:
    if variant == "nftables":
        return (
            "nft flush chain ip kube-portals host",
            "nft delete table ip kube-portals",
            "nft add rule ip kube-portals firewall tcp dport 1 drop",
            "nft flush ruleset",
        )
    return (
        f"iptables-{variant} -t nat -F KUBE-PORTALS-HOST",
        f"iptables-{variant} -t nat -F OUTPUT; iptables-{variant} -t nat -X KUBE-PORTALS-HOST",
        f"iptables-{variant} -t nat -F; iptables-{variant} -t nat -X",
        f"iptables-{variant} -A KUBE-PORTALS-FIREWALL -p tcp --dport 1 -j DROP",
        f"iptables-{variant} -D KUBE-PORTALS-FIREWALL 1",
    )


def datagrams(*endpoints: Endpoint, verdict: Verdict = Verdict.FORWARD) -> ServicePlan:
    action = Action(verdict)
    frontend = Frontend(FrontendKind.CLUSTER_IP, VIP, PORT, action, action, action)
    return ServicePlan(owner(Protocol.UDP), (frontend,), endpoints, (), endpoints)
