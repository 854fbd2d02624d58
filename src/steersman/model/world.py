"""The World: everything that is known when an operator asks a question.

It comes from the running process, from manifests or from an API server, and every answer is
computed from it in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from steersman.model.findings import Finding
from steersman.model.inputs import HostFacts, NodeConfig, Snapshot
from steersman.model.kube import Node, Service
from steersman.model.names import ObjectName
from steersman.model.node_state import NodeState
from steersman.model.plan import NodePlan


class Origin(msgspec.Struct, frozen=True):
    """The place that a World was read from."""

    kind: Literal["process", "manifests", "apiserver"]
    text: str
    """For people, such as `the running process (pid 4211, nftables mode)`."""
    hung: str = ""
    """Why the running process, which was meant, was not asked."""


class World(msgspec.Struct, frozen=True):
    """Everything known about the cluster and this node. Read-only."""

    origin: Origin
    snapshot: Snapshot
    plan: NodePlan
    """The plan of this node; its Findings are in `findings`, too."""
    mode: str
    variant: str = ""
    """Tool or flavour of the mode in use, such as `legacy`; "" if it is not known."""
    config: NodeConfig = NodeConfig()
    facts: HostFacts = HostFacts()
    findings: tuple[Finding, ...] = ()
    """Findings of the source, of the compiler and, from the running process, of the kernel."""
    nodes: tuple[Node, ...] = ()
    """All Nodes that are known, this one included."""
    unserved: Mapping[ObjectName, Service] = {}
    """Services that this proxy does not serve: headless, ExternalName, or another proxy's."""
    process: NodeState | None = None
    """The running process that this World is of; None if it is read from elsewhere."""

    @property
    def not_yet(self) -> str:
        """Why a process that has just started serves no Service yet; "" if it may."""
        process = self.process
        if process is None or process.synced_at or self.plan.services:
            return ""
        return f"not served yet: the process waits for {process.waiting or 'its first sync'}"

    def service(self, name: ObjectName) -> Service | None:
        """Return a Service, served here or not; None if it is not known."""
        return self.snapshot.services.get(name) or self.unserved.get(name)

    def why_unserved(self, service: Service) -> str:
        """Return why a Service has no plan: no proxy serves it, or not this one, or not yet."""
        spec, labels = service.spec, service.metadata.labels
        if labels is not None and labels.proxy_name is not None:
            return (
                "another proxy serves it: its label service.kubernetes.io/service-proxy-name is"
                f" {labels.proxy_name!r}"
            )
        if spec.type == "ExternalName":
            target = spec.external_name or "another name"
            return f"ExternalName: cluster DNS answers with {target}, no proxy takes part"
        if spec.cluster_ip == "None":
            return (
                "headless (clusterIP None): cluster DNS answers with the addresses of its pods, no"
                " proxy takes part"
            )
        if not spec.ports:
            return "it has no port"
        if not spec.cluster_ip:
            return "it has no clusterIP yet, which the API server assigns"
        return self.not_yet or (
            "it has no valid clusterIP in a family that this node serves, or no port that is valid"
            " and free"
        )
