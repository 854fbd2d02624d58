"""The Planner: what it reports, and the cost of a change."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from steersman.compile import endpoints
from steersman.compile.planner import PlanChange, Planner, compile_all
from steersman.compile.service_plan import plan_service
from steersman.model.failover import Backend, Ejection, Observation
from steersman.model.inputs import Snapshot
from steersman.model.kube import Annotations
from steersman.model.names import ObjectName, Protocol
from steersman.model.plan import ServicePlan
from tests.support.builders.objects import (
    CONFIG,
    FACTS,
    IPTABLES,
    KEY,
    NODE,
    endpoint,
    node,
    port,
    service,
    slice_,
    snapshot,
)

HERE, THERE = endpoint("10.0.0.1", NODE), endpoint("10.0.0.2", "other")


def test_a_planner_reports_what_changed() -> None:
    planner = Planner(CONFIG, IPTABLES)
    assert planner.plan.services == {}
    name = ObjectName("shop", "cart")
    world = snapshot(service(), slice_(HERE))
    first = planner.update(world, FACTS, {name})
    assert (first.settings_changed, list(first.changed), set(first.removed)) == (True, [KEY], set())
    again = planner.update(world, FACTS, {name}, everything=True)
    assert again == PlanChange()
    gone = planner.update(snapshot(), FACTS, {name})
    assert gone == PlanChange(removed=frozenset({KEY}))
    assert planner.plan.services == {}


def test_one_endpoint_in_the_place_of_another_is_reported_as_that() -> None:
    planner, cart, name = Planner(CONFIG, IPTABLES), service(), ObjectName("shop", "cart")
    other = endpoint("10.0.0.3", "other")
    for pods, gone, came in (
        ((HERE, THERE), None, None),  # the Service is new
        ((HERE, other), {"10.0.0.2"}, {"10.0.0.3"}),
        ((HERE, other, THERE), set(), {"10.0.0.2"}),
        ((HERE, {**other, "conditions": {"ready": False}}, THERE), {"10.0.0.3"}, set()),
        ((), None, None),  # from now on clients are rejected
        ((HERE,), None, None),
    ):
        change = planner.update(snapshot(cart, slice_(*pods)), FACTS, {name})
        assert list(change.changed) == [KEY]
        lists = change.relisted.get(KEY)
        assert (lists and {end.ip for end in lists.gone}) == gone
        assert (lists and {end.ip for end in lists.came}) == came


def test_each_port_of_a_service_of_several_slices_has_its_new_endpoints() -> None:
    planner, name = Planner(CONFIG, IPTABLES), ObjectName("shop", "cart")
    cart = service(ports=[port(), port("admin", 81)])
    at = [port(number=8080), port("admin", 8081)]
    for address in ("10.0.0.2", "10.0.0.3"):
        slices = slice_(HERE, ports=at), slice_(endpoint(address, "other"), name="cart-2", ports=at)
        change = planner.update(snapshot(cart, *slices), FACTS, {name})
    assert {
        (key.name.port, came.ip, came.port, gone.ip)
        for key, lists in change.relisted.items()
        for came in lists.came
        for gone in lists.gone
    } == {("http", "10.0.0.3", 8080, "10.0.0.2"), ("admin", "10.0.0.3", 8081, "10.0.0.2")}


def test_a_service_of_several_slices_with_a_bad_endpoint_is_planned_as_a_whole() -> None:
    planner, cart, name = Planner(CONFIG, IPTABLES), service(), ObjectName("shop", "cart")
    for address in ("10.0.0.2", "10.0.0.256"):
        slices = slice_(HERE), slice_(endpoint(address, "other"), name="cart-2")
        change = planner.update(snapshot(cart, *slices), FACTS, {name})
    assert not change.relisted
    assert [end.ip for end in change.changed[KEY].cluster] == ["10.0.0.1"]
    (finding,) = planner.plan.findings
    assert "10.0.0.256" in str(finding)


def test_a_service_that_uses_the_endpoints_of_this_node_is_planned_as_a_whole() -> None:
    planner, name = Planner(CONFIG, IPTABLES), ObjectName("shop", "cart")
    ports = [port(nodePort=30080)]
    cart = service(type="NodePort", externalTrafficPolicy="Local", ports=ports)
    for address in ("10.0.0.1", "10.0.0.3"):
        pods = slice_(endpoint(address, NODE), THERE)
        change = planner.update(snapshot(cart, pods), FACTS, {name})
        assert not change.relisted
        assert [end.ip for end in change.changed[KEY].local] == [address]


def test_a_slice_with_an_annotation_is_planned_as_a_whole() -> None:
    planner, cart, name = Planner(CONFIG, IPTABLES), service(), ObjectName("shop", "cart")
    planner.update(snapshot(cart, slice_(HERE)), FACTS, {name})
    pods = slice_(THERE)
    meta = msgspec.structs.replace(pods.metadata, annotations=Annotations(weight="2"))
    change = planner.update(
        snapshot(cart, msgspec.structs.replace(pods, metadata=meta)), FACTS, {name}
    )
    assert not change.relisted
    assert [end.ip for end in change.changed[KEY].cluster] == ["10.0.0.2"]


def test_slices_beyond_the_limit_are_planned_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, cart, name = Planner(CONFIG, IPTABLES), service(), ObjectName("shop", "cart")
    planner.update(snapshot(cart, slice_(HERE)), FACTS, {name})
    monkeypatch.setattr(endpoints, "MAX_LISTED", 1)
    change = planner.update(snapshot(cart, slice_(HERE, THERE)), FACTS, {name})
    assert not change.relisted
    assert change.changed[KEY].cluster == ()
    (finding,) = planner.plan.findings
    assert "more than 1 endpoints" in str(finding)


def test_a_clash_dirties_just_the_other_claimant() -> None:
    planner = Planner(CONFIG, IPTABLES)
    a, b = service("a", clusterIP="10.96.0.9"), service("b", clusterIP="10.96.0.9")
    c = service("c", clusterIP="10.96.0.3")
    planner.update(snapshot(a, b, c), FACTS, (), everything=True)
    change = planner.update(snapshot(b, c), FACTS, {ObjectName("shop", "a")})
    assert {key.name.service for key in change.removed} == {"a"}
    assert {key.name.service for key in change.changed} == {"b"}
    assert planner.plan.findings == ()
    back = planner.update(snapshot(a, b, c), FACTS, {ObjectName("shop", "a")})
    assert {key.name.service for key in back.changed} == {"a"}  # b has it, and keeps it
    assert len(planner.plan.findings) == 1


@pytest.mark.parametrize("reads_addresses", [False, True])
def test_a_new_address_is_rendered_only_if_the_mode_reads_it(reads_addresses: bool) -> None:
    planner = Planner(CONFIG, msgspec.structs.replace(IPTABLES, reads_addresses=reads_addresses))
    world = snapshot(service(type="NodePort", ports=[port(nodePort=30000)]), slice_(HERE))
    planner.update(world, FACTS, (), everything=True)
    interfaces = {"eth1": ("192.0.2.9/24",), "lo": FACTS.interfaces["lo"]}
    facts = msgspec.structs.replace(FACTS, interfaces=interfaces)
    change = planner.update(world, facts, ())
    assert (change.settings_changed, change.changed) == (reads_addresses, {})
    assert planner.plan.settings.ipv4.local_addresses == ("127.0.0.1", "192.0.2.9")
    interfaces = {"lo": ("127.0.0.1/8", "127.0.0.9/8")}  # node ports may be served on loopback
    facts = msgspec.structs.replace(FACTS, interfaces=interfaces)
    assert planner.update(world, facts, ()).settings_changed


def test_a_service_that_cannot_be_planned_costs_no_other_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = Planner(CONFIG, IPTABLES)
    a, b, c = (service(name, clusterIP=f"10.96.0.{i}") for i, name in enumerate("abc", 1))
    planner.update(snapshot(a, b), FACTS, (), everything=True)
    (before,) = (plan for key, plan in planner.services.items() if key.name.service == "a")
    names = [each.metadata.object_name for each in (a, b, c)]

    def failing(parsed: Any, *rest: Any, **more: Any) -> Any:
        if parsed.service.metadata.name == "a":
            raise MemoryError("no room")
        return plan_service(parsed, *rest, **more)

    monkeypatch.setattr("steersman.compile.planner.plan_service", failing)
    changed = service("a", clusterIP="10.96.0.7")
    change = planner.update(snapshot(changed, c), FACTS, names)
    assert change.failed == {names[0]}
    assert {key.name.service for key in change.changed} == {"c"}
    assert {key.name.service for key in change.removed} == {"b"}
    assert planner.services[before.key] == before
    (finding,) = planner.plan.findings
    assert finding.object == "Service shop/a"
    assert "MemoryError: no room" in finding.reason
    monkeypatch.undo()
    planner.update(snapshot(changed, c), FACTS, change.failed)
    assert planner.services[before.key].frontends[0].address == "10.96.0.7"
    assert planner.plan.findings == ()


def test_steps_yield_and_give_the_plan_of_a_single_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steersman.compile.planner._SLICE", 0)
    world = snapshot(*(service(f"s{i}", clusterIP=f"10.96.0.{i}") for i in range(1, 9)))
    planner = Planner(CONFIG, IPTABLES)
    assert sum(1 for _ in planner.steps(world, FACTS, (), everything=True)) >= 8
    assert planner.services == compile_all(world, CONFIG, FACTS, IPTABLES).services


def test_a_zone_change_dirties_everything() -> None:
    near, far = endpoint("10.0.0.1", zones=["z1"]), endpoint("10.0.0.2", zones=["z2"])
    planner = Planner(CONFIG, IPTABLES)
    planner.update(snapshot(service(), slice_(near, far), node("z1")), FACTS, (), everything=True)
    moved = snapshot(service(), slice_(near, far), node("z2"))
    assert list(planner.update(moved, FACTS, ()).changed) == [KEY]


def test_thresholds_have_hysteresis() -> None:
    config = msgspec.structs.replace(CONFIG, split_threshold=4, large_cluster_endpoints=2)
    planner = Planner(config, IPTABLES)

    def flags(ports: int, endpoints: int) -> tuple[bool, bool, bool]:
        obj = service(ports=[port(str(n), 80 + n) for n in range(ports)])
        entries = [endpoint(f"10.0.0.{n}") for n in range(endpoints)]
        world = snapshot(obj, slice_(*entries, ports=[port("0")]))
        change = planner.update(world, FACTS, {ObjectName("shop", "cart")})
        settings = planner.plan.settings
        return settings.split_dispatch, settings.large_cluster, change.settings_changed

    assert flags(4, 2) == (False, False, True)
    assert flags(5, 3) == (True, True, True)
    assert flags(3, 2) == (True, True, False)
    assert flags(2, 1) == (False, False, True)


def test_a_fresh_planner_has_the_same_configuration() -> None:
    assert Planner(CONFIG, IPTABLES).fresh().config == CONFIG


def ejected(world: Snapshot, *ips: str) -> Snapshot:
    ejections = tuple(
        Ejection(Backend(ip, 8080, Protocol.TCP), Observation.SILENT, 1e9, 1e9 + 10, 1)
        for ip in ips
    )
    return msgspec.structs.replace(world, ejected={ObjectName("shop", "cart"): ejections})


def one_plan(world: Snapshot) -> ServicePlan:
    return compile_all(world, CONFIG, FACTS, IPTABLES).services[KEY]


def test_an_ejected_endpoint_leaves_the_lists_and_comes_back() -> None:
    planner = Planner(CONFIG, IPTABLES)
    name = ObjectName("shop", "cart")
    world = snapshot(service(), slice_(HERE, THERE))
    before = planner.update(world, FACTS, {name}).changed[KEY]
    during = planner.update(ejected(world, "10.0.0.2"), FACTS, {name}).changed[KEY]
    assert [each.ip for each in before.reachable] == ["10.0.0.1", "10.0.0.2"]
    assert [each.ip for each in during.reachable] == ["10.0.0.1"]
    assert planner.update(world, FACTS, {name}).changed[KEY] == before


def test_policies_see_an_ejection_as_an_endpoint_that_is_not_ready() -> None:
    obj = service(internalTrafficPolicy="Local")
    plan = one_plan(ejected(snapshot(obj, slice_(HERE, THERE)), "10.0.0.1"))
    not_ready = endpoint("10.0.0.1", NODE, ready=False, serving=False)
    assert plan == one_plan(snapshot(obj, slice_(not_ready, THERE)))


def test_health_checks_count_pods_and_not_ejections() -> None:
    obj = service(type="LoadBalancer", externalTrafficPolicy="Local", healthCheckNodePort=32000)
    plan = one_plan(ejected(snapshot(obj, slice_(HERE, THERE)), "10.0.0.1"))
    assert (plan.ready_here, plan.local) == (1, ())
