"""What one object may cost (docs/limits.md): exceeding a limit is a Finding, never a stall."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steersman.compile.annotations import MAX_FLAGS, MAX_WEIGHT_ENTRIES
from steersman.compile.endpoints import MAX_ENDPOINTS, MAX_LISTED, build_endpoints, read_endpoints
from steersman.compile.findings import IN_TOTAL, PER_SERVICE
from steersman.compile.planner import Planner
from steersman.compile.service import MAX_DESTINATIONS, MAX_PORTS, STEP, parse_service, parse_steps
from steersman.compile.service_plan import plan_service
from steersman.model.findings import Finding, Severity
from steersman.model.inputs import Snapshot
from steersman.model.kube import EndpointSlice
from steersman.model.names import Family, ObjectName, Protocol
from steersman.model.plan import NodePlan, ServicePlan
from steersman.source.packed import PackedSlices
from tests.support.builders import objects
from tests.support.builders.objects import (
    CONFIG,
    FACTS,
    IPTABLES,
    KEY,
    endpoint,
    plan_of,
    port,
    slice_,
)

THOUSAND = [f"10.{n // 250}.{n % 250}.1" for n in range(1000)]
MANY_PORTS = [port(f"p{n}", 1 + n) for n in range(1000)]


def ends(count: int) -> list[dict[str, Any]]:
    return [endpoint(address) for address in THOUSAND[:count]]


def one_error(plan: NodePlan) -> Finding:
    (finding,) = plan.findings
    assert finding.severity is Severity.ERROR
    return finding


def test_only_ports_that_a_service_asks_for_are_expanded() -> None:
    wide = slice_(*ends(1000), ports=MANY_PORTS)
    found, _ = read_endpoints([wide], Family.IPV4, "", {("p7", Protocol.TCP)})
    assert {port: len(states) for port, states in found.items()} == {("p7", Protocol.TCP): 1000}
    nothing_wanted = build_endpoints([wide], Family.IPV4, "", {("other", Protocol.TCP)})
    assert list(nothing_wanted) == [("p0", Protocol.TCP)]  # for the health check's count
    assert len(build_endpoints([slice_(*ends(2), ports=MANY_PORTS)], Family.IPV4, "")) == 1000


def test_endpoints_of_all_ports_of_a_service() -> None:
    plan = plan_of(
        objects.service(ports=MANY_PORTS),
        slice_(*ends(1000), name="a", ports=MANY_PORTS),
        slice_(*ends(1000), name="b", ports=MANY_PORTS),
    )
    counts = {len(each.cluster) for each in plan.services.values()}
    assert counts == {MAX_ENDPOINTS // len(MANY_PORTS)}  # every port is served
    finding = one_error(plan)
    assert (finding.object, finding.field) == ("EndpointSlice shop/a", "endpoints[50]")
    assert f"the {MAX_ENDPOINTS} that are served" in finding.reason


def test_one_endpoint_beyond_the_limit_is_said() -> None:
    full = slice_(*ends(MAX_ENDPOINTS // 1000), name="a", ports=MANY_PORTS)
    asked = objects.service(ports=MANY_PORTS)
    assert plan_of(asked, full).findings == ()
    assert plan_of(asked, full, slice_(name="b", ports=MANY_PORTS)).findings == ()
    plan = plan_of(asked, full, slice_(endpoint("10.9.9.9"), name="b", ports=MANY_PORTS))
    finding = one_error(plan)
    assert (finding.object, finding.field) == ("EndpointSlice shop/b", "endpoints[0]")


def test_no_more_slices_are_looked_at_than_are_served() -> None:
    big = slice_(*ends(1000), name="big", ports=[])
    held, owner = PackedSlices(), ObjectName("shop", "cart")
    for number in range(MAX_LISTED // 1000 + 50):
        meta = msgspec.structs.replace(big.metadata, name=f"s{number:04}")
        held.put(owner, msgspec.structs.replace(big, metadata=meta))
    looked: list[str] = []

    def each() -> Iterator[EndpointSlice]:
        for slice_of_it in held[owner]:
            looked.append(slice_of_it.metadata.name)
            yield slice_of_it

    settings = objects.settings_of()
    parsed = parse_service(objects.service(), settings.families)
    plans, (finding,) = plan_service(parsed, each(), settings, "")
    assert len(looked) == MAX_LISTED // 1000 + 1
    assert looked == sorted(looked)
    assert finding.object == f"EndpointSlice shop/{looked[-1]}"
    assert finding.severity is Severity.ERROR
    assert list(plans) == [KEY]


def test_ports_of_a_service() -> None:
    most = [port(f"p{n}", 1 + n) for n in range(MAX_PORTS)]
    plan = plan_of(objects.service(ports=most))
    assert (len(plan.services), plan.findings) == (MAX_PORTS, ())
    plan = plan_of(objects.service(ports=[*most, port("more", 20_000)]))
    assert len(plan.services) == MAX_PORTS
    finding = one_error(plan)
    assert (finding.object, finding.field) == ("Service shop/cart", "spec.ports")
    assert f"has {MAX_PORTS + 1} entries, of which {MAX_PORTS} are served" in finding.reason


def frontends(plan: ServicePlan, kind: str) -> int:
    return sum(frontend.kind == kind for frontend in plan.frontends)


def test_external_ips_times_ports() -> None:
    plan = plan_of(objects.service(ports=MANY_PORTS, externalIPs=THOUSAND))
    each = MAX_DESTINATIONS // len(MANY_PORTS)
    assert {frontends(p, "externalIP") for p in plan.services.values()} == {each}
    finding = one_error(plan)
    assert (finding.object, finding.field) == ("Service shop/cart", "spec.externalIPs")
    assert plan_of(objects.service(externalIPs=THOUSAND)).findings == ()
    assert plan_of(objects.service(externalIPs=["192.0.2.1"] * 100_000)).findings == ()


def test_load_balancer_ips_and_source_ranges_times_ports() -> None:
    plan = plan_of(
        objects.service(
            type="LoadBalancer",
            ports=MANY_PORTS,
            ingress=[{"ip": address} for address in THOUSAND[:10]],
            loadBalancerSourceRanges=[f"{address}/32" for address in THOUSAND],
        ),
        slice_(*ends(1), ports=MANY_PORTS),
    )
    vips = [f for p in plan.services.values() for f in p.frontends if f.kind == "loadBalancerIP"]
    assert len(vips) == 10 * len(MANY_PORTS)
    assert {len(frontend.source_ranges) for frontend in vips} == {5}  # and nobody else is let in
    assert one_error(plan).field == "spec.loadBalancerSourceRanges"
    plan = plan_of(
        objects.service(
            type="LoadBalancer", ports=MANY_PORTS, ingress=[{"ip": ip} for ip in THOUSAND]
        )
    )
    assert {frontends(p, "loadBalancerIP") for p in plan.services.values()} == {50}
    assert one_error(plan).field == "status.loadBalancer.ingress"


def length(steps: Generator[None, None, Any]) -> int:
    """The number of steps that a generator takes."""
    return 1 + sum(1 for _ in steps)


RANGES = [f"{1 + n // 65536}.{n // 256 % 256}.{n % 256}.0/24" for n in range(50_000)]


@pytest.mark.parametrize(
    "fields",
    [
        {"loadBalancerSourceRanges": RANGES},
        {"loadBalancerSourceRanges": [f"x{text}" for text in RANGES]},
        {"ingress": [{"ip": text.removesuffix("/24")} for text in RANGES]},
        {"externalIPs": [text.removesuffix("/24") for text in RANGES]},
    ],
)
def test_long_lists_are_read_in_steps(fields: dict[str, Any]) -> None:
    asked = objects.service(**{"type": "LoadBalancer", "ingress": [{"ip": "192.0.2.1"}], **fields})
    assert length(parse_steps(asked, (Family.IPV4,))) == 50_000 // STEP + 1
    name = asked.metadata.object_name
    steps = Planner(CONFIG, IPTABLES).steps(Snapshot({name: asked}), FACTS, [name])
    assert length(steps) >= 50_000 // STEP
    assert [*parse_steps(objects.service(), (Family.IPV4,))] == []


def test_ports_are_read_in_steps() -> None:
    asked = objects.service(ports=[port(f"p{n}", 1 + n) for n in range(MAX_PORTS)])
    assert length(parse_steps(asked, (Family.IPV4,))) == 2 * MAX_PORTS // STEP + 1


def test_source_ranges_leave_nothing_in_caches() -> None:
    asked = objects.service(
        type="LoadBalancer", ingress=[{"ip": "192.0.2.1"}], loadBalancerSourceRanges=RANGES
    )
    plan_of(objects.service())  # imports and small caches
    tracemalloc.start()
    try:
        plan_of(asked)
        gc.collect()
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert left < 200_000


def test_a_service_without_ports_may_have_addresses() -> None:
    plan = plan_of(objects.service(ports=[], externalIPs=THOUSAND))
    assert (dict(plan.services), plan.findings) == ({}, ())


def test_thousands_of_lost_ports_are_one_finding() -> None:
    planner = Planner(CONFIG, IPTABLES)
    asking = [port(f"p{n}", 1 + n, nodePort=1 + n) for n in range(2000)]
    first = objects.service("a", type="NodePort", clusterIP="10.96.0.1", ports=asking)
    second = objects.service("b", type="NodePort", clusterIP="10.96.0.2", ports=asking)
    planner.update(objects.snapshot(first), FACTS)
    planner.update(objects.snapshot(first, second), FACTS, {ObjectName("shop", "b")})
    finding = one_error(planner.plan)
    assert finding.field == "spec.ports[0].nodePort"
    assert "(and 1999 more: spec.ports[1].nodePort, " in finding.reason


@pytest.mark.parametrize(
    ("address", "family", "word"),
    [
        ("127.0.0.1", "IPv4", "loopback"),
        ("127.1.2.3", "IPv4", "loopback"),
        ("169.254.169.254", "IPv4", "link-local"),
        ("0.0.0.0", "IPv4", "unspecified"),
        ("224.0.0.1", "IPv4", "link-local multicast"),
        ("::1", "IPv6", "loopback"),
        ("::", "IPv6", "unspecified"),
        ("fe80::1", "IPv6", "link-local"),
        ("febf::1", "IPv6", "link-local"),
        ("ff02::1", "IPv6", "link-local multicast"),
    ],
)
def test_addresses_that_the_api_server_refuses(address: str, family: str, word: str) -> None:
    """Endpoints there would be the node itself, or its metadata service (userspace modes dial)."""
    vips = {"IPv4": "10.96.0.10", "IPv6": "fd00::10"}
    good = {"IPv4": "10.0.0.1", "IPv6": "fd00:10::1"}[family]
    plan = plan_of(
        objects.service(clusterIP=vips[family], externalIPs=[address]),
        slice_(endpoint(address), endpoint(good), family=family),
    )
    (served,) = plan.services.values()
    assert [end.ip for end in served.reachable] == [good]
    assert [frontend.kind.value for frontend in served.frontends] == ["clusterIP"]
    said = {finding.field: finding.reason for finding in plan.findings}
    assert f"{address} is {word}, which no endpoint may be" in said["endpoints[0].addresses[0]"]
    assert f"{address} is {word}, which no external IP may be" in said["spec.externalIPs[0]"]


@pytest.mark.parametrize(
    ("address", "family", "word"),
    [
        ("127.0.0.1", "IPv4", "loopback"),
        ("0.0.0.0", "IPv4", "unspecified"),
        ("::1", "IPv6", "loopback"),
    ],
)
def test_no_service_takes_an_address_of_the_node_itself(
    address: str, family: str, word: str
) -> None:
    """Some modes reject all ports of a cluster IP that no Service has: 127.0.0.1 would be dead."""
    plan = plan_of(objects.service(clusterIP=address), slice_(endpoint("10.0.0.1")))
    assert not plan.services
    said = {finding.field: finding.reason for finding in plan.findings}
    assert f"{address} is {word}, which no clusterIP may be" in said["spec.clusterIP"]

    plan = plan_of(objects.service(type="LoadBalancer", ingress=[{"ip": address}]))
    (served,) = plan.services.values()
    assert [frontend.kind.value for frontend in served.frontends] == ["clusterIP"]
    said = {finding.field: finding.reason for finding in plan.findings}
    assert f"is {word}; ignored" in said["status.loadBalancer.ingress[0].ip"]


@pytest.mark.parametrize(
    "address", ["126.0.0.1", "128.0.0.1", "169.253.0.1", "224.0.1.1", "0.0.0.1", "192.0.2.127"]
)
def test_addresses_next_to_those(address: str) -> None:
    plan = plan_of(objects.service(), slice_(endpoint(address)))
    assert [end.ip for end in plan.services[KEY].reachable] == [address]


def test_the_page_on_limits_has_them_all() -> None:
    page = Path(__file__).parents[3].joinpath("docs/limits.md").read_text()
    for number in (
        MAX_ENDPOINTS,
        MAX_LISTED,
        MAX_PORTS,
        MAX_DESTINATIONS,
        IN_TOTAL,
        PER_SERVICE,
        MAX_WEIGHT_ENTRIES,
        MAX_FLAGS,
    ):
        assert f"{number:,}" in page
