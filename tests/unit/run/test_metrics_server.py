from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator

import pytest

from steersman import __version__
from steersman.model.errors import BusyError
from steersman.run.observe.metrics import Metrics
from steersman.run.observe.prometheus import Counter, Declared, Metric
from steersman.run.observe.service_metrics import ServiceFilter
from steersman.run.serve import page_builder
from steersman.run.serve.metrics_server import Pages, metrics_app
from tests.support.http import Reply, ask, serving


def pages(**changes: object) -> Pages:
    return Pages(Metrics("iptables"), lambda: "iptables", **changes)  # type: ignore[arg-type]


async def fetch(shown: Pages, path: str, method: str = "GET", data: str | None = None) -> Reply:
    async with serving(metrics_app(shown)) as port:
        return await ask(port, path, method, data)


@pytest.mark.parametrize(("path", "body"), [("/healthz", "ok"), ("/proxyMode", "iptables")])
async def test_plain_pages_are_upstreams(path: str, body: str) -> None:
    reply = await fetch(pages(), path)
    assert (reply.status, reply.body) == (200, body)
    assert reply.received["Content-Type"] == "text/plain; charset=utf-8"
    assert reply.received["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    ["/", "/livez", "/configz", "/flagz", "/state", "/statusz", "/debug/pprof/", "/debug/flags/v"],
)
async def test_what_is_not_offered_is_not_found(path: str) -> None:
    reply = await fetch(pages(statusz=False), path)
    assert (reply.status, reply.body) == (404, "404 page not found\n")


async def test_metrics_are_rendered() -> None:
    reply = await fetch(pages(), "/metrics")
    assert "kubeproxy_sync_proxy_rules_duration_seconds_count" in str(reply.body)
    assert reply.received["Content-Type"].startswith("text/plain; version=0.0.4")


