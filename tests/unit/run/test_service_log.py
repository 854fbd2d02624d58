"""At -v 2 each changed Service is a line that says what changed and why."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from steersman.model.names import NODE, ObjectName
from steersman.run.observe.service_log import ServiceLog, cause
from steersman.run.process.klog import v
from steersman.source.store import CONFIGURATION, EJECTIONS, Change
from tests.support.builders import kube
from tests.support.builders.store import make, service, slice_
from tests.support.modes.memory import World

WEB = ObjectName("shop", "web")


class Logged:
    """A World whose reports are logged."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.world = World(0)
        self.log = ServiceLog(self.world.sync.in_force)
        self.caplog = caplog

    async def lines(self, *objects: object) -> list[str]:
        self.caplog.clear()
        for each in objects:
            self.world.store.upsert(each)  # type: ignore[arg-type]
        report = await self.world.sync.run()
        assert report is not None
        self.log.observe(report)
        return [
            record.getMessage() for record in self.caplog.records if "service_log" in record.name
        ]


@pytest.fixture
async def logged(caplog: pytest.LogCaptureFixture) -> Logged:
    caplog.set_level(v(2))
    logged = Logged(caplog)
    await logged.lines()
    return logged


def web(**spec: Any) -> object:
    return service("web", clusterIP="10.96.0.1", clusterIPs=["10.96.0.1"], **spec)


async def test_what_happens_to_a_service_is_a_line(logged: Logged) -> None:
    assert await logged.lines(web(), slice_()) == [
        "Service shop/web: port TCP added at 10.96.0.1:80/TCP with 1 endpoint "
        "(Service, EndpointSlice)"
    ]
    assert await logged.lines(slice_(ips=("10.1.0.2", "10.1.0.3"))) == [
        "Service shop/web: port TCP +10.1.0.2:8080 +10.1.0.3:8080 -10.1.0.1:8080 (EndpointSlice)"
    ]
    record = logged.caplog.records[-1]
    assert vars(record)["service"] == "shop/web"
    assert (vars(record)["endpointsAdded"], vars(record)["endpointsRemoved"]) == (2, 1)
    assert await logged.lines(web(externalIPs=["192.0.2.1"])) == [
        "Service shop/web: port TCP serves 192.0.2.1:80/TCP (Service)"
    ]
    assert await logged.lines(web(sessionAffinity="ClientIP")) == [
        "Service shop/web: port TCP no longer serves 192.0.2.1:80/TCP, "
        "session affinity 10800 s (Service)"
    ]
    logged.world.store.delete("Service", WEB)
    assert await logged.lines() == ["Service shop/web: port TCP removed (Service)"]


async def test_endpoints_that_only_terminate_are_told(logged: Logged) -> None:
    await logged.lines(web(), slice_())
    conditions = {"ready": False, "serving": True, "terminating": True}
    end = {"addresses": ["10.1.0.1"], "conditions": conditions}
    ports = [{"name": "", "port": 8080, "protocol": "TCP"}]
    ending = make("EndpointSlice", kube.endpoint_slice("web-1", "web", end, ports=ports))
    told = "Service shop/web: port TCP {} (EndpointSlice)"
    assert await logged.lines(ending) == [told.format("only endpoints that terminate are left")]
    assert await logged.lines(slice_()) == [told.format("ready endpoints")]


async def test_a_change_without_effect_is_no_line(logged: Logged) -> None:
    await logged.lines(web(), slice_())
    assert await logged.lines(web(), slice_()) == []


async def test_many_endpoints_are_counted(logged: Logged) -> None:
    ips = tuple(f"10.1.0.{n}" for n in range(2, 14))
    await logged.lines(web(), slice_())
    (line,) = await logged.lines(slice_(ips=("10.1.0.1", *ips)))
    assert "+4 more" in line


async def test_many_services_are_counted(logged: Logged) -> None:
    services = [
        service(f"web-{n}", clusterIP=f"10.96.1.{n}", clusterIPs=[f"10.96.1.{n}"])
        for n in range(1, 251)
    ]
    lines = await logged.lines(*services)
    assert len(lines) == 201
    assert lines[-1] == "50 more Services changed"


async def test_a_lower_verbosity_logs_and_keeps_nothing(
    logged: Logged, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert await logged.lines(web(), slice_()) == []
    caplog.set_level(v(2))  # set by a request: from the next change on
    assert await logged.lines(slice_(ips=("10.1.0.2",))) == []
    assert await logged.lines(slice_(ips=("10.1.0.3",))) != []


def test_the_cause_may_be_elsewhere() -> None:
    assert cause(WEB, [Change("Node", ObjectName("", "me"))]) == "Node"
    assert cause(WEB, [Change("ServiceCIDR", ObjectName("", "more"))]) == "Node"
    assert cause(WEB, [Change(EJECTIONS, WEB)]) == "failover"
    assert cause(WEB, [Change("EndpointSlice", WEB), Change("Service", WEB)]) == (
        "Service, EndpointSlice"
    )
    another = Change("Service", ObjectName("shop", "another"))
    assert "another Service" in cause(WEB, [another, CONFIGURATION, NODE])


async def test_a_log_that_failed_writes_the_same_lines_the_next_time(
    logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("steersman.run.observe.service_log.cause", failing)
        with pytest.raises(OSError, match="no space"):
            await logged.lines(web(), slice_())
    other = service("other", clusterIP="10.96.0.2", clusterIPs=["10.96.0.2"])
    assert sorted(await logged.lines(other)) == [
        "Service shop/other: port TCP added at 10.96.0.2:80/TCP with 0 endpoints (Service)",
        "Service shop/web: port TCP added at 10.96.0.1:80/TCP with 1 endpoint "
        "(Service, EndpointSlice)",
    ]
