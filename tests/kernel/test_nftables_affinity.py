"""ClientIP affinity over time, on every path that a connection can take."""

from __future__ import annotations

import asyncio
import time

import pytest

from steersman.model.errors import ApplyError
from steersman.model.plan import Endpoint, Frontend, FrontendKind, ServicePlan
from steersman.model.ruleset import Diff
from steersman.modes.nftables.layout import Kind, base_name, own_set_name
from tests.support.builders import nftables_plans as make
from tests.support.builders.plans import EXTERNAL_LOCAL, MASQUERADED, Actions
from tests.support.lab.cluster import Lab
from tests.support.lab.nft_cluster import ENDS, NODE, OUTSIDE, POD, Cluster, lab

__all__ = ["lab"]  # a fixture

pytestmark = pytest.mark.kernel
MEMORY = own_set_name(Kind.AFFINITY, base_name(make.key()), local=False)


def frontends(actions: Actions) -> list[Frontend]:
    return [
        make.cluster_ip(),
        Frontend(FrontendKind.EXTERNAL_IP, "198.51.100.1", 80, *actions),
        Frontend(FrontendKind.NODE_PORT, "", 30080, *actions),
    ]


WAYS = (("10.96.0.10", 80), ("198.51.100.1", 80), (NODE, 30080))


@pytest.fixture
def cluster(lab: Lab) -> Cluster:
    return Cluster(lab)


@pytest.mark.parametrize("source", [OUTSIDE, ENDS[0], POD, NODE])
def test_a_client_sticks_whatever_service_ip_it_uses(cluster: Cluster, source: str) -> None:
    cluster.program()
    cluster.program(make.port(frontends=frontends(MASQUERADED), affinity=600))
    first = cluster.reached(source, *WAYS[0])
    assert {cluster.reached(source, *way) for way in WAYS * 6} == {first}
    assert f"{source} timeout 10m" in cluster.remembered()


def test_pools_have_entries_of_their_own(cluster: Cluster) -> None:
    cluster.program()
    cluster.program(make.port(frontends=frontends(EXTERNAL_LOCAL), affinity=600))
    local = {cluster.reached(OUTSIDE, *way) for way in WAYS[1:] * 6}
    assert len(local) == 1
    assert local < {f"{ENDS[0]}:8080", f"{ENDS[2]}:8080"}
    assert {cluster.reached(OUTSIDE, *WAYS[0]) for _ in range(6)} == local  # it may be used there


def test_a_removed_endpoint_is_forgotten(cluster: Cluster) -> None:
    cluster.program()
    ways = frontends(MASQUERADED)
    cluster.program(make.port(frontends=ways, affinity=600))
    first = cluster.reached(OUTSIDE, *WAYS[2])
    left = [n for n in range(3) if f"{ENDS[n]}:8080" != first]
    cluster.program(make.port(left, frontends=ways, affinity=600))
    assert first.partition(":")[0] + " ." not in cluster.remembered()
    second = cluster.reached(OUTSIDE, *WAYS[2])
    assert second != first
    cluster.program(make.port(frontends=ways, affinity=600))
    assert {cluster.reached(OUTSIDE, *WAYS[2]) for _ in range(8)} == {second}


def test_a_stale_affinity_entry_is_removed_at_start(cluster: Cluster) -> None:
    cluster.program()
    plan = make.port(affinity=600)
    cluster.program(plan)
    cluster.reached(OUTSIDE, *WAYS[0])
    stale = f"add element ip kube-proxy {MEMORY} {{ 203.0.113.99 timeout 1h : 10.244.9.9 . 80 }}"
    cluster.lab.run("nft", stale)
    fresh = Cluster(cluster.lab)
    fresh.program(plan)
    assert "10.244.9.9" not in fresh.remembered()
    assert OUTSIDE in fresh.remembered()


def test_a_chain_that_stays_in_use_goes_as_soon_as_it_can(cluster: Cluster) -> None:
    """Others may hold one for long, and several writes may come meanwhile."""
    cluster.program()
    ways = [make.cluster_ip(address="10.96.0.11")]
    plan, other = (
        make.port(affinity=600),
        make.port(of=make.key("other"), frontends=ways, affinity=600),
    )
    cluster.program(plan, other)
    chains, more = (
        [
            key[2:].decode()
            for key in cluster.mode.render_service(each, make.SETTINGS)
            if is_chain(key)
        ]
        for each in (plan, other)
    )
    held = chains[0]
    cluster.lab.run("nft", "add chain ip kube-proxy sm-foreign")
    cluster.lab.run("nft", f"add rule ip kube-proxy sm-foreign jump {held}")
    cluster.change(removed=[plan])
    cluster.change(removed=[other])  # nobody holds its chains
    left = cluster.lab.run("nft", "list", "chains", "ip")
    assert [chain for chain in (*chains, *more) if f"chain {chain} " in left] == [held]
    cluster.change(added=[plan])  # it comes back, and works
    cluster.reached(OUTSIDE, *WAYS[0])
    cluster.change(removed=[plan])
    cluster.change(added=[other])
    cluster.lab.run("nft", "delete chain ip kube-proxy sm-foreign")
    cluster.change(removed=[other])
    left = cluster.lab.run("nft", "list", "chains", "ip")
    assert [chain for chain in (*chains, *more) if f"chain {chain} " in left] == []
    assert "affinity-postrouting" not in left, "no packet passes a hook that nobody needs"


