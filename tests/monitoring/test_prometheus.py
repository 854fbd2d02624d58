"""A real Prometheus on a real process: every query of the rules and boards has an answer."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from scripts.monitoring import FOLDER
from tests.support.apiserver.reading import service_cidr
from tests.support.apiserver.server import ApiServer
from tests.support.builders import kube
from tests.support.lab.namespace import in_namespace, sh
from tests.support.monitoring import metrics_in, queries, rows, rules
from tests.support.processes.steersman import NODE, Process, command, get, steersman, until

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

MODES = ("nftables", "iptables", "userspace")
NOT_HERE = {
    "steersman_mode_fallback": "the wanted mode runs",
    "steersman_mode_events_total": "in ebpf mode, which needs a node with a bpffs of its own",
    "steersman_mode_table_entries": "in ebpf mode, as above",
}
"""Queries that have no answer in this test, by words in them, and why."""
OF_RECORDS = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}
OF_MODE = {row.name: row.modes for row in rows() if row.modes != "all"}


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
    return {query for query in found if not any(words in query for words in NOT_HERE)}


class Traffic:
    """A Service that changes, and clients that connect to it."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.number = 0

    async def go_on(self) -> None:
        while True:
            self.number += 1
            now = datetime.now(UTC).isoformat()
            ends = [HOST, "192.168.77.3"][: 1 + self.number % 2]
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
    listed = {row.name for row in rows() if mode in row.modes.split(", ") or row.modes == "all"}
    others = {row.name for row in rows()} - listed
    page = (await get("/metrics"))[1] + (await get("/metrics/services"))[1]
    shown = set(re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE))
    assert not shown & others, mode
    assert not shown - listed, f"{mode}: not in docs/metrics.md"
    missing = {name for name in listed - shown if not name.startswith("kubeproxy_iptables_")}
    assert not missing, mode


async def tour(proxy: Process) -> None:
    """Ask in each mode whatever it can answer."""
    for mode in MODES:
        if mode != MODES[0]:
            words = ("switch", f"--to={mode}", "--watch-for=100ms", "-o", "json")
            status, out, errors = await command(*words)
            assert status == 0, (out, errors, proxy.log)
            assert json.loads(out)["result"]["outcome"] == "switched"
        assert (await get("/proxyMode"))[1] == mode
        wanted = answerable(mode)

        async def all_answered(wanted: set[str] = wanted) -> bool:
            for query in tuple(wanted):
                if await asked(of_the_node(query)):
                    wanted.discard(query)
            return not wanted

        try:
            await until(all_answered, WAIT)
        except TimeoutError:
            assert not wanted, f"no answer in {mode} mode"
        await declared(mode)


def test_every_query_has_an_answer(tmp_path: Path) -> None:
    async def body() -> None:
        sh(f"ip link add eth0 type bridge && ip link set eth0 up && ip addr add {HOST}/24 dev eth0")
        sh("ip route add default dev eth0")
        answering = await asyncio.start_server(lambda _, writer: writer.close(), HOST, 8080)
        world = (
            kube.service("web", VIP),
            kube.service("bad", "not an address"),
            kube.endpoint_slice("web-1", "web", HOST),
            kube.node(NODE, HOST),
            service_cidr(),
        )
        async with (
            answering,
            ApiServer(world) as server,
            prometheus(tmp_path),
            steersman(
                tmp_path,
                f"--master={server.url}",
                "--proxy-mode=nftables",
                "--metrics-per-service",
                "--conntrack-max-per-core=0",
            ) as proxy,
        ):
            server.fault("status", kind="EndpointSlice", verb="watch", status=500)
            await proxy.said("sync 1 (start)")
            sh("nft flush ruleset")  # drift, which is repaired
            traffic = asyncio.create_task(Traffic(server).go_on())
            try:
                await tour(proxy)
                await rules_are_well()
            finally:
                traffic.cancel()

    in_namespace(body)


def test_only_what_is_excused_is_never_asked() -> None:
    asked_for = set[str]().union(*map(answerable, MODES))
    left = set(queries()) - asked_for
    for words in NOT_HERE:
        assert any(words in query for query in left), "this reason is no longer needed"
    assert all(any(words in query for words in NOT_HERE) for query in left), left
