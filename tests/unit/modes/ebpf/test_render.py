"""Rendering of the ebpf mode, by the words that `text` has for it."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steersman.model.names import Family
from steersman.model.plan import FamilySettings, LocalDetector, NodeSettings, ServicePlan
from steersman.modes.ebpf import layout, render
from steersman.modes.ebpf.dump import describe
from steersman.modes.ebpf.layout import Kind
from tests.support.builders import plans
from tests.support.parts import examples

PROGRAMS = render.Programs(b"\x07" * 16)
C = Path(layout.__file__).parent / "c"


def said(plan: ServicePlan) -> list[str]:
    return sorted(map(describe, render.render_service(plan).items()))


def node(settings: NodeSettings, programs: render.Programs = PROGRAMS) -> list[str]:
    return sorted(map(describe, render.render_node(settings, programs).items()))


def test_a_cluster_ip() -> None:
    plan = plans.plan(
        plans.key("shop/cart:http"),
        plans.cluster_ip("10.96.0.1"),
        cluster=plans.endpoints("10.244.0.5", "10.244.0.6"),
    )
    assert said(plan) == [
        "frontend 10.96.0.1:80/TCP: shop/cart:http TCP IPv4, pods to all, "
        "node to all masqueraded, others to all masqueraded",
        "service shop/cart:http TCP IPv4: all [10.244.0.5:8080 10.244.0.6:8080], local []",
    ]


def test_everything_at_once() -> None:
    ends = plans.endpoints("fd00::5")
    plan = plans.plan(
        plans.key("shop/cart", family=Family.IPV6),
        plans.load_balancer("2001:db8::1", plans.EXTERNAL_LOCAL, ("2001:db8:7::/48",)),
        plans.node_port(30080, plans.NONE_HERE),
        cluster=ends,
        local=ends,
        affinity=60,
    )
    assert said(plan) == [
        "frontend [2001:db8::1]:80/TCP: shop/cart TCP IPv6, pods to all, node to all masqueraded, "
        "others to local, source ranges",
        "frontend node port 30080/TCP IPv6: shop/cart TCP IPv6, pods to all, "
        "node to all masqueraded, others dropped",
        "range 2001:db8:7::/48 may use shop/cart TCP IPv6",
        "service shop/cart TCP IPv6: all [[fd00::5]:8080], local [[fd00::5]:8080], affinity 60 s",
    ]


def test_refused() -> None:
    plan = plans.plan(plans.key("shop/none"), plans.node_port(30080, plans.REJECTED))
    assert said(plan) == [
        "frontend node port 30080/TCP IPv4: shop/none TCP IPv4, pods rejected, node rejected, "
        "others rejected",
        "service shop/none TCP IPv4: all [], local []",
    ]


def test_nothing_is_rendered_of_a_plan_without_frontends() -> None:
    assert said(plans.plan(plans.key("shop/none"))) == []


def test_the_node() -> None:
    settings = NodeSettings(
        families=(Family.IPV4, Family.IPV6),
        ipv4=FamilySettings(
            LocalDetector(cidr="10.244.0.0/16"),
            "10.250.1.2",
            ("10.250.1.2", "127.0.0.1"),
            localhost_node_ports=True,
            service_cidrs=("10.96.0.0/12",),
        ),
        ipv6=FamilySettings(node_port_addresses=("2001:db8::2",), local_addresses=("::1",)),
    )
    assert node(settings) == [
        "ServiceCIDR 10.96.0.0/12",
        "configuration flags 13",
        "node port address 10.250.1.2",
        "node port address 2001:db8::2",
        "pods are in 10.244.0.0/16",
        f"programs {'07' * 16}",
    ]


@pytest.mark.parametrize(
    ("detector", "flags"),
    [
        (LocalDetector(), 8),
        (LocalDetector(cidr="10.0.0.0/8"), 9),
        (LocalDetector(interface="cni0"), 10),
        (LocalDetector(interface_prefix="veth"), 10),
    ],
)
def test_detectors(detector: LocalDetector, flags: int) -> None:
    value = render.render_node(NodeSettings(ipv4=FamilySettings(detector)), PROGRAMS)
    config = layout.NODE_VALUE.unpack(value[Kind.CONFIG.value])
    assert config[2] == flags
    assert config[3].rstrip(b"\0").decode() == detector.interface
    assert config[4].rstrip(b"\0").decode() == detector.interface_prefix


def test_node_ports_need_not_be_guarded() -> None:
    free = render.Programs(bytes(16), guard_node_ports=False)
    assert "configuration flags 0" in node(NodeSettings(), free)


def test_known_connections_may_take_the_fast_path() -> None:
    fast = render.Programs(bytes(16), guard_node_ports=False, fast_path=True)
    assert f"configuration flags {layout.CONFIG_FAST_PATH}" in node(NodeSettings(), fast)


@given(st.randoms(use_true_random=False), st.integers(0, 200), st.sampled_from(Family))
def test_keys_of_two_plans_never_meet(rng: object, number: int, family: Family) -> None:
    one = render.render_service(plans.random_plan(rng, number, family))  # type: ignore[arg-type]
    two = render.render_service(plans.random_plan(rng, number + 1, family))  # type: ignore[arg-type]
    assert not one.keys() & two.keys()


@given(st.ip_addresses())
def test_addresses_survive(address: object) -> None:
    canonical = str(address)
    assert layout.pack_address(layout.print_address(layout.pack_address(canonical))) == (
        layout.pack_address(canonical)
    )


@given(
    st.integers(0, 2**32 - 1), st.binary().map(lambda b: b * 18), st.binary().map(lambda b: b * 18)
)
def test_services_survive(seconds: int, cluster: bytes, local: bytes) -> None:
    value = layout.ServiceValue(seconds, cluster, local)
    assert layout.ServiceValue.unpack(value.pack()) == value


DEFINED = ("FRONTEND_", "CONFIG_", "DEVICE_", "PREFIXES_", "ACTION_", "PRESENCE_", "L3_")


def test_numbers_are_those_of_the_programs() -> None:
    text = (C / "constants.h").read_text()
    numbers = {
        name: int(n, 0) for name, n in re.findall(r"#define (\w+) (\w+?)u?(?: //.*)?$", text, re.M)
    }
    ours = {name: value for name, value in vars(layout).items() if isinstance(value, int)}
    shared = {name: n for name, n in ours.items() if name.startswith(DEFINED)}
    assert len(shared) > 10
    assert {name: numbers.get(name) for name in shared} == shared


def test_counters_are_those_of_the_programs() -> None:
    text = (C / "constants.h").read_text()
    names = re.findall(r"^\t(\w+)", text[text.index("enum counter") :], re.M)
    assert tuple(name.lower() for name in names[:-1]) == layout.COUNTERS


# Maglev: tables are even, the same on every node, and steady.


def endpoints(numbers: range) -> list[bytes]:
    return [layout.pack_address(f"10.244.{n // 250}.{n % 250 + 1}") + b"\x1f\x90" for n in numbers]


def owners(ends: list[bytes]) -> list[bytes]:
    """The endpoint that has each place."""
    return [ends[number] for number in array("H", render.maglev_table(ends))[: render.MAGLEV_SIZE]]


@pytest.mark.parametrize(("count", "tolerance"), [(1, 0.0), (3, 0.01), (40, 0.02), (200, 0.06)])
def test_shares_are_even(count: int, tolerance: float) -> None:
    shares = Counter(owners(endpoints(range(count))))
    assert len(shares) == count
    mean = render.MAGLEV_SIZE / count
    assert all(abs(share - mean) <= max(1, tolerance * mean) for share in shares.values())


@settings(max_examples=examples(100))
@given(st.integers(2, 30), st.data())
def test_one_that_goes_moves_few_of_the_others(count: int, data: st.DataObject) -> None:
    before = endpoints(range(count))
    gone = before[data.draw(st.integers(0, count - 1))]
    after = owners([end for end in before if end != gone])
    moved = sum(a != b for a, b in zip(owners(before), after, strict=True) if a != gone)
    assert moved <= 0.25 * render.MAGLEV_SIZE


def test_nobody_has_a_table_of_nobody() -> None:
    assert render.maglev_table([]) == bytes(2 * render.MAGLEV_PADDED)


def test_more_endpoints_than_places_do_no_harm() -> None:
    places = set(
        array("H", render.maglev_table(endpoints(range(render.MAGLEV_SIZE + 5))))[
            : render.MAGLEV_SIZE
        ]
    )
    assert places == set(range(render.MAGLEV_SIZE))


def test_only_who_asks_has_one() -> None:
    plan = plans.plan(
        plans.key("shop/cart"), plans.cluster_ip("10.96.0.1"), cluster=plans.endpoints("10.244.0.5")
    )
    key = Kind.MAGLEV + layout.service_name(plan.key)
    assert key not in render.render_service(plan)
    asked = msgspec.structs.replace(plan, maglev=True)
    assert render.render_service(asked)[key] == bytes(2 * render.MAGLEV_PADDED)
    assert key not in render.render_service(msgspec.structs.replace(asked, cluster=()))
