"""Names, keys and values in our tables."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import pytest

from steersman.model.names import Family, PlanKey, Protocol, ServicePortName
from steersman.modes.nftables import skeleton
from steersman.modes.nftables.layout import (
    LEARN_CHAIN,
    PROTOCOLS,
    SETS,
    SIZES,
    Kind,
    base_name,
    base_name_of,
    cluster_ip_key,
    counted_key,
    element_key,
    family_number,
    family_of,
    fields_of,
    hairpin_key,
    is_first_slot,
    is_local,
    key_behind,
    kind_of,
    name_of,
    named,
    other_set,
    own_set_kind,
    own_set_name,
    pack_address,
    pack_port,
    pool_key,
    prefix,
    prefix_of,
    printed_fields,
    size_for,
    split_counted_key,
    unpack_endpoint,
    unpack_slot,
    without_locality,
)
from steersman.modes.nftables.render import render_service
from tests.support.builders import nftables_plans as make


def test_names_are_those_of_upstream_and_limited_in_length() -> None:
    name = ServicePortName("ns1", "svc1", "p80", Protocol.TCP)
    assert base_name(PlanKey(name, Family.IPV4)) == "ULMVA6XW-ns1/svc1/tcp/p80"
    long = name._replace(namespace="n" * 120, service="s" * 120)
    assert len(base_name(PlanKey(long, Family.IPV4))) == 200


def test_more_endpoints_than_slots_are_left_out() -> None:
    assert [size_for(n) for n in (0, 1, 2, 4, 5, 65536)] == [1, 1, 4, 4, 16, 65536]
    assert SIZES[-1] == 65536


def test_every_set_has_a_name_of_its_own() -> None:
    names = [spec.name for spec in SETS.values()]
    assert len(set(names)) == len(names)
    for family in Family:
        text = skeleton.foundation(family)
        assert all(f" {name} {{ type" in text for name in names)


def endpoint_elements(family: Family, protocol: Protocol) -> dict[bytes, bytes]:
    """Slots of two endpoints, the first of them local, by keys of `service-endpoints`."""
    address = "10.96.0.10" if family is Family.IPV4 else "fd00:96::1"
    plan = make.port(
        [2, 3],
        of=make.key(family=family, protocol=protocol),
        frontends=[make.cluster_ip(address=address)],
    )
    rendered: dict[bytes, Any] = render_service(plan, make.SETTINGS, {})
    return {k: v for k, v in rendered.items() if kind_of(k) == Kind.SERVICE_ENDPOINTS}


@pytest.mark.parametrize("protocol", list(Protocol))
@pytest.mark.parametrize("family", list(Family))
def test_keys_are_taken_apart_as_they_are_made(family: Family, protocol: Protocol) -> None:
    elements = endpoint_elements(family, protocol)
    address = "10.96.0.10" if family is Family.IPV4 else "fd00:96::1"
    pods = make.pods([2, 3], family)
    for slot, (key, value) in enumerate(elements.items()):
        start = prefix(Kind.SERVICE_ENDPOINTS, family)
        assert (prefix_of(key), fields_of(key)) == (start, key_behind(start)(key))
        assert (family_of(key), family_number(key)) == (family, family)
        assert printed_fields(key) == [address, protocol.lower(), "80", str(slot)]
        assert unpack_slot(key) == slot
        assert pool_key(key) == min(elements)
        assert is_first_slot(key) == (slot == 0)
        end = str(ip_address(pods[slot].ip))
        assert unpack_endpoint(value) == (end, pods[slot].port)
        assert is_local(value) == pods[slot].local
        hairpin = hairpin_key(key, value)
        assert printed_fields(hairpin) == [end, end, protocol.lower(), "8080"]


@pytest.mark.parametrize("family", list(Family))
def test_a_counter_is_known_by_its_frontend_and_endpoint(family: Family) -> None:
    elements = endpoint_elements(family, Protocol.UDP)
    address = "10.96.0.10" if family is Family.IPV4 else "fd00:96::1"
    own = pack_address(address) + PROTOCOLS[Protocol.UDP] + pack_port(80)
    frontend = prefix(Kind.SERVICE_IPS, family) + own
    assert cluster_ip_key(frontend) == prefix(Kind.CLUSTER_IPS, family) + pack_address(address)
    assert split_counted_key(counted_key(frontend, b"lb-1")) == (frontend, b"")
    for key, value in elements.items():
        expected = (frontend, without_locality(value))
        assert split_counted_key(counted_key(key, value)) == expected
    members = named(Kind.MEMBERS, family, own_set_name(Kind.MEMBERS, "ABC-ns/svc/tcp/p", True))
    member = element_key(members, without_locality(value))
    assert split_counted_key(counted_key(member, b"")) == (members, without_locality(value))
    assert name_of(member) == name_of(members) == "members-local-ABC-ns/svc/tcp/p"


@pytest.mark.parametrize("local", [False, True])
def test_sets_of_a_service_port_lead_to_each_other_by_name(local: bool) -> None:
    base = base_name(make.key())
    names = [own_set_name(kind, base, local) for kind in (Kind.AFFINITY, Kind.MEMBERS)]
    assert [own_set_kind(name) for name in names] == [Kind.AFFINITY, Kind.MEMBERS]
    entries, members = (
        named(kind, Family.IPV4, name)
        for kind, name in zip((Kind.AFFINITY, Kind.MEMBERS), names, strict=True)
    )
    assert (other_set(entries), other_set(members)) == (members, entries)
    assert base_name_of(f"{LEARN_CHAIN}-{base}") == base
    assert base_name_of(f"np-masquerade-affinity-{base}") == base
    for name in ("affinity-ips", "members-of-another-program"):
        assert own_set_kind(name) is None
