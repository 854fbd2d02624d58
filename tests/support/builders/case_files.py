"""Reads tests/cases: a directory per behaviour, the same for every mode.

`objects.yaml` is what the cluster holds, `case.yaml` what the node is like and what becomes of
traffic, MODE.txt what a mode renders for it. In `case.yaml`:

    description: one sentence
    node: settings other than the usual ones (see `_config`); `zone`, `podCIDRs` of its Node object
    findings: words, each of which some Finding must have; no other Findings may there be
    flows:
      - {from: WHO, to: ADDRESS:PORT[/PROTOCOL], expect: forward|drop|reject|untouched,
         endpoints: [...], masquerade: false, sticky: false, where: [not] TRAIT}

WHO is `pod` (one that is no endpoint), `node`, `external`, or an address. `untouched` packets
arrive where they were sent. A flow with `where` counts only for modes with (or without) a trait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from steersman.model.addresses import canonical_ip, in_cidr, split_host_port
from steersman.model.inputs import DetectLocalMode, HostFacts, NodeConfig, Snapshot
from steersman.model.names import Family
from steersman.model.plan import Traits
from tests.support.builders import kube
from tests.support.builders.worlds import POD_NETWORKS, World, snapshot_of
from tests.support.modes.flows import FlowCase, as_served

CASES = Path(__file__).parents[2] / "cases"
NODE, ZONE = "node-a", "zone-a"
INTERFACES = {
    "lo": ("127.0.0.1/8", "::1/128"),
    "eth0": ("192.168.0.2/24", "192.168.99.11/24", "2001:db8::2/64", "2001:db8:0:1::2/64"),
}
NODE_IPS = ("192.168.0.2", "2001:db8::2")
CLUSTER_CIDRS = ("10.244.0.0/16", "fd00:10:244::/48")
CLIENTS = {
    "pod": ("10.244.1.100", "fd00:10:244:1::100"),
    "node": ("192.168.99.11", "2001:db8:0:1::2"),  # not the address that masquerading picks
    "external": ("203.0.113.9", "2001:db8:99::9"),
}
"""Who is meant by a word, in each family."""
SETTINGS = {
    "clusterCIDRs": "cluster_cidrs",
    "nodePortAddresses": "node_port_addresses",
    "detectLocalMode": "detect_local_mode",
    "bridgeInterface": "bridge_interface",
    "interfaceNamePrefix": "interface_name_prefix",
    "masqueradeAll": "masquerade_all",
    "localhostNodePorts": "localhost_node_ports",
    "allowServiceExternalIPs": "allow_service_external_ips",
}
"""What `node` may say, and which field of NodeConfig it is."""


def names() -> list[str]:
    """The cases there are."""
    return sorted(path.parent.name for path in CASES.glob("*/case.yaml"))


@cache  # every mode has several tests of each case
def read(name: str) -> dict[str, Any]:
    """A case's case.yaml."""
    case: dict[str, Any] = yaml.safe_load((CASES / name / "case.yaml").read_text())
    unknown = set(case) - {"description", "node", "findings", "flows"}
    assert not unknown, f"{name}: {unknown} mean nothing in a case"
    return case


@cache
def world(name: str, traits: Traits) -> World:
    """A case as a World, with the flows that count for a mode of these traits."""
    case = read(name)
    config = _config(case.get("node") or {})
    flows = tuple(_flows(case["flows"], config, traits))
    facts = HostFacts(hostname=NODE, interfaces=INTERFACES)
    return World(name, _snapshot(name), config, facts, flows)


@cache
def _snapshot(name: str) -> Snapshot:
    node = _node_object(read(name).get("node") or {})
    objects = yaml.safe_load_all((CASES / name / "objects.yaml").read_text())
    snapshot, malformed = snapshot_of(NODE, [node, *objects])
    assert not malformed, malformed
    return snapshot


def _node_object(node: Mapping[str, Any]) -> dict[str, Any]:
    cidrs = node.get("podCIDRs", [])
    return kube.node(NODE, *NODE_IPS, zone=node.get("zone", ZONE), podCIDRs=cidrs)


def _config(node: Mapping[str, Any]) -> NodeConfig:
    fields: dict[str, Any] = {"cluster_cidrs": CLUSTER_CIDRS}
    for key in node.keys() - {"zone", "podCIDRs"}:
        value = node[key]
        fields[SETTINGS[key]] = tuple(value) if isinstance(value, list) else value
    mode = DetectLocalMode(fields.pop("detect_local_mode", DetectLocalMode.CLUSTER_CIDR))
    families = (Family.IPV4, Family.IPV6)
    return NodeConfig(node_name=NODE, families=families, detect_local_mode=mode, **fields)


def _flows(flows: list[dict[str, Any]], config: NodeConfig, traits: Traits) -> Iterator[FlowCase]:
    for flow in flows:
        if _counts(flow.get("where", ""), traits):
            yield as_served(_flow(flow, config), traits)


def _counts(where: str, traits: Traits) -> bool:
    if not where:
        return True
    has = bool(getattr(traits, where.removeprefix("not ")))
    return has is not where.startswith("not ")


def _flow(flow: Mapping[str, Any], config: NodeConfig) -> FlowCase:
    target, _, protocol = flow["to"].partition("/")
    address, port = split_host_port(target)
    clients = CLIENTS.get(flow["from"])
    source = clients[":" in address] if clients else flow["from"]
    assert canonical_ip(source) == source, f"{source} is no client"
    return FlowCase(
        flow["from"],
        source,
        address,
        port,
        protocol or "TCP",
        flow["expect"],
        frozenset(flow.get("endpoints", ())),
        flow.get("masquerade", False),
        _interface(source, config),
        flow.get("sticky", False),
    )


def _interface(source: str, config: NodeConfig) -> str:
    """The node's interface that a client's packets come in by, in the lab too."""
    own = {a.partition("/")[0] for group in INTERFACES.values() for a in group}
    if source in own:
        return ""
    if not any(in_cidr(source, cidr) for cidr in POD_NETWORKS):
        return "eth0"
    if source.startswith(("10.244.2.", "fd00:10:244:2:")):
        return "eth1"
    return config.bridge_interface or f"{config.interface_name_prefix or 'pod'}0"
