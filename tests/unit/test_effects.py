"""What the world is told after syncs: metrics, health, health checks, conntrack."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from steersman.config.types import MODES
from steersman.model.names import Family, ObjectName
from steersman.run.effects import Effects
from steersman.run.health import Moment, ProxyHealth
from steersman.run.metrics import Metrics
from tests.unit.test_store import make, service, slice_
from tests.unit.test_sync import World

LOCAL_LB: dict[str, Any] = {
    "type": "LoadBalancer",
    "externalTrafficPolicy": "Local",
    "healthCheckNodePort": 32100,
    "ports": [{"port": 80, "nodePort": 30080}],
}


class NotedServers:
    """Takes the place of sockets: notes what is to be served."""

    def __init__(self) -> None:
        self.ports: Any = None
        self.counts: Any = None

    async def sync(self, ports: Any, counts: Any) -> None:
        self.ports, self.counts = dict(ports), dict(counts)


class Told:
    """A World whose syncs are told to everybody."""

    def __init__(self, services: int = 2, mode: str = "iptables") -> None:
        self.world = World(services)
        self.metrics = Metrics(mode)
        self.seconds = 1000.0
        self.health = ProxyHealth(60.0)
        self.servers = NotedServers()
        self.effects = Effects(
            self.world.store,
            self.metrics,
            self.health,
            {Family.IPV4: self.servers},  # type: ignore[dict-item]
            wall=lambda: self.seconds,
            moment=self.now,
        )
        self.synced: list[Any] = []
        self.world.sync._on_synced = self.synced.append

    def now(self) -> Moment:
        return Moment(int(self.seconds * 1e9), self.seconds)

    async def sync(self) -> None:
        await self.world.sync.run()
        for synced in self.synced:
            await self.effects.after(synced, ())
        self.synced.clear()

    def metric(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


async def test_a_sync_is_seen_in_the_metrics() -> None:
    told = Told()
    await told.sync()
    told.world.store.upsert(slice_("s1-x", "s1", ("10.1.0.9",)))
    told.effects.queued([Family.IPV4])
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


async def test_a_change_that_waits_too_long_is_unhealthy_until_it_is_synced() -> None:
    told = Told()
    told.effects.started([Family.IPV4])
    await told.sync()
    told.effects.queued([Family.IPV4])
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
    told.world.store.delete("Service", name)
    await told.sync()
    assert told.servers.ports == {}
    assert told.metric("kubeproxy_sync_proxy_rules_no_local_endpoints_total", **labels) == 0


async def test_refusals_are_counted_by_extent() -> None:
    told = Told()
    told.effects.refused([Family.IPV4], partial=True)
    told.effects.refused([Family.IPV4], partial=False)
    v4 = {"ip_family": "IPv4"}
    prefix = "kubeproxy_sync_proxy_rules_iptables"
    assert told.metric(f"{prefix}_restore_failures_total", **v4) == 2
    assert told.metric(f"{prefix}_partial_restore_failures_total", **v4) == 1


@pytest.mark.parametrize("mode", MODES)
async def test_every_mode_can_be_told_of_syncs_and_refusals(mode: str) -> None:
    told = Told(mode=mode)
    await told.sync()
    told.effects.queued([Family.IPV4])
    told.effects.refused([Family.IPV4], partial=True)
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
    assert told.metric("steersman_findings", severity="error") == 1


class Cleaned:
    """Notes the Services whose conntrack entries are looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[Any] = []
        self.called = asyncio.Event()
        monkeypatch.setattr("steersman.run.effects.clean_conntrack", self._clean)

    async def _clean(self, *_: Any, names: Any, **__: Any) -> None:
        self.names.append(names)
        self.called.set()

    async def next(self) -> Any:
        async with asyncio.timeout(5):
            await self.called.wait()
        self.called.clear()
        return self.names[-1]


@asynccontextmanager
async def cleaning(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Told, Cleaned]]:
    """A world after its first sync, with the task running that cleans conntrack."""
    cleaned, told = Cleaned(monkeypatch), Told()
    task = asyncio.create_task(told.effects.clean_conntrack())
    await told.sync()
    assert await cleaned.next() is None  # at the start: everything
    yield told, cleaned
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_conntrack_is_cleaned_of_what_udp_changes_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cleaning(monkeypatch) as (told, cleaned):
        told.world.store.upsert(slice_("s1-x", "s1", ("10.1.0.9",)))
        await told.sync()  # TCP: nothing to clean
        told.world.store.upsert(slice_("s2-x", "s2", ("10.1.0.9",), protocol="UDP"))
        await told.sync()
        assert await cleaned.next() == {ObjectName("shop", "s2")}
        assert len(cleaned.names) == 2


async def test_services_that_ask_for_it_have_their_connections_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes = {"steersman/close-connections": "true"}
    meta = {"namespace": "shop", "name": "s1", "annotations": notes}
    spec = {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}
    async with cleaning(monkeypatch) as (told, cleaned):
        told.world.store.upsert(make("Service", {"metadata": meta, "spec": spec}))
        await told.sync()
        assert await cleaned.next() == {ObjectName("shop", "s1")}
