"""The Planner: what it reports, and the cost of a change."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from steersman.compile import endpoints
from steersman.compile.planner import Planner, compile_all
from steersman.compile.service_plan import plan_service
from steersman.model.failover import Backend, Ejection, Observation
from steersman.model.inputs import Snapshot
from steersman.model.kube import Annotations, Service
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
from tests.support.following import Planned, update

HERE, THERE = endpoint("10.0.0.1", NODE), endpoint("10.0.0.2", "other")


def test_a_planner_reports_what_changed() -> None:
    planner = Planner(CONFIG, IPTABLES)
    assert planner.plan.services == {}
    name = ObjectName("shop", "cart")
    world = snapshot(service(), slice_(HERE))
    first = update(planner, world, FACTS, {name})
    assert (first.settings_changed, list(first.changed), set(first.removed)) == (True, [KEY], set())
    assert update(planner, world, FACTS, {name}) == Planned(False, {}, frozenset())
    assert update(planner, snapshot(), FACTS, {name}) == Planned(False, {}, frozenset({KEY}))
    assert planner.plan.services == {}


def test_endpoints_come_and_go() -> None:
    planner, cart, name = Planner(CONFIG, IPTABLES), service(), ObjectName("shop", "cart")
    other = endpoint("10.0.0.3", "other")
    not_ready = {**other, "conditions": {"ready": False}}
    for pods, ips in (
        ((HERE, THERE), ["10.0.0.1", "10.0.0.2"]),
        ((HERE, other), ["10.0.0.1", "10.0.0.3"]),
        ((HERE, other, THERE), ["10.0.0.1", "10.0.0.2", "10.0.0.3"]),
        ((HERE, not_ready, THERE), ["10.0.0.1", "10.0.0.2"]),
        ((), []),
        ((HERE,), ["10.0.0.1"]),
    ):
        change = update(planner, snapshot(cart, slice_(*pods)), FACTS, {name})
        assert list(change.changed) == [KEY]
        assert [end.ip for end in change.changed[KEY].cluster] == ips


def test_each_port_of_a_service_of_several_slices_has_its_new_endpoints() -> None:
    planner, name = Planner(CONFIG, IPTABLES), ObjectName("shop", "cart")
    cart = service(ports=[port(), port("admin", 81)])
    at = [port(number=8080), port("admin", 8081)]
    for address in ("10.0.0.2", "10.0.0.3"):
        slices = slice_(HERE, ports=at), slice_(endpoint(address, "other"), name="cart-2", ports=at)
        change = update(planner, snapshot(cart, *slices), FACTS, {name})
    assert {
        key.name.port: list(map(str, plan.cluster)) for key, plan in change.changed.items()
    } == {
        "http": ["10.0.0.1:8080", "10.0.0.3:8080"],
        "admin": ["10.0.0.1:8081", "10.0.0.3:8081"],
    }


def test_a_bad_endpoint_of_one_slice_leaves_the_others() -> None:
    planner, cart, name = Planner(CONFIG, IPTABLES), service(), ObjectName("shop", "cart")
    for address in ("10.0.0.2", "10.0.0.256"):
        slices = slice_(HERE), slice_(endpoint(address, "other"), name="cart-2")
        change = update(planner, snapshot(cart, *slices), FACTS, {name})
    assert [end.ip for end in change.changed[KEY].cluster] == ["10.0.0.1"]
    (finding,) = planner.plan.findings
    assert "10.0.0.256" in str(finding)


def test_endpoints_of_this_node_take_the_place_of_each_other() -> None:
    planner, name = Planner(CONFIG, IPTABLES), ObjectName("shop", "cart")
    ports = [port(nodePort=30080)]
    cart = service(type="NodePort", externalTrafficPolicy="Local", ports=ports)
    for address in ("10.0.0.1", "10.0.0.3"):
        pods = slice_(endpoint(address, NODE), THERE)
        change = update(planner, snapshot(cart, pods), FACTS, {name})
        assert [end.ip for end in change.changed[KEY].local] == [address]


def test_a_slice_that_gets_weights_changes_the_plan() -> None:
    planner, cart, name = Planner(CONFIG, IPTABLES), service(), ObjectName("shop", "cart")
    planner.update(snapshot(cart, slice_(HERE)), FACTS, {name})
    pods = slice_(THERE)
    meta = msgspec.structs.replace(pods.metadata, annotations=Annotations(weight="2"))
    change = update(
        planner, snapshot(cart, msgspec.structs.replace(pods, metadata=meta)), FACTS, {name}
    )
    plan = change.changed[KEY]
    assert [end.ip for end in plan.cluster] == ["10.0.0.2"]
    assert plan.scheduling.weights == (("10.0.0.2", 8080, 2),)


def test_slices_beyond_the_limit_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, cart, name = Planner(CONFIG, IPTABLES), service(), ObjectName("shop", "cart")
    planner.update(snapshot(cart, slice_(HERE)), FACTS, {name})
    monkeypatch.setattr(endpoints, "MAX_LISTED", 1)
    change = update(planner, snapshot(cart, slice_(HERE, THERE)), FACTS, {name})
    assert change.changed[KEY].cluster == ()
    (finding,) = planner.plan.findings
    assert "more than 1 endpoints" in str(finding)


def test_a_clash_dirties_just_the_other_claimant() -> None:
    planner = Planner(CONFIG, IPTABLES)
    a, b = service("a", clusterIP="10.96.0.9"), service("b", clusterIP="10.96.0.9")
    c = service("c", clusterIP="10.96.0.3")
    planner.update(snapshot(a, b, c), FACTS)
    change = update(planner, snapshot(b, c), FACTS, {ObjectName("shop", "a")})
    assert {key.name.service for key in change.removed} == {"a"}
    assert {key.name.service for key in change.changed} == {"b"}
    assert planner.plan.findings == ()
    back = update(planner, snapshot(a, b, c), FACTS, {ObjectName("shop", "a")})
    assert {key.name.service for key in back.changed} == {"a"}  # b has it, and keeps it
    assert len(planner.plan.findings) == 1


@pytest.mark.parametrize("reads_addresses", [False, True])
def test_a_new_address_is_rendered_only_if_the_mode_reads_it(reads_addresses: bool) -> None:
    planner = Planner(CONFIG, msgspec.structs.replace(IPTABLES, reads_addresses=reads_addresses))
    world = snapshot(service(type="NodePort", ports=[port(nodePort=30000)]), slice_(HERE))
    planner.update(world, FACTS)
    interfaces = {"eth1": ("192.0.2.9/24",), "lo": FACTS.interfaces["lo"]}
    facts = msgspec.structs.replace(FACTS, interfaces=interfaces)
    plans = dict(planner.services)
    change = update(planner, world, facts, ())
    assert change.settings_changed is reads_addresses
    assert change.changed == (plans if reads_addresses else {})  # they may render differently
    assert planner.plan.settings.ipv4.local_addresses == ("127.0.0.1", "192.0.2.9")
    interfaces = {"lo": ("127.0.0.1/8", "127.0.0.9/8")}  # node ports may be served on loopback
    facts = msgspec.structs.replace(FACTS, interfaces=interfaces)
    assert update(planner, world, facts, ()).settings_changed


def test_a_service_that_cannot_be_planned_costs_no_other_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = Planner(CONFIG, IPTABLES)
    a, b, c = (service(name, clusterIP=f"10.96.0.{i}") for i, name in enumerate("abc", 1))
    planner.update(snapshot(a, b), FACTS)
    (before,) = (plan for key, plan in planner.services.items() if key.name.service == "a")
    names = [each.metadata.object_name for each in (a, b, c)]

    def failing(parsed: Any, *rest: Any, **more: Any) -> Any:
        if parsed.service.metadata.name == "a":
            raise MemoryError("no room")
        return plan_service(parsed, *rest, **more)

    monkeypatch.setattr("steersman.compile.planner.plan_service", failing)
    changed = service("a", clusterIP="10.96.0.7")
    change = update(planner, snapshot(changed, c), FACTS, names)
    assert planner.failed == {names[0]}
    assert {key.name.service for key in change.changed} == {"c"}
    assert {key.name.service for key in change.removed} == {"b"}
    assert planner.services[before.key] == before
    (finding,) = planner.plan.findings
    assert finding.object == "Service shop/a"
    assert "MemoryError: no room" in finding.reason
    monkeypatch.undo()
    planner.update(snapshot(changed, c), FACTS, planner.failed)
    assert planner.services[before.key].frontends[0].address == "10.96.0.7"
    assert planner.plan.findings == ()


def test_steps_yield_and_give_the_plan_of_a_single_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steersman.compile.planner._SLICE", 0)
    world = snapshot(*(service(f"s{i}", clusterIP=f"10.96.0.{i}") for i in range(1, 9)))
    planner = Planner(CONFIG, IPTABLES)
    assert sum(1 for _ in planner.steps(world, FACTS, ())) >= 8
    assert planner.services == compile_all(world, CONFIG, FACTS, IPTABLES).services


def crowd(number: int) -> list[Service]:
    return [service(f"s{n}", clusterIP=f"10.97.0.{n}") for n in range(number)]


def test_steps_that_do_not_run_to_the_end_plan_everything_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("steersman.compile.planner._SLICE", 0)
    planner = Planner(CONFIG, IPTABLES)
    holder = service("web", clusterIP="10.96.0.9")
    planner.update(snapshot(holder), FACTS)
    # By name `aaa` comes first: without a holder it would get the address.
    world = snapshot(holder, service("aaa", clusterIP="10.96.0.9"), *crowd(4))
    names = {ObjectName("shop", name) for name in ("aaa", "s0", "s1", "s2", "s3")}
    steps = planner.steps(world, FACTS, names)
    for _ in range(3):
        next(steps)
    steps.close()
    follower = planner.log.cursor()
    planner.update(world, FACTS)  # whatever is dirty
    assert {key.name.object_name for key in planner.services} == {*world.services}
    assert [key.name.service for key, plan in planner.services.items() if not plan.frontends] == [
        "aaa"
    ]
    assert {*planner.services} <= {*follower.changed()[0]}
    fresh = Planner(CONFIG, IPTABLES)
    fresh.inherit_holders(planner)
    fresh.update(world, FACTS)
    assert planner.plan == fresh.plan


def test_plans_of_services_that_are_gone_do_not_outlive_steps_that_were_stopped() -> None:
    planner = Planner(CONFIG, IPTABLES)
    a, b = service("a", clusterIP="10.96.0.1"), service("b", clusterIP="10.96.0.2")
    planner.update(snapshot(a, b), FACTS)
    steps = planner.steps(snapshot(b), FACTS, {ObjectName("shop", "a")})
    steps.close()  # before the first step
    next(
        steps := planner.steps(
            snapshot(b, *crowd(99)), FACTS, [each.metadata.object_name for each in crowd(99)]
        )
    )
    steps.close()
    change = update(planner, snapshot(b), FACTS)
    assert {key.name.service for key in change.removed} == {"a"}
    assert {key.name.service for key in planner.services} == {"b"}


def test_holders_outlast_a_thousand_updates_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(CONFIG, IPTABLES)
    holder = service("web", clusterIP="10.96.0.9")
    planner.update(snapshot(holder), FACTS)
    world = snapshot(holder, service("aaa", clusterIP="10.96.0.9"))
    with monkeypatch.context() as patch:
        patch.setattr("steersman.compile.planner.node_settings", None)
        for _ in range(1500):
            with pytest.raises(TypeError):
                planner.update(world, msgspec.structs.replace(FACTS, hostname="other"))
    planner.update(world, FACTS)
    assert [key.name.service for key, plan in planner.services.items() if plan.frontends] == ["web"]


def test_another_configuration_plans_everything() -> None:
    planner = Planner(CONFIG, IPTABLES)
    cart = service(externalIPs=["192.0.2.7"])
    holder, asker = service("web", clusterIP="10.96.0.9"), service("aaa", clusterIP="10.96.0.9")
    planner.update(snapshot(cart, holder), FACTS)
    world = snapshot(cart, holder, asker)
    planner.update(world, FACTS, {ObjectName("shop", "aaa")})
    assert not update(planner, world, FACTS).changed
    planner.config = msgspec.structs.replace(CONFIG, allow_service_external_ips=False)
    change = update(planner, world, FACTS)
    assert change.changed.keys() == planner.services.keys()
    assert [frontend.kind for frontend in change.changed[KEY].frontends] == ["clusterIP"]
    # The one that had the address keeps it, by the new configuration, too.
    assert [key.name.service for key, plan in planner.services.items() if not plan.frontends] == [
        "aaa"
    ]
    assert not update(planner, world, FACTS).changed


def test_a_contender_may_leave_between_two_steps() -> None:
    """Its name comes in the next update; this one goes on with what it had."""
    planner = Planner(CONFIG, IPTABLES)
    ends = [endpoint(f"10.1.{n // 250}.{n % 250 + 1}") for n in range(300)]
    names = ["a", "b", "c", "d"]
    many = [service(name, clusterIP="10.96.0.9") for name in names]
    slices = [slice_(*ends, name=f"{name}-1", owner=name) for name in names]
    leaver = service("leaver", clusterIP="10.96.0.9")
    planner.update(snapshot(leaver), FACTS)
    live = snapshot(leaver, *many, *slices)
    steps = planner.steps(live, FACTS, {each.metadata.object_name for each in many})
    next(steps)
    assert isinstance(live.services, dict)
    del live.services[ObjectName("shop", "leaver")]
    for _ in steps:
        pass
    assert [key.name.service for key, plan in planner.services.items() if plan.frontends] == [
        "leaver"
    ]
    planner.update(live, FACTS, {ObjectName("shop", "leaver")})
    assert [key.name.service for key, plan in planner.services.items() if plan.frontends] == ["a"]
    assert planner.plan == compile_all(live, CONFIG, FACTS, IPTABLES)


def test_a_contender_that_cannot_be_planned_costs_no_other_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = Planner(CONFIG, IPTABLES)
    a, b = service("a", clusterIP="10.96.0.9"), service("b", clusterIP="10.96.0.9")
    c = service("c", clusterIP="10.96.0.3")
    planner.update(snapshot(a, b), FACTS)
    names = {ObjectName("shop", "a"), ObjectName("shop", "c")}

    def failing(parsed: Any, *rest: Any, **more: Any) -> Any:
        if parsed.service.metadata.name == "b":
            raise MemoryError("no room")
        return plan_service(parsed, *rest, **more)

    monkeypatch.setattr("steersman.compile.planner.plan_service", failing)
    change = update(planner, snapshot(b, c), FACTS, names)  # `b` gets the address of `a`
    assert planner.failed == {ObjectName("shop", "b")}
    assert {key.name.service for key in change.removed} == {"a"}
    assert {key.name.service for key in change.changed} == {"c"}
    (finding,) = planner.plan.findings
    assert finding.object == "Service shop/b"
    monkeypatch.undo()
    planner.update(snapshot(b, c), FACTS, planner.failed)
    assert planner.failed == set()
    assert planner.plan == compile_all(snapshot(b, c), CONFIG, FACTS, IPTABLES)


def test_a_zone_change_dirties_everything() -> None:
    near, far = endpoint("10.0.0.1", zones=["z1"]), endpoint("10.0.0.2", zones=["z2"])
    planner = Planner(CONFIG, IPTABLES)
    planner.update(snapshot(service(), slice_(near, far), node("z1")), FACTS)
    moved = snapshot(service(), slice_(near, far), node("z2"))
    assert list(update(planner, moved, FACTS, ()).changed) == [KEY]


def test_thresholds_have_hysteresis() -> None:
    config = msgspec.structs.replace(CONFIG, split_threshold=4, large_cluster_endpoints=2)
    planner = Planner(config, IPTABLES)

    def flags(ports: int, endpoints: int) -> tuple[bool, bool, bool]:
        obj = service(ports=[port(str(n), 80 + n) for n in range(ports)])
        entries = [endpoint(f"10.0.0.{n}") for n in range(endpoints)]
        world = snapshot(obj, slice_(*entries, ports=[port("0")]))
        change = update(planner, world, FACTS, {ObjectName("shop", "cart")})
        settings = planner.plan.settings
        return settings.split_dispatch, settings.large_cluster, change.settings_changed

    assert flags(4, 2) == (False, False, True)
    assert flags(5, 3) == (True, True, True)
    assert flags(3, 2) == (True, True, False)
    assert flags(2, 1) == (False, False, True)


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
    before = update(planner, world, FACTS, {name}).changed[KEY]
    during = update(planner, ejected(world, "10.0.0.2"), FACTS, {name}).changed[KEY]
    assert [each.ip for each in before.reachable] == ["10.0.0.1", "10.0.0.2"]
    assert [each.ip for each in during.reachable] == ["10.0.0.1"]
    assert update(planner, world, FACTS, {name}).changed[KEY] == before


def test_policies_see_an_ejection_as_an_endpoint_that_is_not_ready() -> None:
    obj = service(internalTrafficPolicy="Local")
    plan = one_plan(ejected(snapshot(obj, slice_(HERE, THERE)), "10.0.0.1"))
    not_ready = endpoint("10.0.0.1", NODE, ready=False, serving=False)
    assert plan == one_plan(snapshot(obj, slice_(not_ready, THERE)))


def test_health_checks_count_pods_and_not_ejections() -> None:
    obj = service(type="LoadBalancer", externalTrafficPolicy="Local", healthCheckNodePort=32000)
    plan = one_plan(ejected(snapshot(obj, slice_(HERE, THERE)), "10.0.0.1"))
    assert (plan.ready_here, plan.local) == (1, ())
