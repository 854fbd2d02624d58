"""Hypothesis strategies for plans, and the flows that are asked of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from steersman.compile.planner import compile_all
from steersman.model.inputs import HostFacts, NodeConfig
from steersman.model.names import Family
from steersman.model.plan import FrontendKind, NodePlan
from tests.support.builders.objects import endpoint, port, service, slice_, snapshot
from tests.support.modes.flows import FlowCase
from tests.support.modes.registry import ModeUnderTest

NODE = "node-a"


FACTS = HostFacts(
    NODE,
    {
        "lo": ("127.0.0.1/8", "::1/128"),
        "eth0": ("192.168.0.2/24", "192.168.99.11/24", "2001:db8::2/64"),
    },
)


CLIENTS = {
    Family.IPV4: ("10.244.1.9", "192.168.0.2", "192.168.99.11", "203.0.113.9", "203.0.113.200"),
    Family.IPV6: ("fd00:10:244::9", "2001:db8::2", "2001:db8:99::9"),
}


PORTS = (
    port(nodePort=30080),
    port("dns", 53, protocol="UDP", nodePort=30053),
    port("radio", 99, protocol="SCTP"),
)


SLICE_PORTS = (
    port(number=8080, protocol="TCP"),
    port("dns", 5353, protocol="UDP"),
    port("radio", 99, protocol="SCTP"),
)


POLICY = st.sampled_from(("Local", "Cluster"))


@st.composite
def endpoints(draw: st.DrawFn, family: Family) -> list[dict[str, Any]]:
    head = "10.244.{}.{}" if family is Family.IPV4 else "fd00:10:244:{}::{}"
    chosen = draw(st.lists(st.tuples(st.integers(1, 2), st.integers(5, 7)), unique=True))
    return [
        endpoint(
            head.format(host, number),
            NODE if host == 1 else "node-b",
            ready=draw(st.booleans()),
            serving=draw(st.booleans()),
            terminating=draw(st.booleans()),
        )
        for host, number in chosen
    ]


@st.composite
def plans(draw: st.DrawFn, mode: ModeUnderTest) -> NodePlan:
    """A node with one Service of any kind, in both families."""
    some = st.booleans()
    vips = ["198.51.100.1", "2001:db8:100::1"] if draw(some) else []
    ranges = st.sampled_from(("203.0.113.0/25", "10.244.0.0/16", "192.168.0.0/24", "::/0"))
    kind = draw(st.sampled_from(("ClusterIP", "NodePort", "LoadBalancer")))
    web = service(
        "web",
        type=kind,
        clusterIP="10.96.0.10",
        clusterIPs=["10.96.0.10", "fd00:10:96::10"],
        ipFamilies=["IPv4", "IPv6"],
        ports=list(PORTS if kind != "ClusterIP" else ({**p, "nodePort": 0} for p in PORTS)),
        externalIPs=["198.51.100.7", "2001:db8:100::7"] if draw(some) else [],
        externalTrafficPolicy=draw(POLICY),
        internalTrafficPolicy=draw(POLICY),
        sessionAffinity=draw(st.sampled_from(("None", "ClientIP"))),
        loadBalancerSourceRanges=draw(st.lists(ranges, unique=True)),
        ingress=[{"ip": vip} for vip in vips],
    )
    slices = [
        slice_(
            *draw(endpoints(family)),
            name=f"web-{family.value}",
            owner="web",
            family=family.kubernetes,
            ports=list(SLICE_PORTS),
        )
        for family in Family
    ]
    config = NodeConfig(
        node_name=NODE,
        bind_address="192.168.0.2",
        cluster_cidrs=draw(st.sampled_from(((), ("10.244.0.0/16", "fd00:10:244::/48")))),
        node_port_addresses=draw(
            st.sampled_from(((), ("192.168.0.0/24",), ("127.0.0.0/8", "2001:db8::/64")))
        ),
        masquerade_all=draw(some),
        localhost_node_ports=draw(some),
    )
    plan = compile_all(snapshot(web, *slices), config, FACTS, mode.traits)
    large = replace(plan.settings, split_dispatch=draw(some), large_cluster=draw(some))
    return NodePlan(large, plan.services)


def flows(plan: NodePlan) -> Iterator[FlowCase]:
    """Every kind of client to every frontend, and endpoints to themselves."""
    for key, planned in plan.services.items():
        clients = {*CLIENTS[key.family], *(e.ip for e in planned.reachable)}
        for frontend in planned.frontends:
            targets = [frontend.address]
            if frontend.kind is FrontendKind.NODE_PORT:
                targets = list(plan.settings.family(key.family).local_addresses)
            for target in targets:
                loopback = target in ("127.0.0.1", "::1")
                for source in [target] if loopback else sorted(clients):
                    protocol = str(key.name.protocol)
                    yield FlowCase(str(key), source, target, frontend.port, protocol, "")
