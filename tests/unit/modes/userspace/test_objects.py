"""Parts of a Diff: by family, listeners and portals, listeners without endpoints."""

from __future__ import annotations

from steersman.model.names import Family, PlanKey, Protocol, ServicePortName
from steersman.model.plan import Verdict
from steersman.model.ruleset import Diff
from steersman.modes.userspace.render import (
    BASE,
    BaseKey,
    Portal,
    left_without_endpoints,
    listeners_of,
    part_of,
    portals_of,
    removed_listeners,
)
from steersman.proxy.listeners import LISTENER, PORTAL, Decision, FrontendKey, ListenerPlan

DROP = Decision(Verdict.DROP)
NAME = ServicePortName("shop", "cart", "http", Protocol.TCP)


def key(address: str, kind: str = LISTENER) -> FrontendKey:
    family = Family.IPV6 if ":" in address else Family.IPV4
    return FrontendKey(kind, family, Protocol.TCP, address, 80)


def listener(family: Family = Family.IPV4, port: int = 0) -> ListenerPlan:
    return ListenerPlan(PlanKey(NAME, family), "192.168.0.2", port, DROP, DROP, DROP)


ONE, TWO, THREE = (key(f"10.96.0.{n}") for n in (1, 2, 3))
REJECT, LEAD = Portal("shop/cart:http", Verdict.REJECT), Portal("shop/cart:http", Verdict.FORWARD)


def test_new_objects_are_those_added_and_changed() -> None:
    change = Diff(
        {ONE: listener(), ONE.of(PORTAL): LEAD, BaseKey(BASE, Family.IPV4): ""},
        {THREE: listener()},
        {TWO: (listener(), listener(port=81)), TWO.of(PORTAL): (LEAD, REJECT)},
    )
    assert listeners_of(change) == {ONE: listener(), TWO: listener(port=81)}
    assert portals_of(change) == {ONE.of(PORTAL): LEAD, TWO.of(PORTAL): REJECT}
    assert removed_listeners(change) == {THREE}


def test_a_part_has_the_objects_of_one_family() -> None:
    other = key("2001:db8::1")
    change = Diff(
        {ONE: listener(), other: listener(Family.IPV6)},
        {TWO: listener()},
        {THREE: (listener(), listener(port=81))},
    )
    ipv6 = part_of(change, Family.IPV6)
    assert ipv6 == Diff({other: listener(Family.IPV6)}, {}, {})
    assert part_of(change, Family.IPV4).removed == {TWO: listener()}
    assert not part_of(ipv6, Family.IPV4)


def test_a_listener_whose_portal_refuses_now_is_without_endpoints() -> None:
    gone = {ONE: listener(), TWO: listener(), TWO.of(PORTAL): LEAD, THREE: listener()}
    portals = {ONE.of(PORTAL): REJECT, THREE.of(PORTAL): LEAD}
    assert left_without_endpoints(Diff(portals, gone, {})) == {ONE}
