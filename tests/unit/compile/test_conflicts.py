"""Who gets a destination that several Services ask for."""

from __future__ import annotations

from typing import Any

import pytest

from steersman.compile.planner import Planner
from steersman.model.kube import EndpointSlice, Service
from steersman.model.names import Family, ObjectName, PlanKey
from steersman.model.plan import ServicePlan
from steersman.source.store import Store
from tests.support.builders.objects import (
    CONFIG,
    FACTS,
    HTTP,
    IPTABLES,
    NODE,
    endpoint,
    plan_of,
    port,
    service,
    slice_,
)
from tests.support.builders.store import replace_objects
from tests.support.following import StoreFollower, update

OLD, MIDDLE, NEW = "2026-01-01T00:00:00Z", "2026-02-02T00:00:00Z", "2026-03-03T00:00:00Z"
VIPS = {name: f"10.96.0.{number}" for number, name in enumerate(["aaa", "mid", "web"], 1)}


def asking(name: str, number: int = 30080, created: str | None = None, **more: Any) -> Service:
    """A Service that asks for a node port."""
    ports = more.pop("ports", [port(nodePort=number)])
    spec = {"type": "NodePort", "clusterIP": VIPS[name]} | more
    return service(name, created=created, ports=ports, **spec)


class World:
    """A Store and a Planner that follows it."""

    def __init__(self) -> None:
        self.store = Store(NODE)
        self.follower = StoreFollower(self.store)
        self.planner = Planner(CONFIG, IPTABLES)
        self.planned: set[str] = set()

    def update(self, *objects: Service | EndpointSlice | str) -> None:
        """Take objects, and names of Services that are gone, as one batch."""
        for each in objects:
            if isinstance(each, str):
                self.store.delete("Service", ObjectName("shop", each))
            else:
                self.store.upsert(each)
        self.plan()

    def plan(self) -> None:
        dirty = self.follower.take().services
        change = update(self.planner, self.store.snapshot, FACTS, dirty)
        self.planned = {key.name.service for key in change.changed}

    def reload(self) -> None:
        planner = Planner(CONFIG, IPTABLES)
        planner.inherit_holders(self.planner)
        self.planner = planner

    def holder(self, number: int = 30080) -> str:
        """Who has a node port."""
        names = [
            key.name.service
            for key, plan in self.planner.plan.services.items()
            if any(f.kind == "nodePort" and f.port == number for f in plan.frontends)
        ]
        assert len(names) <= 1
        return "".join(names)

    def reasons(self) -> dict[str, str]:
        return {f.object: f.reason for f in self.planner.plan.findings}


@pytest.fixture
def world() -> World:
    return World()


def test_manifests_the_one_that_serves_keeps_its_node_port(world: World) -> None:
    world.update(asking("web"))
    world.update(asking("aaa"))
    assert world.holder() == "web"
    assert world.planned == {"aaa"}
    reasons = world.reasons()
    assert list(reasons) == ["Service shop/aaa"]
    assert "node port 30080/TCP is held by Service shop/web:http" in reasons["Service shop/aaa"]
    world.update(asking("web", sessionAffinity="ClientIP"))  # it changes, and still asks for it
    assert world.holder() == "web"


def test_at_a_start_the_name_decides(world: World) -> None:
    world.update(asking("web"), asking("mid"), asking("aaa"))
    assert world.holder() == "aaa"


@pytest.mark.parametrize(
    ("holder", "newcomer", "winner"),
    [
        (OLD, NEW, "web"),
        (NEW, OLD, "aaa"),
        (OLD, OLD, "web"),
        (None, OLD, "web"),
        (OLD, None, "web"),
        (None, None, "web"),
    ],
)
def test_age_decides_where_both_ages_are_known(
    world: World, holder: str | None, newcomer: str | None, winner: str
) -> None:
    world.update(asking("web", created=holder))
    world.update(asking("aaa", created=newcomer))
    assert world.holder() == winner
    loser = "aaa" if winner == "web" else "web"
    older = bool(holder and newcomer and holder != newcomer)
    assert ("older" in world.reasons()[f"Service shop/{loser}"].partition("(")[0]) is older


def test_a_holder_of_unknown_age_stands_between_others(world: World) -> None:
    world.update(asking("web"))
    world.update(asking("mid", created=MIDDLE), asking("aaa", created=NEW))
    assert world.holder() == "web"
    world.update("web")
    assert world.holder() == "mid"  # at once, and the older of the two
    world.update(asking("web", created=OLD))
    assert world.holder() == "web"


