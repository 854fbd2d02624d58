"""The Kubernetes API server: read objects with one Reflector per kind, and create Events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from steersman.model.kube import Node, Pod
from steersman.source.base import EventHandler, SourceStats, Timing
from steersman.source.bodies import body_chunks
from steersman.source.client import ApiClient
from steersman.source.credentials import Credentials
from steersman.source.event_message import encoded_event
from steersman.source.kubeconfig import ClusterAccess
from steersman.source.lister import Lister, Listing
from steersman.source.reflector import Reflector, StoreUpdater
from steersman.source.wire import ApiError, Resource

# -- Watched ---------------------------------------------------------------------------------------


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
        """Configure the source; it connects in `run`.

        Args:
            access: the servers and the credentials.
            node_name: this node's name.
            watch_list: have watches begin with the list (WatchList).
            timing: clock, sleep and periods.
            credentials: made from `access` by default.
        """
        self._access = access
        self._resources = resources(node_name)
        self._watch_list = watch_list
        self._timing = timing or Timing()
        self._credentials = credentials
        self.stats = SourceStats()
        for resource in self._resources:
            self.stats.kind(resource.kind)

    async def run(self, handler: EventHandler) -> None:
        """Feed the handler until cancelled; failures of the servers are retried inside."""
        # One client, so that all kinds move to another server together.
        client = ApiClient(self._access, self.stats, self._timing, self._credentials)
        async with client, asyncio.TaskGroup() as tasks:
            for resource in self._resources:
                reflector = Reflector(
                    client,
                    resource,
                    handler,
                    self.stats.kind(resource.kind),
                    self._timing,
                    watch_list=self._watch_list,
                )
                tasks.create_task(reflector.run(), name=f"source {resource.kind}")


class ApiEventPoster:
    """Creates Events in events.k8s.io/v1; implements `run.events.EventPoster`.

    Events are rare, so each one gets a connection of its own.
    """

    def __init__(self, access: ClusterAccess) -> None:
        self._access = access
        self._credentials = Credentials(access)

    async def post_event(self, namespace: str, event: dict[str, Any]) -> None:
        """Create an Event.

        Raises:
            ApiError: no server accepts it.
        """
        path = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
        async with ApiClient(self._access, SourceStats(), Timing(), self._credentials) as client:
            await client.post_message(path, encoded_event(event), event)


class NoEvents:
    """Discards Events, if there is no API server (manifests); the log has the same information."""

    async def post_event(self, namespace: str, event: dict[str, Any]) -> None:
        """Do nothing."""


# -- Fetched once ----------------------------------------------------------------------------------
#
# Read an API server once, to answer a question: nothing is watched, and no failure is retried.
#
# The running process never asks for the Nodes and Pods that are fetched here.

_TIMING = Timing(connect=5.0, answer=20.0)  # somebody waits for the answer
_MAX_REPLY = 64 << 20  # bytes
_MAX_POD = 4 << 20  # bytes; etcd refuses objects above 1.5 MiB
_NODES = Resource(kind="Node", path="/api/v1/nodes")


async def fetch_objects(access: ClusterAccess, handler: EventHandler) -> None:
    """Feed a handler with all Services, EndpointSlices, Nodes and ServiceCIDRs of a cluster.

    Services that no proxy serves are included. Nodes and ServiceCIDRs may be forbidden.

    Raises:
        ApiError: no server answers as it should; the message names the server.
    """
    async with _client(access) as (client, stats):
        for resource in resources("", everything=True):
            updater = StoreUpdater(resource.kind, handler, stats.kind(resource.kind))
            try:
                listing = await _list(client, stats, resource)
            except ApiError as error:
                if not resource.optional or error.status not in (403, 404):
                    raise
                updater.set_empty()
            else:
                await updater.replace(listing.objects, listing.findings)


async def fetch_nodes(access: ClusterAccess) -> tuple[Node, ...]:
    """Return all Nodes of a cluster, ordered by name.

    Raises:
        ApiError: no server answers as it should, or it forbids that.
    """
    async with _client(access) as (client, stats):
        listing = await _list(client, stats, _NODES)
    nodes = (each for each in listing.objects if isinstance(each, Node))
    return tuple(sorted(nodes, key=lambda node: node.metadata.name))


async def fetch_pod(access: ClusterAccess, namespace: str, name: str) -> Pod | None:
    """Return a pod; None if there is none of this name.

    Raises:
        ApiError: no server answers as it should, or it forbids that.
    """
    path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"
    body = b""
    async with _client(access) as (client, _):
        try:
            async with client.get(path, {}, _TIMING.answer) as response:
                async for chunk in body_chunks(response):
                    body += chunk
                    if len(body) > _MAX_POD:
                        raise ApiError("too_long", f"pod {namespace}/{name} has too many bytes")
        except ApiError as error:
            if error.status == 404:
                return None
            if error.status == 403:
                reason = "the role of a proxy may not; give --kubeconfig with rights to get pods"
                text = f"pod {namespace}/{name} may not be read ({error}): {reason}"
                raise ApiError(error.reason, text, status=403) from error
            raise
        return msgspec.json.decode(body, type=Pod)


async def _list(client: ApiClient, stats: SourceStats, resource: Resource) -> Listing:
    kind = stats.kind(resource.kind)
    return await Lister(client, resource, kind, _TIMING).fetch("0")


@asynccontextmanager
async def _client(access: ClusterAccess) -> AsyncIterator[tuple[ApiClient, SourceStats]]:
    """Yield a client; every failure becomes an ApiError that names the server."""
    stats = SourceStats()
    try:
        async with ApiClient(access, stats, _TIMING) as client:
            yield client, stats
    except ApiError as error:
        text = f"API server {stats.server}: {error}"
        raise ApiError(error.reason, text, status=error.status) from error
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        text = f"API server {stats.server}: unexpected answer: {error}"
        raise ApiError("malformed", text) from error


class Reply(NamedTuple):
    """An answer of the API server to any request."""

    status: int
    headers: Mapping[str, str]
    """By name in lower case; empty if the request was refused."""
    body: object
    """Decoded from JSON; None if the request was refused."""


async def fetch_reply(access: ClusterAccess, path: str) -> Reply:
    """Return the answer to a GET request, also if the API server refuses it.

    Raises:
        ApiError: no server answers.
    """
    body = b""
    async with _client(access) as (client, _):
        try:
            async with client.get(path, {}, _TIMING.answer) as response:
                headers = {name.lower(): value for name, value in response.headers.items()}
                async for chunk in body_chunks(response):
                    body += chunk
                    if len(body) > _MAX_REPLY:
                        raise ApiError("too_long", f"the answer to {path} has too many bytes")
        except ApiError as error:
            if not error.status:
                raise
            return Reply(error.status, {}, None)
    return Reply(200, headers, msgspec.json.decode(body))
