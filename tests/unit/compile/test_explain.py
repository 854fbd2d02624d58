from __future__ import annotations

from typing import Any

import pytest

from steersman.compile.explain import ServiceReports
from steersman.model.failover import Backend, Ejection, Observation
from steersman.model.kube import EndpointSlice, Service
from steersman.model.names import Family, PlanKey, Protocol
from tests.support.builders.objects import (
    HTTP,
    KEY,
    NODE,
    endpoint,
    port,
    service,
    settings_of,
    slice_,
)

HERE, THERE = endpoint("10.0.0.1", NODE), endpoint("10.0.0.2", "other")
DRAINING = endpoint("10.0.0.3", NODE, ready=False, serving=True, terminating=True)
LOCAL: dict[str, Any] = {
    "type": "NodePort",
    "externalTrafficPolicy": "Local",
    "ports": [port(nodePort=30000)],
}


def why(
    *slices: EndpointSlice, zone: str = "z1", key: PlanKey = KEY, obj: Service | None = None
) -> tuple[str, ...]:
    return ServiceReports(obj or service(), slices, settings_of(), zone).of(key).lines


@pytest.mark.parametrize(
    ("conditions", "says"),
    [
        ({}, "in: ready"),
        ({"ready": False, "serving": True}, "out: not ready"),
        ({"ready": False, "serving": False, "terminating": True}, "out: not ready, terminating"),
        (
            {"ready": False, "serving": True, "terminating": True},
            "out: terminating, and others are ready",
        ),
    ],
)
def test_each_endpoint_is_in_or_out_for_a_reason(conditions: dict[str, Any], says: str) -> None:
    assert why(slice_(HERE, endpoint("10.0.0.9", **conditions))) == (
        "10.0.0.1:8080: in: ready",
        f"10.0.0.9:8080: {says}",
    )


def test_what_shuts_down_is_used_where_nothing_is_ready() -> None:
    assert why(slice_(DRAINING)) == (
        "10.0.0.3:8080: in: terminating, but it still serves and nothing is ready",
    )


def test_both_policies_are_told_apart() -> None:
    assert why(slice_(HERE, THERE, DRAINING), obj=service(**LOCAL)) == (
        "10.0.0.1:8080: for policy Cluster in: ready; for policy Local in: ready, on this node",
        "10.0.0.2:8080: for policy Cluster in: ready; for policy Local out: on another node",
        "10.0.0.3:8080: for policy Cluster out: terminating, and others are ready; "
        "for policy Local out: terminating, and others on this node are ready",
    )


def test_policy_local_inside_alone() -> None:
    inside = service(internalTrafficPolicy="Local")
    hinted = endpoint("10.0.0.2", "other", zones=["z9"])
    assert why(slice_(DRAINING, hinted), obj=inside) == (
        "10.0.0.2:8080: for policy Local out: on another node",
        "10.0.0.3:8080: for policy Local in: terminating, but it still serves and nothing on this"
        " node is ready",
    )


Z1 = endpoint("10.0.0.1", zones=["z1"])
Z2 = endpoint("10.0.0.2", zones=["z2", "z3"])
N1 = endpoint("10.0.0.3", nodes=[NODE], zones=["z1"])
N2 = endpoint("10.0.0.4", nodes=["n2"], zones=["z2"])


@pytest.mark.parametrize(
    ("endpoints", "zone", "lines"),
    [
        (
            (Z1, Z2),
            "z1",
            [
                "zone hints count: only endpoints meant for zone z1 are used",
                "10.0.0.1:8080: in: ready",
                "10.0.0.2:8080: out: ready, but meant for zone z2, z3",
            ],
        ),
        (
            (N1, N2),
            "z1",
            [
                f"node hints count: only endpoints meant for node {NODE} are used",
                "10.0.0.3:8080: in: ready",
                "10.0.0.4:8080: out: ready, but meant for node n2",
            ],
        ),
    ],
)
def test_hints_that_count(
    endpoints: tuple[dict[str, Any], ...], zone: str, lines: list[str]
) -> None:
    assert list(why(slice_(*endpoints), zone=zone)) == lines


