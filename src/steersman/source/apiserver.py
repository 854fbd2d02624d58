"""Objects from the Kubernetes API server: one Reflector per kind, on one ApiClient."""

from __future__ import annotations

import asyncio

from steersman.source.backoff import Timing
from steersman.source.base import Sink
from steersman.source.client import ApiClient
from steersman.source.credentials import Credentials
from steersman.source.kubeconfig import ClusterAccess
from steersman.source.reflector import Reflector
from steersman.source.stats import SourceStats
from steersman.source.wire import Resource


def resources(node_name: str) -> tuple[Resource, ...]:
    """Return what is read from the API server, with the selectors of behaviour 2.

    Args:
        node_name: this node's name; without one, no Node is read.
    """
    node = Resource(
        kind="Node",
        path="/api/v1/nodes",
        selectors={"fieldSelector": f"metadata.name={node_name}"},
        optional=True,
    )
    return (
        Resource(
            kind="Service",
            path="/api/v1/services",
            selectors={
                "labelSelector": "!service.kubernetes.io/service-proxy-name",
                "fieldSelector": "spec.clusterIP!=None",
            },
        ),
        Resource(
            kind="EndpointSlice",
            path="/apis/discovery.k8s.io/v1/endpointslices",
            selectors={"labelSelector": "!service.kubernetes.io/headless"},
        ),
        *((node,) if node_name else ()),
        Resource(
            kind="ServiceCIDR",
            path="/apis/networking.k8s.io/v1/servicecidrs",
            optional=True,  # since Kubernetes 1.33; many roles do not name it
        ),
    )


class ApiServerSource:
    """Lists and watches what a node's proxy needs. Implements `source.base.Source`."""

    def __init__(
        self,
        access: ClusterAccess,
        node_name: str,
        *,
        watch_list: bool = True,
        timing: Timing | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Take where to read; nothing happens before `run`.

        Args:
            access: the servers and how to show who we are.
            node_name: this node's name.
            watch_list: try streaming lists first (WatchList).
            timing: clock, sleep and periods.
            credentials: what to show; made from `access` by default.
        """
        self._access = access
        self._resources = resources(node_name)
        self._watch_list = watch_list
        self._timing = timing or Timing()
        self._credentials = credentials
        self.stats = SourceStats()
        for resource in self._resources:
            self.stats.kind(resource.kind)

    async def run(self, sink: Sink) -> None:
        """Feed the sink until cancelled; whatever the servers do is retried inside."""
        client = ApiClient(self._access, self.stats, self._timing, self._credentials)
        async with client, asyncio.TaskGroup() as tasks:
            for resource in self._resources:
                reflector = Reflector(
                    client,
                    resource,
                    sink,
                    self.stats.kind(resource.kind),
                    self._timing,
                    watch_list=self._watch_list,
                )
                tasks.create_task(reflector.run(), name=f"source {resource.kind}")
