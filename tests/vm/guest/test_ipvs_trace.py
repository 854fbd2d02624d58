"""`steersman trace` in ipvs mode: the rules, and the real server that IPVS chose."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from steersman.modes.base import release
from tests.support.builders import nftables_plans as make
from tests.support.builders.plans import REJECTED
from tests.support.lab import trace_page
from tests.support.lab.inside import Inside
from tests.support.lab.switches import CLIENT, NODE
from tests.support.lab.traced import (
    FRONTENDS,
    VIP,
    Traced,
    first_difference,
    foreign,
    service_lab,
    serving,
)
from tests.support.modes.ipvs import mode_behind


@pytest.fixture
def node() -> Iterator[Traced]:
    with service_lab() as lab:
        mode = mode_behind(Inside(lab.node.path))
        yield serving(lab, mode)
        asyncio.run(release(mode))


def test_the_real_server_is_named(node: Traced) -> None:
    for to in ((VIP, 80), (NODE, 30080)):
        answer = node.trace(*to, source=CLIENT)
        assert answer.differences == ()
        (chosen,) = [shown for shown in answer.steps if shown.step.table == "ip_vs"]
        assert chosen.step.endpoint == answer.endpoint
        assert chosen.step.chain == f"virtual server TCP {to[0]}:{to[1]}"
        assert (chosen.step.hook, chosen.predicted) == ("input", "to one of 2 endpoints")
        assert answer.endpoint in ("10.244.0.0:8080", "10.244.0.2:8080")
    from_node = node.trace()
    assert from_node.differences == ()
    assert from_node.endpoint in ("10.244.0.0:8080", "10.244.0.2:8080")


def test_rules_of_others_and_of_the_plan(node: Traced) -> None:
    foreign(node.lab, "nft", "postrouting", "drop")
    dropped = node.trace(source=CLIENT, timeout=1.0)
    assert first_difference(dropped).startswith("dropped by a rule of another program in chain")
    node.lab.run("nft", "delete", "table", "inet", "firewall")
    refusing = serving(node.lab, node.mode, make.port([], frontends=(make.cluster_ip(REJECTED),)))
    refused = refusing.trace(source=CLIENT)
    assert refused.differences == ()
    assert refused.reply is not None
    assert refused.reply.kind == "icmp"


def test_the_page_shows_a_trace(node: Traced, update: bool) -> None:
    one = serving(node.lab, node.mode, make.port([0], frontends=FRONTENDS))
    answer = one.trace(NODE, 30080, source=CLIENT)
    assert answer.exit_code == 0
    trace_page.check("ipvs mode", answer, update)
