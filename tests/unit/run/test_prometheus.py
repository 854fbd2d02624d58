"""The text of a scrape is that of Prometheus's own library for Python, byte by byte."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import prometheus_client as theirs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.utils import floatToGoString

from steersman.run.observe.prometheus import (
    Counted,
    Counter,
    Declared,
    Gauge,
    Histogram,
    Labelled,
    Metric,
    exposition,
    number,
)
from steersman.run.observe.scraped import process_metrics

LABELS = ("service", "endpoint")
EVIL = 'a "quoted"\\ \n <b>\u202e é'


def text(metrics: Iterable[Metric]) -> str:
    return b"".join(exposition(metrics)).decode()


def test_counters_gauges_and_histograms_are_written_as_by_the_library() -> None:
    theirs.disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = theirs.CollectorRegistry()
    help_text = 'All "of" it \\ and\nmore.'
    bounds = (0.5, 1, 2500000.0)
    counter = Labelled(Counted(Counter, "c_total", help_text, LABELS))
    gauge = Labelled(Counted(Gauge, "g", help_text))
    wide = Labelled(Counted(Histogram, "h_seconds", help_text, ("z",), bounds))
    empty = Labelled(Counted(Gauge, "e_total", help_text, ("of",)))
    their_counter = theirs.Counter("c_total", help_text, LABELS, registry=registry)
    their_gauge = theirs.Gauge("g", help_text, registry=registry)
    their_wide = theirs.Histogram("h_seconds", help_text, ("z",), registry=registry, buckets=bounds)
    theirs.Gauge("e_total", help_text, ("of",), registry=registry)
    for values, amount in ((("b", EVIL), 1), (("a", ""), 2.5), (("b", EVIL), 1e7)):
        counter(*values).inc(amount)
        their_counter.labels(*values).inc(amount)
    for value in (-1.5, 12345678):
        gauge().set(value)
        their_gauge.set(value)
    for amount in (0, 0.5, 0.50001, 1, 99, 3e6):
        wide("x").observe(amount)
        their_wide.labels("x").observe(amount)
    mine = text([each.collect() for each in (counter, gauge, wide, empty)])
    assert mine == theirs.generate_latest(registry).decode()


@given(st.floats() | st.integers(-(10**20), 10**20).map(float))
@example(1e6)
@example(999999.0)
@example(1234567.0)
@example(1e16)
@example(123456789012345.6)
@example(-12345678.0)
@example(math.inf)
@example(-math.inf)
@example(math.nan)
def test_numbers_are_those_of_the_library(value: float) -> None:
    assert number(value) == floatToGoString(value)  # type: ignore[no-untyped-call]


def test_only_some_series_are_held_at_once() -> None:
    made = 0

    def rows() -> Iterable[tuple[tuple[str, str], float]]:
        nonlocal made
        for made in range(1, 20_001):
            yield (f"shop/{made % 7}", f"10.0.0.{made}:80"), made

    metric = Declared(Counter, "connections_total", "Connections.", LABELS).streamed(rows())
    pieces = exposition([metric])
    first = next(pieces)
    assert made < 2_000
    rest = list(pieces)
    assert len(rest) > 10
    assert all(1 << 16 <= len(piece) < 1 << 17 for piece in (first, *rest[:-1]))
    assert b"".join((first, *rest)).count(b"\nconnections_total{") == 20_000


def test_a_counter_never_falls() -> None:
    counter = Counter()
    with pytest.raises(ValueError, match="cannot grow by -1"):
        counter.inc(-1)
    assert counter.value == 0


@pytest.mark.parametrize("labels", [(), ("a",), ("a", "b", "c")])
def test_a_value_has_all_labels(labels: tuple[str, ...]) -> None:
    metric = Labelled(Counted(Counter, "c_total", "Some.", LABELS))
    with pytest.raises(ValueError, match="zip"):
        metric(*labels)
    assert list(metric.collect().samples) == []


def test_without_labels_a_metric_is_there_from_the_start_and_can_be_cleared() -> None:
    plain = Labelled(Counted(Gauge, "g", "Some."))
    assert [sample.value for sample in plain.collect().samples] == [0]
    of = Labelled(Counted(Gauge, "g", "Some.", ("of",)))
    of("x").set(1)
    assert of("x") is of("x")
    of.clear()
    assert list(of.collect().samples) == []


def named(metrics: Iterable[Metric]) -> dict[str, float]:
    return {sample.name: sample.value for metric in metrics for sample in metric.samples}


def test_the_process_says_of_itself_what_the_library_says() -> None:
    registry = theirs.CollectorRegistry()
    theirs.ProcessCollector(registry=registry)
    metrics = list(process_metrics())
    found, value = named(metrics), registry.get_sample_value
    heads: Callable[[str], list[str]] = lambda page: [  # noqa: E731
        line for line in page.splitlines() if line.startswith("#")
    ]
    their_page = theirs.generate_latest(registry).decode()
    only_go = ("virtual_memory_max_bytes", "network_receive_bytes_total",
               "network_transmit_bytes_total")  # fmt: skip
    common = [each for each in metrics if not each.name.endswith(only_go)]
    assert len(metrics) == len(common) + len(only_go)
    assert sorted(heads(text(common))) == sorted(heads(their_page))
    for name in ("process_start_time_seconds", "process_max_fds"):
        assert found[name] == value(name)
    for name, leeway in (
        ("process_virtual_memory_bytes", 5e7),
        ("process_resident_memory_bytes", 5e7),
        ("process_cpu_seconds_total", 20),
        ("process_open_fds", 3),
    ):
        assert abs(found[name] - (value(name) or 0)) <= leeway, name


def test_bytes_of_the_network_are_those_of_ip(tmp_path: Path) -> None:
    own = Path("/proc/self")
    (tmp_path / "self/net").mkdir(parents=True)
    (tmp_path / "self/fd").mkdir()
    for name in ("stat", "limits"):
        (tmp_path / "self" / name).write_bytes((own / name).read_bytes())
    (tmp_path / "stat").write_bytes(Path("/proc/stat").read_bytes())
    names = ("process_network_receive_bytes_total", "process_network_transmit_bytes_total")
    assert not set(names) & named(process_metrics(tmp_path)).keys()
    (tmp_path / "self/net/netstat").write_text(
        "TcpExt: TW InOctets\nTcpExt: 7 8\nIpExt: InOctets OutOctets TW\nIpExt: 30 40 9\n"
    )
    found = named(process_metrics(tmp_path))
    assert [found[name] for name in names] == [30, 40]


def test_nothing_is_said_of_a_process_without_a_proc(tmp_path: Path) -> None:
    assert list(process_metrics(tmp_path)) == []
    (tmp_path / "self").mkdir()
    (tmp_path / "self/stat").write_bytes(Path(f"/proc/{os.getpid()}/stat").read_bytes())
    (tmp_path / "stat").write_text("cpu 1\n")
    assert list(process_metrics(tmp_path)) == []
