"""Connections by ServicePort: the counters of elements, added up and never falling."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from steersman.model.names import Family, ServicePortName
from steersman.model.plan import Frontend, FrontendKind, ServicePlan
from steersman.modes.nftables.layout import Kind, counted_key
from steersman.modes.nftables.render import render_service
from steersman.modes.nftables.totals import ConnectionTotals, Count
from tests.support.builders import nftables_plans as make
from tests.support.builders.plans import EXTERNAL_LOCAL, PLAIN

_FRONTENDS = (Kind.SERVICE_IPS, Kind.SERVICE_NODEPORTS)
_ENDPOINTS = (Kind.SERVICE_ENDPOINTS, Kind.NODEPORT_ENDPOINTS)
NODE_PORT = Frontend(FrontendKind.NODE_PORT, "", 30080, *PLAIN)


def counts(*plans: ServicePlan, each: int) -> dict[bytes, Count]:
    """Return the same count for every element that counts."""
    found: dict[bytes, Count] = {}
    for plan in plans:
        for key, value in render_service(plan, make.SETTINGS, {}).items():
            if key[0] in _FRONTENDS:
                found[key] = key, each
            elif key[0] in _ENDPOINTS:
                assert isinstance(value, bytes)
                found[key] = counted_key(key, value), each
            elif key[0] == Kind.MEMBER:
                found[key] = key, each
    return found


def named(totals: Mapping[tuple[ServicePortName, str], int]) -> dict[str, int]:
    return {f"{name} {what}": count for (name, what), count in totals.items()}


def test_an_endpoint_counts_what_came_by_each_frontend() -> None:
    v4 = make.port([1, 2], frontends=[make.cluster_ip(), NODE_PORT])
    v6 = make.port(
        [257], of=make.key(family=Family.IPV6), frontends=[make.cluster_ip(address="fd00:96::1")]
    )
    made = ConnectionTotals().update(counts(v4, v6, each=3), [v4, v6])
    assert named(made.frontends) == {
        "shop/web:http 10.96.0.10:80": 3,
        "shop/web:http nodePort:30080": 3,
        "shop/web:http [fd00:96::1]:80": 3,
    }
    assert named(made.endpoints) == {
        "shop/web:http 10.244.0.1:8080": 6,
        "shop/web:http 10.244.0.2:8080": 6,
        "shop/web:http [fd00:244::1:1]:8080": 3,
    }


def test_a_removed_frontend_takes_no_counts_of_endpoints() -> None:
    totals, both = ConnectionTotals(), make.port([1], frontends=[make.cluster_ip(), NODE_PORT])
    totals.update(counts(both, each=5), [both])
    one = make.port([1])
    made = totals.update(counts(one, each=7), [one])
    assert named(made.endpoints) == {"shop/web:http 10.244.0.1:8080": 12}
    assert named(made.frontends) == {"shop/web:http 10.96.0.10:80": 7}
    made = totals.update(counts(both, each=8), [both])
    assert named(made.endpoints) == {"shop/web:http 10.244.0.1:8080": 21}


def test_a_counter_that_restarts_at_zero_is_added() -> None:
    totals, plan = ConnectionTotals(), make.port([1])
    totals.update(counts(plan, each=9), [plan])
    made = totals.update(counts(plan, each=2), [plan])
    assert named(made.endpoints) == {"shop/web:http 10.244.0.1:8080": 11}


def test_a_slot_that_changes_hands_is_another_counter() -> None:
    totals, slot, other = ConnectionTotals(), make.port([1, 2]), make.port([2, 1])
    totals.update(counts(slot, each=9), [slot])
    made = totals.update(counts(other, each=10), [other])
    assert set(made.endpoints.values()) == {19}


def test_one_of_two_slots_that_restarts_adds_only_its_own() -> None:
    """An endpoint's count falls by what its lost slot had: the other has counted nothing new."""
    totals, plan = ConnectionTotals(), make.port([1])
    (key,) = (key for key in counts(plan, each=1) if key[0] in _ENDPOINTS)
    counted, second = counts(plan, each=1)[key][0], key[:-1] + bytes((key[-1] ^ 1,))
    totals.update({key: (counted, 9), second: (counted, 9)}, [plan])
    made = totals.update({key: (counted, 9), second: (counted, 2)}, [plan])
    assert set(made.endpoints.values()) == {20}


