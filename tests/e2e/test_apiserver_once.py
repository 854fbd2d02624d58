"""Reading an API server once, for a question: everything or an error at once."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp.test_utils import unused_port

from steersman.model.names import ObjectName
from steersman.source.fetch import fetch_nodes, fetch_objects, fetch_pod
from steersman.source.kubeconfig import ClusterAccess
from steersman.source.store import Store
from steersman.source.wire import ApiError
from tests.support.apiserver.pods import answering
from tests.support.apiserver.reading import NODE, WORLD, node, service
from tests.support.apiserver.server import ApiServer
from tests.support.builders import kube


def access(server: ApiServer) -> ClusterAccess:
    return ClusterAccess(servers=(server.url,))


async def test_everything_is_read_once_and_nothing_is_watched() -> None:
    other = service("theirs", labels={"service.kubernetes.io/service-proxy-name": "x"})
    headless = kube.service("quiet", "None")
    async with ApiServer((*WORLD, node("node-b"), other, headless)) as server:
        store = Store(NODE)
        await fetch_objects(access(server), store)
        assert {request.verb for request in server.log} == {"list"}
    assert store.synced
    assert set(store.snapshot.services) == {ObjectName("shop", "cart"), ObjectName("shop", "till")}
    assert set(store.unserved) == {ObjectName("shop", "theirs"), ObjectName("shop", "quiet")}
    assert store.snapshot.node is not None
    assert [each.metadata.name for each in store.nodes] == [NODE, "node-b"]


@pytest.mark.parametrize(("kind", "works"), [("Node", True), ("Service", False)])
async def test_only_what_is_optional_may_be_forbidden(kind: str, works: bool) -> None:
    async with ApiServer(WORLD) as server:
        server.fault("status", kind=kind, times=-1, status=403, message="no right")
        store = Store(NODE)
        if works:
            await fetch_objects(access(server), store)
            assert len(store.snapshot.services) == 2
        else:
            with pytest.raises(ApiError, match=rf"API server {server.url}: 403: no right"):
                await fetch_objects(access(server), store)


async def test_all_nodes_are_fetched() -> None:
    async with ApiServer((node("node-b"), node("node-a"))) as server:
        nodes = await fetch_nodes(access(server))
    assert [each.metadata.name for each in nodes] == ["node-a", "node-b"]


async def test_a_server_that_is_not_there_is_named_at_once() -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    with pytest.raises(ApiError, match=f"API server {url}: cannot connect to .*refused"):
        await fetch_nodes(ClusterAccess(servers=(url,)))


async def test_something_else_than_a_list_is_no_list() -> None:
    async with ApiServer(WORLD) as server:
        server.fault("wrong_kind", kind="Node", times=-1)
        with pytest.raises(ApiError, match=f"API server {server.url}: "):
            await fetch_nodes(access(server))


# One pod


async def test_a_pod_is_fetched() -> None:
    value = {
        "kind": "Pod",
        "metadata": {"namespace": "shop", "name": "web-1"},
        "spec": {"nodeName": "node-b", "containers": []},
        "status": {"podIP": "10.1.0.1", "podIPs": [{"ip": "10.1.0.1"}, {"ip": "fd00::1"}]},
    }
    async with answering(value) as (server, paths):
        pod = await fetch_pod(server, "shop", "web-1")
        await fetch_pod(server, "shop", "../secrets")
    assert pod is not None
    assert pod.spec.node_name == "node-b"
    assert pod.status is not None
    assert [each.ip for each in pod.status.pod_ips or ()] == ["10.1.0.1", "fd00::1"]
    assert paths[0] == "/api/v1/namespaces/shop/pods/web-1"
    assert paths[1].startswith("/api/v1/namespaces/shop/pods/..%2F")


async def test_a_pod_that_does_not_exist_is_none() -> None:
    async with answering({"message": "not found"}, 404) as (server, _):
        assert await fetch_pod(server, "shop", "web-1") is None


@pytest.mark.parametrize(
    ("value", "status", "says"),
    [
        (
            {"message": "pods is forbidden"},
            403,
            "pod shop/web-1 may not be read .*pods is forbidden.*give --kubeconfig",
        ),
        ({"message": "broken"}, 500, "500: broken"),
        ({"metadata": 7}, 200, "unexpected answer"),
        ({"fill": "x" * (5 << 20)}, 200, "too many bytes"),
    ],
)
async def test_why_a_pod_cannot_be_read(value: Any, status: int, says: str) -> None:
    async with answering(value, status) as (server, _):
        with pytest.raises(ApiError, match=says):
            await fetch_pod(server, "shop", "web-1")
