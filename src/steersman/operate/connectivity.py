"""Try Services of our own on this node, by real packets (`steersman connectivity`).

    client pod ----+                  +---- pod one      answers with its address, and with
    client outside +---- this node ---+---- pod two      the address of whoever asked
    the node ------+                  (linked by veth, addresses of this node's pods)

The Services are a file in a directory of manifests that the running process watches, so it serves
them as any other. The pods and the client hang on descriptors of this process (places.py): the
kernel removes them with it. The file is removed at the end; if this process was killed, by the next
run, or by `steersman cleanup`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import msgspec

from steersman.config import ProxyConfig
from steersman.host.exec import SubprocessExec
from steersman.host.netns import call_inside
from steersman.model.addresses import is_loopback, special_range
from steersman.model.names import Family
from steersman.model.world import World
from steersman.operate.answer import Answer, Block, Cell, Line, QuestionError, Style, Table
from steersman.operate.client import Client
from steersman.operate.dump import mode_of
from steersman.operate.load import world_of_process
from steersman.operate.names import Names
from steersman.operate.places import NODE, Place, client_outside, pod_of_ours

NAMESPACE = "steersman-connectivity"
"""Of the Services; and the beginning of the name of the file."""
_OWN_FILE = re.compile(rf"{NAMESPACE}-(\d+)\.yaml")
_TARGET_PORT, _PORT = 8080, 80
_SERVED_SECONDS, _TRY_SECONDS, _CHECK_SECONDS = 20.0, 3.0, 8.0
_ALL_SECONDS = 50.0
"""After that nothing more is tried, so that a run ends within a minute."""
_LOOK = 0.1  # seconds between two looks whether the Services are served
_TIMES = 8  # connections that must all reach the same endpoint
_MOST_TRIES = 8  # of addresses and ports that nobody has
_ELSEWHERE = {Family.IPV4: "198.18.255.254", Family.IPV6: "2001:2:0:ffff::fe"}
"""Endpoints on another node, which a policy Local must leave alone; nobody has these addresses."""
_VIPS = {Family.IPV4: 0xC6120000, Family.IPV6: 0x2001000200000001 << 64}
"""198.18.0.0/16 and 2001:2:0:1::/64, reserved for tests of networks (RFC 2544, RFC 5180)."""

Result: TypeAlias = Literal["ok", "failed", "not tried"]
_STYLES: Mapping[Result, Style] = {"ok": "good", "failed": "bad", "not tried": "dim"}


class Tried(msgspec.Struct, frozen=True, rename="camel"):
    """One kind of connection that was tried."""

    what: str
    """Such as `pod to cluster IP, TCP`."""
    family: str
    """IPv4 or IPv6."""
    result: Result
    reason: str = ""
    """Why it failed or was not tried."""


class Connectivity(Answer, frozen=True, kw_only=True, rename="camel"):
    """What became of connections to Services of our own."""

    node: str
    mode: str
    tried: tuple[Tried, ...]

    @property
    def exit_code(self) -> int:
        """1 if one failed."""
        return int(any(each.result == "failed" for each in self.tried))

    def blocks(self, wide: bool) -> Iterator[Block]:  # noqa: ARG002 - every column fits
        """Yield the table and a verdict."""
        yield Line(f"Node {self.node} ({self.mode} mode)", "title")
        rows: list[tuple[Cell, ...]] = [
            (each.what, each.family, (each.result, _STYLES[each.result]), each.reason)
            for each in self.tried
        ]
        yield Table(("CONNECTION", "FAMILY", "RESULT", ""), rows, empty="nothing could be tried")
        failed = sum(each.result == "failed" for each in self.tried)
        fine = sum(each.result == "ok" for each in self.tried)
        style: Style = "bad" if failed else "good"
        yield Line(f"{fine} ok, {failed} failed, {len(rows) - fine - failed} not tried", style)


class _Services(NamedTuple):
    """Addresses of our Services in one family."""

    plain: str
    """Leads to pod one."""
    sticky: str
    """Leads to both pods, with session affinity."""
    local: str
    """Leads to pod one and to another node, with policies Local."""
    node_port: int
    """Of `plain`."""
    local_node_port: int


class _Said(NamedTuple):
    """What a pod of ours answered."""

    server: str
    client: str


async def try_connections(config: ProxyConfig, client: Client | None = None) -> Connectivity:
    """Make pods and Services on this node, and connect to them.

    Args:
        config: its directories of manifests are those that the running process watches; without
            any, it is asked for them.
        client: reaches the running process.

    Raises:
        NotRunningError: no steersman process runs here.
        QuestionError: it watches no directory, or something cannot be made on this node.
    """
    client, end = client or Client(), asyncio.get_running_loop().time() + _ALL_SECONDS
    world = await world_of_process(client)
    folder = await asyncio.to_thread(find_folder, config.steersman.manifests, client)
    await asyncio.to_thread(remove_leftovers, [folder])
    node = Names(world).here
    translated = mode_of(world, config, SubprocessExec()).requirements().delivery == "translated"
    tried: list[Tried] = []
    try:
        async with AsyncExitStack() as stack:
            pods = [
                await stack.enter_async_context(pod_of_ours(each)) for each in pod_addresses(world)
            ]
            outside = await stack.enter_async_context(client_outside())
            asking, one, two = pods
            families = []
            for family in world.plan.settings.families:
                if _own_addresses(world, family) and all(pod.has(family) for pod in pods):
                    families.append(family)
                else:
                    reason = "this node has no address of its own in this family"
                    tried.append(Tried("all", family.kubernetes, "not tried", reason))
            for pod in (one, two):
                await stack.enter_async_context(answering(pod))
            services = {family: new_services(world, family) for family in families}
            documents = [
                each for f in families for each in objects_of(services[f], f, node, one, two)
            ]
            await stack.enter_async_context(written(folder, documents))
            await served([f"{each['metadata']['name']}" for each in documents], client)
            for family in families:
                places = Places(asking, one, outside, at_socket=translated)
                tried += await try_family(world, family, services[family], places, end)
    except OSError as error:
        raise QuestionError(
            f"pods of our own cannot be made here: {error.strerror or error}; this needs root (or "
            "CAP_SYS_ADMIN and CAP_NET_ADMIN) on the node"
        ) from error
    return Connectivity(source=world.origin.text, node=node, mode=world.mode, tried=tuple(tried))


class Places(NamedTuple):
    """Where packets come from and go to."""

    asking: Place
    """A pod that only asks."""
    one: Place
    """The pod that most Services lead to."""
    outside: Place
    at_socket: bool
    """Whether the mode balances sockets of this machine: it takes such a client for a pod."""


# Pods and Services


def find_folder(manifests: tuple[str, ...], client: Client) -> Path:
    """Return a directory of manifests of the running process, as this command sees it.

    Raises:
        QuestionError: it watches none, or cannot be asked.
    """
    if not manifests:
        (document,) = json.loads(client.get("/configz")).values()
        manifests = tuple((document.get("steersman") or {}).get("manifests") or ())
    if not manifests:
        raise QuestionError(
            "the running process reads an API server, where this command makes no Services yet: "
            "it works with a process that watches --manifests"
        )
    path = Path(manifests[0])
    pid = client.server_pid()
    if not path.is_dir() and pid:  # relative, or in the mount namespace of the process
        path = Path(f"/proc/{pid}/root{path}" if path.is_absolute() else f"/proc/{pid}/cwd/{path}")
    if not path.is_dir():
        raise QuestionError(f"{manifests[0]} is not a directory that is seen from here")
    return path


def remove_leftovers(folders: Iterable[Path]) -> list[Path]:
    """Remove files of runs that were killed; return them."""
    found = []
    for folder in folders:
        for path in folder.glob(f"{NAMESPACE}-*.yaml"):
            match = _OWN_FILE.fullmatch(path.name)
            if match and not Path(f"/proc/{match[1]}").exists():
                with suppress(OSError):
                    path.unlink()
                    found.append(path)
    return found


def pod_addresses(world: World) -> list[dict[Family, str]]:
    """Return unused addresses of three pods, in the range of pods if there is one."""
    used = {end.ip for plan in world.plan.services.values() for end in plan.reachable}
    pods: list[dict[Family, str]] = [{}, {}, {}]
    for family in world.plan.settings.families:
        cidr = world.plan.settings.family(family).detector.cidr or str(
            ip_network((_VIPS[family], 16 if family is Family.IPV4 else 64))
        )
        net = ip_network(cidr)
        last, size = int(net.broadcast_address) - 1, min(net.num_addresses - 2, 1 << 12)
        found = dict[str, None]()
        while len(found) < len(pods):
            address = str(ip_address(last - secrets.randbelow(max(size, len(pods)))))
            if address not in used:
                found[address] = None
        for pod, address in zip(pods, found, strict=True):
            pod[family] = address
    return pods


def new_services(world: World, family: Family) -> _Services:
    """Return addresses and node ports that no Service has."""
    taken = {
        frontend.port
        for plan in world.plan.services.values()
        for frontend in plan.frontends
        if not frontend.address
    }
    vips, ports = dict[str, None](), dict[int, None]()
    while len(vips) < 3:
        vips[str(ip_address(_VIPS[family] + 1 + secrets.randbelow((1 << 16) - 2)))] = None
    while len(ports) < 2:
        port = 30_000 + secrets.randbelow(2768)
        if port not in taken:
            ports[port] = None
    plain, sticky, local = vips
    return _Services(plain, sticky, local, *ports)


def objects_of(
    own: _Services, family: Family, node: str, one: Place, two: Place
) -> Iterator[dict[str, Any]]:
    """Yield our Services of a family, each followed by its EndpointSlice."""
    word = family.kubernetes.lower()
    first, second = one.addresses[family], two.addresses[family]

    def service(name: str, address: str, node_port: int = 0, **spec: Any) -> dict[str, Any]:
        ports = [
            {"name": p.lower(), "port": _PORT, "targetPort": _TARGET_PORT, "protocol": p}
            | ({"nodePort": node_port} if node_port else {})
            for p in ("TCP", "UDP")
        ]
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": f"{name}-{word}", "namespace": NAMESPACE},
            "spec": {
                "type": "NodePort" if node_port else "ClusterIP",
                "clusterIP": address,
                "clusterIPs": [address],
                "ipFamilies": [family.kubernetes],
                "ports": ports,
                **spec,
            },
        }

    def slice_(name: str, *ends: tuple[str, str]) -> dict[str, Any]:
        return {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": f"{name}-{word}",
                "namespace": NAMESPACE,
                "labels": {"kubernetes.io/service-name": f"{name}-{word}"},
            },
            "addressType": family.kubernetes,
            "ports": [
                {"name": p.lower(), "port": _TARGET_PORT, "protocol": p} for p in ("TCP", "UDP")
            ],
            "endpoints": [
                {"addresses": [address], "nodeName": where, "conditions": {"ready": True}}
                for address, where in ends
            ],
        }

    policies = {"internalTrafficPolicy": "Local", "externalTrafficPolicy": "Local"}
    yield service("plain", own.plain, own.node_port)
    yield slice_("plain", (first, node))
    yield service("sticky", own.sticky, sessionAffinity="ClientIP")
    yield slice_("sticky", (first, node), (second, node))
    yield service("local", own.local, own.local_node_port, **policies)
    yield slice_("local", (first, node), (_ELSEWHERE[family], f"not-{node}"))


@asynccontextmanager
async def written(folder: Path, documents: list[dict[str, Any]]) -> AsyncIterator[None]:
    """Have a file of manifests in a directory for a while.

    Raises:
        QuestionError: it cannot be written.
    """
    path = folder / f"{NAMESPACE}-{os.getpid()}.yaml"
    hidden = folder / f".{path.name}"
    text = "".join(f"---\n{json.dumps(each)}\n" for each in documents)
    try:
        hidden.write_text(text)
        hidden.rename(path)
        yield
    except PermissionError as error:
        raise QuestionError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        for each in (hidden, path):
            each.unlink(missing_ok=True)


async def served(names: Iterable[str], client: Client) -> None:
    """Wait until the kernel has our Services.

    Raises:
        QuestionError: it takes too long.
    """
    for name in sorted(set(names)):
        path, said = f"/connections?service={NAMESPACE}/{name}&most=0", ""
        try:
            async with asyncio.timeout(_SERVED_SECONDS):
                while True:
                    try:
                        await asyncio.to_thread(client.get, path)
                        break
                    except QuestionError as error:
                        said = str(error)
                    await asyncio.sleep(_LOOK)
        except TimeoutError as error:
            raise QuestionError(
                f"the running process does not serve Service {NAMESPACE}/{name} after "
                f"{_SERVED_SECONDS:g} s: {said}; `steersman status` says more"
            ) from error


# Pods that answer


class _Datagrams(asyncio.DatagramProtocol):
    """Answers datagrams with its own address and that of the sender."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        del data
        assert self._transport is not None
        self._transport.sendto(json.dumps([self._address, addr[0]]).encode(), addr)


