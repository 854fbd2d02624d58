"""Laws of addresses and of Diff."""

from __future__ import annotations

import ipaddress

from hypothesis import given
from hypothesis import strategies as st

from steersman.model.addresses import canonical_cidr, canonical_ip, in_cidr, networks_of
from steersman.model.ruleset import diff, diff_of_owners, patch

RULESETS = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 2))


@given(RULESETS, RULESETS)
def test_patching_by_the_diff_gives_what_is_wanted(
    have: dict[str, int], want: dict[str, int]
) -> None:
    change = diff(have, want)
    assert patch(have, change) == want
    assert bool(change) == (have != want)
    assert len(change) <= len(have.keys() | want.keys())


@given(RULESETS, RULESETS, RULESETS, RULESETS)
def test_the_diff_of_separate_owners_is_the_diff_of_both(
    have: dict[str, int], want: dict[str, int], have2: dict[str, int], want2: dict[str, int]
) -> None:
    other = {key.upper(): value for key, value in have2.items()}
    other_want = {key.upper(): value for key, value in want2.items()}
    assert diff_of_owners([(have, want), (other, other_want)]) == diff(
        have | other, want | other_want
    )


@given(st.ip_addresses(v=4))
def test_ipv4_leading_zeros_are_read_as_decimal(address: ipaddress.IPv4Address) -> None:
    padded = ".".join(f"{int(octet):03d}" for octet in str(address).split("."))
    assert canonical_ip(padded) == str(address) == canonical_ip(str(address))


@given(st.ip_addresses(v=6))
def test_ipv6_is_spelled_as_ipaddress_does(address: ipaddress.IPv6Address) -> None:
    mapped = address.ipv4_mapped
    expected = str(mapped) if mapped else str(address)
    assert canonical_ip(address.exploded.upper()) == expected
    assert canonical_ip(str(address)) == expected


@given(st.text(max_size=40) | st.text("0123456789.:/abcf", max_size=40))
def test_any_text_is_canonical_or_refused(text: str) -> None:
    for read in (canonical_ip, canonical_cidr):
        canonical = read(text)
        assert canonical is None or read(canonical) == canonical


@given(st.ip_addresses(), st.integers(0, 128))
def test_an_address_is_in_its_own_network(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, bits: int
) -> None:
    ip = canonical_ip(str(address))
    assert ip is not None
    cidr = canonical_cidr(f"{ip}/{min(bits, ipaddress.ip_address(ip).max_prefixlen)}")
    assert cidr is not None
    assert in_cidr(ip, cidr)


@given(st.ip_addresses(), st.integers(0, 128), st.ip_addresses())
def test_networks_are_those_of_ipaddress(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
    bits: int,
    other: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    ip, client = canonical_ip(str(address)), canonical_ip(str(other))
    assert ip is not None
    assert client is not None
    bits = min(bits, ipaddress.ip_address(ip).max_prefixlen)
    network = ipaddress.ip_network((ip, bits), strict=False)
    cidr = canonical_cidr(f"{ip}/{bits}")
    assert cidr == str(network)
    assert in_cidr(client, cidr) is (ipaddress.ip_address(client) in network)
    assert (cidr in networks_of(client)) is in_cidr(client, cidr)
