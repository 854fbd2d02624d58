from __future__ import annotations

import msgspec
import pytest

from steersman.compile.conntrack import (
    ServedPort,
    destinations_at,
    is_concerned,
    left_destinations,
    numbers_to_look_up,
    served_ports,
    stale,
)
from steersman.compile.planner import compile_all
from steersman.model import kube
from steersman.model.conntrack import Stale
from steersman.model.inputs import HostFacts, NodeConfig, Snapshot
from steersman.model.names import Family, ObjectName, Protocol
from steersman.model.plan import Endpoint, NodePlan, Traits
from tests.support.stale import Entry, contains_entry, stale_entries

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


def _plan(world: Snapshot, external_ips: bool = True) -> NodePlan:
    families = (Family.IPV4, Family.IPV6)
    config = NodeConfig(families=families, allow_service_external_ips=external_ips)
    return compile_all(world, config, HostFacts(), Traits())


def _stale(
    world: Snapshot,
    family: Family = Family.IPV4,
    names: list[ObjectName] | None = None,
    external_ips: bool = True,
) -> Stale:
    return stale_entries(_plan(world, external_ips), world, family, names)


def _world(service: kube.Service, *slices: kube.EndpointSlice) -> Snapshot:
    return Snapshot({DNS: service}, {DNS: slices})


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
    found = _stale(world)
    assert found.protocols == (UDP,)
    assert contains_entry(found, Entry(UDP, destination, 53, source, port)) is expected


@pytest.mark.parametrize("port", [-1, 0, 65536, 2**31 - 1])
def test_a_port_that_cannot_be_served_has_no_entries(port: int) -> None:
    ports = [kube.ServicePort(port=port, name="dns", protocol="UDP", node_port=30053)]
    spec = kube.ServiceSpec(type="NodePort", cluster_ip="10.96.0.10", ports=ports)
    service = kube.Service(kube.ObjectMeta(name=DNS.name, namespace=DNS.namespace), spec)
    assert not _stale(_world(service, _slice(_endpoint("10.244.1.5"))))


def test_other_destinations_ports_and_protocols_are_left_alone() -> None:
    found = _stale(_world(_service(), _slice(_endpoint("10.244.1.5"))))
    for entry in (
        Entry(UDP, "10.96.0.10", 54, "10.244.1.9", 5353),
        Entry(UDP, "10.96.0.11", 53, "10.244.1.9", 5353),
        Entry(TCP, "10.96.0.10", 53, "10.244.1.9", 5353),
        Entry(TCP, "10.96.0.10", 9153, "10.244.1.9", 9153),
        Entry(SCTP, "10.96.0.10", 53, "10.244.1.9", 5353),
    ):
        assert not contains_entry(found, entry)


def test_a_node_port_counts_on_every_destination_that_is_no_services() -> None:
    found = _stale(_world(_service(), _slice(_endpoint("10.244.1.5"))))
    assert contains_entry(found, Entry(UDP, "203.0.113.7", 30053, "10.244.1.9", 5353))
    assert not contains_entry(found, Entry(UDP, "203.0.113.7", 30053, "10.244.1.5", 5353))


def test_a_node_port_of_one_family_says_nothing_of_the_other() -> None:
    """The number is the same in both; only destinations tell the families apart."""
    served = ServedPort(Protocol.UDP, 53, ("10.96.0.1",), 30053, (Endpoint("10.244.1.5", 53),))
    six = ServedPort(Protocol.UDP, 53, ("fd00::1",), 30053, (Endpoint("fd01::5", 53),))
    ipv4 = Entry(UDP, "192.0.2.1", 30053, "10.244.1.9", 53)
    ipv6 = Entry(UDP, "2001:db8::1", 30053, "fd01::9", 53)
    assert contains_entry(stale(Family.IPV4, [served]), ipv4)
    assert not contains_entry(stale(Family.IPV4, [served]), ipv6)
    assert contains_entry(stale(Family.IPV6, [six]), ipv6)
    assert not contains_entry(stale(Family.IPV6, [six]), ipv4)


def test_a_services_address_decides_before_a_node_port() -> None:
    node = ServedPort(Protocol.UDP, 1, ("10.96.0.1",), 30053, (Endpoint("10.244.1.5", 5353),))
    service = ServedPort(Protocol.UDP, 30053, ("10.96.0.2",), 0, (Endpoint("10.244.1.6", 1),))
    found = stale(Family.IPV4, [node, service])
    assert not contains_entry(found, Entry(UDP, "10.96.0.2", 30053, "10.244.1.6", 1))
    assert contains_entry(found, Entry(UDP, "10.96.0.2", 30053, "10.244.1.5", 5353))


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
    found = _stale(world, names=[DNS] if named else None)
    number = protocol.number
    for address in ("10.96.0.20", "192.0.2.20"):
        assert not contains_entry(found, Entry(number, address, 30053, "10.244.1.9", 8080))
    assert contains_entry(found, Entry(number, "203.0.113.7", 30053, "10.244.1.9", 5353))


