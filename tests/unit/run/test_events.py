from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import pytest

from steersman.model.names import ObjectName
from steersman.run.observe.events import Event, Recorder, Regarding


class Poster:
    def __init__(self) -> None:
        self.posted: list[tuple[str, Event]] = []
        self.fails = False

    async def post_event(self, namespace: str, event: Event) -> None:
        if self.fails:
            raise OSError("403 Forbidden")
        self.posted.append((namespace, event))


class Clock:
    def __init__(self) -> None:
        self.now = 1_795_232_991_717_324_000

    def __call__(self) -> int:
        return self.now


async def deliver(recorder: Recorder) -> None:
    task = asyncio.create_task(recorder.run())
    async with asyncio.timeout(60):
        await recorder.flush()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_starting_is_said_of_the_node() -> None:
    poster = Poster()
    recorder = Recorder(poster, "peer-node", hostname="vm", clock=Clock())
    recorder.starting()
    await deliver(recorder)
    assert poster.posted == [
        (
            "default",
            {
                "apiVersion": "events.k8s.io/v1",
                "kind": "Event",
                "metadata": {"name": "peer-node.18e9f2e4f85f74e0", "namespace": "default"},
                "eventTime": "2026-11-21T03:49:51.717324Z",
                "reportingController": "kube-proxy",
                "reportingInstance": "kube-proxy-vm",
                "action": "StartKubeProxy",
                "reason": "Starting",
                "regarding": {"apiVersion": "v1", "kind": "Node", "name": "peer-node"},
                "type": "Normal",
            },
        )
    ]


async def test_a_failed_health_check_is_said_of_the_service() -> None:
    poster = Poster()
    recorder = Recorder(poster, "n")
    recorder.health_check_failed(ObjectName("shop", "cart"), 30001, "address in use")
    await deliver(recorder)
    ((namespace, event),) = poster.posted
    assert namespace == "shop"
    assert event["metadata"]["namespace"] == "shop"
    assert (event["type"], event["action"]) == ("Warning", "Listen")
    assert event["reason"] == "FailedToStartServiceHealthcheck"
    assert event["note"] == (
        'node n failed to start healthcheck "shop/cart" on port 30001: address in use'
    )
    assert event["regarding"] == {
        "apiVersion": "v1",
        "kind": "Service",
        "name": "cart",
        "namespace": "shop",
    }


async def test_the_same_event_is_not_repeated_too_soon() -> None:
    poster, clock = Poster(), Clock()
    recorder = Recorder(poster, "n", clock=clock)
    recorder.starting()
    clock.now += 599 * 10**9
    recorder.starting()
    recorder.node("Warning", "IPVSDeprecation", "StartKubeProxy", "ipvs goes")
    clock.now += 10**9
    recorder.starting()
    await deliver(recorder)
    reasons = [event["reason"] for _, event in poster.posted]
    assert reasons == ["Starting", "IPVSDeprecation", "Starting"]


async def test_failures_are_logged_and_the_next_is_posted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    poster = Poster()
    poster.fails = True
    recorder = Recorder(poster, "n")
    recorder.starting()
    with caplog.at_level(logging.WARNING):
        await deliver(recorder)
    assert "Starting could not be posted: 403 Forbidden" in caplog.text
    poster.fails = False
    recorder.node("Normal", "Other", "Do", "x" * 5000)
    await deliver(recorder)
    assert len(poster.posted[0][1]["note"]) == 1024


async def test_too_many_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(Poster(), "n")
    about = Regarding("Service", "cart", "shop", uid="u-1")
    assert about.reference()["uid"] == "u-1"
    with caplog.at_level(logging.WARNING):
        for index in range(101):
            recorder.record(Regarding("Service", f"cart{index}"), "Normal", "Reason", "Do", "")
    assert "dropped Reason about cart100" in caplog.text


async def test_one_object_cannot_flood_the_api_server() -> None:
    poster, clock = Poster(), Clock()
    recorder = Recorder(poster, "n", clock=clock)
    evil, good = ObjectName("evil", "web"), ObjectName("shop", "web")
    for number in range(5000):
        clock.now += 1
        recorder.health_check_failed(evil, 30000 + number, "in use\n" * 1000)
    recorder.health_check_failed(good, 30001, "in use")
    await deliver(recorder)
    namespaces = [namespace for namespace, _ in poster.posted]
    assert (namespaces.count("evil"), namespaces.count("shop")) == (25, 1)
    assert all(event["note"].isprintable() for _, event in poster.posted)
    assert all(len(event["note"].encode()) <= 1024 for _, event in poster.posted)
    clock.now += 601 * 10**9
    recorder.health_check_failed(evil, 30000, "in use")
    await deliver(recorder)
    assert len(poster.posted) == 27


async def test_what_is_remembered_of_events_is_bounded() -> None:
    recorder = Recorder(Poster(), "n", clock=Clock())
    for number in range(50):
        for port in range(30000, 30040):
            recorder.health_check_failed(ObjectName("shop", f"s{number}"), port, "in use")
        await deliver(recorder)
    assert len(recorder._recorded) <= 1000
    assert recorder._counts.total() == len(recorder._recorded)
