"""The metrics server (behaviour 13): `/metrics`, `/proxyMode`, `/configz` and debugging pages.

Every page is a function of its source in `Pages`. Pages that are expensive to build go through a
`PageBuilder` (page_builder.py). `/metrics` has a builder of its own, so that no other page delays a
scrape.
"""

from __future__ import annotations

import asyncio
import io
import math
import platform
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import msgspec

from steersman import __version__
from steersman.model.addresses import without_password
from steersman.model.errors import ApplyError, BusyError
from steersman.run.observe.metrics import Metrics
from steersman.run.observe.prometheus import (
    CONTENT_TYPE,
    Counted,
    Counter,
    Declared,
    Gauge,
    Labelled,
    Metric,
    exposition,
)
from steersman.run.observe.service_metrics import MOST_SERIES, ServiceFilter
from steersman.run.serve.http import Answer, App, Page, Request, application
from steersman.run.serve.page_builder import PageBuilder, TooManyPagesError

_RETRY_AFTER = 5
"""Seconds after which a rejected client may ask again."""
_NOT_FOR_MACHINES = (
    "Warning: This endpoint is not meant to be machine parseable, has no formatting "
    "compatibility guarantees and is for debugging purposes only."
)
_PROFILE_SECONDS, _MOST_PROFILE_SECONDS = 30.0, 300.0
_MOST_DIGITS = 9
_LONGEST_NAME = 253
_EMULATES = "1.36"
_JSON = "application/json"
_CHECK = Declared(Gauge, "kubernetes_healthcheck", "1 while a check succeeds.", ("name", "type"))
_CHECKS = Counted(
    Counter,
    "kubernetes_healthchecks_total",
    "Number of checks by result.",
    ("name", "type", "status"),
)


async def nothing_more() -> Iterable[Metric]:
    """Return no metrics."""
    return ()


class Pages(msgspec.Struct, frozen=True):
    """The sources of the pages; a page whose source is None does not exist."""

    metrics: Metrics
    mode: Callable[[], str]
    """Returns the name of the mode that serves."""
    configz: Callable[[], bytes] | None = None
    """The configuration in force as JSON, under its component name."""
    flags: Callable[[], str] | None = None
    """The page of flags and their values (`/flagz`)."""
    state: Callable[[], Iterator[bytes]] | None = None
    """The State as JSON (beyond upstream), in pieces made on demand."""
    more: Callable[[], Awaitable[Iterable[Metric]]] = nothing_more
    """Returns the metrics of `/metrics` that are not in the registry."""
    services: Callable[[ServiceFilter], Awaitable[Iterable[Metric]]] | None = None
    """Returns the series of Services, for `/metrics/services`."""
    healthy: Callable[[], bool] = lambda: True
    """Whether the kernel follows the cluster, for `/metrics/slis`."""
    statusz: bool = True
    profiling: bool = False
    """`/debug/pprof` and `/debug/flags/v` are served too."""
    set_verbosity: Callable[[int], None] = lambda _verbosity: None
    started: float = 0.0
    """When the process started, in seconds since 1970."""
    clock: Callable[[], float] = time.time


def metrics_app(pages: Pages) -> App:
    """Return the application of `metricsBindAddress`."""
    scrapes, details = PageBuilder(), PageBuilder()

    async def metrics() -> Iterator[bytes]:
        more = await pages.more()
        return exposition(chain(pages.metrics.collect(), more))

    # A page whose source is missing does not exist, and is not listed by /statusz either.
    found: dict[str, Page] = {
        "/healthz": lambda _: Answer("ok"),
        "/proxyMode": lambda _: Answer(pages.mode()),
        "/metrics": lambda _: _built(scrapes, "/metrics", metrics, CONTENT_TYPE),
        "/metrics/slis": _slis(pages.healthy),
    }
    if (services := pages.services) is not None:
        found["/metrics/services"] = _services(services, details)
    if (configz := pages.configz) is not None:
        found["/configz"] = lambda _: Answer(configz(), content_type=_JSON)
    if (state := pages.state) is not None:

        async def make_state() -> Iterator[bytes]:
            return state()

        found["/state"] = lambda _: _built(details, "/state", make_state, _JSON, nosniff=True)
    if (flags := pages.flags) is not None:
        found["/flagz"] = lambda _: Answer(flags(), nosniff=False)
    if pages.statusz:
        listed = tuple(sorted(found.keys() - {"/metrics/slis"}))
        found["/statusz"] = lambda _: Answer(statusz(pages, listed), nosniff=False)
    if pages.profiling:
        found |= {
            "/debug/flags/v": lambda request: _verbosity(request, pages.set_verbosity),
            "/debug/pprof/": lambda _: Answer("cmdline\ngoroutine\nprofile?seconds=30\n"),
            "/debug/pprof/cmdline": lambda _: Answer(
                without_password(Path("/proc/self/cmdline").read_bytes().decode(errors="replace"))
            ),
            "/debug/pprof/goroutine": lambda _: Answer(stacks()),
            "/debug/pprof/profile": _profile,
        }
    return application(found)


