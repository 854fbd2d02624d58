"""The recorded world: what we render for it equals what upstream's kube-proxy had in the kernel.

Chain by chain and byte for byte; within a chain that Services share the order of Services is free.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from steersman.host.exec import SubprocessExec
from steersman.model.inputs import HostFacts, NodeConfig
from steersman.model.names import Family
from steersman.model.plan import FrontendKind, NodePlan
from steersman.modes.iptables.mode import IptablesMode
from steersman.modes.iptables.names import SHARED_CHAINS
from steersman.modes.iptables.render import Features
from steersman.netfilter.iptables.names import BUILT_IN
from tests.support.builders import kube
from tests.support.builders.worlds import World, snapshot_of
from tests.support.data import RECORDED
from tests.support.modes.flows import FlowCase, by_rules, by_trace
from tests.support.modes.iptables_rules import Rules, parse
from tests.support.modes.registry import iptables_save, render

GOLDEN = RECORDED / "golden"
FILES = {Family.IPV4: "iptables-save.txt", Family.IPV6: "ip6tables-save.txt"}
NODE_NAME = "peer-node"
INTERFACES = {
    "lo": ("127.0.0.1/8", "::1/128"),
    "eth0": ("10.250.1.2/24", "fd00:10:250:1::2/64"),
}
HTTPS = [{"name": "https", "port": 6443, "protocol": "TCP"}]
API_SERVER: tuple[dict[str, Any], ...] = (
    kube.service("kubernetes", namespace="default", ports=[{"name": "https", "port": 443}]),
    kube.endpoint_slice("kubernetes", "kubernetes", "10.250.0.1", namespace="default", ports=HTTPS),
)
"""The API server's own Service, which the list of objects leaves out and the rules show."""


def mode() -> IptablesMode:
    mode = IptablesMode(SubprocessExec())
    mode.features = Features(nfacct=True)
    return mode


@pytest.fixture(scope="module")
def plan() -> NodePlan:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    items = yaml.load((GOLDEN / "objects-from-api.yaml").read_text(), loader)["items"]
    node = yaml.load((GOLDEN / "node.yaml").read_text(), loader)
    kinds = ("Service", "EndpointSlice")
    snapshot, malformed = snapshot_of(
        NODE_NAME, [node, *API_SERVER, *(item for item in items if item["kind"] in kinds)]
    )
    assert not malformed
    config = NodeConfig(node_name=NODE_NAME, cluster_cidrs=("10.244.0.0/16", *cidrs6()))
    facts = HostFacts(hostname=NODE_NAME, interfaces=INTERFACES)
    return World("golden", snapshot, config, facts).plan(mode().traits)


def cidrs6() -> tuple[str, ...]:
    """The IPv6 cluster CIDR of the recording, if it had one: its rules say."""
    text = (GOLDEN / "iptables" / FILES[Family.IPV6]).read_text()
    words = text.split()
    found = {words[i + 2] for i, word in enumerate(words) if word == "!" and words[i + 1] == "-s"}
    return tuple(found - {"127.0.0.0/8"})


def chains(text: str) -> dict[tuple[str, str], list[str]]:
    """Rules by table and chain; a chain without rules counts too, a built-in one does not."""
    out: dict[tuple[str, str], list[str]] = {}
    table = ""
    for line in text.splitlines():
        if line.startswith("*"):
            table = line[1:]
        elif line.startswith(":") and line[1:].split()[0] not in BUILT_IN:
            out.setdefault((table, line[1:].split()[0]), [])
        elif line.startswith("-A"):
            out.setdefault((table, line.split()[1]), []).append(line)
    return {
        place: sorted(rules) if place in SHARED_CHAINS else rules for place, rules in out.items()
    }


@pytest.mark.parametrize("family", list(Family))
def test_every_chain_is_the_same(plan: NodePlan, family: Family) -> None:
    theirs = chains((GOLDEN / "iptables" / FILES[family]).read_text())
    ours = chains(iptables_save(render(plan, mode()), int(family)))
    assert ours.keys() == theirs.keys()
    assert {p: r for p, r in ours.items() if r != theirs[p]} == {}
    assert sum(map(len, theirs.values())) > 50  # the recording is not empty


@pytest.mark.parametrize("family", list(Family))
def test_the_rule_that_must_be_last_is_last(family: Family, plan: NodePlan) -> None:
    text = iptables_save(render(plan, mode()), int(family))
    services: Any = [line for line in text.splitlines() if line.startswith("-A KUBE-SERVICES")]
    last = [i for i, line in enumerate(services) if "NOTE: this must be the last rule" in line]
    assert last == [len(services) - 1]


CLIENTS = {
    Family.IPV4: ("10.244.0.9", "10.250.1.2", "10.251.0.7", "203.0.113.9", "127.0.0.1"),
    Family.IPV6: ("fd00:10:244::9", "fd00:10:250:1::2", "2001:db8:99::9"),
}
"""A pod, the node, clients outside (one within the source ranges), loopback."""
NODE_ADDRESSES = {
    Family.IPV4: ("10.250.1.2", "127.0.0.1"),
    Family.IPV6: ("fd00:10:250:1::2", "::1"),
}


def flows(plan: NodePlan, family: Family) -> Iterator[FlowCase]:
    """Every client to every frontend, and to the port beside it; endpoints are clients too."""
    for key, service in plan.services.items():
        if key.family is not family:
            continue
        protocol = str(key.name.protocol)
        clients = (*CLIENTS[family], *(e.ip for e in service.reachable))
        for frontend in service.frontends:
            node_port = frontend.kind is FrontendKind.NODE_PORT
            targets = NODE_ADDRESSES[family] if node_port else (frontend.address,)
            for source in clients:
                for target in targets:
                    if target.startswith("127.") == source.startswith("127."):
                        for number in (frontend.port, 9):
                            yield FlowCase(str(key), source, target, number, protocol, "")


@pytest.mark.parametrize("family", list(Family))
def test_trace_agrees_with_the_rules_that_upstream_wrote(plan: NodePlan, family: Family) -> None:
    local = frozenset(plan.settings.family(family).local_addresses)
    text = (GOLDEN / "iptables" / FILES[family]).read_text()
    upstream = {family: Rules(parse(text), local)}
    asked = list(flows(plan, family))
    assert len(asked) > 50
    wrong = [
        f"{flow}: trace {by_trace(plan, flow)}, upstream {by_rules(upstream, flow)}"
        for flow in asked
        if by_trace(plan, flow) != by_rules(upstream, flow)
    ]
    assert wrong == []