class Shop:
    """Has series of Services, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[ServiceFilter] = []

    async def services(self, which: ServiceFilter) -> list[Metric]:
        self.asked.append(which)
        if self.error:
            raise self.error
        return [Declared(Counter, "steersman_connections_total", "Connections.").at(7)]


@pytest.mark.parametrize(
    ("query", "which"),
    [
        ("", ServiceFilter()),
        ("?namespace=shop", ServiceFilter("shop")),
        ("?service=cart&top=7&namespace=shop", ServiceFilter("shop", "cart", 7)),
        ("?top=999999999", ServiceFilter()),
    ],
)
async def test_services_are_filtered(query: str, which: ServiceFilter) -> None:
    shop = Shop()
    reply = await fetch(pages(services=shop.services), f"/metrics/services{query}")
    assert "steersman_connections_total 7.0" in str(reply.body)
    assert reply.received["Content-Type"].startswith("text/plain; version=0.0.4")
    assert shop.asked == [which]


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("top=0", "top='0' must be a number above 0"),
        ("top=-1", "top='-1' must be"),
        ("top=" + "9" * 5000, "must be a number"),
        ("top=many", "top='many' must be"),
        ("name=cart", "'name' is unknown; there is namespace, service, top"),
        ("service=" + "x" * 254, "names have at most 253 characters"),
    ],
)
async def test_a_bad_filter_is_refused(query: str, error: str) -> None:
    shop = Shop()
    reply = await fetch(pages(services=shop.services), f"/metrics/services?{query}")
    assert (reply.status, error in str(reply.body), shop.asked) == (400, True, [])


async def test_services_that_cannot_be_counted_now_are_asked_for_again_later() -> None:
    shop = Shop(BusyError("nftables: others change the ruleset"))
    reply = await fetch(pages(services=shop.services), "/metrics/services")
    assert (reply.status, reply.received["Retry-After"]) == (503, "5")
    assert "others change the ruleset" in str(reply.body)


async def test_cheap_pages_are_served_while_an_expensive_one_is_made() -> None:
    go = threading.Event()

    def state() -> Iterator[bytes]:
        go.wait(60)
        yield b"{}"

    async with serving(metrics_app(pages(state=state))) as port:
        asked = [asyncio.create_task(ask(port, "/state")) for _ in range(30)]
        assert (await ask(port, "/healthz")).body == "ok"
        assert (await ask(port, "/metrics")).status == 200
        assert not any(task.done() for task in asked)
        go.set()
        assert {(reply.status, reply.body) for reply in await asyncio.gather(*asked)} == {
            (200, "{}")
        }


async def test_who_comes_when_many_pages_are_made_is_told_when_to_ask_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_builder, "_MOST_WAITING", 0)
    reply = await fetch(pages(state=lambda: iter([b"{}"])), "/state")
    assert (reply.status, reply.received["Retry-After"]) == (503, "5")


async def test_slis_tell_health_at_each_look() -> None:
    healthy = True
    shown = pages(healthy=lambda: healthy)
    async with serving(metrics_app(shown)) as port:
        name = 'kubernetes_healthcheck{name="sync",type="healthz"}'
        assert f"{name} 1.0" in str((await ask(port, "/metrics/slis")).body)
        healthy = False
        text = str((await ask(port, "/metrics/slis")).body)
    assert f"{name} 0.0" in text
    assert 'kubernetes_healthchecks_total{name="sync",status="error",type="healthz"} 1.0' in text


async def test_configuration_and_state_are_json() -> None:
    config = {"kubeproxy.config.k8s.io": {"mode": "iptables"}}
    shown = pages(configz=lambda: json.dumps(config).encode(), state=lambda: iter([b"{", b"}"]))
    reply = await fetch(shown, "/configz")
    assert json.loads(reply.body) == config
    assert reply.received["Content-Type"] == "application/json"
    assert (await fetch(shown, "/state")).body == "{}"


async def test_flags_are_shown_as_they_are_given() -> None:
    reply = await fetch(pages(flags=lambda: "\nkube-proxy flagz\nv 2\n"), "/flagz")
    assert reply.body == "\nkube-proxy flagz\nv 2\n"
    assert "X-Content-Type-Options" not in reply.received


async def test_status_says_what_runs_since_when() -> None:
    began = 1_795_232_326.0
    shown = pages(started=began, clock=lambda: began + 3725, configz=lambda: b"{}")
    text = str((await fetch(shown, "/statusz")).body)
    assert "Started:  Sat Nov 21 03:38:46 UTC 2026\nUp:  1 hr 02 min 05 sec\n" in text
    assert f"Binary version:  {__version__}\n" in text
    assert text.endswith("Paths:  /configz /healthz /metrics /proxyMode\n")


async def test_verbosity_is_put() -> None:
    put = list[int]()
    shown = pages(profiling=True, set_verbosity=put.append)
    reply = await fetch(shown, "/debug/flags/v", "PUT", "4")
    assert (reply.status, reply.body) == (200, "successfully set klog.logging.verbosity to 4")
    assert (await fetch(shown, "/debug/flags/v")).status == 405
    assert (await fetch(shown, "/debug/flags/v", "PUT", "much")).status == 400
    assert (await fetch(shown, "/debug/flags/v", "PUT", "9" * 5000)).status == 400
    assert put == [4]


async def test_profiling_shows_stacks_and_profiles() -> None:
    shown = pages(profiling=True)
    assert "MainThread" in str((await fetch(shown, "/debug/pprof/goroutine")).body)
    assert (await fetch(shown, "/debug/pprof/cmdline")).status == 200
    assert "profile" in str((await fetch(shown, "/debug/pprof/")).body)
    reply = await fetch(shown, "/debug/pprof/profile?seconds=0.01")
    assert "function calls" in str(reply.body)


@pytest.mark.parametrize("seconds", ["x", "", "nan", "inf", "-inf", "-1", "0", "1e9", "301"])
async def test_a_profile_of_no_or_endless_time_is_refused(seconds: str) -> None:
    reply = await fetch(pages(profiling=True), f"/debug/pprof/profile?seconds={seconds}")
    assert (reply.status, "at most 300" in str(reply.body)) == (400, True)
