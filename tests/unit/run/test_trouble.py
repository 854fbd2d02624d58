"""Services in trouble are followed by the plans in force."""

from __future__ import annotations

from typing import Any

from steersman.model.findings import Severity
from steersman.model.names import ObjectName
from steersman.run.observe.trouble import TroubleLog
from tests.support.builders import kube
from tests.support.builders.store import make, service, slice_
from tests.support.modes.memory import World


async def test_services_in_trouble_come_and_go() -> None:
    world = World(0)
    log = TroubleLog(world.sync.in_force)

    async def after(*objects: object) -> list[str]:
        for each in objects:
            world.store.upsert(each)  # type: ignore[arg-type]
        await log.observe(await world.sync.run())
        counts, worst = log.state
        assert sum(counts.values()) == len(worst)
        return [each.object for each in worst]

    def named(name: str, number: int) -> object:
        ip = f"10.96.0.{number}"
        return service(name, clusterIP=ip, clusterIPs=[ip])

    assert await after() == []
    assert await after(named("web", 1), named("none", 2)) == [
        *("Service shop/none", "Service shop/web"),
    ]
    assert log.state[0] == {Severity.ERROR: 2}
    assert await after(slice_()) == ["Service shop/none"]  # web has an endpoint
    assert log.state[0] == {Severity.ERROR: 1}
    assert await after(slice_()) == ["Service shop/none"]
    world.store.delete("Service", ObjectName("shop", "none"))
    assert await after() == []


async def test_the_worst_port_of_a_service_counts() -> None:
    world = World(0)
    log = TroubleLog(world.sync.in_force)
    ports = [{"name": "a", "port": 80}, {"name": "b", "port": 81}]
    ip: dict[str, Any] = {"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"]}
    ending = {"ready": False, "serving": True, "terminating": True}
    for conditions, counts in (
        (ending, {Severity.ERROR: 1}),  # of b
        ({"ready": True}, {Severity.ERROR: 1}),
    ):
        end = {"addresses": ["10.1.0.1"], "conditions": conditions}
        slice_of_a = kube.endpoint_slice("web-1", "web", end, ports=[{"name": "a", "port": 8080}])
        world.store.upsert(service("web", ports=ports, **ip))
        world.store.upsert(make("EndpointSlice", slice_of_a))
        await log.observe(await world.sync.run())
        assert log.state[0] == counts
    world.store.upsert(service("web", ports=ports[:1], **ip))
    await log.observe(await world.sync.run())
    assert log.state == ({}, ())


async def test_what_a_state_lists_is_bounded() -> None:
    world = World(0)
    log = TroubleLog(world.sync.in_force)
    for number in range(80):
        ip = f"10.96.1.{number + 1}"
        world.store.upsert(service(f"s{number:02}", clusterIP=ip, clusterIPs=[ip]))
    await log.observe(await world.sync.run())
    counts, worst = log.state
    assert counts == {Severity.ERROR: 80}
    assert [each.object for each in worst] == [f"Service shop/s{n:02}" for n in range(50)]
