"""Planted faults are named first in the nftables mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernel.faults.judge import healthy_cluster, most_are_named_first

pytestmark = [pytest.mark.kernel, pytest.mark.slow(seconds=600)]


def test_nine_of_ten_faults_are_named_first(tmp_path: Path) -> None:
    with healthy_cluster(tmp_path, "nftables") as cluster:
        most_are_named_first(cluster, "nftables")
