"""Traces of changes: spans with the times of the report, sent by the real exporter."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime

import pytest

from steersman.config.types import Tracing
from steersman.model.names import ObjectName
from steersman.run.observe.change_trace import ChangeTracer, Span, spans_of
from steersman.run.process.startup import StartError
from steersman.run.sync.in_force import InForce
from steersman.run.sync.state import State, SyncReport, SyncResult, Written
from steersman.source.store import Arrivals, Change
from tests.support.otlp import otlp_receiver

WEB = ObjectName("shop", "web")


def report(at: float, *triggers: float | str, received: float | None = None) -> SyncReport:
    times = tuple(
        each if isinstance(each, str) else datetime.fromtimestamp(each, UTC).isoformat()
        for each in triggers
    )
    result = SyncResult(7, "changes", 1, 2, 0, 1, {"plan": 0.5, "render": 0.25, "apply": 1.0})
    arrivals = Arrivals(received, times)
    return SyncReport(State(at=at, result=result), result, arrivals, Written(), compared=False)


def in_force() -> InForce:
    """A sync about a Service."""
    found = InForce()
    found.log.touch(Change("EndpointSlice", WEB))
    return found


def test_the_spans_follow_each_other_from_the_cause_on() -> None:
    found = list(spans_of(report(1010.0, 1003.0, 1001.5), 1006.0, 1010.5, 1000.0))
    assert found == [
        Span("change", 1001.5, 1010.5),
        Span("deliver", 1001.5, 1006.0),
        Span("queue", 1006.0, 1008.25),
        Span("plan", 1008.25, 1008.75),
        Span("render", 1008.75, 1009.0),
        Span("apply", 1009.0, 1010.0),
        Span("publish", 1010.0, 1010.5),
    ]


@pytest.mark.parametrize("trigger", [999.0, 1007.0, "yesterday", "2001-01-01T00:00:00"], ids=str)
def test_other_causes_are_left_out(trigger: float | str) -> None:
    """Before the start, after the event (a clock that is ahead), or no time at all."""
    found = list(spans_of(report(1010.0, trigger), 1006.0, 1010.5, 1000.0))
    assert found[0] == Span("change", 1006.0, 1010.5)
    assert found[1].name == "queue"


def test_a_sync_without_changes_begins_with_itself() -> None:
    found = list(spans_of(report(1010.0), None, 1009.0, 1000.0))
    assert [span.name for span in found] == ["change", "plan", "render", "apply", "publish"]
    assert found[0] == Span("change", 1008.25, 1010.0)


async def test_the_exporter_sends_them_with_their_parent() -> None:
    async with otlp_receiver() as (received, url):
        tracer = ChangeTracer(Tracing(endpoint=url), in_force(), lambda: "node-a")
        running = asyncio.create_task(tracer.run())
        now = time.time()
        tracer.observe(report(now, received=time.monotonic() - 300))
        async with asyncio.timeout(60):
            await received.news.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    (root,) = received.named("change")
    parts = [span for span in received.spans if span is not root]
    assert [span["name"] for span in parts] == ["queue", "plan", "render", "apply", "publish"]
    assert {span["parentSpanId"] for span in parts} == {root["spanId"]}
    assert {span["traceId"] for span in parts} == {root["traceId"]}
    assert abs(int(root["startTimeUnixNano"]) / 1e9 - (now - 300)) < 100
    attributes = {each["key"]: each["value"] for each in root["attributes"]}
    assert attributes["k8s.node.name"] == {"stringValue": "node-a"}
    assert attributes["steersman.revision"] == {"intValue": "7"}
    names = attributes["steersman.service_names"]["arrayValue"]["values"]
    assert names == [{"stringValue": "shop/web"}]
    assert received.resource["service.name"] == "steersman"


async def test_only_a_share_is_sampled() -> None:
    async with otlp_receiver() as (received, url):
        config = Tracing(endpoint=f"{url}/v1/traces", sampling_rate_per_million=0)
        tracer = ChangeTracer(config, in_force(), lambda: "node-a")
        running = asyncio.create_task(tracer.run())
        for _ in range(50):
            tracer.observe(report(time.time()))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)  # it sends all that is left
        assert received.spans == []


async def test_a_receiver_that_is_gone_costs_nothing() -> None:
    before = set(threading.enumerate())
    tracer = ChangeTracer(Tracing(endpoint="http://127.0.0.1:9"), in_force(), lambda: "node-a")
    running = asyncio.create_task(tracer.run())
    began = time.monotonic()
    for _ in range(3000):
        tracer.observe(report(time.time()))
    assert time.monotonic() - began < 300, "one that waited would wait for seconds each time"
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    # The SDK's thread ends too, also while it waits to try again.
    left = {each for each in threading.enumerate() if each.name.startswith("Otel")} - before
    assert not left


def test_without_the_packages_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(StartError, match=r"install steersman\[otel\]"):
        ChangeTracer(Tracing(endpoint="http://127.0.0.1:4318"), InForce(), lambda: "")


def test_nothing_of_it_is_imported_unless_it_is_on() -> None:
    code = (
        "import steersman.run.process.assemble, sys; "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
