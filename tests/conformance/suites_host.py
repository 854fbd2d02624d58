"""Conformance suites of what surrounds the rules: runner, conntrack, sysctls, health, node."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from steersman.compile.conntrack import ServedPort, stale
from steersman.host.sysctl import ConntrackConfig, conntrack_max, conntrack_settings
from steersman.model.inputs import DetectLocalMode, NodeConfig
from steersman.model.kube import Node, NodeAddress, NodeSpec, NodeStatus, ObjectMeta
from steersman.model.names import Family, ObjectName, Protocol
from steersman.model.plan import Endpoint
from steersman.run.process.node_watcher import NodeWatcher, host_ips, pod_cidrs
from steersman.run.serve.health import Moment, ProxyHealth, ServiceHealth
from steersman.run.serve.http import Answer
from steersman.run.sync.runner import Runner
from steersman.source.store import Store
from tests.support.clock import FakeClock, PatientClock, settle
from tests.support.stale import Entry, contains_entry

Case = Mapping[str, Any]

# The runner


def sync_runner(case: Case) -> None:
    """Play a script of requests and moments; count the runs."""
    asyncio.run(_sync_runner(case))


async def _sync_runner(case: Case) -> None:
    clock, work = FakeClock(), _Work()
    intervals = (case["minInterval"], case["retryInterval"], case["maxInterval"])
    runner = Runner(work, *intervals, clock)
    task = asyncio.create_task(runner.run())
    await settle()
    for index, (step, *values) in enumerate(case["script"]):
        match step:
            case "run":
                runner.request()
                await settle()
            case "advance":
                await clock.advance(values[0])
            case "setResult":
                work.fails = values[0] == "error"
            case "expectCalls":
                assert work.calls == values[0], f"step {index}: {work.calls} calls"
            case _:
                raise ValueError(f"unknown step {step!r}")
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


class _Work:
    def __init__(self) -> None:
        self.calls = 0
        self.fails = False

    async def __call__(self) -> None:
        self.calls += 1
        if self.fails:
            raise OSError("as the script says")


# conntrack


def conntrack_cleanup(case: Case) -> None:
    """Tell stale entries from the others."""
    family = Family.IPV4 if case["ipFamily"] == "IPv4" else Family.IPV6
    ports = [
        _served(name, port, case["endpoints"].get(name) or ())
        for name, port in case["servicePorts"].items()
    ]
    found = stale(family, ports)
    deleted = [e for e in case["entriesBefore"] if contains_entry(found, _entry(e))]
    left = [e for e in case["entriesBefore"] if e not in deleted]
    assert _sorted(deleted) == _sorted(case["expectDeleted"])
    assert _sorted(left) == _sorted(case["expectLeft"])


def _sorted(entries: list[Case]) -> list[str]:
    return sorted(str(sorted(e.items(), key=str)) for e in entries)


def _served(name: str, port: Case, endpoints: Sequence[Case]) -> ServedPort:
    return ServedPort(
        protocol=Protocol(name.rpartition("/")[2]),
        port=port["port"],
        addresses=(
            port["clusterIP"],
            *(port["externalIPs"] or ()),
            *(port["loadBalancerVIPs"] or ()),
        ),
        node_port=port["nodePort"],
        endpoints=tuple(Endpoint(e["ip"], e["port"]) for e in endpoints if e["serving"]),
    )


def _entry(entry: Case) -> Entry:
    return Entry(
        Protocol(entry["protocol"]).number,
        entry["origDst"] or "0.0.0.0",
        entry["origDstPort"],
        entry["replySrc"],
        entry["replySrcPort"],
    )


_SYSCTL_CALLS = {
    "nf_conntrack_max": "SetMax",
    "nf_conntrack_tcp_timeout_established": "SetTCPEstablishedTimeout({})",
    "nf_conntrack_tcp_timeout_close_wait": "SetTCPCloseWaitTimeout({})",
    "nf_conntrack_tcp_be_liberal": "SetTCPBeLiberal({})",
    "nf_conntrack_udp_timeout": "SetUDPTimeout({})",
    "nf_conntrack_udp_timeout_stream": "SetUDPStreamTimeout({})",
}


def conntrack_sysctl(case: Case) -> None:
    """Compare the table size, or the settings in order (as the calls upstream makes of them)."""
    row = case["case"]
    if case["sourceTest"] == "TestGetConntrackMax":
        # How many cores the recording machine had is not recorded.
        sizes = {conntrack_max(row["maxPerCore"], row["min"], cpus) for cpus in range(1, 257)}
        assert row["expected"] in sizes
        return
    config = row["config"]
    settings = conntrack_settings(
        ConntrackConfig(
            config["MaxPerCore"],
            config["Min"],
            _seconds(config["TCPEstablishedTimeout"]),
            _seconds(config["TCPCloseWaitTimeout"]),
            config["TCPBeLiberal"],
            _seconds(config["UDPTimeout"]),
            _seconds(config["UDPStreamTimeout"]),
        ),
        cpus=4,
    )
    calls = [
        _SYSCTL_CALLS[name].format(setting.value)
        for setting in settings
        if (name := Path(setting.path).name) in _SYSCTL_CALLS
    ]
    assert calls == (row["expect"] or [])


def _seconds(duration: str | None) -> float | None:
    return None if duration is None else float(duration.removesuffix("s"))


# Health


def healthcheck(case: Case) -> None:
    """Play the events of one server instance and compare every answer."""
    proxy: ProxyHealth | None = None
    services = ServiceHealth()
    for event in case["events"]:
        match event["event"]:
            case "hc_sync_services":
                services.sync_services(_names(event["services"]))
            case "hc_sync_endpoints":
                services.sync_endpoints(_names(event["endpoints"]))
            case "hc_request":
                name = ObjectName(*event["service"].split("/"))
                _same_answer(services.answer(name, event["proxyHealthy"]), event)
            case _:
                proxy = proxy or ProxyHealth(_timeout(case))
                _proxy_event(proxy, event)


def _names(values: Mapping[str, int] | None) -> dict[ObjectName, int]:
    return {ObjectName(*name.split("/")): value for name, value in (values or {}).items()}


def _timeout(case: Case) -> float:
    return float(next(e["healthTimeout"] for e in case["events"] if "healthTimeout" in e)[:-1])


def _proxy_event(health: ProxyHealth, event: Case) -> None:
    seconds = float(event["now"].removeprefix("T+"))
    now = Moment(round(seconds * 1e9), seconds)
    match event["event"]:
        case "health_updated":
            health.updated(_FAMILIES[event["family"]], now)
        case "health_queued":
            health.queued(_FAMILIES[event["family"]], now)
        case "healthz_request" if event["path"] == "/livez":
            _same_answer(health.livez(now), event)
        case "healthz_request":
            node = msgspec.convert(event["node"], Node) if event["node"] else None
            _same_answer(health.healthz(now, node), event)
        case other:
            raise ValueError(f"unknown event {other!r}")


_FAMILIES = {"IPv4": Family.IPV4, "IPv6": Family.IPV6}


def _same_answer(answer: Answer, event: Case) -> None:
    assert answer.status == event["status"]
    assert {name: [value] for name, value in answer.headers.items()} == event["headers"]
    body = answer.body if isinstance(answer.body, str) else answer.body.decode()
    assert re.sub(r"\d{4}-\d\d-\d\dT[0-9:.]+Z", _relative, body) == event["body"]


def _relative(time: re.Match[str]) -> str:
    return f"T+{datetime.fromisoformat(time[0]).timestamp():g}"


# This node


def node_manager(case: Case) -> None:
    """Wait for the node at start.

    The recorded updates are functions, not data: what stands for them here is a node that gets
    what the outcome names, a piece an update.
    """
    row = case["case"]
    ips, cidrs = row["expectedNodeIPs"] or [], row["expectedPodCIDRs"] or []
    pieces = (None, _node([], []), _node(ips, []), _node(ips, cidrs))
    updates = list(pieces[-len(row["nodeUpdates"]) :] if row["nodeUpdates"] else [None])
    asyncio.run(_node_manager(row, updates))


async def _node_manager(row: Case, updates: list[Node | None]) -> None:
    store, errors = Store("n"), list[str]()

    class Clock(PatientClock):
        async def wait(self, event: asyncio.Event, seconds: float) -> None:
            await super().wait(event, seconds)
            show()

    clock = Clock()

    def show() -> None:
        if (node := updates[min(int(clock.time()), len(updates) - 1)]) is not None:
            store.upsert(node)

    show()
    by = DetectLocalMode.NODE_CIDR if row["watchPodCIDRs"] else DetectLocalMode.CLUSTER_CIDR
    config = NodeConfig(node_name="n", detect_local_mode=by)
    await NodeWatcher(config, store, errors.append).wait(clock)
    assert "".join(errors) == row["expectedError"]
    found = None if errors else store.snapshot.node
    assert list(host_ips(found)) == (row["expectedNodeIPs"] or [])
    assert list(pod_cidrs(found)) == (row["expectedPodCIDRs"] or [])


def _node(ips: list[str], cidrs: list[str]) -> Node:
    addresses = [NodeAddress("InternalIP", ip) for ip in ips]
    return Node(ObjectMeta(name="n"), NodeSpec(pod_cidrs=cidrs), NodeStatus(addresses))


SUITES: dict[str, Callable[[Case], None]] = {
    "sync_runner": sync_runner,
    "conntrack_cleanup": conntrack_cleanup,
    "conntrack_sysctl": conntrack_sysctl,
    "healthcheck": healthcheck,
    "node_manager": node_manager,
}
