"""Worlds for tests: objects, a node and flows; and the lab that a world needs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from steersman.compile.planner import compile_all
from steersman.model.addresses import canonical_ip, in_cidr
from steersman.model.findings import Finding
from steersman.model.inputs import HostFacts, NodeConfig, Snapshot
from steersman.model.kube import KINDS, EndpointSlice, KubeObject
from steersman.model.plan import NodePlan, Traits
from steersman.model.ruleset import diff
from steersman.modes.base import Mode, release
from steersman.source.objects import decode_value
from steersman.source.store import Store
from tests.support.builders.store import replace_objects
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.inside import Inside
from tests.support.modes.flows import FlowCase
from tests.support.modes.registry import ModeUnderTest, render

Findings: TypeAlias = tuple[Finding, ...]

POD_NETWORKS = ("10.0.0.0/8", "fd00::/8")
"""Clients in these are pods, other clients are outside (unless the node itself has the address)."""


@dataclass(frozen=True)
class World:
    """Everything that decides about traffic, and the traffic to look at."""

    id: str
    snapshot: Snapshot
    config: NodeConfig
    facts: HostFacts
    flows: tuple[FlowCase, ...] = ()

    def plan(self, traits: Traits) -> NodePlan:
        """The plan of this world, for a mode of these traits."""
        return compile_all(self.snapshot, self.config, self.facts, traits)

    @property
    def slices(self) -> Iterator[EndpointSlice]:
        """Every EndpointSlice."""
        for group in self.snapshot.slices.values():
            yield from group

    def layout(self) -> Layout:
        """The lab that can carry this world's traffic."""
        interfaces = {name: tuple(v) for name, v in self.facts.interfaces.items() if name != "lo"}
        node = {a.partition("/")[0] for group in interfaces.values() for a in group}
        pods = {pod.address: pod for pod in self._endpoint_pods() if pod.address not in node}
        outside = set()
        clients = {flow.source: flow.interface for flow in self.flows}
        for source in sorted(clients.keys() - node - {"127.0.0.1", "::1"}):
            if any(in_cidr(source, cidr) for cidr in POD_NETWORKS):
                pods.setdefault(source, Pod(source, local=clients[source] != "eth1"))
            else:
                outside.add(source)
        return Layout(
            interfaces,
            tuple(sorted(outside)),
            tuple(pods.values()),
            bridge=self.config.bridge_interface,
            pod_prefix=self.config.interface_name_prefix or "pod",
        )

    def _endpoint_pods(self) -> Iterator[Pod]:
        for slice_ in self.slices:
            for endpoint in slice_.endpoints or ():
                address = canonical_ip((endpoint.addresses or [""])[0])
                if address:
                    yield Pod(address, endpoint.node_name == self.config.node_name)

    def servers(self) -> set[tuple[str, int, str]]:
        """Address, port and protocol of everything that an EndpointSlice names, wanted or not."""
        return {
            (address, port.port, port.protocol or "TCP")
            for slice_ in self.slices
            for endpoint in slice_.endpoints or ()
            for port in slice_.ports or ()
            if port.port and (address := canonical_ip((endpoint.addresses or [""])[0]))
        }


def snapshot_of(node_name: str, objects: Iterable[dict[str, Any]]) -> tuple[Snapshot, Findings]:
    """A Snapshot of parsed Kubernetes objects, and Findings about malformed ones.

    The Store selects what upstream's watches select (behaviour 2).
    """
    by_kind: dict[str, list[KubeObject]] = {kind: [] for kind in KINDS}
    findings = []
    for value in objects:
        decoded = decode_value(value["kind"], value)
        if isinstance(decoded, Finding):
            findings.append(decoded)
        else:
            by_kind[value["kind"]].append(decoded)
    store = Store(node_name)
    for kind, group in by_kind.items():
        replace_objects(store, kind, group)
    return store.snapshot, tuple(findings)


async def apply(plan: NodePlan, mode: Mode) -> None:
    """Bring the kernel that a mode sees to a plan, whatever it has now."""
    support = await mode.worker.do(mode.probe)
    assert support.usable, support.missing
    await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), render(plan, mode)))


def program(lab: Lab, plan: NodePlan, mode: ModeUnderTest, variant: str) -> None:
    """Make the lab's node carry out a plan."""
    localhost = plan.settings.ipv4.localhost_node_ports
    lab.sysctl("ipv4/conf/all/route_localnet", str(int(localhost)))

    async def once() -> None:
        made = mode.make(Inside(lab.node.path), variant)
        await apply(plan, made)
        if not mode.stays:
            await release(made)

    asyncio.run(once())
    # A port that comes again would lead a datagram where the last world's endpoint was.
    lab.run("conntrack", "--flush")


class LabPool:
    """Hands out labs, and the same one again where it fits: most worlds share one node."""

    def __init__(self) -> None:
        self._labs: dict[str, Lab] = {}

    def lab(self, world: World, use: str = "") -> Lab:
        """A lab that fits a world, its endpoints answering.

        Labs of different `use` are never the same: what programs one would be lost on another.
        """
        layout, lab = world.layout(), self._labs.get(use)
        if lab is None or not lab.can_hold(layout):
            if lab is not None:
                lab.close()
            lab = self._labs[use] = Lab(layout).__enter__()
        lab.silence()
        lab.extend(layout)
        for address, port, protocol in world.servers():
            lab.serve(address, port, protocol)
        return lab

    def close(self) -> None:
        """Remove the labs."""
        for lab in self._labs.values():
            lab.close()
        self._labs.clear()
