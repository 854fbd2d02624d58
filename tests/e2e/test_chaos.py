"""Some time of everything going wrong at once ends in exactly the rules of a fresh start."""

from __future__ import annotations

import pytest

from tests.support.lab.namespace import in_namespace
from tests.support.modes.chaos import run_chaos


@pytest.mark.kernel
@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize(
    "name", ["iptables-nft", "iptables-legacy", "nftables", "ebpf", "userspace-nft"]
)
def test_chaos_ends_in_the_rules_of_a_fresh_start(name: str) -> None:
    in_namespace(lambda: run_chaos(name))