def is_chain(key: bytes) -> bool:
    return key[0] == Kind.CHAIN


def test_time_slides_with_every_connection_and_ends(cluster: Cluster) -> None:
    cluster.program()
    cluster.program(make.port(frontends=frontends(MASQUERADED), affinity=1))
    deadline = time.monotonic() + 60
    first, began, last = "", 0.0, -1.0
    while last - began < 2.2:  # twice the time-out
        now = time.monotonic()
        assert now < deadline, "connections take too long"
        reached = cluster.reached(OUTSIDE, *WAYS[1])
        if time.monotonic() - last > 1:  # the machine stood still: it may be forgotten already
            first, began = reached, now
        assert reached == first
        last = now
    while OUTSIDE in cluster.remembered():
        assert time.monotonic() < deadline, "the client is never forgotten"


def test_an_endpoint_in_the_hosts_network_is_learned(cluster: Cluster) -> None:
    """Its packets go to the input hook, never to postrouting."""
    cluster.program()
    own = (Endpoint(NODE, 8080, True), Endpoint(ENDS[0], 8080, True))
    plan = ServicePlan(make.key(), tuple(frontends(EXTERNAL_LOCAL)), own, own, own, 600)
    cluster.program(plan)
    deadline = time.monotonic() + 60
    while cluster.reached(OUTSIDE, *WAYS[2]) != f"{NODE}:8080":
        assert time.monotonic() < deadline, "the node's own endpoint is never drawn"
        cluster.program()
        cluster.program(plan)
    assert {cluster.reached(OUTSIDE, *WAYS[2]) for _ in range(10)} == {f"{NODE}:8080"}


def test_counts_are_kept_when_elements_are_replaced(cluster: Cluster) -> None:
    cluster.program()
    cluster.program(make.port([0, 1]))
    for _ in range(20):
        cluster.reached(OUTSIDE, *WAYS[0])

    def counts(plan: ServicePlan) -> tuple[int, dict[str, int]]:
        made = asyncio.run(cluster.mode.worker.do_slowly(cluster.mode.stats([plan])))
        (front,) = made.frontends.values()
        return front, {end: count for (_, end), count in made.endpoints.items()}

    before, ends = counts(make.port([0, 1]))
    assert before == sum(ends.values()) == 20
    have = asyncio.run(cluster.mode.worker.do(cluster.mode.read))
    (element,) = (key for key in have if key[0] == Kind.SERVICE_IPS)
    refused = Diff(changed={element: (have[element], b"no-such-chain\0")})
    with pytest.raises(ApplyError):
        asyncio.run(cluster.mode.worker.do(cluster.mode.apply, refused))
    assert counts(make.port([0, 1])) == (before, ends)
    cluster.program(make.moved(make.port([0, 1])))
    assert counts(make.port([0, 1])) == (before, ends)
    cluster.program(make.port(range(40)))  # another chain, so another element
    cluster.program(make.port([1]))  # another slot
    after, left = counts(make.port([1]))
    assert after == 20
    assert left == {end: n for end, n in ends.items() if end in left}
    assert len(left) == 1


DAMAGE = {
    "everything": "flush ruleset",
    "an element": "delete element ip kube-proxy service-ips { 10.96.0.10 . tcp . 80 }",
    "a fixed rule": "flush chain ip kube-proxy lb-4",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_counters_reset_by_others_are_not_counted_twice(cluster: Cluster, damage: str) -> None:
    plan = make.port([0])

    def reached(times: int) -> None:
        for _ in range(times):
            cluster.reached(OUTSIDE, *WAYS[0])

    def counts() -> tuple[list[int], list[int]]:
        made = asyncio.run(cluster.mode.worker.do_slowly(cluster.mode.stats([plan])))
        return list(made.frontends.values()), list(made.endpoints.values())

    cluster.program()
    cluster.program(plan)
    reached(6)
    assert counts() == ([6], [6])
    cluster.program(make.port([0, 1, 2]))
    cluster.program(plan)  # its elements are others than at first
    reached(3)
    assert counts() == ([9], [9])
    cluster.lab.run("nft", damage)
    cluster.program(plan)
    reached(1)
    frontends, endpoints = counts()
    assert frontends == [10]
    assert endpoints[0] <= 10


def test_every_sticky_connection_is_counted(cluster: Cluster) -> None:
    cluster.program()
    assert asyncio.run(cluster.mode.worker.do_slowly(cluster.mode.stats([]))).frontends == {}
    plan = make.port(frontends=frontends(EXTERNAL_LOCAL), affinity=600)
    cluster.program(plan)
    for way in WAYS * 4:
        cluster.reached(OUTSIDE, *way)
        cluster.reached(POD, *way)
    made = asyncio.run(cluster.mode.worker.do_slowly(cluster.mode.stats([plan])))
    assert sum(made.frontends.values()) == 24
    assert sum(made.endpoints.values()) == 24
