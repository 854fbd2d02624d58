"""The search for connections: which are wanted, which are kept, and counts."""

from __future__ import annotations

import msgspec
import pytest

from steersman.model.connections import ConnectionSearch, ConnectionState, OpenConnection
from steersman.model.conntrack import pack_socket
from steersman.model.names import Family, Protocol
from steersman.model.plan import FamilySettings, NodeSettings
from tests.support.builders.plans import cluster_ip, external_ip, key, node_port, plan

SETTINGS = NodeSettings(ipv4=FamilySettings(local_addresses=("192.0.2.1",)))
PLANS = [
    plan("shop/web:http", cluster_ip("10.96.0.1"), external_ip("192.0.2.9"), node_port(30080)),
    plan(key("shop/web:http", family=Family.IPV6), cluster_ip("fd00::1")),
    plan(key("shop/web:dns", Protocol.UDP), cluster_ip("10.96.0.1", port=53)),
]


def destination(address: str, port: int, protocol: Protocol = Protocol.TCP) -> bytes:
    return bytes((protocol.number,)) + pack_socket(address, port)


@pytest.mark.parametrize(
    ("packed", "translated", "wanted"),
    [
        (destination("10.96.0.1", 80), True, True),
        (destination("10.96.0.1", 80), False, True),  # a client that nothing led anywhere
        (destination("10.96.0.1", 81), True, False),
        (destination("10.96.0.1", 80, Protocol.UDP), True, False),
        (destination("10.96.0.1", 53, Protocol.UDP), True, True),
        (destination("fd00::1", 80), True, True),
        (destination("fd00::2", 80), True, False),
        (destination("192.0.2.1", 30080), True, True),
        (destination("192.0.2.1", 30080), False, False),  # of a program that listens there
        (destination("127.0.0.1", 30080), True, True),
        (destination("192.0.2.2", 30080), True, False),  # another node
        (destination("fd00::9", 30080), True, False),
    ],
)
def test_connections_of_the_service_are_wanted(
    packed: bytes, translated: bool, wanted: bool
) -> None:
    assert ConnectionSearch(PLANS, SETTINGS).wants(packed, translated=translated) == wanted


def test_only_some_addresses_may_serve_node_ports() -> None:
    own = FamilySettings(local_addresses=("192.0.2.1",), node_port_addresses=("192.0.2.3",))
    search = ConnectionSearch(PLANS, NodeSettings(ipv4=own))
    assert search.wants(destination("192.0.2.3", 30080))
    assert not search.wants(destination("192.0.2.1", 30080))


def test_a_table_is_asked_for_destinations() -> None:
    search = ConnectionSearch(PLANS, SETTINGS)
    assert search.families == {Family.IPV4, Family.IPV6}
    assert search.owners == {each.key for each in PLANS}
    assert search.keys(Family.IPV4) == {
        destination("10.96.0.1", 80),
        destination("192.0.2.9", 80),
        destination("10.96.0.1", 53, Protocol.UDP),
        b"\6" + (30080).to_bytes(2, "big"),
    }
    assert search.keys(Family.IPV6) == {destination("fd00::1", 80)}


def connection(endpoint: str, number: int, state: str = "open") -> OpenConnection:
    client = f"10.244.0.9:{40000 + number}"
    return OpenConnection(endpoint, client, "10.96.0.1:80", "TCP", ConnectionState(state))


def test_the_first_are_kept_and_all_are_counted() -> None:
    search = ConnectionSearch(PLANS, SETTINGS, most=2)
    for number in range(9, 0, -1):
        search.add(connection("b" if number % 2 else "a", number))
    search.add(connection("a", 0, "ended"))
    found = search.result("nftables")
    assert found.rows == (connection("a", 2), connection("a", 4))
    assert (found.mode, found.by_endpoint, found.ended) == ("nftables", {"a": 4, "b": 5}, 1)
    assert found.matching == 9


def test_those_that_have_ended_are_listed_if_asked_for() -> None:
    search = ConnectionSearch(PLANS, SETTINGS, ended=True)
    search.add(connection("a", 1, "ended"))
    search.add(connection("", 2, "opening"))
    found = search.result("nftables")
    assert [each.state.value for each in found.rows] == ["opening", "ended"]
    assert (found.by_endpoint, found.matching) == ({"": 1}, 2)
    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found
