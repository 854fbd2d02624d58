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

from steersman.failover.watch import Failure, FailureWatch
from steersman.host.netlink import NETLINK_NETFILTER, Netlink
from steersman.host.probe import try_tcp
from steersman.host.worker import KernelWorker
from steersman.model.failover import Backend, Observation
from steersman.model.names import Family, Protocol
from steersman.model.plan import Frontend, FrontendKind, NodePlan, NodeSettings
from steersman.model.ruleset import diff
from steersman.modes.base import Mode
from steersman.netfilter import nflog
from steersman.netfilter.conntrack.unanswered import ConntrackWatch
from steersman.netfilter.failure_log import GROUPS, FailureLog, open_watch
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


RULES_AND_WATCHES = [*((each, FailureLog) for each in RULES), (RULES[-1], ConntrackWatch)]
"""Entries of conntrack are the same, whatever rules made them."""
both_watches = pytest.mark.parametrize(
    ("serving", "watch"),
    RULES_AND_WATCHES,
    indirect=["serving"],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value.__name__,
)


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
    lab: Lab,
    clients: Callable[[], None],
    until: Callable[[Sequence[Failure]], bool],
    open_watch: Callable[[KernelWorker], FailureWatch] = FailureLog,
) -> list[Failure]:
    """Return the failures that are seen from the start of clients on until they are enough.

    A watch that lists entries every second misses those of a time when the machine stood still:
    for it, clients come again. For the other one they must not, as the kernel limits how many ICMP
    errors it sends to each (net.ipv6.icmp.ratelimit), and without one a refusal is silence.
    """
    found: list[Failure] = []
    enough = threading.Event()

    def come() -> None:
        clients()
        while open_watch is ConntrackWatch and not enough.is_set():
            clients()

    async def watch() -> None:
        watching = open_watch(Inline())
        thread = threading.Thread(target=come)
        thread.start()
        try:
            async with asyncio.timeout(LONGEST):
                while not until(found):
                    found.extend(await watching.receive())
        finally:
            enough.set()
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


@both_watches
def test_a_silent_endpoint_is_seen_with_its_clients(
    serving: Lab, net: Net, watch: type[FailureWatch]
) -> None:
    firewall(serving, net.ends[0], "drop")
    clients = {net.client, net.node, net.outside}

    def connect_all() -> None:
        for source in clients:
            connect(serving, net, source)

    failures = seen(
        serving, connect_all, lambda found: clients <= {each.client for each in found}, watch
    )
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


@both_watches
def test_healthy_connections_and_those_of_others_are_not_seen(
    serving: Lab, net: Net, watch: type[FailureWatch]
) -> None:
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

    failures = seen(serving, clients, bool, watch)
    assert {each.backend for each in failures} == {net.backend}


def test_old_attempts_are_not_counted_against_an_endpoint(lab: Lab) -> None:
    net = NETS[0]
    asyncio.run(program(mode_of(lab, "nftables", "nft")))
    lab.sysctl("netfilter/nf_conntrack_tcp_timeout_syn_sent", "40")
    firewall(lab, net.ends[0], "drop")
    connect(lab, net, net.client)
    # From now on, the first attempt looks 80 seconds old, a new one as what it is.
    lab.sysctl("netfilter/nf_conntrack_tcp_timeout_syn_sent", "120")
    failures = seen(lab, lambda: connect(lab, net, net.outside), bool, ConntrackWatch)
    assert {each.client for each in failures} == {net.outside}


@pytest.mark.parametrize(
    ("taken", "expected"), [(GROUPS[:1], FailureLog), (GROUPS, ConntrackWatch)]
)
def test_other_programs_listen_to_groups(
    lab: Lab, taken: Sequence[int], expected: type[FailureWatch]
) -> None:
    async def opened() -> FailureWatch:
        with ExitStack() as others:
            for group in taken:
                netlink = others.enter_context(Netlink(NETLINK_NETFILTER))
                assert nflog.listen(netlink.request, [group]) == group
            watch = open_watch(Inline())
            await watch.aclose()
            return watch

    watch = inside(lab, opened())
    assert type(watch) is expected
    assert ("listen to all NFLOG groups" in watch.limits) == (expected is ConntrackWatch)


def test_a_killed_process_leaves_no_rules(lab: Lab) -> None:
    async def watch() -> None:
        log = FailureLog(Inline())
        assert "steersman-failures" in await asyncio.to_thread(lab.run, "nft", "list", "ruleset")
        await log.aclose()

    inside(lab, watch())
    assert "steersman-failures" not in lab.run("nft", "list", "ruleset")
