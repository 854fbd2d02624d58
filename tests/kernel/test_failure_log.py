"""Failing connections are seen where they fail, in each kind of rules; others are not."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from steersman.failover.watch import Failure
from steersman.host.netlink import NETLINK_NETFILTER, Netlink
from steersman.host.probe import try_tcp
from steersman.model.errors import BusyError
from steersman.model.failover import Backend, Observation
from steersman.model.names import Family, Protocol
from steersman.model.plan import Frontend, FrontendKind, NodePlan, NodeSettings
from steersman.model.ruleset import diff
from steersman.modes.base import Mode
from steersman.netfilter import nflog
from steersman.netfilter.failure_log import GROUPS, FailureLog
from tests.support.builders import nftables_plans as make
from tests.support.builders.plans import MASQUERADED
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.switches import mode_of
from tests.support.lab.traced import inside
from tests.support.modes.inline import Inline
from tests.support.modes.registry import render

pytestmark = pytest.mark.kernel
RULES = [("iptables", "nft"), ("iptables", "legacy"), ("nftables", "nft")]
LONGEST = 60.0


class Net(NamedTuple):
    """The addresses of one family."""

    family: Family
    vip: str
    node: str
    outside: str
    client: str
    """A pod."""
    ends: tuple[str, str]

    @property
    def backend(self) -> Backend:
        return Backend(self.ends[0], 8080, Protocol.TCP)


NETS = (
    Net(
        Family.IPV4,
        *("10.96.0.10", "192.0.2.1", "203.0.113.9", "10.244.7.7"),
        ("10.244.0.0", "10.244.0.2"),
    ),
    Net(
        Family.IPV6,
        *("fd00:96::a", "2001:db8::1", "2001:db8:1::9", "fd00:244::7:7"),
        ("fd00:244::", "fd00:244::2"),
    ),
)


@pytest.fixture
def lab() -> Iterator[Lab]:
    pods = tuple(Pod(address) for net in NETS for address in (*net.ends, net.client))
    addresses = tuple(f"{net.node}/{net.family.bits // 2}" for net in NETS)
    with Lab(Layout({"eth0": addresses}, tuple(net.outside for net in NETS), pods)) as lab:
        for net in NETS:
            for address in net.ends:
                lab.serve(address, 8080, "TCP")
        yield lab


async def program(mode: Mode) -> None:
    """Serve both families, at their cluster IPs and at a node port."""
    ipv4, ipv6 = (
        replace(
            make.SETTINGS.family(net.family),
            local_addresses=(net.node,),
            node_port_addresses=(net.node,),
        )
        for net in NETS
    )
    settings = NodeSettings(
        node_name="here", families=make.BOTH, ipv4=ipv4, ipv6=ipv6, traits=mode.traits
    )
    node_port = Frontend(FrontendKind.NODE_PORT, "", 30080, *MASQUERADED)
    plans = [
        make.port(
            [0, 2],
            of=make.key(family=net.family),
            frontends=(make.cluster_ip(address=net.vip), node_port),
        )
        for net in NETS
    ]
    plan = NodePlan(settings, {each.key: each for each in plans})
    assert (await mode.worker.do(mode.probe)).usable
    await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), render(plan, mode)))


@pytest.fixture(params=RULES, ids="-".join)
def serving(lab: Lab, request: pytest.FixtureRequest) -> Lab:
    asyncio.run(program(mode_of(lab, *request.param)))
    return lab


@pytest.fixture(params=NETS, ids=lambda net: net.family.kubernetes)
def net(request: pytest.FixtureRequest) -> Net:
    found: Net = request.param
    return found


def firewall(lab: Lab, pod: str, action: str) -> None:
    """Let a pod treat connections to its port in some way."""
    rules = "table inet pod\ndelete table inet pod\n"
    rules += "table inet pod { chain input { type filter hook input priority 0; "
    rules += f"tcp dport 8080 {action}; }}; }}"
    argv = ["nsenter", f"--net={lab.netns(pod).path}", "nft", "-f", "-"]
    subprocess.run(argv, input=rules, text=True, check=True)


def seen(
    lab: Lab, clients: Callable[[], None], until: Callable[[Sequence[Failure]], bool]
) -> list[Failure]:
    """Return the failures that are seen from the start of clients on until they are enough.

    The clients come once: the kernel limits how many ICMP errors it sends to each
    (net.ipv6.icmp.ratelimit), and without one a refusal is silence.
    """
    found: list[Failure] = []

    async def watch() -> None:
        watching = FailureLog(Inline())
        thread = threading.Thread(target=clients)
        thread.start()
        try:
            async with asyncio.timeout(LONGEST):
                while not until(found):
                    found.extend(await watching.receive())
        finally:
            await asyncio.to_thread(thread.join)
            await watching.aclose()

    inside(lab, watch())
    return found


def connect(lab: Lab, net: Net, source: str) -> None:
    """Connect to the Service until it was the failing endpoint's turn."""
    address, port = (net.node, 30080) if source == net.outside else (net.vip, 80)
    for _ in range(100):
        if lab.probe(source, address, port, timeout=1.6).kind != "answered":
            return
    pytest.fail("no connection fails")


