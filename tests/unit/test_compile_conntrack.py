from __future__ import annotations

import pytest

from steersman.compile.conntrack import (
    ServedPort,
    destinations_at,
    served_ports,
    stale,
    stale_entries,
)
from steersman.model import kube
from steersman.model.conntrack import PROTOCOL_NUMBERS, Entry, Stale
from steersman.model.names import Family, ObjectName, Protocol
from steersman.model.plan import Endpoint
from steersman.model.snapshot import Snapshot

UDP, TCP, SCTP = 17, 6, 132
DNS = ObjectName("kube-system", "dns")


def _service(protocol: str = "UDP", closes: str | None = None) -> kube.Service:
    return kube.Service(
        metadata=kube.ObjectMeta(
            name=DNS.name,
            namespace=DNS.namespace,
            annotations=kube.Annotations(close_connections=closes),
        ),
        spec=kube.ServiceSpec(
            type="NodePort",
            cluster_ip="10.96.0.10",
            external_ips=["192.0.2.10"],
            ports=[
                kube.ServicePort(port=53, name="dns", protocol=protocol, node_port=30053),
                kube.ServicePort(port=9153, name="metrics", protocol="TCP"),
            ],
        ),
        status=kube.ServiceStatus(
            kube.LoadBalancerStatus(ingress=[kube.LoadBalancerIngress(ip="192.0.2.11")])
        ),
    )


def _slice(*endpoints: kube.SliceEndpoint, protocol: str = "UDP") -> kube.EndpointSlice:
    return kube.EndpointSlice(
        metadata=kube.ObjectMeta(name="dns-1", namespace=DNS.namespace),
        address_type="IPv4",
        endpoints=list(endpoints),
        ports=[kube.SlicePort(name="dns", protocol=protocol, port=5353)],
    )


def _endpoint(ip: str, serving: bool | None = None) -> kube.SliceEndpoint:
    conditions = kube.EndpointConditions(ready=False, serving=serving, terminating=True)
    return kube.SliceEndpoint(addresses=[ip], conditions=conditions)


def _world(service: kube.Service, *slices: kube.EndpointSlice) -> Snapshot:
    return Snapshot({DNS: service}, {DNS: {s.metadata.name: s for s in slices}})


@pytest.mark.parametrize("destination", ["10.96.0.10", "192.0.2.10", "192.0.2.11"])
@pytest.mark.parametrize(
    ("source", "port", "expected"),
    [
        ("10.244.1.5", 5353, False),
        ("10.244.1.5", 5354, True),  # the endpoint's port changed
        ("10.244.1.6", 5353, True),  # it is there, but does not serve
        ("10.244.1.9", 5353, True),  # it is gone
        ("10.96.0.10", 53, True),  # it was never translated
    ],
)
def test_an_entry_is_stale_unless_a_serving_endpoint_answers_it(
    destination: str, source: str, port: int, expected: bool
) -> None:
    world = _world(_service(), _slice(_endpoint("10.244.1.5"), _endpoint("10.244.1.6", False)))
    found = stale_entries(world, Family.IPV4)
    assert found.protocols == (UDP,)
    assert found.contains_entry(Entry(UDP, destination, 53, source, port)) is expected


@pytest.mark.parametrize("port", [-1, 0, 65536, 2**31 - 1])
def test_a_port_that_cannot_be_served_has_no_entries(port: int) -> None:
    ports = [kube.ServicePort(port=port, name="dns", protocol="UDP", node_port=30053)]
    spec = kube.ServiceSpec(type="NodePort", cluster_ip="10.96.0.10", ports=ports)
    service = kube.Service(kube.ObjectMeta(name=DNS.name, namespace=DNS.namespace), spec)
    assert not stale_entries(_world(service, _slice(_endpoint("10.244.1.5"))), Family.IPV4)


