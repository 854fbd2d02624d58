"""Node ports on loopback in the nftables mode: which sockets there should be."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given

from steersman.compile.actions import TO_CLUSTER
from steersman.model.names import Family, PlanKey, Protocol
from steersman.model.plan import (
    Action,
    Endpoint,
    FamilySettings,
    Frontend,
    FrontendKind,
    NodeSettings,
    ServicePlan,
    Traits,
    Verdict,
)
from steersman.model.ruleset import Diff, diff, patch
from steersman.modes.nftables.layout import Kind
from steersman.modes.nftables.render_localhost import render_localhost, without_listeners
from steersman.modes.nftables.text import diff_text
from steersman.proxy.listeners import Decision, ListenerPlan
from tests.support.builders import nftables_plans as make
from tests.support.builders.nftables_plans import ON


def node_port(actions: make.Actions = make.PLAIN, port: int = 30080) -> Frontend:
    return Frontend(FrontendKind.NODE_PORT, "", port, *actions)


def served(plan: ServicePlan, settings: NodeSettings = ON) -> list[ListenerPlan]:
    found = list(render_localhost(plan, settings).values())
    assert all(isinstance(each, ListenerPlan) for each in found)
    return [each for each in found if isinstance(each, ListenerPlan)]


@pytest.mark.parametrize(("family", "address"), [(Family.IPV4, "127.0.0.1"), (Family.IPV6, "::1")])
@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP])
def test_a_node_port_is_served_on_loopback(
    family: Family, address: str, protocol: Protocol
) -> None:
    frontends = [make.cluster_ip(), node_port()]
    plan = make.plan(of=make.key("web", family, protocol), frontends=frontends, affinity=60)
    [listener] = served(plan)
    assert (listener.bind, listener.port, listener.affinity_seconds) == (address, 30080, 60)
    assert listener.same_for_all
    assert listener.node == Decision(Verdict.FORWARD, plan.cluster)


def test_this_nodes_own_pool_is_drawn_from() -> None:
    plan = make.plan(range(4), frontends=[node_port(make.INTERNAL_LOCAL)])
    [listener] = served(plan)
    assert listener.node.endpoints == plan.local != plan.cluster


@pytest.mark.parametrize(
    ("plan", "settings"),
    [
        (make.plan(), ON),
        (make.plan(of=make.key(protocol=Protocol.SCTP), frontends=[node_port()]), ON),
        (make.plan([], frontends=[node_port(make.REJECTED)]), ON),
        (make.plan(frontends=[node_port()]), make.SETTINGS),
        (make.plan(frontends=[node_port()]), msgspec.structs.replace(ON, ipv4=FamilySettings())),
        (make.plan(frontends=[node_port()]), msgspec.structs.replace(ON, traits=Traits())),
    ],
    ids=["no-node-port", "sctp", "nobody-there", "other-traits", "not-wanted", "cannot"],
)
def test_otherwise_nothing_listens(plan: ServicePlan, settings: NodeSettings) -> None:
    assert served(plan, settings) == []


@given(make.worlds(), make.worlds())
def test_a_diff_is_parted_without_loss(
    before: dict[PlanKey, ServicePlan], after: dict[PlanKey, ServicePlan]
) -> None:
    have, want = (
        {b"\x03else": len(world)}
        | {k: v for plan in world.values() for k, v in render_localhost(plan, ON).items()}
        for world in (before, after)
    )
    kernel, listeners = without_listeners(diff(have, want))
    assert all(key[0] == Kind.RELAY for part in parts(listeners) for key in part)
    assert not any(key[0] == Kind.RELAY for part in parts(kernel) for key in part)
    assert patch(patch(have, kernel), listeners) == want


def parts(change: Diff) -> tuple[Mapping[bytes, object], ...]:
    return change.added, change.removed, change.changed


def test_listeners_are_printed_as_what_they_are() -> None:
    plan = make.plan([1], frontends=[node_port()])
    text = diff_text(Diff(added=render_localhost(plan, ON)))
    assert text == "# add listener at 127.0.0.1 port 30080: all to 10.244.0.1:8080\n"


def test_an_action_that_drops_has_no_listener() -> None:
    drop = Action(Verdict.DROP)
    ends = (Endpoint("10.244.0.1", 8080),)
    frontend = Frontend(FrontendKind.NODE_PORT, "", 30080, TO_CLUSTER, drop, TO_CLUSTER)
    assert served(ServicePlan(make.key(), (frontend,), ends)) == []
