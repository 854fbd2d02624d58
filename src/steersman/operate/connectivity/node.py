"""Try Services of our own on this node, with pods that are namespaces of this process.

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
import json
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, NamedTuple

from steersman.config import ProxyConfig
from steersman.host.exec import SubprocessExec
from steersman.host.netns import call_inside
from steersman.model.addresses import family_of, is_loopback, special_range
from steersman.model.names import Family, Protocol
from steersman.model.world import World
from steersman.operate.answer import QuestionError
from steersman.operate.client import Client
from steersman.operate.connectivity.answer import NAMESPACE, Connectivity, Tried
from steersman.operate.connectivity.pod import (
    TIMES,
    Check,
    answering,
    bound_sockets,
    try_check,
)
from steersman.operate.dump import mode_of
from steersman.operate.load import world_of_process
from steersman.operate.names import Names
from steersman.operate.places import NODE, Place, client_outside, pod_of_ours
from steersman.operate.probe_packet import open_socket

_OWN_FILE = re.compile(rf"{NAMESPACE}-(\d+)\.yaml")
_TARGET_PORT, _PORT = 8080, 80
_ONE = "pod one"
_SERVED_SECONDS = 20.0
_ALL_SECONDS = 50.0
"""After that nothing more is tried, so that a run ends within a minute."""
_LOOK = 0.1  # seconds between two looks whether the Services are served
_ELSEWHERE = {Family.IPV4: "198.18.255.254", Family.IPV6: "2001:2:0:ffff::fe"}
"""Endpoints on another node, which a policy Local must leave alone; nobody has these addresses."""
_VIPS = {Family.IPV4: 0xC6120000, Family.IPV6: 0x2001000200000001 << 64}
"""198.18.0.0/16 and 2001:2:0:1::/64, reserved for tests of networks (RFC 2544, RFC 5180)."""


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
            for pod, name in ((one, _ONE), (two, "pod two")):
                made = partial(bound_sockets, _TARGET_PORT)
                sockets = await asyncio.to_thread(call_inside, pod.netns, made)
                await stack.enter_async_context(answering(sockets, name, ""))
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
            "the running process reads an API server: --kubeconfig (or --in-cluster) tries the "
            "nodes of its cluster; only a process that watches --manifests can be tried alone"
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


# Connections


async def try_family(
    world: World, family: Family, own: _Services, places: Places, end: float
) -> list[Tried]:
    """Try all kinds of connections of one family, as long as there is time (of the loop)."""
    asking, one, outside, at_socket = places
    node_address = _node_address(world, family)
    without = "" if node_address else f"the node has no {family.kubernetes} address for node ports"
    if not outside.has(family):
        without = f"no client with {family.kubernetes} can be made"
    hidden = without
    if world.plan.settings.traits.terminates_connections:
        hidden = without or "endpoints see the node in this mode"
    elif at_socket:
        hidden = without or "a client on this machine counts as a pod in this mode"

    checks: list[tuple[str, str, Place, Check]] = []
    for who, place, impossible, address, port in (
        ("pod to pod", asking, "", one.addresses[family], _TARGET_PORT),
        ("pod to cluster IP", asking, "", own.plain, _PORT),
        ("node to cluster IP", NODE, "", own.plain, _PORT),
        ("outside to node port", outside, without, node_address, own.node_port),
    ):
        for protocol in ("TCP", "UDP"):
            check = Check(address, port, protocol, server=_ONE)
            checks.append((f"{who}, {protocol}", impossible, place, check))
    sticky = Check(own.sticky, _PORT, times=TIMES, same=True)
    local = Check(own.local, _PORT, times=TIMES, server=_ONE)
    seen = Check(node_address, own.local_node_port, times=TIMES, server=_ONE, seen=True)
    checks += [
        ("pod to itself by its Service", "", one, Check(own.plain, _PORT, server=_ONE)),
        ("session affinity", "", asking, sticky),
        ("internal policy Local", "", asking, local),
        ("external policy Local, client seen", hidden, outside, seen),
    ]
    tried = []
    for what, impossible, place, check in checks:
        late = asyncio.get_running_loop().time() > end
        if reason := impossible or (f"{_ALL_SECONDS:g} s are over" if late else ""):
            tried.append(Tried(what, family.kubernetes, "not tried", reason))
        else:
            reason = await try_check(check, partial(_socket_in, place))
            tried.append(Tried(what, family.kubernetes, "failed" if reason else "ok", reason))
    return tried


def _socket_in(place: Place, check: Check) -> socket.socket:
    """Return a socket in a place, with its address if it has one of the family; it blocks."""
    source = place.addresses.get(family_of(check.address), "")
    made = partial(open_socket, Protocol(check.protocol), check.address, source)
    return call_inside(place.netns, made)


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
