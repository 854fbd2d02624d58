from __future__ import annotations

from typing import Any

import pytest

from steersman.compile.endpoints import (
    EndpointState,
    Topology,
    build_endpoints,
    categorize,
    limited_slices,
    local_ready_count,
    read_endpoints,
    topology,
    union,
    with_ejections,
)
from steersman.compile.service import PortSpec
from steersman.model.failover import Backend, Ejection, Observation
from steersman.model.kube import EndpointSlice
from steersman.model.names import Family, Protocol
from steersman.model.plan import Endpoint
from tests.support.builders.objects import NODE, endpoint, port, slice_

HTTP = ("http", Protocol.TCP)
PLAIN = PortSpec("10.96.0.10", 80)
LOCAL_INSIDE = PortSpec("10.96.0.10", 80, internal_policy_local=True)
LOCAL_OUTSIDE = PortSpec("10.96.0.10", 80, node_port=30000, external_policy_local=True)


def states(*slices: EndpointSlice, family: Family = Family.IPV4) -> dict[str, EndpointState]:
    found = build_endpoints(slices, family, NODE).get(HTTP, ())
    return {str(state.endpoint): state for state in found}


def picked(spec: PortSpec, *endpoints: dict[str, Any], zone: str = "z1") -> tuple[str, str, bool]:
    """Last octets of the cluster list and the local list, and has_any."""
    found = build_endpoints([slice_(*endpoints)], Family.IPV4, NODE).get(HTTP, ())
    out = categorize(found, spec, NODE, zone)
    assert set(out.reachable) == {*out.cluster, *out.local}
    assert list(out.reachable) == sorted(out.reachable, key=str)
    return _octets(out.cluster), _octets(out.local), out.has_any


def _octets(endpoints: tuple[Endpoint, ...]) -> str:
    return " ".join(e.ip.rpartition(".")[2] for e in endpoints)


def test_conditions_default_to_what_upstream_takes() -> None:
    found = states(
        slice_(
            endpoint("10.0.0.1"),
            endpoint("10.0.0.2", ready=None, serving=None, terminating=None),
            endpoint("10.0.0.3", ready=False, serving=False, terminating=True),
        )
    )
    assert found["10.0.0.1:8080"] == EndpointState(Endpoint("10.0.0.1", 8080))
    assert found["10.0.0.2:8080"] == EndpointState(Endpoint("10.0.0.2", 8080))
    state = found["10.0.0.3:8080"]
    assert (state.ready, state.serving, state.terminating) == (False, False, True)


def test_printed_order_is_that_of_strings() -> None:
    found = states(slice_(endpoint("10.0.0.2"), endpoint("10.0.0.10"), endpoint("010.0.0.1")))
    assert list(found) == ["10.0.0.10:8080", "10.0.0.1:8080", "10.0.0.2:8080"]
    six = states(
        slice_(endpoint("fd00::2"), endpoint("fd00::1"), family="IPv6"), family=Family.IPV6
    )
    assert list(six) == ["[fd00::1]:8080", "[fd00::2]:8080"]


@pytest.mark.parametrize(
    ("node_name", "node", "local"),
    [(NODE, NODE, True), (NODE, "other", False), (NODE, None, False), ("", "", False)],
)
def test_local(node_name: str, node: str | None, local: bool) -> None:
    found = build_endpoints([slice_(endpoint("10.0.0.1", node))], Family.IPV4, node_name)
    assert found[HTTP][0].endpoint.local is local


def test_only_the_first_address_counts() -> None:
    two = endpoint("10.0.0.1") | {"addresses": ["10.0.0.1", "10.0.0.2"]}
    none = endpoint("10.0.0.1") | {"addresses": []}
    assert list(states(slice_(two, none))) == ["10.0.0.1:8080"]
    assert states(slice_()) == {}
    assert build_endpoints([slice_(two, ports=[])], Family.IPV4, NODE) == {}


def test_hints_are_kept() -> None:
    found = states(
        slice_(
            endpoint("10.0.0.1", zones=["z1", "z2"], nodes=["n"]),
            endpoint("10.0.0.2", zones=[], ready=True),
        )
    )
    assert found["10.0.0.1:8080"].zone_hints == ("z1", "z2")
    assert found["10.0.0.1:8080"].node_hints == ("n",)
    assert found["10.0.0.2:8080"].zone_hints == ()


