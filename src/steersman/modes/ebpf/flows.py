"""Connections that the packets' programs know (c/flow.h): how old each may get, and who goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from steersman.modes.ebpf import layout
from steersman.modes.ebpf.maps import HashMap

OPENING, ESTABLISHED, CLOSING, WAITING = range(4)
_TCP, _UDP = 6, 17
_PROC = Path("/proc/sys/net/netfilter")


class Timeouts(NamedTuple):
    """Seconds without a packet after which a connection is forgotten: those of nf_conntrack."""

    tcp_opening: int = 60
    tcp_established: int = 86400
    tcp_closing: int = 120
    udp: int = 30
    udp_stream: int = 120

    def of(self, protocol: int, state: int) -> int:
        """The timeout of a flow."""
        if protocol == _UDP:
            return self.udp_stream if state == ESTABLISHED else self.udp
        if state == CLOSING:
            return self.tcp_closing
        return self.tcp_established if state == ESTABLISHED else self.tcp_opening


_SYSCTLS = (
    "nf_conntrack_tcp_timeout_syn_sent",
    "nf_conntrack_tcp_timeout_established",
    "nf_conntrack_tcp_timeout_time_wait",
    "nf_conntrack_udp_timeout",
    "nf_conntrack_udp_timeout_stream",
)
"""Where each timeout is, in the order of Timeouts."""


def read_timeouts(proc: Path = _PROC) -> Timeouts:
    """Timeouts that are in force on this node; the defaults where netfilter is not there."""
    defaults = Timeouts()
    return Timeouts(*(_read(proc / n, d) for n, d in zip(_SYSCTLS, defaults, strict=True)))


def _read(path: Path, default: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return default


def expired(flows: HashMap, timeouts: Timeouts, now: int) -> Iterator[bytes]:
    """Keys of the flows that are too old at `now` (CLOCK_MONOTONIC, ns)."""
    for key, value in flows.items():
        protocol = layout.FLOW_KEY.unpack(key)[3]
        _, last, _, _, state, _ = layout.FLOW.unpack(value)
        if now - last > timeouts.of(protocol, state) * 1_000_000_000:
            yield key


def collect(flows: HashMap, timeouts: Timeouts) -> int:
    """Delete the flows that are too old; returns how many there were."""
    old = list(expired(flows, timeouts, time.monotonic_ns()))
    flows.delete_all(old)
    return len(old)
