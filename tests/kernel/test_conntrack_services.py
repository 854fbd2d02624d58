"""From changed objects to packets: which flows continue and which start again, in a real kernel."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import pytest

from steersman.compile.planner import Planner
from steersman.host.exec import SubprocessExec
from steersman.host.facts import read_facts
from steersman.host.netlink import NETLINK_NETFILTER, Netlink
from steersman.host.nlmsg import be32
from steersman.host.worker import finish
from steersman.model.conntrack import Cleanup
from steersman.model.inputs import NodeConfig
from steersman.model.kube import KubeObject
from steersman.model.names import Family
from steersman.model.plan import ServicePlan
from steersman.modes.base import Mode
from steersman.modes.iptables.mode import IptablesMode
from steersman.modes.nftables.mode import NftablesMode
from steersman.netfilter.conntrack.flows import tracked
from steersman.netfilter.conntrack.unanswered import delete_untranslated
from steersman.netfilter.conntrack.wire import SEEN_REPLY
from steersman.run.observe.metrics import Metrics
from steersman.run.observe.observers import SyncObservers
from steersman.run.serve.health import ProxyHealth
from steersman.run.sync.state import SyncReport
from steersman.run.sync.sync import Sync
from steersman.source.store import Store
from tests.support.builders.store import make, replace_objects
from tests.support.lab.conntrack_flows import FlowEntry, add_entries, creation
from tests.support.lab.held_packets import held_packets
from tests.support.lab.namespace import in_namespace, sh
from tests.support.lab.sockets import sent_again
from tests.support.waiting import until

pytestmark = pytest.mark.kernel

NODE, NODE6, NODE_PORT = "192.0.2.1", "2001:db8::1", 30053
ENDS, ENDS6 = ("10.244.1.5", "10.244.1.6"), ("fd00:10:244::5", "fd00:10:244::6")
MODES: dict[str, Callable[[], Mode]] = {
    "nftables": lambda: NftablesMode(SubprocessExec()),
    "iptables": lambda: IptablesMode(SubprocessExec()),
}
both_modes = pytest.mark.parametrize("mode", MODES)
QUESTIONS = itertools.count()


class Proxy:
    """The parts between the sources and the kernel, in the namespace of the calling thread."""

    def __init__(self, mode: Mode, sync: Sync, observers: SyncObservers) -> None:
        self.mode, self._sync, self._observers = mode, sync, observers
        self.store = sync.store

    async def sync(self, *objects: KubeObject, drift: bool = False) -> None:
        for obj in objects:
            self.store.upsert(obj)
        if report := await (self._sync.check() if drift else self._sync.run()):
            await self._observers.observe(report)

    async def repair(self) -> SyncReport:
        """Put missing rules back, and nothing else yet: `observe` does the rest."""
        report = await self._sync.check()
        assert report is not None
        return report

    async def observe(self, report: SyncReport) -> None:
        await self._observers.observe(report)

    @property
    def plans(self) -> Collection[ServicePlan]:
        return self._sync.state.plan.services.values()

    async def cleaned(self) -> None:
        """Wait until nothing is owed to conntrack."""
        await until(lambda: not self._observers.stale_entries.owed)


@asynccontextmanager
async def proxy(name: str) -> AsyncIterator[Proxy]:
    sh("ip link add dm0 type bridge && ip link set dm0 up")
    for address in (NODE, *ENDS):
        sh(f"ip address add {address}/24 dev dm0")
    for address in (NODE6, *ENDS6):
        sh(f"ip address add {address}/64 dev dm0 nodad")
    sh("ip route add 10.96.0.0/16 dev dm0")
    mode = MODES[name]()
    assert (await mode.worker.do(mode.probe)).usable
    config = NodeConfig(node_name="me", families=(Family.IPV4, Family.IPV6))
    store = Store("me", facts=await read_facts())
    sync = Sync(store, Planner(config, mode.traits), mode)
    observers = SyncObservers(store, sync.in_force, Metrics(name), ProxyHealth(60.0), {}, mode=mode)
    for kind in ("Service", "EndpointSlice"):
        replace_objects(store, kind, [])
    task = asyncio.create_task(observers.stale_entries.run())
    try:
        made = Proxy(mode, sync, observers)
        await made.sync()
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def dns(name: str = "dns", protocol: str = "UDP", **spec: Any) -> KubeObject:
    ports = [{"name": "dns", "port": 53, "protocol": protocol, "nodePort": NODE_PORT}]
    spec = {"type": "NodePort", "clusterIP": "10.96.0.10", "ports": ports, **spec}
    notes = {"steersman/close-connections": "true"}
    meta = {"namespace": "shop", "name": name, "annotations": notes}
    meta["creationTimestamp"] = f"2026-0{len(name)}-01T00:00:00Z"
    return make("Service", {"metadata": meta, "spec": spec})


def ends(*ips: str, of: str = "dns", protocol: str = "UDP") -> KubeObject:
    family = "IPv6" if ":" in ips[0] else "IPv4"
    labels = {"kubernetes.io/service-name": of}
    meta = {"namespace": "shop", "name": f"{of}-{family.lower()}", "labels": labels}
    ports = [{"name": "dns", "port": 5300, "protocol": protocol}]
    listed = [{"addresses": [ip]} for ip in ips]
    return make(
        "EndpointSlice",
        {"metadata": meta, "addressType": family, "ports": ports, "endpoints": listed},
    )


@contextmanager
def answering() -> Iterator[None]:
    """Serve on all endpoints: each says its address, and the question."""
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        for address in (*ENDS, *ENDS6):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            sock = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
            sock.bind((address, 5300))

            def answer(sock: socket.socket = sock, address: str = address) -> None:
                question, client = sock.recvfrom(100)
                sock.sendto(address.encode() + b" " + question, client)

            loop.add_reader(sock, answer)
            stack.callback(loop.remove_reader, sock)
        yield


@contextmanager
def client(address: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.connect((address, port))
        yield sock


async def ask(sock: socket.socket) -> str:
    """Ask once; "" if nobody answers."""
    question = b"%d" % next(QUESTIONS)
    with contextlib.suppress(OSError):  # refused, or no answer in time
        await asyncio.sleep(0)
        sock.send(question)
        async with asyncio.timeout(0.2):
            of = b""
            while of != question:  # not a late answer to one before
                said = await asyncio.get_running_loop().sock_recv(sock, 100)
                address, _, of = said.partition(b" ")
            return address.decode()
    return ""


async def answer(sock: socket.socket) -> str:
    """Ask until somebody answers."""
    async with asyncio.timeout(60):
        while not (said := await ask(sock)):
            pass
    return said


def run(mode: str, body: Callable[[Proxy], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with proxy(mode) as made:
            with answering():
                await body(made)

    in_namespace(inside)


@both_modes
@pytest.mark.parametrize("target", [(NODE, NODE_PORT), ("10.96.0.10", 53)])
def test_a_client_that_asks_before_its_service_comes_is_answered_after(
    mode: str, target: tuple[str, int]
) -> None:
    """It never stops asking, so its untranslated entry in conntrack never ends by itself."""

    async def body(made: Proxy) -> None:
        with client(*target) as sock:
            await made.sync(ends(ENDS[0]))
            assert await ask(sock) == ""
            await made.sync(dns())
            assert await answer(sock) == ENDS[0]

    run(mode, body)


@both_modes
def test_a_client_of_an_address_that_comes_later_is_answered(mode: str) -> None:
    async def body(made: Proxy) -> None:
        await made.sync(dns(), ends(ENDS[0]))
        await made.cleaned()
        with client("192.0.2.77", 53) as sock:
            assert await ask(sock) == ""
            await made.sync(dns(externalIPs=["192.0.2.77"]))
            assert await answer(sock) == ENDS[0]

    run(mode, body)


@both_modes
def test_a_client_that_asked_while_the_rules_were_gone_is_answered(mode: str) -> None:
    async def body(made: Proxy) -> None:
        await made.sync(dns(), ends(ENDS[0]))
        await made.cleaned()
        other = "chain ip sm-other input"
        sh(f"nft 'add table ip sm-other; add {other} {{ type filter hook input priority 0; }}'")
        sh(f"nft add {other.replace('chain', 'rule')} ct state new accept")  # conntrack goes on
        if mode == "nftables":
            sh("nft delete table ip kube-proxy")
        else:
            sh("iptables-nft -t nat -F; iptables-nft -t nat -X")
        with client(NODE, NODE_PORT) as sock:
            assert await ask(sock) == ""
            await made.sync(drift=True)
            assert await answer(sock) == ENDS[0]

    run(mode, body)


@both_modes
def test_a_packet_that_was_held_up_meanwhile_keeps_no_client_with_its_endpoint(mode: str) -> None:
    """It was translated by the old rules, and makes its entry after the clean-up of the change."""

    async def body(made: Proxy) -> None:
        await made.sync(dns(), ends(ENDS[0]))
        await made.cleaned()
        with client("10.96.0.10", 53) as sock:
            with held_packets(f"-d {ENDS[0]} -p udp --dport 5300") as held:
                sock.send(b"held up")
                packet = await asyncio.to_thread(held.wait)
                await made.sync(ends(ENDS[1]))
                await made.cleaned()
                held.release(packet)
            assert await ask(sock) == ENDS[0]
            async with asyncio.timeout(60):
                while await ask(sock) != ENDS[1]:  # it never pauses
                    pass

    run(mode, body)


@both_modes
def test_replacing_an_endpoint_moves_nobody_else(mode: str) -> None:
    both: dict[str, Any] = {
        "ipFamilies": ["IPv4", "IPv6"],
        "clusterIPs": ["10.96.0.10", "fd00:10:96::10"],
        "ipFamilyPolicy": "RequireDualStack",
    }

    async def body(made: Proxy) -> None:
        await made.sync(dns(**both), ends(*ENDS), ends(*ENDS6))
        await made.cleaned()
        with ExitStack() as stack:
            socks = [
                stack.enter_context(client(address, NODE_PORT))
                for address in (NODE, NODE6)
                for _ in range(8)
            ]
            before = [await answer(sock) for sock in socks]
            gone = before[0]
            left = next(end for end in ENDS if end != gone)
            await made.sync(ends(left))
            await made.cleaned()
            after = [await answer(sock) for sock in socks]
            assert after == [left if said == gone else said for said in before]

    run(mode, body)


@both_modes
def test_who_lost_an_address_cuts_no_connection_there(mode: str) -> None:
    """A younger Service claims the same clusterIP, and asks for connections to be closed."""

    async def body(made: Proxy) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server((ENDS[0], 5300)))
            listener.setblocking(False)
            await made.sync(dns(protocol="TCP"), ends(ENDS[0], protocol="TCP"))
            await made.cleaned()
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            await loop.sock_connect(sock, ("10.96.0.10", 53))
            server, _ = await loop.sock_accept(listener)
            stack.enter_context(server)
            taker = dns("taker", "TCP", clusterIP="10.96.0.66", externalIPs=["10.96.0.10"])
            await made.sync(taker, ends(ENDS[1], of="taker", protocol="TCP"))
            await made.cleaned()
            await loop.sock_sendall(sock, b"still here")
            async with asyncio.timeout(60):
                assert await loop.sock_recv(server, 100) == b"still here"
            await made.sync(ends(ENDS[1], protocol="TCP"))  # who holds the address, does
            await made.cleaned()
            await loop.sock_sendall(sock, b"gone")
            async with asyncio.timeout(60):
                with pytest.raises(ConnectionError):
                    await loop.sock_recv(sock, 100)

    run(mode, body)


def _tcp_service(**spec: Any) -> KubeObject:
    """A Service that does not ask for its connections to be closed."""
    meta = {"namespace": "shop", "name": "dns"}
    ports = [{"name": "dns", "port": 53, "protocol": "TCP"}]
    spec = {"clusterIP": "10.96.0.10", "ports": ports, **spec}
    return make("Service", {"metadata": meta, "spec": spec})


def _flush(mode: str) -> None:
    """Remove the rules of the mode as another program would."""
    if mode == "nftables":
        sh("nft delete table ip kube-proxy")
    else:
        sh("iptables-nft -t nat -F; iptables-nft -t filter -F; iptables-nft -t nat -X")


@both_modes
def test_who_connects_while_the_rules_are_gone_gets_through_after_the_repair(mode: str) -> None:
    """Its first SYN is lost; the entry that it leaves would keep the next ones untranslated."""
    elsewhere, silent = ("10.96.0.77", 53), ("10.96.0.10", 53)

    def unanswered() -> dict[tuple[str, int], int]:
        """Client ports of the connections that nobody has answered, by destination."""
        to = frozenset([elsewhere, silent])
        found = tracked(Family.IPV4, to)
        return {(e.address, e.port): e.client_port for e in found if not e.answered}

    async def body(made: Proxy) -> None:
        loop = asyncio.get_running_loop()
        sh(
            "nft 'add table ip sm-other; add chain ip sm-other out { type filter hook output"
            " priority 0; }; add rule ip sm-other out ct state new accept'"
        )  # conntrack goes on
        for address, _ in (elsewhere, silent):  # the machines of these addresses say nothing
            sh(f"ip neighbour add {address} lladdr 02:00:00:00:00:99 dev dm0")
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server((ENDS[0], 5300)))
            listener.setblocking(False)
            await made.sync(_tcp_service(), ends(ENDS[0], protocol="TCP"))
            await made.cleaned()
            _flush(mode)
            clients = {to: stack.enter_context(socket.socket()) for to in (elsewhere, silent)}
            waiting = []
            for to, sock in clients.items():
                sock.setblocking(False)
                waiting.append(asyncio.create_task(loop.sock_connect(sock, to)))
            await until(lambda: unanswered().keys() == clients.keys())
            before = unanswered()
            repair = await made.repair()
            # Until the entry is deleted its next packets are untranslated, too, and not refused.
            count = sent_again(clients[silent])
            await until(lambda: sent_again(clients[silent]) > count)
            assert not waiting[1].done()
            await made.observe(repair)
            await made.cleaned()
            assert elsewhere in unanswered()
            assert unanswered()[elsewhere] == before[elsewhere], "it is nobody's of ours"
            async with asyncio.timeout(60):  # it sends again after 1, 3, 7 and 15 s
                await waiting[1]
                server, (_, port) = await loop.sock_accept(listener)
            stack.enter_context(server)
            assert port == clients[silent].getsockname()[1]
            waiting[0].cancel()

    run(mode, body)


@pytest.mark.parametrize(
    ("family", "address", "end", "who"),
    [
        (Family.IPV4, "10.96.0.10", ENDS[0], "10.244.9.1"),
        (Family.IPV6, "fd00:10:96::10", ENDS6[0], "fd00:10:244::99"),
    ],
)
def test_only_unanswered_untranslated_connections_are_deleted(
    family: Family, address: str, end: str, who: str
) -> None:
    tcp, udp = socket.IPPROTO_TCP, socket.IPPROTO_UDP
    flows = [
        FlowEntry(tcp, who, 1001, address, 53, address, 53),  # the one that goes
        FlowEntry(tcp, who, 1002, address, 53, end, 5300),  # translated
        FlowEntry(tcp, who, 1003, address, 54, address, 54),  # not a port of the Service
        FlowEntry(tcp, who, 1004, who, 53, who, 53),  # not its address
        FlowEntry(udp, who, 1005, address, 53, address, 53),  # left to `delete_stale`
    ]
    answered = creation(FlowEntry(tcp, who, 1006, address, 53, address, 53))
    answered = answered._replace(
        payload=answered.payload.replace(be32(3, 0x8), be32(3, 0x8 | SEEN_REPLY))
    )

    async def body(made: Proxy) -> None:
        both = {"clusterIPs": ["10.96.0.10", "fd00:10:96::10"], "ipFamilies": ["IPv4", "IPv6"]}
        await made.sync(_tcp_service(**both), ends(*ENDS, protocol="TCP"))
        await made.sync(ends(*ENDS6, protocol="TCP"))
        await made.cleaned()
        add_entries(flows)
        with Netlink(NETLINK_NETFILTER) as netlink:
            assert netlink.batch([answered]) == {}
        done = finish(delete_untranslated(family, made.plans))
        assert done == Cleanup(1, 0, complete=True)
        left = tracked(family, [("", 53), ("", 54)])
        assert sorted(entry.client_port for entry in left) == [1002, 1003, 1004, 1005, 1006]

    run("nftables", body)