def test_other_destinations_ports_and_protocols_are_left_alone() -> None:
    found = stale_entries(_world(_service(), _slice(_endpoint("10.244.1.5"))), Family.IPV4)
    for entry in (
        Entry(UDP, "10.96.0.10", 54, "10.244.1.9", 5353),
        Entry(UDP, "10.96.0.11", 53, "10.244.1.9", 5353),
        Entry(TCP, "10.96.0.10", 53, "10.244.1.9", 5353),
        Entry(TCP, "10.96.0.10", 9153, "10.244.1.9", 9153),
        Entry(SCTP, "10.96.0.10", 53, "10.244.1.9", 5353),
    ):
        assert not found.contains_entry(entry)


def test_a_node_port_counts_on_every_destination_that_is_no_services() -> None:
    found = stale_entries(_world(_service(), _slice(_endpoint("10.244.1.5"))), Family.IPV4)
    assert found.contains_entry(Entry(UDP, "203.0.113.7", 30053, "10.244.1.9", 5353))
    assert not found.contains_entry(Entry(UDP, "203.0.113.7", 30053, "10.244.1.5", 5353))


def test_a_node_port_of_one_family_says_nothing_of_the_other() -> None:
    """The number is the same in both; only destinations tell the families apart."""
    served = ServedPort(Protocol.UDP, 53, ("10.96.0.1",), 30053, (Endpoint("10.244.1.5", 53),))
    six = ServedPort(Protocol.UDP, 53, ("fd00::1",), 30053, (Endpoint("fd01::5", 53),))
    ipv4 = Entry(UDP, "192.0.2.1", 30053, "10.244.1.9", 53)
    ipv6 = Entry(UDP, "2001:db8::1", 30053, "fd01::9", 53)
    assert stale(Family.IPV4, [served]).contains_entry(ipv4)
    assert not stale(Family.IPV4, [served]).contains_entry(ipv6)
    assert stale(Family.IPV6, [six]).contains_entry(ipv6)
    assert not stale(Family.IPV6, [six]).contains_entry(ipv4)


def test_a_services_address_decides_before_a_node_port() -> None:
    node = ServedPort(Protocol.UDP, 1, ("10.96.0.1",), 30053, (Endpoint("10.244.1.5", 5353),))
    service = ServedPort(Protocol.UDP, 30053, ("10.96.0.2",), 0, (Endpoint("10.244.1.6", 1),))
    found = stale(Family.IPV4, [node, service])
    assert not found.contains_entry(Entry(UDP, "10.96.0.2", 30053, "10.244.1.6", 1))
    assert found.contains_entry(Entry(UDP, "10.96.0.2", 30053, "10.244.1.5", 5353))


@pytest.mark.parametrize("protocol", [Protocol.UDP, Protocol.TCP])
@pytest.mark.parametrize("named", [True, False])
def test_a_services_address_decides_also_where_only_others_are_looked_at(
    protocol: Protocol, named: bool
) -> None:
    web = kube.Service(
        kube.ObjectMeta(name="web", namespace="shop"),
        kube.ServiceSpec(
            cluster_ip="10.96.0.20",
            external_ips=["192.0.2.20"],
            ports=[
                kube.ServicePort(port=30053, protocol=protocol),
                kube.ServicePort(name="other", port=80),
            ],
        ),
    )
    dns = _world(_service(protocol, "true"), _slice(_endpoint("10.244.1.5"), protocol=protocol))
    world = Snapshot({**dns.services, ObjectName("shop", "web"): web}, dns.slices)
    found = stale_entries(world, Family.IPV4, [DNS] if named else None)
    number = PROTOCOL_NUMBERS[protocol]
    for address in ("10.96.0.20", "192.0.2.20"):
        assert not found.contains_entry(Entry(number, address, 30053, "10.244.1.9", 8080))
    assert found.contains_entry(Entry(number, "203.0.113.7", 30053, "10.244.1.9", 5353))


def test_who_is_deleted_meanwhile_has_no_destinations() -> None:
    world, gone = _world(_service()), ObjectName("a", "deleted")
    assert list(destinations_at(world, Family.IPV4, [gone], {53})) == []
    assert len(list(destinations_at(world, Family.IPV4, [gone, DNS], {53}))) == 3


