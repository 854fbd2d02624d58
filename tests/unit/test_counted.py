"""Connections as metrics: asked for in another thread, while plans change and kernels fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection

import pytest

from steersman.model.names import Family, PlanKey, Protocol, ServicePortName
from steersman.model.plan import ServicePlan
from steersman.modes.base import ApplyError, BusyError, Made
from steersman.run.counted import counted
from steersman.run.metrics import Metrics


def plan(name: str) -> ServicePlan:
    key = PlanKey(ServicePortName("shop", name, "", Protocol.TCP), Family.IPV4)
    return ServicePlan(key, ())


class Reading:
    """Goes through the plans in a thread, and is at the first one when they change."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.changed = threading.Event()

    async def made(self, plans: Collection[ServicePlan]) -> Made:
        loop = asyncio.get_running_loop()

        def read() -> Made:
            found = {}
            for each in plans:
                found[each.key.name, "10.96.0.1:80"] = 1
                loop.call_soon_threadsafe(self.begun.set)
                self.changed.wait(10)
            return Made(found, {})

        return await asyncio.to_thread(read)


async def test_plans_may_change_while_connections_are_counted() -> None:
    mode, plans = Reading(), {name: plan(name) for name in "ab"}
    collect = counted(mode, plans.values, asyncio.get_running_loop())
    scrape = asyncio.create_task(asyncio.to_thread(lambda: list(collect())))
    await mode.begun.wait()
    plans["c"] = plan("c")
    mode.changed.set()
    (frontends,) = [m for m in await scrape if m.name == "steersman_frontend_connections"]
    assert [sample.labels["service"] for sample in frontends.samples] == ["a", "b"]


@pytest.mark.parametrize("error", [OSError(24, "x"), TimeoutError(), ApplyError(), BusyError()])
async def test_the_other_metrics_do_not_go_with_these(error: Exception) -> None:
    class Failing:
        async def made(self, _: Collection[ServicePlan]) -> Made:
            raise error

    metrics = Metrics("ebpf")
    metrics.ask(counted(Failing(), list, asyncio.get_running_loop()))
    text, _ = await asyncio.to_thread(metrics.render)
    assert b"kubeproxy_sync_proxy_rules_duration_seconds" in text