@pytest.mark.parametrize(
    ("first", "second", "terminating", "node"),
    [
        ({}, {"node": NODE}, False, True),  # the later one counts
        ({"node": NODE}, {"terminating": True}, False, True),  # but never a terminating one
        ({"terminating": True}, {"node": NODE}, False, True),
        ({"terminating": True, "node": NODE}, {"terminating": True}, True, True),
    ],
)
def test_duplicates(
    first: dict[str, Any], second: dict[str, Any], terminating: bool, node: bool
) -> None:
    slices = [
        slice_(endpoint("10.0.0.1", **second), name="b"),
        slice_(endpoint("10.0.0.1", **first), name="a"),
    ]
    state = states(*slices)["10.0.0.1:8080"]
    assert (state.terminating, state.endpoint.local) == (terminating, node)


def test_slices_that_are_not_meant() -> None:
    assert not states(slice_(endpoint("fd00::1"), family="IPv6"))
    assert not states(slice_(endpoint("10.0.0.1"), labels={"service.kubernetes.io/headless": ""}))
    fqdn = slice_(endpoint("example.org"), family="FQDN")
    assert not states(fqdn)
    _, (finding,) = limited_slices([fqdn, slice_()])
    assert (finding.object, finding.field) == ("EndpointSlice shop/cart-1", "addressType")


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        (port(None), "ports[0].name"),
        (port(protocol="QUIC"), "ports[0].protocol"),
        (port(number=70000), "ports[0].port"),
        (port(number=-1), "ports[0].port"),
    ],
)
def test_a_bad_port_of_a_slice_is_a_finding(entry: dict[str, Any], field: str) -> None:
    obj = slice_(endpoint("10.0.0.1"), ports=[entry, port("ok", 1)])
    found, findings = read_endpoints([obj], Family.IPV4, NODE)
    assert list(found) == [("ok", Protocol.TCP)]
    assert [f.field for f in findings] == [field]


@pytest.mark.parametrize("number", [None, 0])
def test_a_port_without_number_is_skipped(number: int | None) -> None:
    obj = slice_(endpoint("10.0.0.1"), ports=[{"name": "http", "port": number}])
    assert read_endpoints([obj], Family.IPV4, NODE) == ({}, ())


@pytest.mark.parametrize("address", ["10.0.0.1000", "fd00::1", "example.org"])
def test_a_bad_address_is_a_finding_and_others_are_served(address: str) -> None:
    obj = slice_(endpoint("10.0.0.1"), endpoint(address), ports=[port(), port("b")])
    found, findings = read_endpoints([obj], Family.IPV4, NODE)
    assert [str(s.endpoint) for s in found[HTTP]] == ["10.0.0.1:80"]
    assert [f.field for f in findings] == ["endpoints[1].addresses[0]"]
    assert repr(address) in findings[0].reason


def test_local_ready_count_is_of_addresses() -> None:
    obj = slice_(
        endpoint("10.0.0.1", NODE),
        endpoint("10.0.0.2", NODE, ready=False, serving=True, terminating=True),
        endpoint("10.0.0.3", "other"),
        ports=[port(), port("b", 81)],
    )
    assert local_ready_count(build_endpoints([obj], Family.IPV4, NODE)) == 1


READY_HERE, READY_THERE = endpoint("10.0.0.1", NODE), endpoint("10.0.0.2", "other")
DRAINING_HERE = endpoint("10.0.0.3", NODE, ready=False, serving=True, terminating=True)
DRAINING_THERE = endpoint("10.0.0.4", "other", ready=False, serving=True, terminating=True)
DEAD = endpoint("10.0.0.5", NODE, ready=False, serving=False, terminating=True)
NOT_READY = endpoint("10.0.0.6", NODE, ready=False, serving=True)


