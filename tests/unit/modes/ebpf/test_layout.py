"""Keys and values: unpacking returns the packed parts."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.model.names import Family, PlanKey, Protocol, ServicePortName
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.flows import EGRESS, TO_ENDPOINT, FlowEntry
from steersman.modes.ebpf.layout import FrontendValue, Kind

addresses = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)
packed = addresses.map(layout.pack_address)
ports = st.integers(1, 65535)
cidrs = st.sampled_from(["0.0.0.0/0", "10.0.0.0/8", "192.0.2.1/32", "::/0", "2001:db8::/64"])


@given(packed, ports)
def test_endpoints_survive(address: bytes, port: int) -> None:
    endpoint = address + port.to_bytes(2, "big")
    assert layout.split_endpoint(endpoint) == (address, port)
    assert list(layout.cut(endpoint * 3)) == [endpoint] * 3


@pytest.mark.parametrize(
    ("address", "short"), [("192.0.2.1", bytes((192, 0, 2, 1))), ("2001:db8::1", None)]
)
def test_ipv4_has_a_short_form(address: str, short: bytes | None) -> None:
    endpoint = layout.pack_address(address) + b"\0\x50"
    assert layout.is_ipv4(endpoint) is (short is not None)
    assert layout.without_prefix(endpoint) == (short + b"\0\x50" if short else endpoint)


@given(cidrs, st.sampled_from([7, layout.PREFIXES_PODS, layout.PREFIXES_SERVICE_CIDRS]))
def test_prefixes_survive(cidr: str, number: int) -> None:
    own = layout.pack_cidr(cidr)
    assert layout.print_cidr(own) == cidr
    assert layout.unpack_prefix(layout.pack_prefix(number, own)) == (number, own)
    assert layout.split_node_prefix(layout.node_prefix(number, own)) == (number, own)
    assert layout.split_range(own + b"shop/cart:http TCP IPv4") == (own, b"shop/cart:http TCP IPv4")


@given(st.integers(0, 65535), st.integers(0, 255), st.binary())
def test_frontends_survive(actions: int, flags: int, service: bytes) -> None:
    value = FrontendValue(actions, flags, service)
    assert FrontendValue.unpack(value.pack()) == value


def test_keys_begin_with_their_kind() -> None:
    objects = {b"Na": b"", b"Nb": b"", b"Ra": b""}
    assert layout.by_kind(objects) == {b"N": [(b"a", b""), (b"b", b"")], b"R": [(b"a", b"")]}
    assert layout.split_key(b"Ra") == (Kind.RANGE, b"a")
    assert layout.kind_of(b"Ra") == Kind.RANGE


@given(packed, packed, packed, ports, ports)
def test_flows_survive(source: bytes, destination: bytes, to: bytes, one: int, other: int) -> None:
    ends = source + one.to_bytes(2, "big"), destination + other.to_bytes(2, "big")
    key = layout.flow_key(*ends, 6, EGRESS)
    value = layout.FLOW.pack(to, 5, ends[0][16:], TO_ENDPOINT, 2, 9)
    assert FlowEntry.unpack(key, value) == FlowEntry(
        *ends, 6, EGRESS, to + ends[0][16:], TO_ENDPOINT
    )
    assert layout.flow_protocol(key) == 6
    assert (layout.flow_kind(value), layout.flow_state(value)) == (TO_ENDPOINT, 2)


@given(st.integers(0, 2**32 - 1))
def test_numbers_are_those_of_the_machine(number: int) -> None:
    assert layout.number_key(number) == struct.pack("=I", number)
    assert layout.read_number(layout.number_key(number)) == number


def test_a_client_is_an_address_or_a_network_namespace() -> None:
    assert layout.netns_of_client(b"\xff" * 8 + struct.pack("=Q", 7)) == 7
    assert layout.netns_of_client(layout.pack_address("2001:db8::1")) is None


def test_names_are_padded() -> None:
    name = b"shop/cart:http TCP IPv4"
    assert layout.unpack_name(layout.NAME.pack(name)) == name


def test_a_key_begins_with_its_address() -> None:
    address = layout.pack_address("10.96.0.1")
    assert layout.address_of(layout.FRONTEND_KEY.pack(address, 80, 6)) == address


@pytest.mark.parametrize("letter", ["a", "\u00e9"])
def test_names_that_are_too_long_stay_apart(letter: str) -> None:
    """Only a manifest has them; the end of a name tells whether clients are bound (services.py)."""
    long = [
        PlanKey(ServicePortName("shop", letter * 300 + end, "http", Protocol.UDP), Family.IPV4)
        for end in ("", "1", "2")
    ]
    names = {layout.service_name(key) for key in long}
    assert len(names) == 3
    for name in names:
        assert layout.unpack_name(layout.NAME.pack(name)) == name
        assert name.decode().endswith(" UDP IPv4")
    short = PlanKey(ServicePortName("shop", "web", "http", Protocol.TCP), Family.IPV6)
    assert layout.service_name(short) == b"shop/web:http TCP IPv6"