def _tcp(name: str, address: str, port: int) -> Snapshot:
    own = ObjectName("shop", name)
    ports = [kube.ServicePort(port=port)]
    service = kube.Service(
        kube.ObjectMeta(own.name, own.namespace),
        kube.ServiceSpec(cluster_ip=address, ports=ports),
    )
    return Snapshot({own: service})


def test_destinations_are_found_by_their_port() -> None:
    def at(port: int, plan: NodePlan, family: Family = Family.IPV4) -> list[bytes]:
        return sorted(destinations_at({0, port}, plan.services.values(), family))

    web = _plan(_tcp("web", "10.96.0.20", 80))
    assert at(80, web) == [bytes((TCP, 10, 96, 0, 20, 0, 80))]
    assert at(80, web, Family.IPV6) == []
    assert at(30053, web) == []
    assert at(30053, _plan(Snapshot())) == []
    both = _plan(_world(_service()))
    assert len(at(53, both)) == 3
    assert at(30053, both) == [bytes((UDP,)) + (30053).to_bytes(2, "big")]
    losing = next(iter(web.services.values()))
    lost = NodePlan(web.settings, {losing.key: type(losing)(losing.key, ())})
    assert at(80, lost) == []


def _left(before: kube.Service, after: kube.Service | None) -> tuple[Stale, set[bytes]]:
    """What a change of the Service leaves, if nothing else is looked at."""
    slices = _slice(_endpoint("10.244.1.5"))
    plans = _plan(_world(before, slices)).services
    now = _plan(_world(after, slices)).services if after else {}
    left = {each for key, plan in plans.items() for each in left_destinations(plan, now.get(key))}
    held = destinations_at(numbers_to_look_up([], left), now.values(), Family.IPV4)
    return stale(Family.IPV4, [], held, left), left


ADDRESS = Entry(UDP, "192.0.2.10", 53, "10.244.1.5", 5353)
NODE_PORT = Entry(UDP, "203.0.113.7", 30053, "10.244.1.5", 5353)


def test_translated_entries_at_destinations_that_were_left_are_stale() -> None:
    """Also those to endpoints that the Service still has."""
    gone, _ = _left(_service(), None)
    for entry in (ADDRESS, NODE_PORT):
        assert contains_entry(gone, entry)
        alone = entry._replace(source=entry.destination, source_port=entry.destination_port)
        assert not contains_entry(gone, alone), "it is nobody's of ours"
        assert not contains_entry(gone, entry._replace(destination_port=54))
        assert not contains_entry(gone, entry._replace(protocol=TCP))
    assert not any(_left(_service("TCP", "true"), None))
    assert not any(_left(_service(), _service()))


def test_a_destination_that_a_service_holds_is_not_left() -> None:
    service = _service()
    ports = [kube.ServicePort(port=53, name="dns", protocol="UDP")]
    spec = msgspec.structs.replace(service.spec, external_ips=[], ports=ports)
    changed, left = _left(service, msgspec.structs.replace(service, spec=spec))
    assert contains_entry(changed, ADDRESS)
    assert contains_entry(changed, NODE_PORT)
    assert not contains_entry(changed, ADDRESS._replace(destination="10.96.0.10"))
    assert not stale(Family.IPV4, [], left, left)
    port = ServedPort(Protocol.UDP, 53, ("192.0.2.10",), 30053, (Endpoint("10.244.1.5", 5353),))
    back = stale(Family.IPV4, [port], (), left)
    assert not contains_entry(back, ADDRESS)
    assert not contains_entry(back, NODE_PORT)
    assert contains_entry(back, NODE_PORT._replace(source="203.0.113.7", source_port=30053))


def test_a_connection_to_somebody_elses_port_of_a_node_ports_number_is_not_cut() -> None:
    world = _world(_service("TCP", "true"), _slice(_endpoint("10.244.1.5"), protocol="TCP"))
    found = _stale(world)
    assert not contains_entry(found, Entry(TCP, "203.0.113.7", 30053, "203.0.113.7", 30053))
    assert contains_entry(found, Entry(TCP, "203.0.113.7", 30053, "10.244.1.9", 5353))


def test_the_endpoints_of_all_who_claim_a_destination_are_valid() -> None:
    one = ServedPort(Protocol.UDP, 53, ("10.96.0.1",), 0, (Endpoint("10.244.1.5", 53),))
    other = ServedPort(Protocol.UDP, 53, ("10.96.0.1",), 0, (Endpoint("10.244.1.6", 53),))
    found = stale(Family.IPV4, [one, other])
    assert not contains_entry(found, Entry(UDP, "10.96.0.1", 53, "10.244.1.5", 53))
    assert not contains_entry(found, Entry(UDP, "10.96.0.1", 53, "10.244.1.6", 53))


def test_without_serving_endpoints_nothing_is_stale() -> None:
    world = _world(_service(), _slice(_endpoint("10.244.1.6", False)))
    assert not _stale(world)
    assert not _stale(_world(_service()))
    assert not _stale(world, Family.IPV6)


def test_only_the_named_services_are_looked_at() -> None:
    world = _world(_service(), _slice(_endpoint("10.244.1.5")))
    assert _stale(world, names=[DNS])
    assert not _stale(world, names=[])
    assert not _stale(world, names=[ObjectName("a", "deleted")])


