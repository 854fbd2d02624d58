"""Traces of changes for OpenTelemetry: which part of the way to the kernel took how long.

    change      from its cause (the trigger time of an EndpointSlice) until it is visible
      deliver   until this process received the event
      queue     until the sync began
      plan, render, read, diff, apply
      publish   until health, metrics and pages show it

The spans of a sync are made from its report when it has ended, and given to the SDK with their
times; a thread of the SDK sends them. Nothing of OpenTelemetry is imported unless it is configured.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from steersman import __version__
from steersman.config.types import Tracing
from steersman.model.findings import clipped
from steersman.model.names import ObjectName
from steersman.run.observe.sync_metrics import causes
from steersman.run.process.startup import StartError
from steersman.run.sync.in_force import InForce, services_of
from steersman.run.sync.state import SyncReport

log = logging.getLogger(__name__)

_NAMES, _LONGEST = 5, 200
"""Services that a trace names, and characters of each."""
_MOST_TIMES = 1000
"""Trigger times that are looked at in one report."""
_QUEUE = 2048
"""Spans that wait to be sent; more are dropped."""
_FLUSH_SECONDS = 0.5


class Span(NamedTuple):
    """A span; times are seconds since 1970."""

    name: str
    start: float
    end: float


def spans_of(
    report: SyncReport, received: float | None, now: float, started: float
) -> Iterator[Span]:
    """Yield the spans of a sync, that of the whole change first.

    Args:
        received: when the first change came, in seconds since 1970; None if there was none.
        started: when the process started: older causes say nothing about it.
    """
    assert report.result is not None
    applied = report.state.at
    began = applied - report.result.seconds
    received = began if received is None else min(received, began)
    times = islice(report.arrivals.trigger_times, _MOST_TIMES)
    cause = min([received, *causes(times, started)])
    yield Span("change", cause, max(now, applied))
    if cause < received:
        yield Span("deliver", cause, received)
    if received < began:
        yield Span("queue", received, began)
    for phase, seconds in report.result.phases.items():
        yield Span(phase, began, began + seconds)
        began += seconds
    yield Span("publish", applied, max(now, applied))


def attributes_of(
    report: SyncReport, node: str, services: Collection[ObjectName]
) -> Mapping[str, str | int | list[str]]:
    """Return the attributes of the span of the whole change."""
    assert report.result is not None
    result, names = report.result, islice(services, _NAMES)
    return {
        "k8s.node.name": node,
        "steersman.mode": report.state.mode,
        "steersman.revision": result.revision,
        "steersman.reason": result.reason,
        "steersman.services": len(services),
        "steersman.service_names": sorted(clipped(str(name), _LONGEST) for name in names),
        "steersman.planned": result.dirty,
        "steersman.objects.added": result.added,
        "steersman.objects.changed": result.changed,
        "steersman.objects.removed": result.removed,
        "steersman.refused": result.refused,
    }


class ChangeTracer:
    """Gives the spans of each sync to the OpenTelemetry SDK."""

    def __init__(self, config: Tracing, in_force: InForce, node: Callable[[], str]) -> None:
        """Set up the SDK; its thread sends spans from now on.

        Raises:
            StartError: the packages are not installed.
        """
        self._node = node
        self._cursor = in_force.log.cursor()
        self._started = time.time()
        try:
            # Half a second and 20 MB, for those who want it only.
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
                OTLPSpanExporter,
            )
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
            from opentelemetry.sdk.trace.sampling import TraceIdRatioBased  # noqa: PLC0415
            from opentelemetry.trace import set_span_in_context  # noqa: PLC0415
        except ImportError as error:
            raise StartError(
                f"steersman.tracing.endpoint needs packages that are not installed ({error.name}): "
                "install steersman[otel], or remove the setting"
            ) from error
        resource = {"service.name": "steersman", "service.version": __version__}
        self._provider = TracerProvider(
            sampler=TraceIdRatioBased(config.sampling_rate_per_million / 1_000_000),
            resource=Resource.create(resource),
            shutdown_on_exit=False,  # a receiver that hangs must not delay the end
        )
        endpoint = config.endpoint.rstrip("/")
        if not endpoint.endswith("/v1/traces"):
            endpoint += "/v1/traces"
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=5)
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter, max_queue_size=_QUEUE, schedule_delay_millis=1000)
        )
        self._tracer = self._provider.get_tracer("steersman", __version__)
        self._parent = set_span_in_context
        log.info("changes are traced to %s", endpoint)

    def observe(self, report: SyncReport) -> None:
        """Trace a sync; to be called after all other observers."""
        if report.result is None:
            return
        names, revision = self._cursor.changed()
        now, received = time.time(), report.arrivals.received
        if received is not None:
            received += now - time.monotonic()
        whole, *parts = spans_of(report, received, now, self._started)
        attributes = attributes_of(report, self._node(), services_of(names))
        root = self._tracer.start_span(
            whole.name, start_time=int(whole.start * 1e9), attributes=attributes
        )
        if root.is_recording():
            context = self._parent(root)
            for part in parts:
                span = self._tracer.start_span(part.name, context, start_time=int(part.start * 1e9))
                span.end(int(part.end * 1e9))
        root.end(int(whole.end * 1e9))
        self._cursor.move(revision)

    async def run(self) -> None:
        """Wait until cancelled; then send the spans that are left if that is fast, and close."""
        try:
            await asyncio.Event().wait()
        finally:
            # The SDK ignores the time limit of a flush and tries again for many seconds.
            flush = asyncio.create_task(asyncio.to_thread(self._provider.force_flush))
            await asyncio.wait({flush}, timeout=_FLUSH_SECONDS)
            self._exporter.shutdown()  # type: ignore[no-untyped-call] # ends the flush too
            await asyncio.to_thread(self._provider.shutdown)
            await flush
