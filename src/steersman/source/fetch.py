"""Read an API server once, to answer a question: nothing is watched, and no failure is retried.

The running process never asks for the Nodes and Pods that are fetched here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from steersman.model.kube import Node, Pod
from steersman.source.apiserver import resources
from steersman.source.base import replace_all
from steersman.source.client import ApiClient, Connections, read_body
from steersman.source.kubeconfig import ClusterAccess
from steersman.source.lister import Lister, Listing
from steersman.source.pace import Timing
from steersman.source.stats import SourceStats
from steersman.source.store import Store
from steersman.source.wire import ApiError, Resource

_TIMING = Timing(connect=5.0, answer=20.0)  # somebody waits for the answer
_MAX_REPLY = 64 << 20  # bytes
_MAX_POD = 4 << 20  # bytes; etcd refuses objects above 1.5 MiB
_NODES = Resource(kind="Node", path="/api/v1/nodes")


async def fetch_objects(access: ClusterAccess, store: Store) -> None:
    """Feed a Store with all Services, EndpointSlices, Nodes and ServiceCIDRs of a cluster.

    Services that no proxy serves are included. Nodes and ServiceCIDRs may be forbidden.

    Raises:
        ApiError: no server answers as it should; the message names the server.
    """
    async with _client(access) as (client, stats):
        for resource in resources("", everything=True):
            try:
                listing = await _list(client, stats, resource)
            except ApiError as error:
                if not resource.optional or error.status not in (403, 404):
                    raise
                store.retain(resource.kind, ())
            else:
                await replace_all(store, resource.kind, listing.objects, listing.findings)


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
    async with _client(access) as (client, _):
        try:
            async with client.get(path, {}, _TIMING.answer) as response:
                body = await read_body(response, _MAX_POD, path)
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
        async with aclosing(Connections(access, _TIMING)) as connections:
            yield ApiClient(connections, stats, _TIMING), stats
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
    async with _client(access) as (client, _):
        try:
            async with client.get(path, {}, _TIMING.answer) as response:
                body, headers = await read_body(response, _MAX_REPLY, path), response.headers
        except ApiError as error:
            if not error.status:
                raise
            return Reply(error.status, {}, None)
    return Reply(200, headers, msgspec.json.decode(body))
