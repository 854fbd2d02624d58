"""Events reach events.k8s.io; where they do not, the log says so and nothing else happens."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from steersman.model.names import ObjectName
from steersman.run.observe.events import Recorder
from steersman.source.client import Connections
from steersman.source.events import ApiEventPoster
from steersman.source.kubeconfig import ClusterAccess, Material
from steersman.source.pace import Timing
from steersman.source.stats import RequestStats
from steersman.source.wire import ApiError
from tests.support.apiserver.certificates import Authority
from tests.support.apiserver.server import ApiServer

NODE = "node-a"
NOBODY = "http://127.0.0.1:1"
REFUSALS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"what": "status", "status": 401}, "http_401"),
    ({"what": "status", "status": 403, "message": "events is forbidden"}, "http_403"),
    ({"what": "status", "status": 429, "retry_after": 1}, "http_429"),
    ({"what": "status", "status": 500}, "http_500"),
    ({"what": "html"}, "not_json"),
    ({"what": "redirect"}, "redirect"),
    ({"what": "drop"}, "connection"),
)


def poster_to(access: ClusterAccess, requests: RequestStats | None = None) -> ApiEventPoster:
    return ApiEventPoster(Connections(access, Timing()), requests)


@asynccontextmanager
async def recording(access: ClusterAccess) -> AsyncIterator[Recorder]:
    """A Recorder at work, with a clock that never stands still."""
    clock = itertools.count(1_800_000_000_000_000_000, 1_000_000)
    recorder = Recorder(poster_to(access), NODE, hostname="host", clock=lambda: next(clock))
    task = asyncio.create_task(recorder.run())
    try:
        yield recorder
        async with asyncio.timeout(60):
            await recorder.flush()
        assert not task.done(), "the recorder ended by itself"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_event_is_created_with_all_that_the_api_asks_for(tmp_path: Path) -> None:
    authority = Authority()
    async with ApiServer(tls=authority.server_context(tmp_path)) as server:
        access = ClusterAccess(
            servers=(server.url,), ca=Material(data=authority.pem), token="secret"
        )
        async with recording(access) as recorder:
            recorder.starting()
            recorder.health_check_failed(ObjectName("shop", "web"), 32100, "in use")
        (starting, failed) = server.events
        assert starting["reason"] == "Starting"
        assert starting["regarding"] == {"apiVersion": "v1", "kind": "Node", "name": NODE}
        assert starting["reportingInstance"] == "kube-proxy-host"
        assert failed["metadata"]["namespace"] == "shop"
        assert failed["note"].endswith("on port 32100: in use")
        headers = server.requests("Event")[0].headers
        assert headers["Authorization"] == "Bearer secret"
        assert headers["Content-Type"] == "application/vnd.kubernetes.protobuf"


async def test_an_event_is_posted_in_json_where_the_server_speaks_no_protobuf() -> None:
    async with ApiServer() as server:
        server.protobuf = False
        async with recording(ClusterAccess(servers=(server.url,))) as recorder:
            recorder.starting()
        assert [event["reason"] for event in server.events] == ["Starting"]
        kinds = [each.headers["Content-Type"] for each in server.requests("Event")]
        assert kinds == ["application/vnd.kubernetes.protobuf", "application/json"]


@pytest.mark.parametrize(("fault", "reason"), REFUSALS, ids=[reason for _, reason in REFUSALS])
async def test_a_refusal_is_an_api_error(fault: dict[str, Any], reason: str) -> None:
    async with ApiServer() as server:
        server.fault(kind="Event", verb="create", **fault)
        poster = poster_to(ClusterAccess(servers=(server.url,)))
        with pytest.raises(ApiError) as caught:
            await poster.post_event("default", {"metadata": {"name": "a"}})
        assert caught.value.reason == reason
        assert not server.events
        assert len(server.requests("Event")) == 1  # a refusal is final: nobody waits for Events


@pytest.mark.parametrize("fault", [fault for fault, _ in REFUSALS],
                         ids=[reason for _, reason in REFUSALS])  # fmt: skip
async def test_a_refusal_is_logged_and_the_next_event_is_posted(
    fault: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with ApiServer() as server:
        server.fault(kind="Event", verb="create", **fault)
        with caplog.at_level(logging.WARNING):
            async with recording(ClusterAccess(servers=(server.url,))) as recorder:
                recorder.starting()
                recorder.node("Warning", "Later", "Test", "posted all the same")
        assert "event Starting could not be posted: " in caplog.text
        assert [event["reason"] for event in server.events] == ["Later"]


async def test_what_the_server_finds_wrong_is_in_the_error() -> None:
    async with ApiServer() as server:
        poster = poster_to(ClusterAccess(servers=(server.url,)))
        event = {"metadata": {"name": "a", "namespace": "elsewhere"}}
        with pytest.raises(ApiError, match="400: the namespace of the object"):
            await poster.post_event("default", event)
        event = {"metadata": {"name": "a", "namespace": "default"}}
        with pytest.raises(ApiError, match="422: Event is invalid: eventTime"):
            await poster.post_event("default", event)


async def test_requests_are_counted_by_status_and_server() -> None:
    event = {"metadata": {"name": "a", "namespace": "default"}}
    async with ApiServer() as server:
        counts = RequestStats()
        for url in (server.url, NOBODY):
            with pytest.raises(ApiError):
                await poster_to(ClusterAccess(servers=(url,)), counts).post_event("default", event)
    nobody, host = (url.removeprefix("http://") for url in (NOBODY, server.url))
    assert counts.codes["422", "POST", host] == 1
    assert counts.codes["<error>", "POST", nobody] == 1
    durations = {key: sum(each.counts) for key, each in counts.durations.items()}
    assert sum(durations.values()) == counts.codes.total()


async def test_the_same_event_twice_is_a_conflict() -> None:
    async with ApiServer() as server:
        access = ClusterAccess(servers=(server.url,))
        async with recording(access) as recorder:
            recorder.starting()
        with pytest.raises(ApiError) as caught:
            await poster_to(access).post_event("default", server.events[0])
        assert caught.value.reason == "http_409"


async def test_the_next_server_is_asked_where_one_is_down() -> None:
    async with ApiServer() as server:
        async with recording(ClusterAccess(servers=(NOBODY, server.url))) as recorder:
            recorder.starting()
        assert [event["reason"] for event in server.events] == ["Starting"]


async def test_no_server_at_all_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with recording(ClusterAccess(servers=(NOBODY,))) as recorder:
            recorder.starting()
    assert "event Starting could not be posted: " in caplog.text


async def test_an_unreadable_token_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with ApiServer() as server:
        url = server.url.replace("http:", "https:")
        access = ClusterAccess(servers=(url,), token_file="/nowhere/token")
        with caplog.at_level(logging.WARNING):
            async with recording(access) as recorder:
                recorder.starting()
        assert "posted: token file /nowhere/token: No such file or directory" in caplog.text
        assert not server.log
