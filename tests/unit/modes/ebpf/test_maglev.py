"""Tables of the ebpf mode: even, the same whatever node makes them, and steady."""

from __future__ import annotations

from array import array
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.modes.ebpf import layout, maglev, render
from steersman.modes.ebpf.layout import Kind
from tests.support.builders import plans


def endpoints(numbers: range) -> list[bytes]:
    return [layout.pack_address(f"10.244.{n // 250}.{n % 250 + 1}") + b"\x1f\x90" for n in numbers]


def owners(ends: list[bytes]) -> list[bytes]:
    """The endpoint that has each place."""
    return [ends[number] for number in array("H", maglev.table(ends))[: maglev.SIZE]]


@pytest.mark.parametrize(("count", "tolerance"), [(1, 0.0), (3, 0.01), (40, 0.02), (200, 0.06)])
def test_shares_are_even(count: int, tolerance: float) -> None:
    shares = Counter(owners(endpoints(range(count))))
    assert len(shares) == count
    mean = maglev.SIZE / count
    assert all(abs(share - mean) <= max(1, tolerance * mean) for share in shares.values())


@given(st.integers(2, 30), st.data())
def test_one_that_goes_moves_few_of_the_others(count: int, data: st.DataObject) -> None:
    before = endpoints(range(count))
    gone = before[data.draw(st.integers(0, count - 1))]
    after = owners([end for end in before if end != gone])
    moved = sum(a != b for a, b in zip(owners(before), after, strict=True) if a != gone)
    assert moved <= 0.25 * maglev.SIZE


def test_nobody_has_a_table_of_nobody() -> None:
    assert maglev.table([]) == bytes(2 * maglev.ROOM)


def test_more_endpoints_than_places_do_no_harm() -> None:
    places = set(array("H", maglev.table(endpoints(range(maglev.SIZE + 5))))[: maglev.SIZE])
    assert places == set(range(maglev.SIZE))


def test_only_who_asks_has_one() -> None:
    plan = plans.plan(
        plans.key("shop/cart"), plans.cluster_ip("10.96.0.1"), cluster=plans.endpoints("10.244.0.5")
    )
    key = Kind.MAGLEV + layout.service_name(plan.key)
    assert key not in render.render_service(plan)
    asked = msgspec.structs.replace(plan, maglev=True)
    assert render.render_service(asked)[key] == bytes(2 * maglev.ROOM)
    assert key not in render.render_service(msgspec.structs.replace(asked, cluster=()))
