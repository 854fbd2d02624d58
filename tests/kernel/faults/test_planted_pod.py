"""doctor in a pod without hostPID never says that all is well while a fault breaks a connection."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernel.faults.judge import healthy_cluster, some_are_never_called_fine

pytestmark = [pytest.mark.kernel, pytest.mark.slow(seconds=200)]


@pytest.mark.parametrize(("mode", "first"), [("nftables", 0), ("iptables", 2)])
def test_nothing_is_called_fine(mode: str, first: int, tmp_path: Path) -> None:
    with healthy_cluster(tmp_path, mode) as cluster:
        some_are_never_called_fine(cluster, mode, first)