def test_external_ips_can_be_switched_off() -> None:
    world = _world(_service(), _slice(_endpoint("10.244.1.5")))
    found = _stale(world, external_ips=False)
    assert not contains_entry(found, Entry(UDP, "192.0.2.10", 53, "10.244.1.9", 5353))


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.SCTP])
def test_connections_are_stale_only_on_request_and_only_to_endpoints_that_are_gone(
    protocol: Protocol,
) -> None:
    slice_ = _slice(_endpoint("10.244.1.5", False), protocol=protocol)
    number = protocol.number
    gone = Entry(number, "10.96.0.10", 53, "10.244.1.9", 5353)
    for word in (None, "false"):
        assert not _stale(_world(_service(protocol, word), slice_))
    found = _stale(_world(_service(protocol, "true"), slice_))
    assert contains_entry(found, gone)
    assert not contains_entry(found, gone._replace(source="10.244.1.5"))
    nobody_left = _stale(_world(_service(protocol, "true")))
    assert contains_entry(nobody_left, gone)


def test_addresses_of_the_other_family_are_left_out() -> None:
    both = ServedPort(Protocol.UDP, 53, ("10.96.0.1", "fd00::1"), 0, (Endpoint("fd01::1", 53),))
    assert len(stale(Family.IPV6, [both]).by_address) == 1


def test_served_ports_name_what_matters() -> None:
    def served(service: kube.Service, *names: ObjectName) -> list[ServedPort]:
        world = _world(service, _slice(_endpoint("10.244.1.5")))
        plan = _plan(world)
        return [p for name in names for p in served_ports(name, plan, world, Family.IPV4)]

    (port,) = served(_service(), DNS)
    assert port == ServedPort(
        Protocol.UDP,
        53,
        ("10.96.0.10", "192.0.2.10", "192.0.2.11"),
        30053,
        (Endpoint("10.244.1.5", 5353),),
    )
    assert served(_service("TCP"), DNS) == []
    assert served(_service("DCCP"), DNS) == []
    assert len(served(_service("DCCP", "true"), DNS)) == 1  # the other port, over TCP
    assert served(_service(), ObjectName("a", "deleted")) == []


def test_most_services_are_of_no_concern() -> None:
    assert is_concerned(_service("UDP"))
    assert is_concerned(_service("TCP", "true"))
    assert not is_concerned(_service("TCP", "false"))
    spec = kube.ServiceSpec(cluster_ip="10.96.0.1")
    assert not is_concerned(kube.Service(kube.ObjectMeta("a", "b"), spec))


def _claiming(protocol: str, cluster_ip: str, external_ip: str, node_port: int) -> kube.Service:
    """A young Service of somebody else, which asks for connections to be closed."""
    return kube.Service(
        kube.ObjectMeta(
            "taker",
            "evil",
            creation_timestamp="2026-02-02T00:00:00Z",
            annotations=kube.Annotations(close_connections="true"),
        ),
        kube.ServiceSpec(
            type="NodePort",
            cluster_ip=cluster_ip,
            external_ips=[external_ip],
            ports=[kube.ServicePort(port=53, name="dns", protocol=protocol, node_port=node_port)],
        ),
    )


@pytest.mark.parametrize("protocol", ["UDP", "TCP"])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("claims", "destination", "port"),
    [
        (("10.96.0.66", "10.96.0.10", 30066), "10.96.0.10", 53),
        (("10.96.0.66", "192.0.2.10", 30066), "192.0.2.10", 53),
        (("10.96.0.66", "192.0.2.11", 30066), "192.0.2.11", 53),
        (("10.96.0.10", "192.0.2.66", 30066), "10.96.0.10", 53),
        (("10.96.0.66", "192.0.2.66", 30053), "203.0.113.7", 30053),
    ],
)
def test_who_lost_a_destination_cuts_nobody_there(
    protocol: str, named: bool, claims: tuple[str, str, int], destination: str, port: int
) -> None:
    """Only the older Service says which entries are stale, with its own endpoints."""
    taker, dns = ObjectName("evil", "taker"), _service(protocol)
    old = kube.ObjectMeta(DNS.name, DNS.namespace, creation_timestamp="2026-01-01T00:00:00Z")
    dns = msgspec.structs.replace(dns, metadata=old)
    mine = _slice(_endpoint("10.244.1.5"), protocol=protocol)
    other = _slice(_endpoint("10.244.6.6"), protocol=protocol)
    world = Snapshot(
        {DNS: dns, taker: _claiming(protocol, *claims)},
        {DNS: (mine,), taker: (other,)},
    )
    found = _stale(world, names=[taker] if named else None)
    number = Protocol(protocol).number
    assert not contains_entry(found, Entry(number, destination, port, "10.244.1.5", 5353))


def test_an_empty_one_is_falsy() -> None:
    assert not Stale(Family.IPV4, {}, {})
    assert Stale(Family.IPV4, {}, {b"\x11\0\1": frozenset()})