@asynccontextmanager
async def answering(pod: Place) -> AsyncIterator[None]:
    """Have a pod answer by TCP and UDP for a while."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        for address in pod.addresses.values():

            async def answer(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, own: str = address
            ) -> None:
                del reader
                writer.write(json.dumps([own, writer.get_extra_info("peername")[0]]).encode())
                with suppress(OSError):
                    await writer.drain()
                writer.close()

            stream = await asyncio.to_thread(_bound, pod, address, socket.SOCK_STREAM)
            server = await asyncio.start_server(answer, sock=stream)
            stack.callback(server.close)
            datagrams = await asyncio.to_thread(_bound, pod, address, socket.SOCK_DGRAM)
            transport, _ = await loop.create_datagram_endpoint(
                partial(_Datagrams, address), sock=datagrams
            )
            stack.callback(transport.close)
        yield


def _bound(pod: Place, address: str, kind: socket.SocketKind) -> socket.socket:
    """Return a socket in a pod, bound to its address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET

    def make() -> socket.socket:
        sock = socket.socket(family, kind)
        sock.setblocking(False)
        if family == socket.AF_INET6:  # usable at once, before duplicate address detection
            sock.setsockopt(socket.IPPROTO_IPV6, 78, 1)  # IPV6_FREEBIND
        sock.bind((address, _TARGET_PORT))
        return sock

    return call_inside(pod.netns, make)