@pytest.mark.parametrize(
    ("spec", "endpoints", "expected"),
    [
        (PLAIN, [], ("", "", False)),
        (PLAIN, [DEAD, NOT_READY], ("", "", False)),
        (LOCAL_OUTSIDE, [DEAD, NOT_READY], ("", "", False)),
        (PLAIN, [READY_HERE, READY_THERE, DRAINING_HERE, NOT_READY], ("1 2", "", True)),
        (PLAIN, [DRAINING_HERE, DRAINING_THERE, DEAD], ("3 4", "", True)),
        (LOCAL_INSIDE, [READY_HERE, READY_THERE], ("", "1", True)),
        (LOCAL_INSIDE, [READY_THERE], ("", "", True)),
        (LOCAL_INSIDE, [READY_THERE, DRAINING_HERE], ("", "3", True)),
        (LOCAL_INSIDE, [DRAINING_THERE], ("", "", True)),
        (LOCAL_OUTSIDE, [READY_HERE, READY_THERE], ("1 2", "1", True)),
        (LOCAL_OUTSIDE, [READY_THERE, DRAINING_HERE], ("2", "3", True)),
    ],
)
def test_ready_else_draining(
    spec: PortSpec, endpoints: list[dict[str, Any]], expected: tuple[str, str, bool]
) -> None:
    assert picked(spec, *endpoints) == expected


IN_Z1 = endpoint("10.0.0.1", NODE, zones=["z1"], nodes=[NODE])
IN_Z2 = endpoint("10.0.0.2", zones=["z2"], nodes=["n2"])
ALSO_Z1 = endpoint("10.0.0.3", zones=["z0", "z1"], nodes=["n3"])


@pytest.mark.parametrize(
    ("endpoints", "zone", "mode", "cluster"),
    [
        ([IN_Z1, IN_Z2, ALSO_Z1], "z1", Topology.SAME_NODE, "1"),
        ([IN_Z2, ALSO_Z1], "z1", Topology.SAME_ZONE, "3"),
        ([IN_Z2, ALSO_Z1], "", Topology.NONE, "2 3"),
        ([IN_Z2, ALSO_Z1], "z9", Topology.NONE, "2 3"),
        ([IN_Z1, READY_THERE], "z1", Topology.NONE, "1 2"),
        ([READY_HERE, IN_Z2], "z2", Topology.NONE, "1 2"),
        ([IN_Z2, endpoint("10.0.0.6", ready=False)], "z2", Topology.SAME_ZONE, "2"),
    ],
)
def test_hints_narrow_the_cluster_list(
    endpoints: list[dict[str, Any]], zone: str, mode: Topology, cluster: str
) -> None:
    ready = [s for s in states(slice_(*endpoints)).values() if s.ready]
    assert topology(ready, NODE, zone) is mode
    assert picked(PLAIN, *endpoints, zone=zone)[0] == cluster


def test_hints_never_narrow_the_local_list() -> None:
    elsewhere = endpoint("10.0.0.7", NODE, zones=["z2"])
    near = endpoint("10.0.0.8", "other", zones=["z1"])
    assert picked(LOCAL_OUTSIDE, elsewhere, near) == ("8", "7", True)


def test_no_node_name_matches_no_hint() -> None:
    assert topology([EndpointState(Endpoint("10.0.0.1", 1), node_hints=("",))], "", "") is (
        Topology.NONE
    )


def test_union_is_sorted_and_cheap_where_one_holds_all() -> None:
    one, two, ten = (Endpoint(f"10.0.0.{n}", 80) for n in (1, 2, 10))
    assert union((two,), (ten, one)) == (ten, one, two)
    assert union((), (one,)) == union((one,), ()) == union((one,), (one,)) == (one,)


# Ejections


def ejection(ip: str, port: int = 8080, protocol: Protocol = Protocol.TCP) -> Ejection:
    return Ejection(Backend(ip, port, protocol), Observation.SILENT, 1e9, 1e9 + 10, 1)


def test_an_ejected_endpoint_is_not_ready() -> None:
    found = tuple(states(slice_(endpoint("10.0.0.1"), endpoint("10.0.0.2"))).values())
    out = with_ejections(found, Protocol.TCP, [ejection("10.0.0.1")])
    assert [(state.ready, state.serving) for state in out] == [(False, False), (True, True)]
    assert out[0].ejection is not None


def test_if_every_ready_endpoint_is_ejected_all_stay() -> None:
    ready, gone = endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=False)
    found = tuple(states(slice_(ready, gone)).values())
    assert with_ejections(found, Protocol.TCP, [ejection("10.0.0.1")]) == found


@pytest.mark.parametrize(
    "other",
    [ejection("10.0.0.9"), ejection("10.0.0.1", 9), ejection("10.0.0.1", protocol=Protocol.UDP)],
)
def test_an_ejection_is_of_an_address_a_port_and_a_protocol(other: Ejection) -> None:
    found = tuple(states(slice_(endpoint("10.0.0.1"))).values())
    assert with_ejections(found, Protocol.TCP, [other]) == found
