"""Metrics that are collected when scraped: of values that are known elsewhere.

Each is a row with name, type, labels and meaning, which the reference page (docs/metrics.md) lists.
Metrics that the program counts itself are in metrics.py, series by Service in service_metrics.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from steersman.model.world import ProcessStatus
from steersman.run.observe.prometheus import Described, Metric
from steersman.source.base import SourceStats

Collect: TypeAlias = Callable[[], Iterator[Metric]]


CONNTRACK_ENTRIES = Described(
    "gauge", "steersman_conntrack_entries", "Number of entries in the conntrack table."
)
CONNTRACK_LIMIT = Described(
    "gauge",
    "steersman_conntrack_entries_limit",
    "Number of entries that the conntrack table can hold.",
)
NFACCT = {
    "ct_state_invalid_dropped_pkts": Described(
        "counter",
        "kubeproxy_iptables_ct_state_invalid_dropped_packets_total",
        "Number of packets that were dropped because conntrack found them invalid.",
    ),
    "localhost_nps_accepted_pkts": Described(
        "counter",
        "kubeproxy_iptables_localhost_nodeports_accepted_packets_total",
        "Number of packets accepted on node ports of loopback addresses.",
    ),
}
"""nfacct objects of the iptables mode, and the metrics that show them."""
WATCH_ERRORS = Described(
    "counter",
    "steersman_watch_errors_total",
    "Number of failed requests and watches.",
    ("kind", "reason"),
)
SOURCE_CONNECTED = Described(
    "gauge",
    "steersman_source_connected",
    "1 while a watch of this kind of object is open at the API server, else 0.",
    ("kind",),
)
SOURCE_QUIET = Described(
    "gauge",
    "steersman_source_quiet_seconds",
    "Seconds since the API server last sent anything.",
)
CONDITION = Described(
    "gauge",
    "steersman_condition",
    "1 for the status that a condition of the process has (true, false or unknown), else 0.",
    ("condition", "status"),
)
CONDITION_SINCE = Described(
    "gauge",
    "steersman_condition_since_timestamp_seconds",
    "Unix time at which a condition of the process got its status.",
    ("condition",),
)
OLDEST_CHANGE = Described(
    "gauge",
    "steersman_oldest_change_waiting_seconds",
    "Seconds that the oldest change not yet in force has been waiting; 0 if none waits.",
)
SERVICE_PORTS = Described(
    "gauge", "steersman_service_ports", "Number of ServicePorts planned, in both families."
)
SCRAPED = (
    CONNTRACK_ENTRIES,
    CONNTRACK_LIMIT,
    *NFACCT.values(),
    WATCH_ERRORS,
    SOURCE_CONNECTED,
    SOURCE_QUIET,
    CONDITION,
    CONDITION_SINCE,
    OLDEST_CHANGE,
    SERVICE_PORTS,
)
"""The metrics of this module, for the reference page."""


def conntrack_usage(usage: Callable[[], tuple[int, int]]) -> Collect:
    """Return a collection of how full the conntrack table is.

    Args:
        usage: returns entries and maximum; an OSError leaves the metrics out of this scrape.
    """

    def collect() -> Iterator[Metric]:
        try:
            entries, maximum = usage()
        except OSError:
            return
        yield CONNTRACK_ENTRIES.at(entries)
        yield CONNTRACK_LIMIT.at(maximum)

    return collect


def nfacct_packets(packets: Callable[[], Mapping[str, int]]) -> Collect:
    """Return a collection of the iptables mode's nfacct counters.

    Args:
        packets: returns packets by object; the ones that are not there are left out.
    """

    def collect() -> Iterator[Metric]:
        counts = packets()
        for name, metric in NFACCT.items():
            if name in counts:
                yield metric.at(counts[name])

    return collect


def source_state(stats: SourceStats, clock: Callable[[], float]) -> Collect:
    """Return a collection of how the connection to the API server is.

    Args:
        stats: the counters of the source; they are updated while it runs.
        clock: the clock of `stats.last_event`.
    """

    def collect() -> Iterator[Metric]:
        kinds = tuple(stats.kinds.items())
        yield WATCH_ERRORS.of(
            ((kind, reason), count)
            for kind, each in kinds
            for reason, count in tuple(each.errors.items())
        )
        yield SOURCE_CONNECTED.of(((kind,), each.connected) for kind, each in kinds)
        if (last := stats.last_event) is not None:
            yield SOURCE_QUIET.at(max(0.0, clock() - last))

    return collect


def process_state(status: ProcessStatus, waiting: float, service_ports: int) -> Iterator[Metric]:
    """Yield what the process says of itself.

    Args:
        status: the process now, with its conditions.
        waiting: seconds that the oldest change has been waiting.
        service_ports: number of planned ServicePorts.
    """
    conditions = status.conditions
    yield CONDITION.of(
        ((each.type, word.lower()), each.status == word)
        for each in conditions
        for word in ("True", "False", "Unknown")
    )
    yield CONDITION_SINCE.of(((each.type,), each.since) for each in conditions)
    yield OLDEST_CHANGE.at(waiting)
    yield SERVICE_PORTS.at(service_ports)


_MEMORY = Described("gauge", "process_virtual_memory_bytes", "Virtual memory size in bytes.")
_RESIDENT = Described("gauge", "process_resident_memory_bytes", "Resident memory size in bytes.")
_STARTED = Described(
    "gauge",
    "process_start_time_seconds",
    "Start time of the process since unix epoch in seconds.",
)
_CPU = Described(
    "counter", "process_cpu_seconds_total", "Total user and system CPU time spent in seconds."
)
_OPEN = Described("gauge", "process_open_fds", "Number of open file descriptors.")
_MOST_OPEN = Described("gauge", "process_max_fds", "Maximum number of open file descriptors.")


def process_metrics(proc: Path = Path("/proc")) -> Iterator[Metric]:
    """Yield what every Prometheus client says of its process; nothing without a /proc."""
    try:
        stat = (proc / "self/stat").read_bytes().rpartition(b")")[2].split()
        boot = (proc / "stat").read_bytes().partition(b"\nbtime ")[2].split(maxsplit=1)[0]
        limits = (proc / "self/limits").read_bytes().partition(b"Max open files")[2].split()
        descriptors = len(os.listdir(proc / "self/fd"))
    except (OSError, IndexError):
        return
    ticks = os.sysconf("SC_CLK_TCK")
    yield _MEMORY.at(float(stat[20]))
    yield _RESIDENT.at(float(stat[21]) * os.sysconf("SC_PAGE_SIZE"))
    yield _STARTED.at(float(stat[19]) / ticks + float(boot))
    yield _CPU.at((float(stat[11]) + float(stat[12])) / ticks)
    yield _OPEN.at(descriptors)
    yield _MOST_OPEN.at(float(limits[0]) if limits[0] != b"unlimited" else math.inf)
