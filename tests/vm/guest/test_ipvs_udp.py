"""UDP clients that never pause follow every change of their Service in the ipvs mode, too."""

from __future__ import annotations

from pathlib import Path

from tests.support.lab.udp_changes import follow_every_change
from tests.support.lab.udp_cluster import udp_lab
from tests.vm.guest.ipvs import only_with_all


@only_with_all
def test_clients_follow_every_change_of_type_and_ports(tmp_path: Path) -> None:
    with udp_lab() as lab:
        follow_every_change(lab, tmp_path, "ipvs")
