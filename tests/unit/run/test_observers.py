"""The observers of syncs: metrics, health, health checks, and what they do if one fails."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from steersman.model import codes
from steersman.model.names import Family, ObjectName, PlanKey, Protocol, ServicePortName
from steersman.model.plan import Action, Frontend, FrontendKind, ServicePlan, Verdict
from steersman.modes.specs import SPECS
from steersman.netfilter.iptables.restore import count_rules
from steersman.run.observe.endpoint_counts import EndpointCounts, without_local
from steersman.run.observe.metrics import Metrics
from steersman.run.observe.observers import SyncObservers
from steersman.run.observe.prometheus import Labelled
from steersman.run.observe.sync_metrics import programming_seconds
from steersman.run.serve.health import Moment, ProxyHealth
from steersman.run.sync.in_force import InForce
from steersman.run.sync.state import RefusedBatches, SyncReport
from tests.support.builders.plans import plan
from tests.support.builders.store import make, service, slice_
from tests.support.clock import FakeClock, settle
from tests.support.modes.memory import World
from tests.support.samples import value_of

LOCAL_LB: dict[str, Any] = {
    "type": "LoadBalancer",
    "externalTrafficPolicy": "Local",
    "healthCheckNodePort": 32100,
    "ports": [{"port": 80, "nodePort": 30080}],
}


class NotedServers:
    """Takes the place of sockets: records the ports to serve."""

    def __init__(self) -> None:
        self.ports: Any = None
        self.counts: Any = None
        self.calls = 0
        self.failing = False

    async def sync(self, ports: Any, counts: Any) -> None:
        self.calls += 1
        self.ports, self.counts = dict(ports), dict(counts)


class Told:
    """A World whose syncs are given to all observers."""

    def __init__(self, services: int = 2, mode: str = "iptables") -> None:
        self.world = World(services)
        self.metrics = Metrics(mode)
        self.seconds = 1000.0
        self.health = ProxyHealth(60.0)
        self.servers = NotedServers()
        self.clock = FakeClock()
        self.objects: list[Any] = []
        self.observers = SyncObservers(
            self.world.store,
            self.world.sync.in_force,
            self.metrics,
            self.health,
            {Family.IPV4: self.servers},  # type: ignore[dict-item]
            mode=self.world.mode,
            objects=lambda: self.objects,
            wall=lambda: self.seconds,
            moment=self.now,
            clock=self.clock,
        )

    def now(self) -> Moment:
        return Moment(int(self.seconds * 1e9), self.seconds)

    async def report(self) -> SyncReport:
        report = await self.world.sync.run()
        assert report is not None
        return report

    async def sync(self) -> None:
        await self.observe(await self.report())

    async def observe(self, report: SyncReport) -> None:
        task = asyncio.create_task(self.observers.health_checks.run())
        await self.observers.observe(report)
        await settle()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def metric(self, name: str, **labels: str) -> float | None:
        return value_of(self.metrics.collect(), name, labels)


async def test_a_sync_is_seen_in_the_metrics() -> None:
    told = Told()
    await told.sync()
    told.world.store.upsert(slice_("s1-x", "s1", ("10.1.0.9",)))
    told.observers.queued([Family.IPV4])
    v4 = {"ip_family": "IPv4"}
    assert told.metric("kubeproxy_sync_proxy_rules_endpoint_changes_pending") == 1
    assert told.metric("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", **v4) == 1000
    told.seconds = 1005.0
    await told.sync()
    assert told.metric("kubeproxy_sync_proxy_rules_endpoint_changes_pending") == 0
    assert told.metric("kubeproxy_sync_proxy_rules_endpoint_changes_total") == 3
    assert told.metric("kubeproxy_sync_proxy_rules_service_changes_total") == 2
    assert told.metric("kubeproxy_sync_proxy_rules_last_timestamp_seconds", **v4) == 1005
    assert told.metric("kubeproxy_sync_proxy_rules_duration_seconds_count", **v4) == 2
    assert told.metric("kubeproxy_sync_full_proxy_rules_duration_seconds_count", **v4) == 1
    assert told.metric("kubeproxy_sync_partial_proxy_rules_duration_seconds_count", **v4) == 1
    assert told.metric("steersman_syncs_total", reason="changes", outcome="ok") == 1


async def test_a_change_that_comes_while_a_sync_runs_is_pending() -> None:
    told = Told()
    await told.sync()
    told.world.store.upsert(slice_("s1-x", "s1", ("10.1.0.9",)))
    report = await told.report()
    told.world.store.upsert(slice_("s1-x", "s1", ("10.1.0.8",)))
    await told.observe(report)
    assert told.metric("kubeproxy_sync_proxy_rules_endpoint_changes_pending") == 1
    await told.sync()
    assert told.metric("kubeproxy_sync_proxy_rules_endpoint_changes_pending") == 0


async def test_a_change_without_effect_is_synced_too() -> None:
    told = Told()
    await told.sync()
    told.seconds = 2000.0
    told.world.store.upsert(slice_("nobody-x", "nobody", ("10.1.0.9",)))
    told.observers.queued([Family.IPV4])
    told.seconds = 2001.0
    report = await told.report()
    assert report.result is None
    await told.observe(report)
    v4 = {"ip_family": "IPv4"}
    assert told.metric("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", **v4) == 2000
    assert told.metric("kubeproxy_sync_proxy_rules_last_timestamp_seconds", **v4) == 2001


async def test_a_small_sync_is_told_in_one_turn_of_the_loop() -> None:
    told = Told()
    await told.sync()
    told.world.store.upsert(slice_("s1-x", "s1", ("10.1.0.9",)))
    report = await told.report()
    with pytest.raises(StopIteration):  # it did not wait
        told.observers.observe(report).send(None)


async def test_a_change_that_waits_too_long_is_unhealthy_until_it_is_synced() -> None:
    told = Told()
    told.observers.started([Family.IPV4])
    await told.sync()
    told.observers.queued([Family.IPV4])
    told.seconds += 61
    assert not told.health.healthy(told.now())
    await told.sync()
    assert told.health.healthy(told.now())


async def test_latency_is_counted_from_the_trigger_of_the_change() -> None:
    told = Told()
    await told.sync()
    told.world.store.upsert(slice_("s1-x", "s1", ("10.1.0.9",), trigger="1970-01-01T00:17:00Z"))
    told.seconds = 1021.0
    await told.sync()
    name = "kubeproxy_network_programming_duration_seconds_sum"
    assert told.metric(name, ip_family="IPv4") == 1.0


async def test_health_checks_follow_services_and_their_local_endpoints() -> None:
    told = Told(0)
    told.world.store.upsert(service("lb", None, **LOCAL_LB))
    told.world.store.upsert(slice_("lb-x", "lb", ("10.1.0.9",)))
    await told.sync()
    name = ObjectName("shop", "lb")
    assert (told.servers.ports, told.servers.counts) == ({name: 32100}, {name: 0})
    labels = {"traffic_policy": "external", "ip_family": "IPv4"}
    assert told.metric("kubeproxy_sync_proxy_rules_no_local_endpoints_total", **labels) == 1
    without = "steersman_service_ports_without_endpoints"
    before = told.metric(without, ip_family="IPv4") or 0.0
    told.world.store.upsert(service("bare", None, clusterIP="10.96.0.8"))
    await told.sync()
    assert told.metric(without, ip_family="IPv4") == before + 1
    told.world.store.delete("Service", ObjectName("shop", "bare"))
    # It has an endpoint elsewhere: its clients here are dropped, not refused.
    told.world.store.upsert(
        service("here", None, clusterIP="10.96.0.9", internalTrafficPolicy="Local")
    )
    told.world.store.upsert(slice_("here-x", "here", ("10.1.0.9",)))
    await told.sync()
    assert told.metric(without, ip_family="IPv4") == before
    told.world.store.delete("Service", name)
    await told.sync()
    assert told.servers.ports == {}
    assert told.metric("kubeproxy_sync_proxy_rules_no_local_endpoints_total", **labels) == 0


async def test_refusals_are_counted_by_extent() -> None:
    told = Told()
    report = msgspec.structs.replace(
        await told.report(), refused_batches=RefusedBatches(full=1, partial=1)
    )
    await told.observe(report)
    v4 = {"ip_family": "IPv4"}
    prefix = "kubeproxy_sync_proxy_rules_iptables"
    assert told.metric(f"{prefix}_restore_failures_total", **v4) == 2
    assert told.metric(f"{prefix}_partial_restore_failures_total", **v4) == 1


@pytest.mark.parametrize("mode", SPECS)
async def test_every_mode_can_be_told_of_syncs_and_refusals(mode: str) -> None:
    told = Told(mode=mode)
    await told.sync()
    told.observers.queued([Family.IPV4])
    report = await told.report()
    await told.observe(msgspec.structs.replace(report, refused_batches=RefusedBatches(partial=1)))
    failures = {
        "iptables": "iptables_restore",
        "ipvs": "iptables_restore",
        "nftables": "nftables_sync",
    }
    if mode in failures:
        name = f"kubeproxy_sync_proxy_rules_{failures[mode]}_failures_total"
        assert told.metric(name, ip_family="IPv4") == 1


async def test_findings_are_a_metric() -> None:
    told = Told()
    spec = {"clusterIP": "10.96.0.300", "ports": [{"port": 80}]}
    meta = {"namespace": "shop", "name": "bad"}
    told.world.store.upsert(make("Service", {"metadata": meta, "spec": spec}))
    await told.sync()
    assert told.metric("steersman_findings", severity="error", code=codes.CLUSTER_IP) == 1
    assert told.metric("steersman_findings", severity="warning", code="") == 0
    told.world.store.delete("Service", ObjectName("shop", "bad"))
    await told.sync()
    assert told.metric("steersman_findings", severity="error", code=codes.CLUSTER_IP) == 0


async def test_an_observer_that_raises_fails_nothing_and_nobody_else(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, seen = Told(0), []

    def refuse(*_: Any) -> None:
        raise KeyError("no such metric")

    def complain(report: SyncReport) -> None:
        seen.append(report.state.revision)
        raise ValueError("fails")

    told.observers.observers |= {"first": complain, "second": complain}
    monkeypatch.setattr(Labelled, "__call__", refuse)
    told.world.store.upsert(service("lb", None, **LOCAL_LB))
    told.observers.queued([Family.IPV4])
    told.seconds += 61
    await told.sync()
    assert seen == [1, 1], "each observer is given each sync once"
    assert told.servers.ports == {ObjectName("shop", "lb"): 32100}
    assert told.health.healthy(told.now())
    logged = [record.getMessage().partition(" ")[0] for record in caplog.records]
    assert sorted(logged) == ["first", "metrics", "second"]


async def test_an_observer_that_raises_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = Told()

    def complain(_: SyncReport) -> None:
        raise ValueError("fails")

    told.observers.observers["other"] = complain
    for seconds in (0, 30, 31, 30):
        await told.clock.advance(seconds)
        await told.sync()
    assert len(caplog.records) == 2


async def test_health_checks_count_what_is_in_force_not_what_waits() -> None:
    told = Told(0)
    told.world.store.upsert(service("lb", None, **LOCAL_LB))
    endpoints = [{"addresses": ["10.1.0.9"], "nodeName": "me"}]
    labels = {"kubernetes.io/service-name": "lb"}
    slice_here = {
        "metadata": {"namespace": "shop", "name": "lb-x", "labels": labels},
        "addressType": "IPv4",
        "ports": [{"name": "", "port": 8080}],
        "endpoints": endpoints,
    }
    told.world.store.upsert(make("EndpointSlice", slice_here))
    report = await told.report()
    told.world.store.delete("EndpointSlice", ObjectName("shop", "lb-x"))
    await told.observe(report)
    assert told.servers.counts == {ObjectName("shop", "lb"): 1}
    await told.sync()
    assert told.servers.counts == {ObjectName("shop", "lb"): 0}


async def test_health_check_servers_hear_of_what_changes_for_them_only() -> None:
    told = Told(2)
    told.world.store.upsert(service("lb", None, **LOCAL_LB))
    await told.sync()
    assert told.servers.calls == 1
    told.world.store.upsert(slice_("s1-x", "s1", ("10.1.0.9",)))
    await told.sync()
    assert told.servers.calls == 1
    told.servers.failing = True  # a port is taken: it is tried again after each sync
    told.world.store.upsert(slice_("lb-x", "lb", ("10.1.0.9",), protocol="UDP"))
    told.world.store.upsert(service("lb", None, **{**LOCAL_LB, "healthCheckNodePort": 32101}))
    await told.sync()
    told.servers.failing = False
    for ip in ("10.1.0.7", "10.1.0.8"):
        told.world.store.upsert(slice_("s1-x", "s1", (ip,)))
        await told.sync()
    assert told.servers.calls == 3


async def test_a_health_check_client_that_hangs_holds_no_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, hangs = Told(0), asyncio.Event()

    async def sync(*_: Any) -> None:
        await hangs.wait()

    monkeypatch.setattr(told.servers, "sync", sync)
    told.world.store.upsert(service("lb", None, **LOCAL_LB))
    task = asyncio.create_task(told.observers.health_checks.run())
    report = await told.report()
    async with asyncio.timeout(60):
        await told.observers.observe(report)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_loop_goes_on_while_many_plans_and_rules_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = list[int]()

    def counting(objects: Any) -> Any:
        sizes.append(len(objects))
        return count_rules(objects)

    monkeypatch.setattr("steersman.netfilter.iptables.restore.count_rules", counting)
    told = Told(0)
    for number in range(1500):
        told.world.store.upsert(
            service(f"s{number}", clusterIP=f"10.97.{number >> 8}.{number & 255}")
        )
    told.world.mode.name = "iptables"
    report = await told.report()
    counts = told.observers.counts
    turns = list(counts.observe().__await__())
    assert len(turns) >= 1500 // 1000
    assert counts.without_endpoints(Family.IPV4) == 1500
    monkeypatch.setattr(
        "steersman.netfilter.iptables.restore.count_written", lambda _: (Counter(), Counter())
    )
    told.objects = [((4, "nat", "KUBE-SVC"), "-A one")] * 2500
    await told.observers.observe(report)
    assert sizes == [1000, 1000, 500]
    told.world.sync.suspect()
    report = msgspec.structs.replace(await told.report(), compared=True)
    await told.observers.observe(report)
    assert len(sizes) == 3, "nothing was written since they were counted"
    name, labels = "kubeproxy_sync_proxy_rules_iptables_total", {"table": "nat"}
    assert told.metric(name, **labels, ip_family="IPv4") == 2500


CART = ObjectName("shop", "cart")
FORWARD, DROP, REJECT = (Action(Verdict(word)) for word in ("forward", "drop", "reject"))


def key(name: str, family: Family = Family.IPV4) -> PlanKey:
    return PlanKey(ServicePortName("shop", name, "", Protocol.TCP), family)


def acting(owner: PlanKey, health_port: int = 0, **external: Action) -> ServicePlan:
    """A plan with a frontend of each kind, and what it does with clients outside."""
    frontends = [
        Frontend(FrontendKind[kind], "", 80, FORWARD, FORWARD, action)
        for kind, action in external.items()
    ]
    return plan(owner, *frontends, health=health_port)


@pytest.mark.parametrize(
    ("external", "expected"),
    [
        ({"CLUSTER_IP": FORWARD, "NODE_PORT": FORWARD}, ()),
        ({"CLUSTER_IP": REJECT, "NODE_PORT": REJECT}, ()),
        ({"CLUSTER_IP": DROP, "NODE_PORT": FORWARD}, ("internal",)),
        ({"CLUSTER_IP": FORWARD, "EXTERNAL_IP": DROP}, ("external",)),
        ({"CLUSTER_IP": DROP, "NODE_PORT": DROP}, ("internal", "external")),
    ],
)
def test_dropping_means_that_no_endpoint_is_local(
    external: dict[str, Action], expected: tuple[str, ...]
) -> None:
    assert without_local(acting(key("cart"), 0, **external)) == expected


class Counted:
    """Counts of plans in force that a test changes."""

    def __init__(self) -> None:
        self.in_force = InForce()
        self.counts = EndpointCounts(self.in_force)
        self.plans: dict[PlanKey, ServicePlan] = {}

    def put(self, *plans: ServicePlan, gone: Iterable[PlanKey] = ()) -> None:
        for each in plans:
            self.plans[each.key] = each
        for owner in gone:
            self.plans.pop(owner, None)
        owners = [*(each.key for each in plans), *gone]
        self.in_force.update(self, self.plans, owners, ((), 0), frozenset())

    async def update(self, *plans: ServicePlan, gone: Iterable[PlanKey] = ()) -> EndpointCounts:
        self.put(*plans, gone=gone)
        await self.counts.observe()
        return self.counts


async def test_counts_follow_the_changes() -> None:
    counted = Counted()
    one, two, six = key("one"), key("two"), key("one", Family.IPV6)
    counts = await counted.update(*(acting(k, NODE_PORT=DROP) for k in (one, two, six)))
    assert counts.no_local_endpoints("external", Family.IPV4) == 2
    assert counts.no_local_endpoints("external", Family.IPV6) == 1
    assert counts.no_local_endpoints("internal", Family.IPV4) == 0
    await counted.update(acting(one, NODE_PORT=FORWARD), acting(two, NODE_PORT=DROP), gone=[six])
    assert counts.no_local_endpoints("external", Family.IPV4) == 1
    assert counts.no_local_endpoints("external", Family.IPV6) == 0


async def test_health_ports_follow_the_changes() -> None:
    counted = Counted()
    four, six = key("cart"), key("cart", Family.IPV6)
    counts = await counted.update(acting(four, 30001), acting(six, 30001), acting(key("b")))
    assert counts.health_ports(Family.IPV4) == {CART: 30001}
    await counted.update(acting(four, 30002), gone=[six, key("unknown")])
    assert counts.health_ports(Family.IPV4) == {CART: 30002}
    assert counts.health_ports(Family.IPV6) == {}


async def test_ready_endpoints_are_told_with_the_plan() -> None:
    counted = Counted()
    four, six = key("cart"), key("cart", Family.IPV6)
    counts = await counted.update(acting(four, 30001), acting(six, 30001))
    assert counts.ready_here(Family.IPV4) == {CART: 0}
    await counted.update(msgspec.structs.replace(acting(four, 30001), ready_here=2))
    assert counts.ready_here(Family.IPV4) == {CART: 2}
    assert counts.ready_here(Family.IPV6) == {CART: 0}
    await counted.update(gone=[four])
    assert counts.ready_here(Family.IPV4) == {}


async def test_counts_that_failed_half_way_are_made_up_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = Counted()
    counts = await counted.update(acting(key("gone"), 30001, NODE_PORT=DROP))

    def failing(each: ServicePlan) -> Any:
        if each.key == key("two"):
            raise ValueError("fails")
        return without_local(each)

    monkeypatch.setattr("steersman.run.observe.endpoint_counts.without_local", failing)
    with pytest.raises(ValueError, match="fails"):
        await counted.update(
            *(
                acting(key(name), 30002, CLUSTER_IP=REJECT, NODE_PORT=DROP)
                for name in ("one", "two", "three")
            ),
            gone=[key("gone")],
        )
    monkeypatch.undo()
    await counts.observe()
    assert counts.no_local_endpoints("external", Family.IPV4) == 3
    assert counts.without_endpoints(Family.IPV4) == 3
    names = {ObjectName("shop", name) for name in ("one", "two", "three")}
    assert counts.health_ports(Family.IPV4).keys() == names


async def test_a_plan_that_changes_while_others_are_counted_is_counted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("steersman.run.observe.endpoint_counts._SLICE", 1)
    counted = Counted()
    one, two = key("one"), key("two")
    counted.put(acting(one, NODE_PORT=DROP), acting(two))
    half_way = counted.counts.observe()
    half_way.send(None)  # the first one is counted
    counted.put(acting(one, NODE_PORT=FORWARD))
    await asyncio.create_task(half_way)
    await counted.counts.observe()
    assert counted.counts.no_local_endpoints("external", Family.IPV4) == 0


def test_latency_is_counted_from_valid_causes_since_the_start() -> None:
    times = ["1970-01-01T00:01:40.250000001Z", "1970-01-01T00:00:09Z", "junk", "1970-01-01"]
    assert programming_seconds(times, now=101.0, started=10.0) == [pytest.approx(0.75)]


def test_a_cause_in_the_future_took_no_time() -> None:
    times = ["2999-01-01T00:00:00Z"]
    assert programming_seconds(times, now=101.0, started=10.0) == [0.0]
