"""Our HTTP endpoints against what upstream's answered in one world, where that recording is."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest

from steersman.config import flagz
from steersman.model.kube import Node, ObjectMeta
from steersman.model.names import Family, ObjectName
from steersman.run.observe.metrics import Metrics
from steersman.run.observe.observers import SyncObservers
from steersman.run.observe.prometheus import exposition
from steersman.run.observe.scraped import NFACCT, nfacct_packets
from steersman.run.serve.health import ProxyHealth, ServiceHealth, now, proxy_health_app
from steersman.run.serve.http import App, application
from steersman.run.serve.metrics_server import Pages, metrics_app
from steersman.run.sync.in_force import InForce
from steersman.source.store import Store
from tests.support.data import RECORDED
from tests.support.http import Reply, ask, serving
from tests.support.modes.bare import BareMode

GOLDEN = RECORDED / "golden"
MODES = ("iptables", "nftables")


class Recorded(NamedTuple):
    status: int
    headers: dict[str, str]
    body: str


def recorded(mode: str, name: str) -> Recorded:
    text = (GOLDEN / mode / f"http-{name}.txt").read_bytes().decode().replace("\r\n", "\n")
    head, _, body = text.partition("\n\n")
    first, *rest = head.split("\n")
    headers = dict(line.split(": ", 1) for line in rest)
    return Recorded(int(first.split()[1]), headers, body)


def same_head(reply: Reply, golden: Recorded) -> None:
    varying = {"Date", "Content-Length"}
    assert reply.status == golden.status
    assert reply.received.keys() == golden.headers.keys()
    for name in golden.headers.keys() - varying:
        assert reply.received[name] == golden.headers[name]


def shape(value: Any) -> Any:
    """JSON with its keys in order and the kinds of its values."""
    if isinstance(value, dict):
        return [(key, shape(inner)) for key, inner in value.items()]
    return type(value).__name__


def metrics_pages(mode: str) -> App:
    return metrics_app(
        Pages(
            Metrics(mode),
            lambda: mode,
            configz=lambda: b"{}",
            flags=lambda: flagz({"v": 2}),
        )
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", ["", "livez", "healthz", "proxyMode"])
async def test_metrics_server_pages_are_the_same(mode: str, path: str) -> None:
    golden = recorded(mode, f"10249-{path}")
    async with serving(metrics_pages(mode)) as port:
        reply = await ask(port, f"/{path}")
    same_head(reply, golden)
    assert str(reply.body).rstrip("\n") == golden.body.rstrip("\n")
    assert len(str(reply.body)) == int(golden.headers["Content-Length"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", ["configz", "flagz", "statusz"])
async def test_debugging_pages_have_the_same_head(mode: str, path: str) -> None:
    golden = recorded(mode, f"10249-{path}")
    async with serving(metrics_pages(mode)) as port:
        reply = await ask(port, f"/{path}")
    same_head(reply, golden)
    if path != "configz":
        assert str(reply.body).split("\n")[:3] == golden.body.split("\n")[:3]


def labels_of_statusz(text: str) -> list[str]:
    """What stands before the values; upstream varies the separator on purpose."""
    return [re.split(":?  ", line)[0] for line in text.split("\n")[3:] if line]


@pytest.mark.parametrize("mode", MODES)
async def test_statusz_has_the_same_lines(mode: str) -> None:
    async with serving(metrics_pages(mode)) as port:
        reply = await ask(port, "/statusz")
    ours, theirs = map(labels_of_statusz, (str(reply.body), recorded(mode, "10249-statusz").body))
    assert [re.sub("^Python", "Go", label) for label in ours] == theirs
    paths = recorded(mode, "10249-statusz").body.strip().rpartition("  ")[2]
    assert str(reply.body).strip().endswith(paths.strip())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", ["", "healthz", "livez"])
async def test_health_pages_have_the_same_head_and_shape(mode: str, path: str) -> None:
    golden = recorded(mode, f"10256-{path}")
    health = ProxyHealth(60)
    for family in Family:
        health.updated(family, now())
    async with serving(proxy_health_app(health, lambda: Node(ObjectMeta(name="n")))) as port:
        reply = await ask(port, f"/{path}")
    same_head(reply, golden)
    if path:
        assert shape(json.loads(reply.body)) == shape(json.loads(golden.body))


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        *(("iptables", name) for name in ("32100-", "32101-", "32102-")),
        *((mode, "nodeip-32100") for mode in MODES),
    ],
)
async def test_service_health_answers_are_the_same(mode: str, name: str) -> None:
    golden = recorded(mode, name)
    said = json.loads(golden.body)
    service = ObjectName(**said["service"])
    services = ServiceHealth()
    services.sync_services({service: 32100})
    services.sync_endpoints({service: said["localEndpoints"]})
    app = application({}, lambda _: services.answer(service, proxy_healthy=True))
    async with serving(app) as port:
        reply = await ask(port)
    same_head(reply, golden)
    assert reply.body == golden.body.rstrip("\n")


def _types(text: str, pattern: str) -> dict[str, str]:
    return dict(re.findall(pattern, text, re.MULTILINE))


@pytest.mark.parametrize("mode", MODES)
def test_every_metric_upstream_showed_is_here_with_its_type(mode: str) -> None:
    golden = (GOLDEN / mode / "metrics-names-types.txt").read_text()
    theirs = _types(golden, r"^(kubeproxy_\S+) (\S+)$")
    metrics = Metrics(mode)
    SyncObservers(Store(), InForce(), metrics, ProxyHealth(60.0), {}, mode=BareMode())
    metrics.on_scrape(lambda: nfacct_packets(dict.fromkeys(NFACCT, 0)))
    ours = _types(
        b"".join(exposition(metrics.collect())).decode(), r"^# TYPE (kubeproxy_\S+) (\S+)$"
    )
    assert theirs.items() <= ours.items()