def test_totals_of_removed_endpoints_are_dropped() -> None:
    totals, plan = ConnectionTotals(), make.port([1, 2])
    totals.update(counts(plan, each=9), [plan])
    less = make.port([2])
    made = totals.update(counts(plan, each=10), [less])  # the kernel's elements go later
    assert named(made.endpoints) == {"shop/web:http 10.244.0.2:8080": 10}
    assert totals.update(counts(plan, each=9), []).endpoints == {}


def test_sticky_connections_are_counted_once_where_they_are_learned() -> None:
    actions = EXTERNAL_LOCAL
    both = [make.cluster_ip(), Frontend(FrontendKind.EXTERNAL_IP, "192.0.2.80", 80, *actions)]
    plan = make.port([1, 2], frontends=both, affinity=60)  # 2 is local, so a member twice
    made = ConnectionTotals().update(counts(plan, each=5), [plan])
    assert named(made.endpoints) == {
        "shop/web:http 10.244.0.1:8080": 5,
        "shop/web:http 10.244.0.2:8080": 5,
    }
    assert set(made.frontends.values()) == {5}


def test_relayed_connections_count_for_the_node_port() -> None:
    plan = make.port([1], frontends=[make.cluster_ip(), NODE_PORT], affinity=60)
    found = counts(plan, each=5)
    (slot,) = (counted for counted, _ in found.values() if counted[0] == Kind.NODEPORT_ENDPOINTS)
    relay = bytes((Kind.RELAY,)) + slot[1:]
    found[relay] = relay, 2
    made = ConnectionTotals().update(found, [plan])
    assert named(made.endpoints) == {"shop/web:http 10.244.0.1:8080": 7}
    assert named(made.frontends)["shop/web:http nodePort:30080"] == 7


@given(st.lists(st.tuples(make.plans(0), st.integers(0, 20)), max_size=6))
def test_no_count_ever_falls(steps: list[tuple[ServicePlan, int]]) -> None:
    totals, before = ConnectionTotals(), dict[tuple[ServicePortName, str], int]()
    for plan, each in steps:
        made = totals.update(counts(plan, each=each), [plan])
        now = {**made.endpoints, **made.frontends}
        assert all(now[name] >= before[name] for name in now.keys() & before.keys())
        before = now


def test_a_count_that_is_missing_for_a_while_is_not_added_again() -> None:
    totals, plan = ConnectionTotals(), make.port([1, 2])
    totals.update(counts(plan, each=9), [plan])
    totals.update({}, [plan])  # the kernel left elements out of its list
    made = totals.update(counts(plan, each=11), [plan])
    assert set(made.endpoints.values()) == {11}
    assert set(made.frontends.values()) == {11}
    less = make.port([2])
    totals.update({}, [less])
    made = totals.update(counts(plan, each=3), [plan])  # an endpoint that was gone is a new one
    assert named(made.endpoints)["shop/web:http 10.244.0.1:8080"] == 3


@given(st.lists(st.tuples(make.plans(0), st.integers(0, 3)), max_size=6))
def test_counts_of_zero_may_be_left_out(steps: list[tuple[ServicePlan, int]]) -> None:
    dense, sparse = ConnectionTotals(), ConnectionTotals()
    for plan, each in steps:
        found = counts(plan, each=each)
        some = {key: n for key, n in found.items() if n[1] or key[0] == Kind.MEMBER}
        one, other = dense.update(found, [plan]), sparse.update(some, [plan])
        assert named(one.endpoints) == named(other.endpoints)
        assert named(one.frontends) == named(other.frontends)


def test_totals_of_zero_are_left_out() -> None:
    plan = make.port([1, 2], frontends=[make.cluster_ip(), NODE_PORT])
    made = ConnectionTotals().update({}, [plan])
    assert (made.frontends, made.endpoints) == ({}, {})