async def _built(
    builder: PageBuilder,
    key: Hashable,
    make: Callable[[], Awaitable[Iterable[bytes]]],
    content_type: str,
    *,
    nosniff: bool = False,
) -> Answer:
    """Answer with an expensive page, or with the reason why it cannot be built now."""
    later = {"Retry-After": str(_RETRY_AFTER)}
    try:
        pieces = await builder.page(key, make)
    except TooManyPagesError:
        return Answer("too many pages are being made; ask again\n", 503, more_headers=later)
    except (OSError, ApplyError, BusyError) as error:
        text = f"connections cannot be counted now: {str(error) or 'the mode is busy'}\n"
        return Answer(text, 503, more_headers=later)
    return Answer(pieces=pieces, content_type=content_type, nosniff=nosniff)


def _services(
    services: Callable[[ServiceFilter], Awaitable[Iterable[Metric]]], builder: PageBuilder
) -> Page:
    async def page(request: Request) -> Answer:
        which = _filter(request.query)
        if isinstance(which, str):
            return Answer(f"{which}\n", 400)

        async def make() -> Iterator[bytes]:
            return exposition(await services(which))

        return await _built(builder, which, make, CONTENT_TYPE)

    return page


def _filter(query: Mapping[str, str]) -> ServiceFilter | str:
    """Return the filter of a query, or an error message."""
    if unknown := sorted(query.keys() - ServiceFilter._fields):
        return f"{unknown[0][:40]!r} is unknown; there is {', '.join(ServiceFilter._fields)}"
    namespace, service = query.get("namespace", ""), query.get("service", "")
    if max(len(namespace), len(service)) > _LONGEST_NAME:
        return f"names have at most {_LONGEST_NAME} characters"
    top = query.get("top", str(MOST_SERIES))
    if not (top.isascii() and top.isdigit() and len(top) <= _MOST_DIGITS and int(top)):
        return f"top={top[:40]!r} must be a number above 0"
    return ServiceFilter(namespace, service, min(int(top), MOST_SERIES))


def _slis(healthy: Callable[[], bool]) -> Page:
    """Return the page of `/metrics/slis`, in the format of Kubernetes components."""
    checks = Labelled(_CHECKS)

    def page(_: Request) -> Answer:
        good = healthy()
        checks("sync", "healthz", "success" if good else "error").inc()
        metrics = (_CHECK.of([(("sync", "healthz"), good)]), checks.collect())
        body = b"".join(exposition(metrics))
        return Answer(body, content_type=CONTENT_TYPE, nosniff=False)

    return page


def statusz(pages: Pages, paths: tuple[str, ...]) -> str:
    """Describe the running program and its start time, in upstream's format."""
    minutes, seconds = divmod(max(0, int(pages.clock() - pages.started)), 60)
    hours, minutes = divmod(minutes, 60)
    started = time.strftime("%a %b %e %H:%M:%S UTC %Y", time.gmtime(pages.started))
    return (
        f"\nkube-proxy statusz\n{_NOT_FOR_MACHINES}\n\n"
        f"Started:  {started}\n"
        f"Up:  {hours} hr {minutes:02d} min {seconds:02d} sec\n"
        f"Python version:  {platform.python_version()}\n"
        f"Binary version:  {__version__}\n"
        f"Emulation version:  {_EMULATES}\n"
        f"Paths:  {' '.join(paths)}\n"
    )


# /debug


async def _verbosity(request: Request, set_verbosity: Callable[[int], None]) -> Answer:
    if request.method != "PUT":
        return Answer("only PUT is understood here\n", 405)
    text = (await request.read()).decode(errors="replace").strip()
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        return Answer(f"{text[:40]!r} is not a verbosity; put up to {_MOST_DIGITS} digits\n", 400)
    set_verbosity(int(text))
    return Answer(f"successfully set klog.logging.verbosity to {text}")


def stacks() -> str:
    """Return the stacks of all tasks and threads, as Go's goroutine profile does."""
    out = io.StringIO()
    for task in asyncio.all_tasks():
        task.print_stack(file=out)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        out.write(f"Thread {names.get(ident, ident)}:\n")
        traceback.print_stack(frame, file=out)
    return out.getvalue()


async def _profile(request: Request) -> Answer:
    import cProfile  # noqa: PLC0415 - 0.7 MB, and hardly anybody asks
    import pstats  # noqa: PLC0415

    try:
        seconds = float(request.query.get("seconds", _PROFILE_SECONDS))
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MOST_PROFILE_SECONDS:  # false for nan, too
        return Answer(f"seconds must be above 0 and at most {_MOST_PROFILE_SECONDS:g}\n", 400)
    profile = cProfile.Profile()
    try:
        profile.enable()
    except ValueError:
        return Answer("another profile is being taken; try again later\n", 409)
    try:
        await asyncio.sleep(seconds)
    finally:
        profile.disable()
    out = io.StringIO()
    pstats.Stats(profile, stream=out).sort_stats("cumulative").print_stats(60)
    return Answer(out.getvalue())
