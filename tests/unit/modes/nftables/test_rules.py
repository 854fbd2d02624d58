"""Chains that go in by netlink: those of ServicePorts, and lazy ones."""

from __future__ import annotations

import pytest

from steersman.host.nlmsg import Request, attributes
from steersman.model.names import Family
from steersman.modes.nftables.rules import (
    LAZY,
    LAZY_CHAINS,
    active_lazy,
    chain_requests,
    removal_of_lazy,
    rule_count,
)
from steersman.netfilter.nft import wire as nft


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


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("first", LAZY)
def test_lazy_chains_become_empty_or_go(family: Family, first: str) -> None:
    def chains(requests: list[Request], kind: int, name: int) -> set[bytes]:
        found = [each for each in requests if each.kind & 0xFF == kind]
        return {attributes(each.payload, 4)[name] for each in found}

    made, ended = LAZY[first].rules(family), removal_of_lazy(family, first)
    for come, go, name in (
        (nft.NEWRULE, nft.DELRULE, nft.RULE_CHAIN),
        (nft.NEWCHAIN, nft.DELCHAIN, nft.CHAIN_NAME),
    ):
        assert chains(ended, go, name) == chains(made, come, name)
