"""Chains that go in by netlink: those of ServicePorts, and lazy ones."""

from __future__ import annotations

import pytest

from steersman.model.names import Family
from steersman.modes.nftables.layout import Kind, prefix
from steersman.modes.nftables.rules import (
    LAZY,
    LAZY_CHAINS,
    active_lazy,
    chain_requests,
    in_force,
    needed_lazy,
    rule_count,
)
from steersman.netfilter.nft import wire as nft

V4 = Family.IPV4
AFFINITY, SOURCE_RANGES = LAZY


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize(
    ("value", "rules"),
    [
        ("lookup tcp mark-cluster cluster lb-4", 3),
        ("lookup udp - local local-lb-1", 2),
        ("learn 60 cluster", 1),
        ("learn 10800 cluster local", 2),
    ],
)
def test_a_chain_has_as_many_rules_as_its_value_says(
    family: Family, value: str, rules: int
) -> None:
    requests = chain_requests(family, "affinity-HASH-ns/svc/tcp/p", value)
    added = [each for each in requests if each.kind & 0xFF == nft.NEWRULE]
    assert len(added) == rule_count(value) == rules
    assert [value.encode() in each.payload for each in added] == [True] + [False] * (rules - 1)


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("first", LAZY)
def test_lazy_chains_are_active_once_they_have_all_rules(family: Family, first: str) -> None:
    requests = LAZY[first].rules(family)
    added = [each for each in requests if each.kind & 0xFF == nft.NEWRULE]
    chains = [name for name, count in LAZY[first].sizes.items() for _ in range(count)]
    assert len(added) == len(chains)
    assert active_lazy(chains) == {first}
    assert active_lazy(chains[1:]) == set()
    assert set(chains) <= LAZY_CHAINS


def test_objects_need_the_chains_that_look_them_up() -> None:
    ranges = prefix(Kind.FIREWALL_IPS, V4) + b"key"
    learned = prefix(Kind.AFFINITY_NODEPORTS, V4) + b"key"
    other = prefix(Kind.SERVICE_IPS, V4) + b"key"
    assert needed_lazy({ranges: b"", other: b""}) == {(V4, SOURCE_RANGES)}
    assert needed_lazy({learned: b""}) == {(V4, AFFINITY)}
    objects = {ranges: b"", learned: b"", other: b""}
    assert in_force(objects, LAZY) == objects
    assert in_force(objects, {AFFINITY}).keys() == {learned, other}
    assert in_force(objects, ()).keys() == {other}