# Connections


class _Asking(NamedTuple):
    """Questions to our Services of one family; each returns what went wrong, or ""."""

    family: Family
    own: _Services
    places: Places

    async def answers(self, place: Place, address: str, port: int, protocol: str = "TCP") -> str:
        """Check that pod one answers."""
        said = await ask(place, self.family, address, port, protocol)
        right = self.places.one.addresses[self.family]
        return "" if said.server == right else f"{said.server} answered instead of {right}"

    async def same_endpoint(self) -> str:
        """Check that a client gets the same pod each time."""
        servers = set()
        for _ in range(_TIMES):
            said = await ask(self.places.asking, self.family, self.own.sticky, _PORT)
            servers.add(said.server)
        return "" if len(servers) == 1 else f"one client reached {' and '.join(sorted(servers))}"

    async def stays_here(self, place: Place, address: str, port: int, source: str = "") -> str:
        """Check that no connection leaves for the endpoint elsewhere, and which client is seen."""
        for _ in range(_TIMES):
            said = await ask(place, self.family, address, port)
            if source and said.client != source:
                return f"the endpoint saw {said.client} instead of {source}"
        return ""


async def try_family(
    world: World, family: Family, own: _Services, places: Places, end: float
) -> list[Tried]:
    """Try all kinds of connections of one family, as long as there is time (of the loop)."""
    asking, one, outside, at_socket = places
    questions, node_address = _Asking(family, own, places), _node_address(world, family)
    without = "" if node_address else f"the node has no {family.kubernetes} address for node ports"
    if not outside.has(family):
        without = f"no client with {family.kubernetes} can be made"
    hidden = without
    if world.plan.settings.traits.terminates_connections:
        hidden = without or "endpoints see the node in this mode"
    elif at_socket:
        hidden = without or "a client on this machine counts as a pod in this mode"

    checks: list[tuple[str, str, Callable[[], Awaitable[str]]]] = []
    for who, place, impossible, address, port in (
        ("pod to cluster IP", asking, "", own.plain, _PORT),
        ("node to cluster IP", NODE, "", own.plain, _PORT),
        ("outside to node port", outside, without, node_address, own.node_port),
    ):
        for protocol in ("TCP", "UDP"):
            check = partial(questions.answers, place, address, port, protocol)
            checks.append((f"{who}, {protocol}", impossible, check))
    seen = (outside, node_address, own.local_node_port, outside.addresses.get(family, ""))
    checks += [
        ("pod to itself by its Service", "", partial(questions.answers, one, own.plain, _PORT)),
        ("session affinity", "", questions.same_endpoint),
        ("internal policy Local", "", partial(questions.stays_here, asking, own.local, _PORT)),
        ("external policy Local, client seen", hidden, partial(questions.stays_here, *seen)),
    ]
    return [await _tried(*each, family=family, end=end) for each in checks]