def test_a_connection_to_somebody_elses_port_of_a_node_ports_number_is_not_cut() -> None:
    world = _world(_service("TCP", "true"), _slice(_endpoint("10.244.1.5"), protocol="TCP"))
    found = stale_entries(world, Family.IPV4)
    assert not found.contains_entry(Entry(TCP, "203.0.113.7", 30053, "203.0.113.7", 30053))
    assert found.contains_entry(Entry(TCP, "203.0.113.7", 30053, "10.244.1.9", 5353))


def test_the_endpoints_of_all_who_claim_a_destination_are_valid() -> None:
    one = ServedPort(Protocol.UDP, 53, ("10.96.0.1",), 0, (Endpoint("10.244.1.5", 53),))
    other = ServedPort(Protocol.UDP, 53, ("10.96.0.1",), 0, (Endpoint("10.244.1.6", 53),))
    found = stale(Family.IPV4, [one, other])
    assert not found.contains_entry(Entry(UDP, "10.96.0.1", 53, "10.244.1.5", 53))
    assert not found.contains_entry(Entry(UDP, "10.96.0.1", 53, "10.244.1.6", 53))


def test_without_serving_endpoints_nothing_is_stale() -> None:
    world = _world(_service(), _slice(_endpoint("10.244.1.6", False)))
    assert not stale_entries(world, Family.IPV4)
    assert not stale_entries(_world(_service()), Family.IPV4)
    assert not stale_entries(world, Family.IPV6)


def test_only_the_named_services_are_looked_at() -> None:
    world = _world(_service(), _slice(_endpoint("10.244.1.5")))
    assert stale_entries(world, Family.IPV4, [DNS])
    assert not stale_entries(world, Family.IPV4, [])
    assert not stale_entries(world, Family.IPV4, [ObjectName("a", "deleted")])


def test_external_ips_can_be_switched_off() -> None:
    world = _world(_service(), _slice(_endpoint("10.244.1.5")))
    found = stale_entries(world, Family.IPV4, allow_external_ips=False)
    assert not found.contains_entry(Entry(UDP, "192.0.2.10", 53, "10.244.1.9", 5353))


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.SCTP])
def test_connections_are_stale_only_on_request_and_only_to_endpoints_that_are_gone(
    protocol: Protocol,
) -> None:
    slice_ = _slice(_endpoint("10.244.1.5", False), protocol=protocol)
    number = PROTOCOL_NUMBERS[protocol]
    gone = Entry(number, "10.96.0.10", 53, "10.244.1.9", 5353)
    for word in (None, "false"):
        assert not stale_entries(_world(_service(protocol, word), slice_), Family.IPV4)
    found = stale_entries(_world(_service(protocol, "true"), slice_), Family.IPV4)
    assert found.contains_entry(gone)
    assert not found.contains_entry(gone._replace(source="10.244.1.5"))
    nobody_left = stale_entries(_world(_service(protocol, "true")), Family.IPV4)
    assert nobody_left.contains_entry(gone)


def test_addresses_of_the_other_family_are_left_out() -> None:
    both = ServedPort(Protocol.UDP, 53, ("10.96.0.1", "fd00::1"), 0, (Endpoint("fd01::1", 53),))
    assert len(stale(Family.IPV6, [both]).by_address) == 1


def test_served_ports_name_what_matters() -> None:
    (port,) = served_ports(_service(), [_slice(_endpoint("10.244.1.5"))], Family.IPV4)
    assert port == ServedPort(
        Protocol.UDP,
        53,
        ("10.96.0.10", "192.0.2.10", "192.0.2.11"),
        30053,
        (Endpoint("10.244.1.5", 5353),),
    )
    assert list(served_ports(_service("TCP"), [], Family.IPV4)) == []


def test_an_empty_one_is_falsy() -> None:
    assert not Stale(Family.IPV4, {}, {})
    assert Stale(Family.IPV4, {}, {b"\x11\0\1": frozenset()})
