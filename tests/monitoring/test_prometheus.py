"""A real Prometheus on a real process: every query of the rules and boards has an answer."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from reference import metric_rows

from scripts.monitoring import FOLDER
from tests.support.apiserver.reading import service_cidr
from tests.support.apiserver.server import ApiServer
from tests.support.builders import kube
from tests.support.lab import ebpf
from tests.support.lab.namespace import in_namespace, sh
from tests.support.monitoring import metrics_in, queries, rules
from tests.support.processes.steersman import HAS_IPVS, NODE, Process, command, get, steersman
from tests.support.waiting import until

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="Prometheus is not installed: `scripts/setup.sh tests`",
    ),
]
WAIT = 60.0
PORT, METRICS = 9090, 10249
HOST, VIP = "192.168.77.2", "10.96.0.10"
HOSTS = (HOST, "192.168.77.3")
"""Addresses of the node, and endpoints that all answer: a switch goes back if connections fail."""

MODES = ("nftables", "iptables", "userspace")
FALLBACK = "steersman_mode_fallback"
"""In queries that only have an answer where another mode than the wanted one runs."""
OF_RECORDS = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}
OF_MODE = {row.name: row.modes for row in metric_rows() if row.modes != "all"}


def config(directory: Path) -> Path:
    """Prometheus as docs/monitoring.md sets it up, but for a target that is given."""
    shutil.copy(FOLDER / "rules.yaml", directory)
    path = directory / "prometheus.yml"
    target = {"targets": [f"127.0.0.1:{METRICS}"], "labels": {"instance": NODE}}
    job = {"job_name": "steersman", "static_configs": [target]}
    settings = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    path.write_text(
        yaml.safe_dump({"global": settings, "rule_files": ["rules.yaml"], "scrape_configs": [job]})
    )
    return path


@asynccontextmanager
async def prometheus(directory: Path) -> AsyncIterator[None]:
    """Prometheus, in the network namespace of the test."""
    with (directory / "prometheus.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={config(directory)}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{PORT}",
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def api(path: str, **params: str) -> dict[str, Any]:
    """An answer of Prometheus."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{PORT}/api/v1/{path}", params=params) as response,
    ):
        body = await response.json()
    assert body["status"] == "success", (path, params, body)
    data: dict[str, Any] = body["data"]
    return data


async def asked(query: str) -> bool:
    """Whether Prometheus has an answer to a query."""
    return bool((await api("query", query=query))["result"])


async def rules_are_well() -> None:
    """Every rule was evaluated without an error, such as labels that match twice."""
    groups = (await api("rules"))["groups"]
    found = [rule for group in groups for rule in group["rules"]]
    assert len(found) == len(rules())
    assert {rule["health"] for rule in found} == {"ok"}


def of_the_node(query: str) -> str:
    """A query with the variables of Grafana filled in; an alert's without its threshold."""
    for name, value in {"job": "steersman", "instance": NODE, "rate": "1m"}.items():
        query = query.replace(f"${name}", value)
    if " or " in query:
        return query
    query = re.sub(r"time\(\) - (\S+) .*", r"\1", query)
    return re.sub(r" (==|>|<) .*$", "", query, flags=re.DOTALL)


def answerable(mode: str) -> set[str]:
    """The queries that a node in this mode can answer."""
    found = set()
    for query in queries():
        records = re.findall(r"steersman:\w+:\w+", query)
        names = set[str]().union(*(metrics_in(OF_RECORDS[name]) for name in records))
        names |= metrics_in(query)
        modes = (OF_MODE.get(re.sub("_(bucket|sum|count)$", "", name), mode) for name in names)
        if all(mode in each.split(", ") for each in modes):
            found.add(query)
    return {query for query in found if FALLBACK not in query}


class Traffic:
    """A Service that changes, and clients that connect to it."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.number = 0

    async def go_on(self) -> None:
        while True:
            self.number += 1
            now = datetime.now(UTC).isoformat()
            ends = HOSTS[: 1 + self.number % 2]
            trigger = {"endpoints.kubernetes.io/last-change-trigger-time": now}
            self.server.add(kube.endpoint_slice("web-1", "web", *ends, annotations=trigger))
            self.server.add(kube.service("more", f"10.96.1.{1 + self.number % 200}"))
            for _ in range(4):
                with suppress(OSError, TimeoutError):
                    async with asyncio.timeout(0.5):
                        _, writer = await asyncio.open_connection(VIP, 80)
                        writer.close()
            await asyncio.sleep(0.1)  # the pace of changes, not a wait


async def declared(mode: str) -> None:
    """The process shows exactly the metrics that the reference page lists for its mode."""
    listed = {
        row.name for row in metric_rows() if mode in row.modes.split(", ") or row.modes == "all"
    }
    others = {row.name for row in metric_rows()} - listed
    page = (await get("/metrics"))[1] + (await get("/metrics/services"))[1]
    shown = set(re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE))
    assert not shown & others, mode
    assert not shown - listed, f"{mode}: not in the list of metrics"
    missing = {name for name in listed - shown if not name.startswith("kubeproxy_iptables_")}
    assert not missing, mode


async def all_answered(queries: set[str], mode: str) -> None:
    """Wait until each query has an answer."""
    wanted = set(queries)

    async def answered() -> bool:
        for query in tuple(wanted):
            if await asked(of_the_node(query)):
                wanted.discard(query)
        return not wanted

    try:
        await until(answered, WAIT)
    except TimeoutError:
        assert not wanted, f"no answer in {mode} mode"


async def tour(proxy: Process, modes: Sequence[str]) -> None:
    """Ask in each mode whatever it can answer."""
    for mode in modes:
        if mode != modes[0]:
            words = ("switch", f"--to={mode}", "--watch-for=100ms", "-o", "json")
            status, out, errors = await command(*words)
            assert status == 0, (out, errors, proxy.log)
            assert json.loads(out)["result"]["outcome"] == "switched"
        assert (await get("/proxyMode"))[1] == mode
        await all_answered(answerable(mode), mode)
        await declared(mode)


CONNECT = f"""
import socket, sys, time
while True:
    with socket.socket() as sock:
        sock.settimeout(1)
        sock.connect_ex(("{VIP}", 80))
    time.sleep(0.05)
