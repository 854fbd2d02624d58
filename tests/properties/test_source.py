"""Packed objects are unpacked as they were."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.model.findings import Finding
from steersman.model.kube import KINDS, EndpointSlice
from steersman.model.names import ObjectName
from steersman.source.lister import ArrivingList
from steersman.source.objects import decode_value
from steersman.source.packed import plain
from steersman.source.store import Store
from tests.support.builders.objects import endpoint, slice_, snapshot

ANY_INT = st.integers() | st.integers(0, 65535)
METADATA = {"namespace": "shop", "name": "web"}
OBJECTS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "Service": st.fixed_dictionaries(
        {},
        optional={
            "type": st.none() | st.text(),
            "clusterIPs": st.none() | st.lists(st.text(), max_size=2),
            "healthCheckNodePort": st.none() | ANY_INT,
            "ports": st.lists(
                st.fixed_dictionaries({"port": ANY_INT}, optional={"nodePort": ANY_INT}),
                max_size=3,
            ),
        },
    ),
    "EndpointSlice": st.fixed_dictionaries(
        {},
        optional={
            "addressType": st.text(max_size=5),
            "ports": st.none() | st.lists(st.fixed_dictionaries({"port": st.none() | ANY_INT})),
            "endpoints": st.none()
            | st.lists(
                st.fixed_dictionaries(
                    {"addresses": st.none() | st.lists(st.text(), max_size=2)},
                    optional={"conditions": st.just({"ready": False}), "zone": st.text()},
                ),
                max_size=3,
            ),
        },
    ),
}


@pytest.mark.parametrize("kind", OBJECTS)
@given(data=st.data())
def test_a_list_that_was_put_aside_is_the_same_list(kind: str, data: st.DataObject) -> None:
    values = data.draw(st.lists(OBJECTS[kind], max_size=4))
    many = values * data.draw(st.sampled_from([1, 200]))  # more than are packed at once
    wrap = (lambda v: {"spec": v}) if kind == "Service" else (lambda v: v)
    decoded = [decode_value(kind, {"metadata": METADATA, **wrap(value)}) for value in many]
    objects = [obj for obj in decoded if not isinstance(obj, Finding)]
    arriving = ArrivingList(kind)
    for obj in objects:
        assert isinstance(obj, KINDS[kind])
        arriving.add([obj], [], 1 << 11)
    assert list(arriving.complete("1").objects) == objects
    assert list(arriving.complete("1").objects) == []


NAMES = st.sampled_from(["a", "b", "c"])
SLICES = st.builds(
    lambda name, owner, ip, protocol: slice_(
        endpoint(ip),
        name=name,
        owner=owner,
        ports=[{"name": "", "port": 80, "protocol": protocol}],
    ),
    NAMES,
    NAMES,
    st.sampled_from(["10.1.0.1", "10.1.0.2"]),
    st.sampled_from(["TCP", "UDP"]),
)


@given(st.lists(SLICES | NAMES, max_size=20))
def test_slices_are_held_by_service_and_name(steps: list[EndpointSlice | str]) -> None:
    store, wanted = Store(), dict[str, EndpointSlice]()
    for step in steps:
        if isinstance(step, str):
            known = wanted.pop(step, None)
            assert store.delete("EndpointSlice", ObjectName("shop", step)) == (known is not None)
        else:
            name = step.metadata.name
            assert store.upsert(step) == (wanted.get(name) != step)
            wanted[name] = step
    held = store.snapshot.slices
    found = {owner: [*map(plain, slices)] for owner, slices in held.items()}
    assert found == snapshot(*(wanted[name] for name in sorted(wanted))).slices
    assert len(held) == len(set(held))
    assert all(name in held for name in held)
