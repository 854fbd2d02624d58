"""The Kubernetes API server as a Source: one Reflector for each kind of object."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from steersman.source.client import ApiClient, Connections
from steersman.source.credentials import Credentials
from steersman.source.kubeconfig import ClusterAccess
from steersman.source.pace import Timing
from steersman.source.reflector import Reflector
from steersman.source.stats import SourceStats
from steersman.source.store import Store
from steersman.source.wire import Resource


def resources(node_name: str, *, everything: bool = False) -> tuple[Resource, ...]:
    """Return the resources to read, with the selectors of behaviour 2.

    Args:
        node_name: this node's name; if empty, no Node is read.
        everything: read all Nodes, and the Services of others, too: to answer a question.
    """
    node = Resource(
        kind="Node",
        path="/api/v1/nodes",
        selectors={} if everything else {"fieldSelector": f"metadata.name={node_name}"},
        optional=True,
    )
    return (
        Resource(
            kind="Service",
            path="/api/v1/services",
            selectors={}
            if everything
            else {
                "labelSelector": "!service.kubernetes.io/service-proxy-name",
                "fieldSelector": "spec.clusterIP!=None",
            },
        ),
        Resource(
            kind="EndpointSlice",
            path="/apis/discovery.k8s.io/v1/endpointslices",
            selectors={"labelSelector": "!service.kubernetes.io/headless"},
        ),
        *((node,) if node_name or everything else ()),
        Resource(
            kind="ServiceCIDR",
            path="/apis/networking.k8s.io/v1/servicecidrs",
            optional=True,  # since Kubernetes 1.33; many roles lack it
        ),
    )


class ApiServerSource:
    """Lists and watches the objects that a node's proxy needs. Implements `source.base.Source`."""

    def __init__(
        self,
        access: ClusterAccess,
        node_name: str,
        *,
        watch_list: bool = False,
        timing: Timing | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self._resources = resources(node_name)
        self._watch_list = watch_list
        self._timing = timing or Timing()
        self.connections = Connections(access, self._timing, credentials)
        """Open until `run` ends."""
        self.stats = SourceStats()
        for resource in self._resources:
            self.stats.kind(resource.kind)

    async def run(self, store: Store) -> None:
        """Feed the Store until cancelled; failures of the servers are retried inside."""
        # One client, so that all kinds move to another server together.
        client = ApiClient(self.connections, self.stats, self._timing)
        async with aclosing(self.connections), asyncio.TaskGroup() as tasks:
            for resource in self._resources:
                reflector = Reflector(
                    client,
                    resource,
                    store,
                    self.stats.kind(resource.kind),
                    self._timing,
                    watch_list=self._watch_list,
                )
                tasks.create_task(reflector.run(), name=f"source {resource.kind}")