async def _tried(
    what: str, impossible: str, check: Callable[[], Awaitable[str]], *, family: Family, end: float
) -> Tried:
    """Carry out a check, which returns why it failed; "" if it did not."""
    late = asyncio.get_running_loop().time() > end
    if impossible or late:
        reason = impossible or f"{_ALL_SECONDS:g} s are over"
        return Tried(what, family.kubernetes, "not tried", reason)
    try:
        async with asyncio.timeout(_CHECK_SECONDS):
            wrong = await check()
    except TimeoutError:
        wrong = f"no answer within {_TRY_SECONDS:g} s"
    except OSError as error:
        wrong = os.strerror(error.errno) if error.errno else str(error)
    return Tried(what, family.kubernetes, "failed" if wrong else "ok", wrong)


async def ask(
    place: Place, family: Family, address: str, port: int, protocol: str = "TCP"
) -> _Said:
    """Connect from a place, and return what the pod answers.

    Raises:
        TimeoutError: there is no answer.
        OSError: the connection was refused, or there is no route.
    """
    loop = asyncio.get_running_loop()
    number = socket.AF_INET6 if family is Family.IPV6 else socket.AF_INET
    kind = socket.SOCK_STREAM if protocol == "TCP" else socket.SOCK_DGRAM
    sock = await asyncio.to_thread(call_inside, place.netns, partial(socket.socket, number, kind))
    with contextlib.closing(sock):
        sock.setblocking(False)
        async with asyncio.timeout(_TRY_SECONDS):
            if own := place.addresses.get(family):
                if number == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, 78, 1)  # IPV6_FREEBIND
                sock.bind((own, 0))
            await loop.sock_connect(sock, (address, port))
            if protocol != "TCP":
                await loop.sock_sendall(sock, b"?")
            answer = await loop.sock_recv(sock, 1024)
    if not answer:
        raise ConnectionResetError(104, "the connection was closed without an answer")
    return _Said(*json.loads(answer))


def _node_address(world: World, family: Family) -> str:
    """Return an address of this node that serves node ports; "" if it has none."""
    own = world.plan.settings.family(family)
    found = _own_addresses(world, family)
    if own.node_port_addresses is not None:
        found = [each for each in found if each in own.node_port_addresses]
    return own.node_ip if own.node_ip in found else next(iter(found), "")


def _own_addresses(world: World, family: Family) -> list[str]:
    """Return the addresses of this node that others can reach."""
    addresses = world.plan.settings.family(family).local_addresses
    return [each for each in addresses if not is_loopback(each) and not special_range(each)]
