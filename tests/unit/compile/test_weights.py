"""Weights of endpoints, by annotation of their slices."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from steersman.model.kube import Annotations, EndpointSlice
from steersman.model.names import ObjectName
from steersman.source.packed import PackedSlices
from tests.support.builders.objects import KEY, endpoint, plan_of, service, slice_


def weighed(text: str | None, *addresses: str, name: str = "cart-1", **more: Any) -> EndpointSlice:
    made = slice_(*map(endpoint, addresses), name=name, **more)
    annotations = Annotations(weight=text, trigger_time="2024-01-01T00:00:00Z")
    meta = msgspec.structs.replace(made.metadata, annotations=annotations)
    held, owner = PackedSlices(), ObjectName("shop", "cart")
    held.put(meta.object_name, owner, msgspec.structs.replace(made, metadata=meta))
    return held[owner][name]


def planned(*slices: EndpointSlice) -> tuple[dict[str, int], list[str]]:
    plan = plan_of(service(), *slices)
    weights = {ip: weight for ip, _, weight in plan.services[KEY].scheduling.weights}
    return weights, [str(finding) for finding in plan.findings]


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        (None, {}),
        ("1", {}),
        ("65535", {"10.0.0.1": 65535, "10.0.0.2": 65535}),
        ("10.0.0.2=3", {"10.0.0.2": 3}),
        ("10.0.0.2=3, 5", {"10.0.0.1": 5, "10.0.0.2": 3}),
        (" 010.0.0.1 = 2 ,10.0.0.9=7", {"10.0.0.1": 2}),
    ],
)
def test_weights(text: str | None, weights: dict[str, int]) -> None:
    assert planned(weighed(text, "10.0.0.1", "10.0.0.2")) == (weights, [])


@pytest.mark.parametrize("text", ["0", "-1", "65536", "many", "10.0.0.=3", "=3", "3=", "", " "])
def test_what_is_no_weight(text: str) -> None:
    weights, findings = planned(weighed(text, "10.0.0.1"))
    assert weights == {}
    assert ["steersman/weight" in finding for finding in findings] == ([True] if text else [])


def test_what_is_right_counts_beside_what_is_wrong() -> None:
    weights, (finding,) = planned(weighed("10.0.0.1=2,10.0.0.2=x", "10.0.0.1", "10.0.0.2"))
    assert weights == {"10.0.0.1": 2}
    assert "EndpointSlice shop/cart-1" in finding


def test_each_slice_has_its_own() -> None:
    stable = weighed("9", "10.0.0.1", name="stable")
    canary = weighed(None, "10.0.0.2", name="canary")
    assert planned(canary, stable) == ({"10.0.0.1": 9}, [])


def test_the_last_slice_that_says_something_counts() -> None:
    one, two = weighed("2", "10.0.0.1", name="a"), weighed("3", "10.0.0.1", name="b")
    assert planned(two, one)[0] == {"10.0.0.1": 3}


def test_endpoints_of_no_use() -> None:
    odd = slice_(endpoint("what"), {**endpoint("10.0.0.1"), "addresses": []}, name="odd")
    meta = msgspec.structs.replace(odd.metadata, annotations=Annotations(weight="3"))
    portless = msgspec.structs.replace(odd, metadata=meta, ports=None)
    assert planned(portless, weighed("2", "10.0.0.1"))[0] == {"10.0.0.1": 2}
    assert planned(msgspec.structs.replace(odd, metadata=meta), weighed("2", "10.0.0.1"))[0] == {
        "10.0.0.1": 2
    }


def test_a_hostile_annotation_is_one_finding() -> None:
    weights, (finding,) = planned(weighed("10.0.0.1=3," + "x\n," * 48_000, "10.0.0.1"))
    assert weights == {"10.0.0.1": 3}
    assert "'x', 'x', 'x' and 1996 more: ignored" in finding
    assert len(finding) < 400
