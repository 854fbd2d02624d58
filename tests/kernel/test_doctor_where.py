"""Where a packet leaves the way that the plan predicts: a fault each, named with its object."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from steersman.host.exec import SubprocessExec
from steersman.operate.doctor.check import CheckResult, Context, Verdict
from steersman.operate.doctor.where import where_lost
from steersman.operate.trace_question import TraceQuestion
from tests.support.lab.cluster import Lab
from tests.support.lab.switches import CLIENT, mode_of
from tests.support.lab.traced import VIP, Traced, foreign, inside, service_lab, serving

pytestmark = pytest.mark.kernel
every_mode = pytest.mark.parametrize(
    ("name", "variant"), [("iptables", "nft"), ("nftables", "nft")]
)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with service_lab() as lab:
        yield lab


def lost(node: Traced, timeout: float = 0.5) -> CheckResult | None:
    """Follow a packet of the client to the Service."""
    context = Context(node.world, execute=SubprocessExec())
    netns = Path(node.lab.netns(CLIENT).path)
    question = TraceQuestion(VIP, 80, source=CLIENT, netns=netns, timeout=timeout)
    return inside(node.lab, where_lost(context, question))


@every_mode
def test_a_packet_that_goes_as_predicted_is_not_lost(lab: Lab, name: str, variant: str) -> None:
    node = serving(lab, mode_of(lab, name, variant))
    assert lost(node, timeout=20.0) is None


@every_mode
def test_a_firewall_is_named(lab: Lab, name: str, variant: str) -> None:
    node = serving(lab, mode_of(lab, name, variant))
    foreign(lab, "iptables-nft", "forward", "drop")
    found = lost(node)
    assert found is not None
    assert found.verdict is Verdict.ERROR
    assert found.text.startswith("dropped by a rule of Docker in chain DOCKER-USER of table ip")
