"""The order of the operations of a transaction."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.model.plan import ServicePlan
from steersman.model.ruleset import Diff, diff, patch
from steersman.modes.nftables.derived import DerivedElements
from steersman.modes.nftables.layout import Kind, element_key
from steersman.modes.nftables.render import Slots, render_service
from steersman.modes.nftables.transaction import in_steps, transaction
from steersman.netfilter.nft import wire as nft
from tests.support.builders import nftables_plans as make
from tests.support.builders.plans import EXTERNAL_LOCAL


def test_many_elements_take_several_messages_and_one_transaction() -> None:
    plan = make.port(range(3000))
    operations = transaction(Diff(render_service(plan, make.SETTINGS, {})), destroy=True)
    assert all(len(operation.request.payload) < 65536 for operation in operations)
    endpoints = [s for s in operations if s.keys[0][0] == Kind.SERVICE_ENDPOINTS]
    assert len(endpoints) > 1
    batch = nft.batch([operation.request for operation in operations])
    assert len(batch) == len(operations) + 2


def test_order_elements_go_before_their_chains_and_come_after() -> None:
    rules = render_service(make.port([1], affinity=60), make.SETTINGS, {})
    kinds = [operation.keys[0][0] for operation in transaction(Diff(rules), destroy=True)]
    assert kinds.index(Kind.AFFINITY) < kinds.index(Kind.CHAIN) < kinds.index(Kind.SERVICE_IPS)
    gone = [operation.keys[0][0] for operation in transaction(Diff({}, rules), destroy=False)]
    assert gone.index(Kind.SERVICE_IPS) < gone.index(Kind.CHAIN) < gone.index(Kind.MEMBERS)
    assert Kind.MEMBER not in gone  # they go with their set


def test_order_lazy_chains_get_rules_before_elements_need_them() -> None:
    rules = render_service(make.port([1], affinity=60), make.SETTINGS, {})
    rules |= DerivedElements().load(rules)
    (lazy,) = (key for key in rules if key[0] == Kind.LAZY)
    kinds = [operation.keys[0][0] for operation in transaction(Diff(rules), destroy=True)]
    assert kinds.index(Kind.LAZY) < kinds.index(Kind.AFFINITY_IPS)
    gone = transaction(Diff(removed=rules), destroy=True)
    elements = next(n for n, each in enumerate(gone) if each.keys[0][0] == Kind.AFFINITY_IPS)
    empty = [n for n, each in enumerate(gone) if each.keys == (lazy,)]
    assert elements < min(empty)


def test_a_chain_that_changes_lets_go_of_a_set_before_it_is_deleted() -> None:
    both = make.port([0, 1], frontends=[make.cluster_ip(EXTERNAL_LOCAL)], affinity=60)
    one = make.port([0, 1], affinity=60)
    rules = [render_service(each, make.SETTINGS, {}) for each in (both, one)]
    operations = transaction(diff(*rules), destroy=True)
    deleted = [n for n, s in enumerate(operations) if s.request.kind & 0xFF == nft.DELSET]
    learn = [n for n, s in enumerate(operations) if b"affinity-learn-" in s.keys[0]]
    assert deleted
    assert max(learn) < min(deleted)


def test_a_member_leaves_a_set_that_stays() -> None:
    slots: Slots = {}
    two = render_service(make.port([1, 3], affinity=60), make.SETTINGS, slots)
    one = render_service(make.port([1], affinity=60), make.SETTINGS, slots)
    kinds = {operation.keys[0][0] for operation in transaction(diff(two, one), destroy=False)}
    assert Kind.MEMBER in kinds
    assert Kind.MEMBERS not in kinds


@pytest.mark.parametrize(
    ("destroy", "verbs"), [(True, [nft.DESTROYSETELEM]), (False, [nft.NEWSETELEM, nft.DELSETELEM])]
)
def test_an_entry_that_may_expire_is_added_before_it_is_deleted(
    destroy: bool, verbs: list[int]
) -> None:
    rules = render_service(make.port([1], affinity=60), make.SETTINGS, {})
    memory = next(key for key in rules if key[0] == Kind.AFFINITY)
    entry = {element_key(memory, bytes((203, 0, 113, 9))): bytes((10, 244, 0, 9, 31, 144, 0, 0))}
    operations = transaction(Diff(removed=entry), destroy=destroy)
    assert [each.request.kind & 0xFF for each in operations] == verbs


BY_SOURCE = {
    *(Kind.POD_SERVICE_IPS, Kind.NODE_SERVICE_IPS, Kind.EXTERNAL_SERVICE_IPS),
    *(Kind.POD_NODEPORTS, Kind.NODE_NODEPORTS, Kind.EXTERNAL_NODEPORTS),
}
DISPATCH = {Kind.SERVICE_IPS, Kind.SERVICE_NODEPORTS} | BY_SOURCE
NEEDED_LATER = BY_SOURCE | {Kind.SERVICE_ENDPOINTS, Kind.NODEPORT_ENDPOINTS}
NEEDED_LATER |= {Kind.CHAIN, Kind.AFFINITY, Kind.MEMBERS, Kind.MEMBER}


def way(value: Any) -> bytes:
    """The chain of a verdict, whatever the number of its slots."""
    return re.sub(rb"\blb-\d+\0.*", b"lb", value, flags=re.DOTALL).partition(b"\0")[0]


@given(st.integers(0, 7).flatmap(lambda n: st.tuples(make.plans(n), make.plans(n))))
def test_a_packet_that_meets_a_switch_finds_the_old_or_the_new_way(
    versions: tuple[ServicePlan, ServicePlan],
) -> None:
    slots: Slots = {}
    old, new = (dict(render_service(each, make.SETTINGS, slots)) for each in versions)
    first, switch, last = in_steps(diff(old, new))
    prepared = patch(old, first)
    switched = patch(prepared, switch)
    assert patch(switched, last) == new
    destinations = [key for key in old.keys() & new.keys() if key[0] in DISPATCH]
    if any(way(old[key]) != way(new[key]) for key in destinations):
        assert {key for key in new if key[0] in NEEDED_LATER} <= prepared.keys()
        assert {key for key in old if key[0] in NEEDED_LATER} <= switched.keys()
        assert prepared.items() >= old.items()
    else:
        assert not first
        assert not last


@pytest.mark.parametrize("count", [3, 4])
def test_a_new_endpoint_takes_one_transaction(count: int) -> None:
    slots: Slots = {}
    before = render_service(make.port(range(count)), make.SETTINGS, slots)
    after = render_service(make.port(range(count + 1)), make.SETTINGS, slots)
    change = diff(before, after)
    assert in_steps(change) == (Diff(), change, Diff())
    assert bool(change.changed) is (count == 4), "it chooses from more slots"
