"""Pods at the test API server: an answer about one of them, and the proxy to their ports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from steersman.source.kubeconfig import ClusterAccess
from tests.support.apiserver.answers import answer_status
from tests.support.apiserver.world import Kind, Object

PROXY = "/api/v1/namespaces/{namespace}/pods/{pod}/proxy/{path:.*}"
PROXIED = Kind("pods/proxy", "v1", "/api/v1/pods/proxy", {})
_OURS = ("authorization", "host", "content-length", "transfer-encoding")


def steersman_pod(node: str, *, port: int | None = 10259, phase: str = "Running") -> Object:
    """The pod of steersman on a node, as the chart makes it."""
    ports = [{"name": "healthz", "containerPort": 10256}]
    if port is not None:
        ports.append({"name": "state", "containerPort": port})
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": f"steersman-{node}",
            "namespace": "kube-system",
            "labels": {"app.kubernetes.io/name": "steersman"},
        },
        "spec": {"nodeName": node, "containers": [{"name": "steersman", "ports": ports}]},
        "status": {"phase": phase, "podIP": "127.0.0.1"},
    }


async def proxy(request: web.Request, urls: Mapping[tuple[str, str], str]) -> web.StreamResponse:
    """Pass a request on to a pod, without the caller's credentials, as the API server does."""
    info = request.match_info
    url = urls.get((info["namespace"], info["pod"]))
    if url is None:
        return answer_status(request, 404, f'pods "{info["pod"]}" not found')
    kept = [(k, v) for k, v in request.headers.items() if k.lower() not in _OURS]
    target = f"{url}/{info['path']}" + (f"?{request.query_string}" if request.query_string else "")
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        try:
            answer = await session.request(
                request.method, target, headers=kept, data=await request.read() or None
            )
        except aiohttp.ClientConnectorError as error:
            text = f"error trying to reach service: {error}"
            return answer_status(request, 503, text)
        response = web.StreamResponse(status=answer.status)
        response.content_type = answer.content_type
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        return response


@asynccontextmanager
async def answering(
    value: Any, status: int = 200
) -> AsyncIterator[tuple[ClusterAccess, list[str]]]:
    """An API server with one answer, and the paths that it was asked for."""
    paths: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        paths.append(request.rel_url.raw_path)
        return web.json_response(value, status=status)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        yield ClusterAccess(servers=(f"http://{host}:{port}",)), paths
    finally:
        await runner.cleanup()
