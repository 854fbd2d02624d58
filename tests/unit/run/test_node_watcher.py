from __future__ import annotations

import asyncio

import pytest

from steersman.model.inputs import DetectLocalMode, NodeConfig
from steersman.model.kube import Node, NodeAddress, NodeSpec, NodeStatus, ObjectMeta
from steersman.model.names import ObjectName
from steersman.run.process.node_watcher import NodeWatcher, Wait, host_ips, judge, pod_cidrs
from steersman.source.store import Store
from tests.support.builders.store import replace_objects
from tests.support.clock import FakeClock, PatientClock, settle


def node(*ips: str, cidrs: list[str] | None = None, cidr: str | None = None) -> Node:
    return Node(
        ObjectMeta(name="n"),
        NodeSpec(pod_cidr=cidr, pod_cidrs=cidrs),
        NodeStatus([NodeAddress("InternalIP", ip) for ip in ips]),
    )


BARE, ADDRESSED = node(), node("192.0.2.1")
WHOLE = node("192.0.2.1", cidrs=["10.244.1.0/24"])
OTHER_CIDR = node("192.0.2.1", cidrs=["10.244.2.0/24"])
MOVED = node("192.0.2.9", cidrs=["10.244.1.0/24"])


@pytest.mark.parametrize(
    ("current", "waited", "needs_pod_cidrs", "expected"),
    [
        (None, 0, False, Wait.ON),
        (BARE, 29.9, False, Wait.ON),
        (ADDRESSED, 0, False, Wait.START),
        (None, 30, False, Wait.START),
        (BARE, 30, False, Wait.START),
        (ADDRESSED, 0, True, Wait.ON),
        (ADDRESSED, 329, True, Wait.ON),
        (None, 330, True, Wait.FAIL),
        (ADDRESSED, 330, True, Wait.FAIL),
        (WHOLE, 0, True, Wait.START),
        (node(cidrs=["10.0.0.0/24"]), 29, True, Wait.ON),
        (node(cidrs=["10.0.0.0/24"]), 30, True, Wait.START),
    ],
)
def test_when_to_start(
    current: Node | None, waited: float, needs_pod_cidrs: bool, expected: Wait
) -> None:
    assert judge(current, waited, needs_pod_cidrs=needs_pod_cidrs) is expected


def test_what_is_read_of_a_node() -> None:
    assert host_ips(None) == ()
    assert host_ips(node("2001:db8::1", "192.0.2.1", "192.0.2.2")) == ("2001:db8::1", "192.0.2.1")
    assert pod_cidrs(None) == ()
    assert pod_cidrs(node(cidr="10.0.0.0/24")) == ("10.0.0.0/24",)
    assert pod_cidrs(node(cidr="a", cidrs=["a", "b"])) == ("a", "b")


@pytest.mark.parametrize("seen", [None, ADDRESSED])
async def test_waiting_in_vain_for_pod_cidrs_fails_with_upstreams_words(seen: Node | None) -> None:
    config = NodeConfig(node_name="n", detect_local_mode=DetectLocalMode.NODE_CIDR)
    store, stopped, clock = Store("n"), list[str](), PatientClock()
    if seen is not None:
        store.upsert(seen)
    await NodeWatcher(config, store, stopped.append).wait(clock)
    what = 'PodCIDR allocation on node "n"' if seen else 'node "n" to exist'
    assert (stopped, clock.time()) == ([f"timeout waiting for {what}"], 330)


@pytest.mark.parametrize(
    ("mode", "changed", "message", "ends"),
    [
        (DetectLocalMode.NODE_CIDR, OTHER_CIDR, "10.244.1.0/24 to 10.244.2.0/24", True),
        (DetectLocalMode.CLUSTER_CIDR, OTHER_CIDR, "", False),
        (DetectLocalMode.NODE_CIDR, WHOLE, "", False),
        (DetectLocalMode.NODE_CIDR, MOVED, "192.0.2.1 to 192.0.2.9", False),
    ],
)
async def test_only_changed_pod_cidrs_end_the_process_where_they_matter(
    mode: DetectLocalMode,
    changed: Node,
    message: str,
    ends: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, stopped = Store("n"), list[str]()
    store.upsert(WHOLE)
    own = NodeWatcher(NodeConfig(node_name="n", detect_local_mode=mode), store, stopped.append)
    await own.wait()
    store.upsert(changed)
    own.follow()
    assert len(caplog.messages) == bool(message)
    assert message in caplog.text
    assert stopped == (caplog.messages if ends else [])


async def test_a_change_ends_the_waiting_at_once() -> None:
    store = Store("n")
    own = NodeWatcher(NodeConfig(node_name="n"), store, pytest.fail)
    clock = FakeClock()
    waiting = asyncio.create_task(own.wait(clock))
    await settle()
    assert not waiting.done()
    store.upsert(WHOLE)
    own.follow()
    await settle()
    assert waiting.done()


@pytest.mark.parametrize(
    ("found", "said"), [(None, 'node "n" is not known'), (BARE, 'node "n" has no addresses')]
)
async def test_going_on_without_addresses_is_said(
    found: Node | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, stopped, clock = Store("n"), list[str](), PatientClock()
    if found is not None:
        store.upsert(found)

    own = NodeWatcher(NodeConfig(node_name="n"), store, stopped.append)
    await own.wait(clock)
    assert f"{said}, going on without" in caplog.text
    assert (clock.time(), stopped) == (30, [])


@pytest.mark.parametrize(
    ("listed", "said"), [(True, "--hostname-override"), (False, "API server has not answered")]
)
async def test_why_a_node_is_not_known_is_said(
    listed: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store("n")
    for kind in ("Service", "EndpointSlice") if listed else ():
        replace_objects(store, kind, ())
    await NodeWatcher(NodeConfig(node_name="n"), store, pytest.fail).wait(PatientClock())
    assert said in caplog.text


async def test_nothing_is_said_of_a_node_that_is_whole(caplog: pytest.LogCaptureFixture) -> None:
    store = Store("n")
    store.upsert(WHOLE)
    await NodeWatcher(NodeConfig(node_name="n"), store, pytest.fail).wait()
    assert caplog.text == ""


async def test_a_node_that_is_deleted_and_registered_again_is_logged_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    config = NodeConfig(node_name="n", detect_local_mode=DetectLocalMode.NODE_CIDR)
    store, stopped = Store("n"), list[str]()
    store.upsert(WHOLE)
    own = NodeWatcher(config, store, stopped.append)
    await own.wait()

    def last_line() -> str:
        own.follow()
        return caplog.messages[-1]

    store.delete("Node", ObjectName("", "n"))
    assert "was deleted; keeping its last addresses and pod CIDRs" in last_line()
    store.upsert(BARE)
    assert "has no IPv4 addresses, pod CIDRs; keeping the last ones" in last_line()
    lines = len(caplog.messages)
    own.follow()
    assert len(caplog.messages) == lines
    store.upsert(WHOLE)
    assert "complete again" in last_line()
    assert stopped == []
    store.upsert(node("192.0.2.1", cidrs=["10.244.9.0/24"]))
    own.follow()
    assert len(stopped) == 1
    own.use(NodeConfig(node_name="n"))
    own.follow()  # by CIDRs of the cluster, the node's own do not matter
    assert len(stopped) == 1
