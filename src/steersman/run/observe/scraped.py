"""Metrics that are collected when scraped: of values that are known elsewhere."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from steersman.config.features import GATES, enabled
from steersman.host.usage import cpu_seconds, windows_usage
from steersman.model.node_state import NodeState
from steersman.run.observe.metric_table import MetricTable
from steersman.run.observe.prometheus import Counter, Declared, Metric
from steersman.source.stats import REQUEST_BUCKETS, SourceStats

NFACCT: Mapping[str, Declared[Counter]] = {
    "ct_state_invalid_dropped_pkts": MetricTable.invalid_packets_dropped,
    "localhost_nps_accepted_pkts": MetricTable.localhost_node_port_packets,
}
"""nfacct objects of the iptables mode, and the metrics that show them."""


def conntrack_usage(usage: Callable[[], tuple[int, int]]) -> Iterator[Metric]:
    """Yield how full the conntrack table is.

    Args:
        usage: returns entries and maximum; an OSError leaves the metrics out.
    """
    with suppress(OSError):
        entries, maximum = usage()
        yield MetricTable.conntrack_entries.at(entries)
        yield MetricTable.conntrack_limit.at(maximum)


def nfacct_packets(packets: Mapping[str, int]) -> Iterator[Metric]:
    """Yield the iptables mode's nfacct counters, of packets by object, as far as they are there."""
    for name, metric in NFACCT.items():
        if name in packets:
            yield metric.at(packets[name])


def source_state(stats: SourceStats, now: float) -> Iterator[Metric]:
    """Yield how the connection to the API server is.

    Args:
        stats: the counters of the source; they are updated while it runs.
        now: by the clock of `stats.last_event`.
    """
    kinds = tuple(stats.kinds.items())
    yield MetricTable.watch_errors.of(
        ((kind, reason), count)
        for kind, each in kinds
        for reason, count in tuple(each.errors.items())
    )
    yield MetricTable.source_connected.of(((kind,), each.connected) for kind, each in kinds)
    yield MetricTable.requests.of(tuple(stats.requests.codes.items()))
    yield MetricTable.request_seconds.histogram(
        (labels, REQUEST_BUCKETS, tuple(each.counts), each.sum)
        for labels, each in tuple(stats.requests.durations.items())
    )
    if (last := stats.last_event) is not None:
        yield MetricTable.source_quiet.at(max(0.0, now - last))


def feature_gates(gates: Mapping[str, bool]) -> Iterator[Metric]:
    """Yield which of the gates that have an effect here are on.

    Args:
        gates: as configured.
    """
    yield MetricTable.feature_enabled.of(
        ((name, gate.stage), enabled(gates, name)) for name, gate in GATES.items()
    )


def process_state(state: NodeState, waiting: float) -> Iterator[Metric]:
    """Yield what the process says of itself.

    Args:
        waiting: seconds that the oldest change has been waiting.
    """
    conditions = state.conditions
    yield MetricTable.condition.of(
        ((each.type, word.lower()), each.status == word)
        for each in conditions
        for word in ("True", "False", "Unknown")
    )
    yield MetricTable.condition_since.of(((each.type,), each.since) for each in conditions)
    yield MetricTable.oldest_change.at(waiting)
    yield MetricTable.service_ports.at(state.service_ports)


def process_metrics(proc: Path = Path("/proc")) -> Iterator[Metric]:
    """Yield what every Prometheus client says of its process; nothing without a /proc."""
    if sys.platform == "win32":
        usage = windows_usage()
        yield MetricTable.resident_memory.at(usage.resident)
        yield MetricTable.cpu_seconds.at(cpu_seconds())
        yield MetricTable.open_fds.at(usage.handles)
        return
    try:
        stat = (proc / "self/stat").read_bytes().rpartition(b")")[2].split()
        boot = (proc / "stat").read_bytes().partition(b"\nbtime ")[2].split(maxsplit=1)[0]
        limits = (proc / "self/limits").read_bytes()
        descriptors = len(os.listdir(proc / "self/fd"))
    except (OSError, IndexError):
        return
    ticks = os.sysconf("SC_CLK_TCK")
    yield MetricTable.virtual_memory.at(float(stat[20]))
    yield MetricTable.resident_memory.at(float(stat[21]) * os.sysconf("SC_PAGE_SIZE"))
    yield MetricTable.start_time.at(float(stat[19]) / ticks + float(boot))
    yield MetricTable.cpu_seconds.at((float(stat[11]) + float(stat[12])) / ticks)
    yield MetricTable.open_fds.at(descriptors)
    yield MetricTable.max_fds.at(_limit(limits, b"Max open files"))
    yield MetricTable.max_virtual_memory.at(_limit(limits, b"Max address space"))
    with suppress(OSError, KeyError, ValueError):
        lines = (proc / "self/net/netstat").read_bytes().splitlines()
        names, values = (each.split() for each in lines if each.startswith(b"IpExt:"))
        counts = dict(zip(names, values, strict=True))
        yield MetricTable.received_bytes.at(float(counts[b"InOctets"]))
        yield MetricTable.sent_bytes.at(float(counts[b"OutOctets"]))


def _limit(limits: bytes, name: bytes) -> float:
    soft = limits.partition(name)[2].split(maxsplit=1)[0]
    return math.inf if soft == b"unlimited" else float(soft)
