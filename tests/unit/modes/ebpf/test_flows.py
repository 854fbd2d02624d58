"""Timeouts of flows."""

from __future__ import annotations

from pathlib import Path

from steersman.modes.ebpf.flows import Timeouts, read_timeouts


def test_timeouts_are_those_of_netfilter(tmp_path: Path) -> None:
    (tmp_path / "nf_conntrack_udp_timeout").write_text("7\n")
    (tmp_path / "nf_conntrack_tcp_timeout_established").write_text("what?\n")
    assert read_timeouts(tmp_path) == Timeouts(udp=7)
