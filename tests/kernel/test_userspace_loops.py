"""Endpoints that lead back to the proxy by way of portals: the kernel translates addresses."""

from __future__ import annotations

import pytest

from steersman.host.exec import SubprocessExec
from steersman.model.plan import (
    Action,
    Endpoint,
    Frontend,
    FrontendKind,
    ServicePlan,
    Verdict,
)
from steersman.modes.base import release
from tests.support.lab.userspace import userspace_mode
from tests.support.lab.userspace_node import (
    HOST,
    NODE_PORT,
    PORT,
    VARIANTS,
    VIP,
    become,
    on_a_node,
    served,
)
from tests.support.modes.userspace_proxy import ask, owner
from tests.support.waiting import until

pytestmark = pytest.mark.kernel
OTHER_VIP = "10.96.0.11"


def other(one: Endpoint) -> ServicePlan:
    """Plan another Service, with a cluster IP only."""
    action = Action(Verdict.FORWARD)
    frontend = Frontend(FrontendKind.CLUSTER_IP, OTHER_VIP, PORT, action, action, action)
    return ServicePlan(owner(name="other"), (frontend,), (one,), (), (one,))


@VARIANTS
def test_a_loop_by_a_portal_or_node_port_is_refused(
    variant: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(one: Endpoint) -> None:
        mode = userspace_mode(SubprocessExec(), variant)
        mode.proxy.budget.limit = 100  # so that a loop ends some time
        await mode.worker.do(mode.probe)
        for back in (Endpoint(VIP, PORT), Endpoint(HOST, NODE_PORT)):
            await become(mode, served(back))
            with pytest.raises(ConnectionResetError):
                await ask(PORT, b"!", VIP)
            await until(lambda: mode.proxy.open_connections == 0)
            assert mode.proxy.traffic.of(owner(), back).connections == 1
        assert f"leads back to this proxy, to {owner()}" in caplog.text
        await become(mode, served(one), other(Endpoint(VIP, PORT)))
        assert await ask(PORT, b"!", OTHER_VIP) == b"one!"
        await become(mode, served(Endpoint(OTHER_VIP, PORT)), other(Endpoint(VIP, PORT)))
        with pytest.raises(ConnectionResetError):
            await ask(PORT, b"!", OTHER_VIP)
        await until(lambda: mode.proxy.open_connections == 0)
        assert mode.proxy.traffic.total.connections == 2 + 2 + 2
        await release(mode)

    on_a_node(body)