@pytest.mark.parametrize(
    ("endpoints", "zone", "says"),
    [
        (
            (Z1, HERE | {"addresses": ["10.0.0.9"]}),
            "z1",
            ": 10.0.0.9:8080: without a hint of a zone",
        ),
        (
            (Z1, *(endpoint(f"10.0.1.{n}") for n in range(1, 31))),
            "z1",
            "10.0.1.19:8080 and 20 more: without a hint of a zone",
        ),
        ((N2, endpoint("10.0.0.5", nodes=["n3"])), "z2", f"meant for node {NODE}"),
        ((Z1, Z2), "", "this node has no zone label"),
        ((Z1, Z2), "z9", "no ready endpoint is meant for this node's zone z9"),
    ],
)
def test_hints_that_do_not_count(
    endpoints: tuple[dict[str, Any], ...], zone: str, says: str
) -> None:
    lines = why(slice_(*endpoints), zone=zone)
    assert lines[0].startswith("hints are ignored: ")
    assert says in lines[0]
    assert all(line.endswith("in: ready") for line in lines[1:])


@pytest.mark.parametrize(
    ("slices", "says"),
    [
        ((slice_(HERE, ports=[port("web"), port("")]),), "(there are: '', 'web')"),
        ((slice_(HERE, ports=[]),), "(there are: none)"),
        ((slice_(HERE, ports=[port(protocol="UDP")]),), "has an IPv4 endpoint for TCP"),
        ((slice_(family="IPv6"),), "has an IPv4 endpoint for TCP"),
    ],
)
def test_no_endpoint_at_all(slices: tuple[EndpointSlice, ...], says: str) -> None:
    assert says in why(*slices)[0]


def test_findings_on_the_slices_are_told() -> None:
    lines = why(slice_(HERE, endpoint("bad")))
    assert "endpoints[1].addresses[0]: 'bad' is not an IPv4 address" in lines[-1]


def test_a_port_that_is_not_served() -> None:
    (line,) = why(key=PlanKey(HTTP, Family.IPV6))
    assert "is not served: see the Findings on Service shop/cart" in line


def test_a_report_tells_what_is_used() -> None:
    obj = service(**LOCAL)
    report = ServiceReports(obj, [slice_(HERE, THERE, DRAINING)], settings_of(), "z1").of(KEY)
    assert [each.used for each in report.endpoints] == [True, True, False]
    assert (report.notes, report.findings) == ((), ())
    inside = service(internalTrafficPolicy="Local")
    report = ServiceReports(inside, [slice_(HERE, THERE)], settings_of(), "z1").of(KEY)
    assert [each.used for each in report.endpoints] == [True, False]


def test_a_service_without_a_selector_needs_somebody_who_writes_its_slices() -> None:
    assert "it has no selector" in why()[0]
    assert "does its selector match any pod?" in why(obj=service(selector={"app": "cart"}))[0]


@pytest.mark.parametrize(
    ("reason", "node", "says"),
    [
        (Observation.SILENT, "", "it has not answered connections"),
        (Observation.REFUSED, "", "it has refused connections"),
        (Observation.UNREACHABLE, "", "it has been unreachable"),
        (Observation.SILENT, "other", "node other seems to be dead"),
    ],
)
def test_an_ejection_is_a_reason(reason: Observation, node: str, says: str) -> None:
    backend = Backend("10.0.0.2", 8080, Protocol.TCP)
    ejection = Ejection(backend, reason, 1_700_000_000, 1_700_000_010, 1, node=node)
    reports = ServiceReports(
        service(), [slice_(HERE, THERE)], settings_of(), "z1", ejections=(ejection,)
    )
    lines = reports.of(KEY).lines
    when = "since 22:13:20 UTC; this node tries it again from 22:13:30"
    assert lines[1] == f"10.0.0.2:8080: out: ejected: {says} {when}"
