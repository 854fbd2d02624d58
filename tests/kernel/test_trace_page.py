"""docs/trace.md and traces.md show what `steersman trace` prints; `--update` writes them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.builders import nftables_plans as make
from tests.support.lab import trace_page
from tests.support.lab.cluster import Lab
from tests.support.lab.switches import CLIENT, NODE, mode_of
from tests.support.lab.traced import FRONTENDS, VIP, foreign, service_lab, serving

pytestmark = pytest.mark.kernel
ONE_ENDPOINT = make.port([0], frontends=FRONTENDS)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with service_lab() as lab:
        yield lab


@pytest.mark.parametrize(
    ("title", "name", "variant"),
    [
        ("nftables mode", "nftables", "nft"),
        ("iptables mode", "iptables", "nft"),
        ("iptables mode with iptables-legacy", "iptables", "legacy"),
        ("ebpf mode", "ebpf", "tcx"),
        ("userspace mode", "userspace", "nftables"),
    ],
)
def test_a_flow_in_each_mode(lab: Lab, title: str, name: str, variant: str, update: bool) -> None:
    to = (VIP, 80) if name == "userspace" else (NODE, 30080)  # its proxy listens on node ports
    answer = serving(lab, mode_of(lab, name, variant), ONE_ENDPOINT).trace(*to, source=CLIENT)
    assert answer.exit_code == 0
    trace_page.check(title, answer, update)


def test_a_firewall_drops_the_packet(lab: Lab, update: bool) -> None:
    node = serving(lab, mode_of(lab, "nftables", "nft"), ONE_ENDPOINT)
    foreign(lab, "iptables-nft", "forward", "drop")
    answer = node.trace(source=CLIENT, timeout=1)
    assert answer.exit_code == 1
    trace_page.check("A firewall in the way", answer, update)