def test_the_next_one_gets_it_when_the_holder_goes_or_asks_for_another(world: World) -> None:
    world.update(asking("web"))
    world.update(asking("mid"), asking("aaa"))
    world.update(asking("web", number=30081))
    assert (world.holder(), world.holder(30081)) == ("aaa", "web")
    world.update("aaa")
    assert world.holder() == "mid"
    assert world.reasons() == {}
    world.update(asking("web"), asking("aaa"))
    assert world.holder() == "mid"
    assert set(world.reasons()) == {"Service shop/web", "Service shop/aaa"}
    world.update("mid", "web", "aaa")
    assert (world.holder(), world.reasons()) == ("", {})


def test_a_holder_may_rename_its_port(world: World) -> None:
    world.update(asking("web"))
    world.update(asking("aaa"))
    world.update(asking("web", ports=[port("other", nodePort=30080)]))
    assert world.holder() == "web"


def test_a_holder_that_is_deleted_and_recreated(world: World) -> None:
    world.update(asking("web", created=OLD), asking("aaa", created=MIDDLE))
    assert world.holder() == "web"
    world.update("web")
    assert world.holder() == "aaa"
    world.update(asking("web", created=NEW))
    assert world.holder() == "aaa"
    assert "older Service shop/aaa" in world.reasons()["Service shop/web"]
    world.update("aaa", asking("aaa", created="2027-01-01T00:00:00Z"))  # both within one batch
    assert world.holder() == "web"
    assert "older Service shop/web" in world.reasons()["Service shop/aaa"]
    world.update("web", asking("web"))
    assert "held by Service shop/web" in world.reasons()["Service shop/aaa"]


def test_a_relist_changes_nothing(world: World) -> None:
    world.update(asking("web"))
    world.update(asking("aaa"))
    replace_objects(world.store, "Service", [asking("aaa"), asking("web")])
    world.plan()
    assert (world.holder(), world.planned) == ("web", set())


def test_a_reload_leaves_everything_with_who_has_it(world: World) -> None:
    world.update(asking("web"))
    world.update(asking("mid", number=30081))
    world.update(asking("aaa"))
    world.reload()
    world.reload()  # the first one was never used
    world.store.upsert(asking("aaa", number=30081))  # a newcomer at the same moment
    world.plan()
    assert (world.holder(), world.holder(30081)) == ("web", "mid")
    world.reload()
    world.update("web", "mid")
    assert (world.holder(), world.holder(30081)) == ("", "aaa")


def test_a_cluster_ip_is_not_taken_by_an_older_service(world: World) -> None:
    world.update(service("web", created=NEW, clusterIP="10.96.0.3"), slice_(endpoint("10.0.0.1")))
    before = dict(world.planner.plan.services)
    world.update(service("aaa", created=OLD, clusterIP="10.96.0.1", externalIPs=["10.96.0.3"]))
    after = {k: p for k, p in world.planner.plan.services.items() if k.name.service == "web"}
    assert after == before
    assert (
        "10.96.0.3:80/TCP is the clusterIP of Service shop/web:http"
        in (world.reasons()["Service shop/aaa"])
    )


def test_a_thousand_that_ask_for_one_destination(world: World) -> None:
    crowd = [service(f"s{n}", clusterIP="10.96.1.1", created=NEW) for n in range(1000)]
    world.update(service("web", clusterIP="10.96.1.1", created=OLD), *crowd)
    world.update(service("s7", clusterIP="10.96.1.1", created=NEW, sessionAffinity="ClientIP"))
    assert world.planned <= {"s7"}  # the others are not planned again
    world.update("web")
    assert sum(bool(plan.frontends) for plan in world.planner.plan.services.values()) == 1


def test_health_check_ports_of_many_services_are_one_finding_each(world: World) -> None:
    check: dict[str, Any] = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "healthCheckNodePort": 32000,
    }
    vips = [f"10.96.1.{n}" for n in range(20)]
    world.update(*(service(f"s{n:02}", clusterIP=vip, **check) for n, vip in enumerate(vips)))
    assert len(world.reasons()) == len(world.planner.plan.findings) == 20
    assert "shop/s00:http and 18 more" in world.reasons()["Service shop/s01"]
    world.update(*(f"s{n:02}" for n in range(1, 20)))
    assert world.reasons() == {}


def test_a_plan_that_stops_half_way_leaves_everything_with_who_has_it(world: World) -> None:
    world.update(asking("web"))
    crowd = [service(f"s{n}", clusterIP=f"10.97.{n // 250}.{n % 250}") for n in range(500)]
    for obj in (asking("aaa"), *crowd):
        world.store.upsert(obj)
    steps = world.planner.steps(world.store.snapshot, FACTS, world.follower.take().services)
    next(steps)
    steps.close()
    world.plan()
    assert world.holder() == "web"


# Two Services


HERE, THERE = endpoint("10.0.0.1", NODE), endpoint("10.0.0.2", "other")