def test_a_silent_endpoint_is_seen_with_its_clients(serving: Lab, net: Net) -> None:
    firewall(serving, net.ends[0], "drop")
    clients = {net.client, net.node, net.outside}

    def connect_all() -> None:
        for source in clients:
            connect(serving, net, source)

    failures = seen(serving, connect_all, lambda found: clients <= {each.client for each in found})
    assert {each[:2] for each in failures} == {(net.backend, Observation.SILENT)}


ACTIONS = {
    "tcp reset": Observation.REFUSED,
    "icmpx type port-unreachable": Observation.REFUSED,
    "icmpx type host-unreachable": Observation.UNREACHABLE,
    "icmpx type admin-prohibited": Observation.UNREACHABLE,
}


def test_a_refusal_is_seen_at_once(serving: Lab, net: Net) -> None:
    for action, observation in ACTIONS.items():
        firewall(serving, net.ends[0], f"reject with {action}")
        for source in (net.client, net.node):
            [first, *_] = seen(
                serving,
                partial(connect, serving, net, source),
                lambda found: net.backend in {each.backend for each in found},
            )
            assert (first.backend, first.observation) == (net.backend, observation), action


@pytest.mark.parametrize("action", ACTIONS)
def test_a_probe_of_the_node_comes_to_the_same_result(lab: Lab, net: Net, action: str) -> None:
    firewall(lab, net.ends[0], f"reject with {action}")
    assert inside(lab, try_tcp(net.ends[0], 8080, LONGEST)) == ACTIONS[action]


def test_healthy_connections_and_those_of_others_are_not_seen(serving: Lab, net: Net) -> None:
    def clients() -> None:
        firewall(serving, net.ends[0], "accept")
        for source in (net.client, net.node):
            for _ in range(25):
                assert serving.probe(source, net.vip, 80).kind == "answered"
        # Silent, but not through a Service.
        firewall(serving, net.ends[1], "drop")
        serving.probe(net.client, net.ends[1], 8080, timeout=1.5)
        firewall(serving, net.ends[1], "accept")
        # Its failure is seen after everything else.
        firewall(serving, net.ends[0], "drop")
        connect(serving, net, net.client)

    failures = seen(serving, clients, bool)
    assert {each.backend for each in failures} == {net.backend}


@pytest.mark.parametrize("taken", [GROUPS[:1], GROUPS], ids=["one", "all"])
def test_other_programs_listen_to_groups(lab: Lab, taken: Sequence[int]) -> None:
    async def opened() -> None:
        with ExitStack() as others:
            for group in taken:
                netlink = others.enter_context(Netlink(NETLINK_NETFILTER))
                assert nflog.listen(netlink.request, [group]) == group
            await FailureLog(Inline()).aclose()

    if taken == GROUPS:
        with pytest.raises(BusyError, match="listen to all NFLOG groups"):
            inside(lab, opened())
    else:
        inside(lab, opened())


def test_a_killed_process_leaves_no_rules(lab: Lab) -> None:
    async def watch() -> None:
        log = FailureLog(Inline())
        assert "steersman-failures" in await asyncio.to_thread(lab.run, "nft", "list", "ruleset")
        await log.aclose()

    inside(lab, watch())
    assert "steersman-failures" not in lab.run("nft", "list", "ruleset")
