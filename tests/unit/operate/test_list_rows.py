"""Lists of Services, endpoints and node ports: their contents, and the rows that filters select."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from steersman.cli.output import plain_lines
from steersman.model.findings import Finding, Severity
from steersman.model.kube import EndpointSlice, Node, Service
from steersman.model.names import ObjectName
from steersman.model.node_state import NodeState
from steersman.model.stats import ConnectionStats
from steersman.model.world import World
from steersman.operate.answer import Table, age_text
from steersman.operate.list_answers import ServiceList
from steersman.operate.list_rows import Filter, Lists
from steersman.operate.served import Sample
from tests.support.builders.doctor import world_of
from tests.support.builders.objects import (
    CONFIG,
    HTTP,
    NODE,
    endpoint,
    node,
    plan_of,
    port,
    service,
    slice_,
)

NOON = 1_700_000_000.0
HERE, ELSEWHERE = endpoint("10.1.0.1", NODE), endpoint("10.1.0.2", "node-2", zone="b")
BROKEN = endpoint("10.1.0.3", "node-2", ready=False)
WEB: dict[str, Any] = {"type": "NodePort", "ports": [port(nodePort=30080)]}


def lister(
    *things: Service | EndpointSlice | Node,
    samples: tuple[Sample, ...] = (),
    describe: Any = None,
    **more: Any,
) -> Lists:
    return Lists(world_of(*things, **more), NOON, samples, describe)


def text(answer: Any, wide: bool = False) -> list[str]:
    """The printed lines, each with single spaces."""
    return [" ".join(line.split()) for line in plain_lines(answer.blocks(wide))]


def rows(answer: Any, wide: bool = False) -> dict[str, str]:
    """The first row of a list by column."""
    table = next(iter(answer.blocks(wide)))
    assert isinstance(table, Table)
    cells = [cell if isinstance(cell, str) else cell[0] for cell in table.rows[0]]
    return dict(zip(table.columns, cells, strict=True))


def with_pods(slice_: EndpointSlice, *names: str) -> EndpointSlice:
    """The slice with a Pod behind each endpoint."""
    value = msgspec.to_builtins(slice_)
    for entry, name in zip(value["endpoints"], names, strict=False):
        kind, _, pod = name.rpartition(":")
        entry["targetRef"] = {"kind": kind or "Pod", "name": pod}
    return msgspec.convert(value, EndpointSlice)


# Services


def test_a_service_is_a_row() -> None:
    found = lister(service(**WEB), slice_(HERE, ELSEWHERE, BROKEN)).services()
    assert rows(found) == {
        "SERVICE": "shop/cart",
        "PORT": "http/TCP",
        "FRONTENDS": "10.96.0.10:80, :30080",
        "ENDPOINTS": "2 in, 1 out",
        "STATUS": "ok",
    }
    assert found.exit_code == 0


def test_wide_shows_policy_affinity_age_and_kernel_objects() -> None:
    spec: dict[str, Any] = {
        "type": "LoadBalancer",
        "ports": [port(nodePort=30080)],
        "externalTrafficPolicy": "Local",
        "healthCheckNodePort": 32000,
        "sessionAffinity": "ClientIP",
        "created": "2023-11-14T20:13:20Z",
        "externalIPs": ["198.51.100.1", "198.51.100.2", "198.51.100.3"],
    }
    objects = ("chain A", "chain B", "chain C", "chain D")
    found = lister(service(**spec), slice_(HERE), describe=lambda _: objects).services()
    row = rows(found, wide=True)
    assert row["AFFINITY"] == "10800 s"
    assert (row["TYPE"], row["INTERNAL"], row["EXTERNAL"]) == ("LoadBalancer", "Cluster", "Local")
    assert (row["HEALTH CHECK"], row["AGE"], row["KERNEL"]) == ("32000", "2h", "A, B, C and 1 more")
    assert row["FRONTENDS"].count(",") == 4
    assert rows(found)["FRONTENDS"].endswith("198.51.100.2:80 and 2 more")
    (listed,) = found.ports
    external = next(each for each in listed.frontends if each.kind == "externalIP")
    assert external.clients["external"] == "to 10.1.0.1:8080 on this node"


@pytest.mark.parametrize(
    ("spec", "endpoints", "status"),
    [
        ({}, [], "no endpoint: clients are rejected"),
        (
            {"internalTrafficPolicy": "Local"},
            [ELSEWHERE],
            "no endpoint on this node: clients of 10.96.0.10:80/TCP are dropped",
        ),
        (
            {"type": "NodePort", "ports": [port(nodePort=30080)], "externalTrafficPolicy": "Local"},
            [ELSEWHERE],
            "no endpoint on this node: clients of node port 30080/TCP are dropped",
        ),
    ],
)
def test_what_clients_cannot_use_is_said(
    spec: dict[str, Any], endpoints: list[Any], status: str
) -> None:
    assert rows(lister(service(**spec), slice_(*endpoints)).services())["STATUS"] == status


def test_a_service_without_any_frontend_is_served_nowhere() -> None:
    young = service("web", created="2023-01-02T00:00:00Z")
    old = service("cart", created="2023-01-01T00:00:00Z")
    found = lister(young, old, slice_(HERE)).services(Filter(name="web"))
    (listed,) = found.ports
    assert listed.problem == "not served: another Service or port holds its addresses"
    assert (listed.port_text, rows(found)["FRONTENDS"]) == ("http/TCP", "none")


def test_a_port_without_a_valid_number_is_no_conflict() -> None:
    ports = [{"name": "http", "port": 80}, {"name": "far", "port": 70000}]
    (far, http) = lister(service(ports=ports), slice_(HERE)).services().ports
    assert far.problem == "not served: 70000 is no port number"
    assert http.problem == ""


def test_findings_of_the_service_and_its_slices_are_the_status() -> None:
    findings = (
        Finding("Service shop/cart", "spec", "is odd"),
        Finding("EndpointSlice shop/cart-1", "", "is odd, too", Severity.ERROR),
        Finding("Service shop/other", "", "is not asked for"),
    )
    found = lister(service(), slice_(HERE), findings=findings).services()
    assert rows(found)["STATUS"] == "Service shop/cart spec: is odd and 1 more"
    assert len(found.ports[0].findings) == 2
    one = lister(service(), slice_(HERE), findings=findings[:1]).services()
    assert rows(one)["STATUS"] == "Service shop/cart spec: is odd"


def test_the_family_is_a_column_if_there_are_two() -> None:
    dual = service(
        clusterIPs=["10.96.0.10", "fd00:96::10"], ipFamilies=["IPv4", "IPv6"], ports=[port(None)]
    )
    ends = [slice_(HERE), slice_(endpoint("fd00:10::1"), name="six", family="IPv6")]
    found = lister(dual, *ends).services()
    assert "FAMILY" in rows(found)
    assert {each.port_text for each in found.ports} == {"80/TCP"}
    dual = service(clusterIPs=["10.96.0.10", "fd00:96::10"], ipFamilies=["IPv4", "IPv6"], **WEB)
    assert "FAMILY" in rows(lister(dual, *ends).node_ports())
    assert "FAMILY" not in rows(lister(service(**WEB), ends[0]).node_ports())


def test_services_that_are_not_served_are_listed_with_the_reason() -> None:
    unserved = {
        ObjectName("shop", "pods"): service("pods", clusterIP="None"),
        ObjectName("shop", "mail"): service("mail", type="ExternalName"),
        ObjectName("shop", "mesh"): service(
            "mesh", labels={"service.kubernetes.io/service-proxy-name": "linkerd"}
        ),
    }
    broken, empty = service("broken", clusterIP="nonsense"), service("empty", ports=[])
    broken_finding = Finding("Service shop/broken", "spec.ports[0].port", "is no port")
    found = lister(
        service(), broken, empty, slice_(HERE), unserved=unserved, findings=(broken_finding,)
    ).services()
    why = {each.service: each.reason for each in found.unserved}
    assert set(why) == {"shop/pods", "shop/mail", "shop/mesh", "shop/broken", "shop/empty"}
    assert why["shop/pods"].startswith("headless (clusterIP None): ")
    assert why["shop/mail"].startswith("ExternalName: ")
    assert why["shop/mesh"].startswith("another proxy serves it: its label ")
    assert why["shop/broken"] == "spec.ports[0].port: is no port"
    assert why["shop/empty"].startswith("it has no port")
    assert "Not served by this proxy:" in text(found)
    assert lister(service(), unserved=unserved).services(Filter(port=80)).unserved == ()
    assert lister(unserved=unserved).services(Filter(namespace="else")).unserved == ()
    only = lister(unserved=unserved).services(Filter(name="pods"))
    assert (len(only.unserved), only.exit_code) == (1, 0)
    assert "Not served by this proxy:" not in text(only)
    assert "there are no Services" not in text(lister(unserved=unserved).services())


def test_before_the_first_sync_no_service_is_blamed() -> None:
    starting = NodeState(waiting="the addresses of this node")
    (row,) = lister(service(), plan=plan_of(), process=starting).services().unserved
    assert row.reason == "not served yet: the process waits for the addresses of this node"
    later = lister(service(ports=[]), process=NodeState(synced_at=NOON))
    assert later.services().unserved[0].reason.startswith("it has no port")


# Endpoints


def test_endpoints_say_in_or_out_and_why() -> None:
    found = lister(service(), slice_(HERE, BROKEN)).endpoints()
    assert text(found) == [
        "SERVICE PORT ENDPOINT NODE USED WHY",
        f"shop/cart http/TCP 10.1.0.1:8080 {NODE} (here) in ready",
        "shop/cart http/TCP 10.1.0.3:8080 node-2 out not ready",
    ]
    wide = rows(lister(service(), slice_(endpoint("10.1.0.9"))).endpoints(), wide=True)
    assert (wide["NODE"], wide["FAMILY"], wide["ZONE"]) == ("-", "IPv4", "-")


def test_notes_tell_of_hints_and_of_what_is_missing() -> None:
    hinted = slice_(endpoint("10.1.0.1", zones=["a"]), endpoint("10.1.0.2", zones=["b"]))
    lines = text(lister(service(), hinted, node(zone="a")).endpoints())
    assert (
        "shop/cart http/TCP (IPv4): zone hints count: only endpoints meant for zone a are used"
        in lines
    )
    lines = text(lister(service()).endpoints())
    assert lines[0] == "there are no endpoints"
    assert "no EndpointSlice belongs to the Service" in lines[1]


def test_pods_are_named_if_the_slice_tells() -> None:
    ends = with_pods(slice_(HERE, ELSEWHERE, BROKEN), "cart-a", "VM:cart-b")
    found = lister(service(), ends).endpoints()
    assert [each.pod for each in found.ports[0].endpoints] == ["shop/cart-a", "", ""]
    assert rows(found)["POD"] == "shop/cart-a"


def test_an_endpoint_without_an_address_is_not_listed() -> None:
    empty = endpoint("10.1.0.9") | {"addresses": []}
    odd = endpoint("nonsense")
    found = lister(service(), slice_(HERE, empty, odd)).endpoints()
    assert [each.address for each in found.ports[0].endpoints] == ["10.1.0.1:8080"]


def test_the_snapshot_may_be_ahead_of_the_plan() -> None:
    world = world_of(service(), slice_(HERE))
    ahead = msgspec.structs.replace(world.snapshot, services={})
    world = msgspec.structs.replace(world, snapshot=ahead)
    (listed,) = Lists(world, NOON).services().ports
    assert (listed.endpoints, listed.type) == ((), "ClusterIP")


# Filters


def cluster() -> World:
    web = service("web", clusterIP="10.96.0.20", **WEB)
    pods = with_pods(slice_(HERE, ELSEWHERE), "cart-a", "cart-b")
    other = slice_(endpoint("10.1.0.7"), name="web-1", owner="web", ports=[port(number=9090)])
    return world_of(service(), web, pods, other)


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (Filter(), ["cart", "web"]),
        (Filter(namespace="shop"), ["cart", "web"]),
        (Filter(namespace="shop", name="web"), ["web"]),
        (Filter(namespace="else"), []),
        (Filter(address="10.96.0.10"), ["cart"]),
        (Filter(address="10.1.0.7"), ["web"]),
        (Filter(port=30080), ["web"]),
        (Filter(port=9090), ["web"]),
        (Filter(port=80), ["cart", "web"]),
        (Filter(pod="shop/cart-a"), ["cart"]),
        (Filter(pod="cart-b"), ["cart"]),
        (Filter(pod="10.1.0.7"), ["web"]),
        (Filter(pod="else/cart-a"), []),
    ],
)
def test_filters_select(wanted: Filter, names: list[str]) -> None:
    found = Lists(cluster(), NOON).services(wanted)
    assert [each.service.removeprefix("shop/") for each in found.ports] == names
    assert found.exit_code == (0 if names else 1)
    if not names:
        assert text(found) == ["no Services match"]


@pytest.mark.parametrize(
    ("wanted", "addresses"),
    [
        (Filter(pod="shop/cart-b"), ["10.1.0.2:8080"]),
        (Filter(address="10.1.0.1"), ["10.1.0.1:8080"]),
        (Filter(address="10.96.0.10"), ["10.1.0.1:8080", "10.1.0.2:8080"]),
        (Filter(port=9090), ["10.1.0.7:9090"]),
        (Filter(port=30080), ["10.1.0.7:9090"]),
    ],
)
def test_endpoints_that_a_filter_names_are_listed_alone(
    wanted: Filter, addresses: list[str]
) -> None:
    found = Lists(cluster(), NOON).endpoints(wanted)
    assert [end.address for each in found.ports for end in each.endpoints] == addresses
    assert found.exit_code == 0


def test_endpoints_of_nothing_are_bad_news() -> None:
    assert Lists(cluster(), NOON).endpoints(Filter(name="nobody")).exit_code == 1


# Node ports


def test_node_ports_are_sorted_and_say_whose_they_are() -> None:
    spec: dict[str, Any] = {
        "type": "LoadBalancer",
        "ports": [port(nodePort=30090), port("more", 81, nodePort=30070)],
        "externalTrafficPolicy": "Local",
        "healthCheckNodePort": 32000,
    }
    config = msgspec.structs.replace(CONFIG, node_port_addresses=("192.168.0.0/24",))
    ends = slice_(HERE, ports=[port(number=8080), port("more", 8081)])
    made = lister(service(**spec), ends, config=config)
    found = made.node_ports()
    assert [(each.port, each.kind) for each in found.node_ports] == [
        (30070, "node port"),
        (30090, "node port"),
        (32000, "health check"),
    ]
    assert text(found)[1] == (
        "30070/TCP node port shop/cart:more 192.168.0.2 to 10.1.0.1:8081 on this node 1"
    )
    assert "LOOPBACK" in rows(found, wide=True)
    assert [each.port for each in made.node_ports(Filter(port=30090)).node_ports] == [30090]
    # By its number inside the cluster, a Service has all its node ports.
    assert len(made.node_ports(Filter(port=81)).node_ports) == 2


def test_a_node_port_without_endpoints_is_shown_as_bad() -> None:
    found = lister(service(**WEB)).node_ports()
    table = next(iter(found.blocks(False)))
    assert isinstance(table, Table)
    assert table.rows[0][4] == ("rejected, no endpoint can take the traffic", "bad")
    none = lister(service()).node_ports(Filter(port=1))
    assert (none.exit_code, text(none)) == (1, ["no node ports match"])


# Counts and ages


def sample(at: float, connections: int) -> Sample:
    return Sample(
        at,
        ConnectionStats(
            {(HTTP, "10.96.0.10:80"): connections, (HTTP, "nodePort:30080"): 1},
            {(HTTP, "10.1.0.1:8080"): connections + 1},
        ),
    )


def test_one_sample_gives_connections_and_two_give_rates() -> None:
    things = service(**WEB), slice_(HERE)
    once = lister(*things, samples=(sample(1.0, 10),)).services()
    assert rows(once)["CONNECTIONS"] == "11"
    assert "PER SECOND" not in rows(once)
    twice = lister(*things, samples=(sample(1.0, 10), sample(3.0, 30)))
    assert rows(twice.services())["PER SECOND"] == "10.0"
    assert rows(twice.endpoints())["CONNECTIONS"] == "31"
    assert rows(twice.node_ports())["CONNECTIONS"] == "1"
    again = lister(*things, samples=(sample(1.0, 10), sample(3.0, 3)))
    assert rows(again.services())["PER SECOND"] == "0.0"  # counted from zero again
    at_once = lister(*things, samples=(sample(1.0, 10), sample(1.0, 10)))
    assert "PER SECOND" not in rows(at_once.services())


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "-"), (-5, "0s"), (59, "59s"), (600, "10m"), (10000, "2h"), (864000, "10d")],
)
def test_ages(seconds: float | None, shown: str) -> None:
    assert age_text(seconds) == shown


@pytest.mark.parametrize("created", ["2023-11-14T22:13:10", "2023-11-14T22:13:10Z"])
def test_a_creation_time_is_an_age(created: str) -> None:
    assert rows(lister(service(created=created), slice_(HERE)).services(), True)["AGE"] == "10s"
    odd = lister(service(created="yesterday"), slice_(HERE)).services()
    assert rows(odd, True)["AGE"] == "-"


def test_a_list_can_be_printed_as_json() -> None:
    found = lister(service(**WEB), slice_(HERE), samples=(sample(1.0, 10),)).services()
    data = msgspec.to_builtins(found.data)
    (listed,) = data["ports"]
    assert listed["frontends"][1]["clients"]["external"] == "to 10.1.0.1:8080, masqueraded"
    assert listed["endpoints"][0]["counts"] == {"connections": 11, "rate": None}
    assert listed["healthCheckNodePort"] == 0
    assert isinstance(found, ServiceList)
    later = msgspec.structs.replace(found, now=found.now + 5)
    assert msgspec.to_builtins(later.data) == data  # or --watch would print it again