"""


@contextmanager
def clients_in(cgroup: Path) -> Iterator[None]:
    """Connect again and again from sockets of a cgroup, which the ebpf mode balances."""
    into = f'echo 0 > {cgroup}/cgroup.threads && exec "$@"'
    process = subprocess.Popen(["sh", "-c", into, "sh", sys.executable, "-c", CONNECT])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def on_a_cgroup() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """A cgroup, and a command that gives a process a bpffs of its own."""
    cgroup = ebpf.new_cgroup(ebpf.next_number())
    try:
        yield (
            cgroup,
            ("unshare", "-m", "sh", "-c", 'mount -t bpf bpf /sys/fs/bpf && exec "$@"', "sh"),
        )
    finally:
        with suppress(OSError):
            cgroup.rmdir()


def in_a_cluster(body: Callable[[ApiServer], Awaitable[None]], directory: Path) -> None:
    """Run a coroutine on a node, beside Prometheus and the API server of a small cluster."""

    async def inside() -> None:
        sh("ip link add eth0 type bridge && ip link set eth0 up")
        for host in HOSTS:
            sh(f"ip addr add {host}/24 dev eth0")
        sh("ip route add default dev eth0")
        answering = await asyncio.start_server(lambda _, writer: writer.close(), HOSTS, 8080)
        world = (
            kube.service("web", VIP),
            kube.service("bad", "not an address"),
            kube.endpoint_slice("web-1", "web", HOST),
            kube.node(NODE, HOST),
            service_cidr(),
        )
        async with answering, ApiServer(world) as server, prometheus(directory):
            traffic = asyncio.create_task(Traffic(server).go_on())
            try:
                await body(server)
            finally:
                traffic.cancel()

    in_namespace(inside)


def flags(server: ApiServer, mode: str) -> tuple[str, ...]:
    return (f"--master={server.url}", f"--proxy-mode={mode}", "--metrics-per-service")


def test_every_query_has_an_answer(tmp_path: Path) -> None:
    async def body(server: ApiServer) -> None:
        server.fault("status", kind="EndpointSlice", verb="watch", status=500)
        async with steersman(tmp_path, *flags(server, MODES[0])) as proxy:
            await proxy.said("sync 1 (start)")
            sh("nft flush ruleset")  # drift, which is repaired
            await tour(proxy, MODES)
            await rules_are_well()

    in_a_cluster(body, tmp_path)


@pytest.mark.skipif(
    not shutil.which("clang") and not ebpf.compiled().exists(),
    reason="no compiled object, no clang",
)
def test_every_query_of_the_ebpf_mode_has_an_answer(tmp_path: Path) -> None:
    async def body(server: ApiServer) -> None:
        server.fault("status", kind="EndpointSlice", verb="watch", status=500)
        with on_a_cgroup() as (cgroup, through), clients_in(cgroup):
            words = (*flags(server, "ebpf"), f"--ebpf-cgroup-root={cgroup}")
            async with steersman(tmp_path, *words, through=through) as proxy:
                await proxy.said("sync 1 (start)")
                await tour(proxy, ("ebpf",))
                await proxy.stop()

    in_a_cluster(body, tmp_path)


@pytest.mark.skipif(HAS_IPVS, reason="this kernel has ip_vs: nothing falls back")
def test_a_fallback_is_shown(tmp_path: Path) -> None:
    async def body(server: ApiServer) -> None:
        async with steersman(tmp_path, *flags(server, "ipvs")) as proxy:
            await proxy.said("sync 1 (start)")
            found = {query for query in queries() if FALLBACK in query}
            assert len(found) == 2
            await all_answered(found, "ipvs")

    in_a_cluster(body, tmp_path)


def test_some_mode_answers_every_query() -> None:
    asked_for = set[str]().union(*map(answerable, (*MODES, "ebpf")))
    assert all(FALLBACK in query for query in set(queries()) - asked_for)
