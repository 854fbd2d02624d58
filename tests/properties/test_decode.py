"""Any JSON thrown at the decoder yields objects or Findings, never an exception."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.model.findings import Finding
from steersman.model.kube import KINDS, Service
from steersman.source.objects import decode_items, decode_object, decode_value

KINDS_ST = st.sampled_from(sorted(KINDS))
WORDS = st.sampled_from(
    ["metadata", "name", "namespace", "labels", "spec", "ports", "port", "clusterIP", "status"]
)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(WORDS | st.text(max_size=5), inner, max_size=6)
    ),
    max_leaves=25,
)
GOOD = {"metadata": {"namespace": "shop", "name": "web"}, "spec": {"clusterIP": "10.96.0.1"}}


@given(KINDS_ST, JSON)
def test_any_json_gives_an_object_or_a_finding(kind: str, value: Any) -> None:
    for result in (decode_object(kind, json.dumps(value).encode()), decode_value(kind, value)):
        assert isinstance(result, (Finding, KINDS[kind]))


@given(KINDS_ST, st.binary())
def test_any_bytes_give_an_object_or_a_finding(kind: str, raw: bytes) -> None:
    assert isinstance(decode_object(kind, raw), (Finding, KINDS[kind]))


@given(st.lists(JSON, max_size=5))
def test_a_malformed_item_never_costs_the_others(items: list[Any]) -> None:
    raw = json.dumps([GOOD, *items, GOOD]).encode()
    objects, findings = decode_items("Service", raw)
    assert len(objects) + len(findings) == len(items) + 2
    assert len(objects) >= 2


def test_a_finding_names_object_field_and_reason() -> None:
    bad = {**GOOD, "spec": {"ports": [{"port": 80}, {"port": "http"}]}}
    finding = decode_object("Service", json.dumps(bad).encode())
    assert isinstance(finding, Finding)
    assert (finding.object, finding.field) == ("Service shop/web", "spec.ports[1].port")
    assert "Expected `int`, got `str`" in finding.reason


@pytest.mark.parametrize(
    ("kind", "meta", "field"),
    [
        ("Service", {"namespace": "shop"}, "metadata.name"),
        ("Service", {"name": "web"}, "metadata.namespace"),
        ("Node", {}, "metadata.name"),
    ],
)
def test_an_object_without_its_name_is_a_finding(
    kind: str, meta: dict[str, str], field: str
) -> None:
    raw = json.dumps({"metadata": meta}).encode()
    result = decode_object(kind, raw)
    assert isinstance(result, Finding)
    assert result.field == field
    _, (listed,) = decode_items(kind, b"[" + raw + b"]")
    assert listed == result


def test_a_cluster_scoped_object_needs_no_namespace() -> None:
    objects, findings = decode_items("ServiceCIDR", b'[{"metadata": {"name": "kubernetes"}}]')
    assert (len(objects), len(findings)) == (1, 0)


def test_what_is_no_list_is_said_to_be_none() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_items("Service", b'{"a": 1}')


def test_null_means_absent_wherever_go_accepts_it() -> None:
    raw = b'{"metadata":{"namespace":"a","name":"b","labels":null},"spec":{"ports":null}}'
    result = decode_object("Service", raw)
    assert isinstance(result, Service)
    assert result.spec.ports is None


def test_a_number_that_kubernetes_cannot_hold_is_malformed() -> None:
    bad = {**GOOD, "spec": {"ports": [{"port": 1 << 31}]}}
    finding = decode_object("Service", json.dumps(bad).encode())
    assert isinstance(finding, Finding)
    assert finding.field == "spec.ports[0].port"