def printed(plan: ServicePlan) -> tuple[list[str], list[str], list[str]]:
    return (
        [str(e) for e in plan.cluster],
        [str(e) for e in plan.local],
        [str(e) for e in plan.reachable],
    )


def clash(
    first: dict[str, Any], second: dict[str, Any]
) -> tuple[list[str], list[str], dict[str, str]]:
    """Kinds of Frontends that Services `a` and `b` keep, and reasons by object and field."""
    a = service("a", **({"clusterIP": "10.96.0.1"} | first))
    b = service("b", **({"clusterIP": "10.96.0.2"} | second))
    plan = plan_of(a, b)
    kept = {
        name: [
            f.kind.value
            for key, p in plan.services.items()
            if key.name.service == name
            for f in p.frontends
        ]
        for name in "ab"
    }
    return kept["a"], kept["b"], {f"{f.object} {f.field}": f.reason for f in plan.findings}


NODE_PORT: dict[str, Any] = {"type": "NodePort", "ports": [port(nodePort=30000)]}


@pytest.mark.parametrize(
    ("first", "second", "loser", "why"),
    [
        ({"created": OLD}, {"created": NEW}, "b", "belongs to the older"),
        ({"created": NEW}, {"created": OLD}, "a", "belongs to the older"),
        ({"created": OLD}, {"created": OLD}, "b", "is held by"),
        ({}, {}, "b", "is held by"),
        ({}, {"created": NEW}, "a", "is held by"),
    ],
)
def test_the_older_service_gets_a_node_port(
    first: dict[str, Any], second: dict[str, Any], loser: str, why: str
) -> None:
    a, b, reasons = clash(first | NODE_PORT, second | NODE_PORT)
    kept = {"a": a, "b": b}
    winner = "a" if loser == "b" else "b"
    assert kept[winner] == ["clusterIP", "nodePort"]
    assert kept[loser] == ["clusterIP"]
    (where,) = reasons
    assert where == f"Service shop/{loser} spec.ports[0].nodePort"
    assert f"node port 30000/TCP {why} Service shop/{winner}:http" in reasons[where]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"clusterIP": "10.96.0.9"}, "spec.clusterIP"),
        ({"externalIPs": ["192.0.2.1"]}, "spec.externalIPs"),
        ({"ingress": [{"ip": "192.0.2.1"}]}, "status.loadBalancer.ingress"),
    ],
)
def test_an_address_that_two_services_claim(more: dict[str, Any], field: str) -> None:
    a, b, reasons = clash(more, more)
    assert len(a) == len(b) + 1
    assert list(reasons) == [f"Service shop/b {field}"]


def test_one_port_number_and_two_protocols_do_not_clash() -> None:
    udp = {"type": "NodePort", "ports": [port(nodePort=30000, protocol="UDP")]}
    assert clash(NODE_PORT, udp)[2] == {}


def test_two_ports_of_one_service_on_one_number() -> None:
    plan = plan_of(service(ports=[port("b"), port("a")]), slice_(HERE))
    frontends = {key.name.port: p.frontends for key, p in plan.services.items()}
    assert len(frontends["a"]) == 1
    assert frontends["b"] == ()
    assert "10.96.0.10:80/TCP belongs to port 'a'" in plan.findings[0].reason


def test_a_lost_frontend_takes_its_endpoints_along() -> None:
    both = [service(name, clusterIP="10.96.0.9") for name in "ab"]
    plan = plan_of(*both, slice_(HERE, owner="b"))
    loser = plan.services[PlanKey(HTTP._replace(service="b"), Family.IPV4)]
    assert (loser.frontends, printed(loser)) == ((), ([], [], []))


def test_ipv6_clash_is_named_in_brackets() -> None:
    six = {"clusterIP": "fd00::9"}
    assert "[fd00::9]:80/TCP is held by" in clash(six, six)[2]["Service shop/b spec.clusterIP"]


HEALTH: dict[str, Any] = {
    "type": "LoadBalancer",
    "externalTrafficPolicy": "Local",
    "healthCheckNodePort": 30000,
}


def test_a_health_check_port_that_is_a_node_port_is_called_out() -> None:
    a, b, reasons = clash(NODE_PORT, HEALTH)
    assert (a, b) == (["clusterIP", "nodePort"], ["clusterIP"])
    assert "of shop/a:http" in reasons["Service shop/b spec.healthCheckNodePort"]


def test_a_health_check_port_of_two_services_is_called_out_on_both() -> None:
    assert len(clash(HEALTH, HEALTH)[2]) == 2


def test_a_health_check_port_that_is_its_own_node_port_is_called_out() -> None:
    own = HEALTH | {"ports": [port(nodePort=30000), port("other", 81)]}
    _, _, reasons = clash(own, {})
    assert list(reasons) == ["Service shop/a spec.healthCheckNodePort"]
