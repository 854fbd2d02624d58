"""UDP clients that never pause follow every change of their Service: of type, ports, endpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lab.udp_changes import follow_every_change
from tests.support.lab.udp_cluster import udp_lab

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("mode", ["iptables", "nftables", "ebpf", "userspace"])
def test_clients_follow_every_change_of_type_and_ports(tmp_path: Path, mode: str) -> None:
    with udp_lab() as lab:
        follow_every_change(lab, tmp_path, mode)
