"""The recorded worlds: their plans in our modes, and the flows that upstream was asked about."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from steersman.config.defaults import apply_platform_defaults
from steersman.config.load import load
from steersman.config.settings import to_node_config
from steersman.model.addresses import canonical_ip, family_of, in_cidr, is_loopback, split_host_port
from steersman.model.inputs import HostFacts, NodeConfig
from steersman.model.names import Family
from tests.support.builders.worlds import World, snapshot_of
from tests.support.data import RECORDED
from tests.support.modes.flows import FlowCase

NODE = "df-node"
_NODE_ADDRESSES = {Family.IPV4: "10.249.1.2", Family.IPV6: "fd00:10:249:1::2"}
_SERVICE_CIDRS = {
    "kind": "ServiceCIDR",
    "apiVersion": "networking.k8s.io/v1",
    "metadata": {"name": "kubernetes"},
    "spec": {"cidrs": ["10.96.0.0/12", "fd00:10:96::/108"]},
}


@dataclass(frozen=True)
class Record:
    """What upstream did with the connections to one destination from one client."""

    step: int
    frontend: str
    """How the destination is meant, such as `nodePort-lo`; see the README of the data."""
    client: str
    protocol: str
    destination: str
    outcome: str
    seen: frozenset[tuple[str, str]]
    """Endpoints, and whose address each saw as the client: `node` or `preserved`."""
    affinity: bool

    @property
    def address(self) -> str:
        return split_host_port(self.destination)[0]

    @property
    def port(self) -> int:
        return int(self.destination.rpartition(":")[2])

    def __str__(self) -> str:
        to = f"{self.destination}/{self.protocol}"
        return f"step {self.step}: {self.frontend} {to} from {self.client}"


class HealthCheck(NamedTuple):
    """What the health check node port of a Service answered."""

    step: int
    service: str
    address: str
    """Of the node."""
    status: int
    """0 if nothing listened."""
    ready: int
    """Endpoints of the Service on the node."""


class OpenFlow(NamedTuple):
    """A connection, or a client of UDP that never pauses, while the world changed."""

    record: Record
    """Its destination and client, in the step that changed the world."""
    before: str
    """What the client met before: ok, sink (not translated), reject or timeout."""
    after: str
    """The same afterwards, but for ok: alive or valid, or stale if the endpoint had gone."""


class Recording:
    """One world and configuration, in the steps in which it changed."""

    def __init__(self, path: Path) -> None:
        self.name = path.name.removesuffix(".json.gz")
        self._path = path

    def __repr__(self) -> str:
        return self.name

    @cached_property
    def _data(self) -> dict[str, Any]:
        data: dict[str, Any] = msgspec.json.decode(gzip.decompress(self._path.read_bytes()))
        return data

    def records(self, mode: str) -> Iterator[Record]:
        """Return what upstream did in a mode."""
        for row in self._data["upstream"][mode]["flows"]:
            step, _, frontend, client, protocol, destination, outcomes, seen, flags = row
            (outcome,) = outcomes
            ends = frozenset((end, source) for end, _, source in (e.partition(" ") for e in seen))
            affinity = bool(flags.get("aff"))
            yield Record(step, frontend, client, protocol, destination, outcome, ends, affinity)

    def health_checks(self, mode: str) -> Iterator[HealthCheck]:
        """Return what health check node ports answered in a mode."""
        for row in self._data["upstream"][mode]["healthChecks"]:
            step, service, address, status, *more = row
            if status == "ConnectionRefusedError":
                yield HealthCheck(step, service, address, 0, 0)
            else:
                yield HealthCheck(step, service, address, status, more[0])

    def open_flows(self, mode: str) -> Iterator[OpenFlow]:
        """Return what became of connections while the world changed."""
        for row in self._data["upstream"][mode]["openFlows"]:
            step, _, frontend, client, protocol, destination, before, after = row
            record = Record(step, frontend, client, protocol, destination, "", frozenset(), False)
            yield OpenFlow(record, before, after)

    def not_serving(self, step: int) -> set[str]:
        """Return the addresses of endpoints that do not serve after a step."""
        return {
            address
            for each in self._data["steps"][step]["endpointSlices"]
            for endpoint in each["endpoints"]
            if endpoint.get("conditions", {}).get("serving") is False
            for address in endpoint["addresses"]
        }

    def config(self, mode: str) -> NodeConfig:
        """Return the configuration of the world, for a mode."""
        given = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            **self._data["configuration"],
            "mode": mode,
        }
        given[mode] = {**given.get(mode, {}), **self._data["modeOptions"]}
        loaded = load(msgspec.json.encode(given))
        assert not loaded.warnings
        return to_node_config(apply_platform_defaults(loaded.config), node_name=NODE)

    def worlds(self, mode: str) -> list[World]:
        """Return the world after each step."""
        addresses = self._data["nodeAddresses"]
        interfaces: dict[str, list[str]] = {"lo": [], "eth0": []}
        for address in addresses:
            length = 128 if ":" in address else 32
            interfaces["lo" if is_loopback(address) else "eth0"].append(f"{address}/{length}")
        facts = HostFacts(NODE, {name: tuple(group) for name, group in interfaces.items()})
        worlds, config = [], self.config(mode)
        for number, step in enumerate(self._data["steps"]):
            objects = [_SERVICE_CIDRS, step["node"], *step["services"], *step["endpointSlices"]]
            snapshot, findings = snapshot_of(NODE, objects)
            assert not findings
            worlds.append(World(f"{self.name}-{number}", snapshot, config, facts))
        return worlds

    @property
    def opens_loopback(self) -> bool:
        """Whether 127.0.0.1 is among the addresses that are to have node ports."""
        named = self._data["configuration"].get("nodePortAddresses", ())
        return any(in_cidr("127.0.0.1", each) for each in named if each != "primary")

    def is_of_node(self, address: str) -> bool:
        """Whether an address is one of the node's."""
        return canonical_ip(address) in self._data["nodeAddresses"] or is_loopback(address)

    def flow(self, record: Record) -> FlowCase:
        """Return the question that a record answers, without its answer."""
        family = family_of(record.address)
        if record.client == "node":  # connections to its own addresses begin at them
            own = self.is_of_node(record.address)
            source, interface = record.address if own else _NODE_ADDRESSES[family], ""
        else:
            source = self._data["clients"][record.client]["6" if family is Family.IPV6 else "4"]
            interface = {"pod": "podc0", "rpod": "eth1"}.get(record.client, "eth0")
        return FlowCase(
            str(record),
            source,
            record.address,
            record.port,
            record.protocol,
            kind="",
            interface=interface,
        )


RECORDINGS = [Recording(path) for path in sorted((RECORDED / "worlds").glob("*.json.gz"))]
