"""Laws of the userspace modes: a listener decides as `trace` does; balancing is fair."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from steersman.compile.trace import Flow, trace
from steersman.model.addresses import family_of, in_cidr
from steersman.model.names import Family
from steersman.model.plan import Endpoint, NodePlan, ServicePlan, Verdict
from steersman.modes.userspace.render import render_direct, render_redirect
from steersman.proxy.balance import Balancer
from steersman.proxy.listeners import ListenerPlan
from tests.support.builders.plans import SETTINGS, random_plan

seeds = st.integers(0, 1 << 32)
SOURCES = {
    Family.IPV4: ("10.244.3.4", "10.250.1.2", "127.0.0.1", "203.0.113.9", "192.0.2.7"),
    Family.IPV6: ("fd00:10:244::9", "::1", "2001:db8::9", "fd00:ffff::1"),
}


def some_plan(seed: int) -> ServicePlan:
    rng = Random(seed)
    return random_plan(rng, 1, rng.choice(list(Family)))


@settings(deadline=None)  # a duration says nothing about a law
@given(seeds)
def test_a_listener_decides_as_trace_does(seed: int) -> None:
    plan = some_plan(seed)
    node = NodePlan(SETTINGS, {plan.key: plan})
    for key, listener in render_direct(plan, SETTINGS).items():
        if not isinstance(listener, ListenerPlan) or key.node_port:
            continue
        for source in SOURCES[plan.key.family]:
            decision = trace(node, Flow(source, key.address, key.port, key.protocol))
            choice = listener.decide(source)
            assert choice.verdict == decision.verdict
            assert choice.endpoints == decision.endpoints


@settings(deadline=None)
@given(seeds, seeds)
def test_keys_of_two_service_ports_differ(one: int, other: int) -> None:
    first = some_plan(one)
    second = random_plan(Random(other), 2, first.key.family)
    for render in (render_redirect, render_direct):
        assert not render(first, SETTINGS).keys() & render(second, SETTINGS).keys()


@settings(deadline=None)
@given(seeds)
def test_every_listener_of_a_redirect_has_a_portal_that_lets_through(seed: int) -> None:
    ruleset = render_redirect(some_plan(seed), SETTINGS)
    for key, value in ruleset.items():
        if isinstance(value, ListenerPlan):
            portal = ruleset[key.of("portal")]
            assert portal.verdict is Verdict.FORWARD
            assert portal.host in ("", value.bind)
            assert family_of(value.bind) is key.family
            for source in SOURCES[key.family]:
                barred = portal.source_ranges and not any(
                    in_cidr(source, cidr) for cidr in portal.source_ranges
                )
                assert not barred or value.decide(source).verdict is Verdict.DROP


endpoints = st.lists(
    st.builds(Endpoint, st.sampled_from([f"10.0.0.{n}" for n in range(9)]), st.just(80)),
    min_size=1,
    max_size=9,
    unique=True,
)


@given(endpoints, st.integers(1, 5))
def test_round_robin_is_fair(some: list[Endpoint], rounds: int) -> None:
    balancer = Balancer()
    firsts = [balancer.order("x", some, 0.0)[0] for _ in range(rounds * len(some))]
    assert all(firsts.count(endpoint) == rounds for endpoint in some)


@given(endpoints, st.lists(st.tuples(st.integers(0, 8), st.sampled_from("rfe")), max_size=40))
def test_an_order_holds_each_endpoint_at_most_once(
    some: list[Endpoint], events: list[tuple[int, str]]
) -> None:
    balancer, now = Balancer(), 0.0
    for number, what in events:
        endpoint, now = some[number % len(some)], now + 1
        if what == "r":
            balancer.reached(f"c{number % 3}", endpoint, now, 5)
        elif what == "f":
            balancer.failed(endpoint, now)
        else:
            balancer.ended(endpoint)
        for least in (False, True):
            order = balancer.order("c1", some, now, affinity_seconds=5, least_connections=least)
            assert len(order) == min(len(some), 4) == len(set(order))
            assert set(order) <= set(some)
