"""Checks of the pods of this node: their addresses, devices, neighbours, routes and sockets.

The rules may be right and a pod still be cut off: two pods have one address, a device is down, the
bridge sends frames to another port, no process listens where the EndpointSlice says. All of that is
read, in the namespaces of the pods and in the node's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from typing import NamedTuple

from steersman.host.link_state import SILENT, Filter, LinkState, Neighbour, link_state
from steersman.host.listening import SELF, ListeningSocket, listening_sockets
from steersman.host.netlink import NETLINK_ROUTE, Netlink
from steersman.host.netns import call_inside, linked_namespaces
from steersman.host.rtnetlink import LIST_ADDRESSES, RT_SCOPE_UNIVERSE, parse_address
from steersman.model.addresses import family_of, is_loopback, join_host_port
from steersman.model.names import Family, Protocol
from steersman.model.world import World
from steersman.netfilter.nft.tables import list_tables
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.facts import ways
from steersman.operate.doctor.processes import ELSEWHERE
from steersman.operate.doctor.result import (
    Cause,
    CheckResult,
    Found,
    notice,
    ok,
    skipped,
    unknown,
    warning,
)
from steersman.operate.doctor.tries import is_pod
from steersman.operate.places import CLIENT_DEVICE
from steersman.operate.trace_lookups import look_up
from steersman.operate.trace_loss import Hop

_SETTLED = 1.5
"""Seconds before neighbours are looked at: dials, which begin now, ask for them."""
_FIXED = ("NOARP", "PERMANENT")
"""States of entries that somebody has written."""
_USUAL = frozenset(
    {"noqueue", "mq", "pfifo_fast", "pfifo", "fq_codel", "fq", "fq_pie", "cake", "noop"}
)
"""Queueing disciplines that keep no packet from a pod on purpose."""
_EVERY = ("0.0.0.0", "::")
_EXAMPLES = 3


class PodView(NamedTuple):
    """A pod of this node, as its network namespace shows it."""

    device: str
    """The node's end of its veth."""
    addresses: frozenset[str]
    state: LinkState
    listening: frozenset[ListeningSocket]
    ways: Mapping[str, Hop]
    """By destination."""
    tables: tuple[str, ...] = ()
    """Tables of netfilter in the namespace."""

    def __str__(self) -> str:
        """Name it for people."""
        if not self.addresses:
            return f"the network namespace behind {self.device}"
        return f"the pod {' '.join(sorted(self.addresses))}"


class Views(NamedTuple):
    """The node and its pods."""

    pods: tuple[PodView, ...]
    unseen: int
    """Pods whose namespaces cannot be seen from here."""
    node: LinkState


class Asked(NamedTuple):
    """What the question is about."""

    endpoints: Mapping[str, Collection[tuple[int, Protocol]]]
    """Ports by address, of endpoints on this node."""
    services: frozenset[str]
    """Addresses of Services."""
    nodes: Mapping[Family, str]
    """An address of this node by family."""
    own: frozenset[str]
    """All addresses of this node."""


async def views(context: Context) -> Views:
    """Look at all pods of this node, when connections to them have begun."""
    await asyncio.sleep(_SETTLED)
    asked = _asked(context)
    return await asyncio.to_thread(_look, (*asked.services, *asked.nodes.values()))


def _look(destinations: Collection[str]) -> Views:
    pods = []
    # A client of doctor's own is no pod, and is not found as one.
    clients = sum(name.startswith(CLIENT_DEVICE) for _, name in socket.if_nameindex())
    linked, unseen = linked_namespaces()
    for path, number in linked.items():
        with suppress(OSError):  # it has ended meanwhile
            device = socket.if_indextoname(number)
            pods.append(call_inside(path, partial(_view, device, destinations)))
    return Views(tuple(pods), max(unseen - clients, 0), link_state())


def _view(device: str, destinations: Collection[str]) -> PodView:
    with Netlink(NETLINK_ROUTE, buffer=1 << 18) as netlink:
        addresses = frozenset(
            str(ip_address(each.packed))
            for each in map(parse_address, netlink.dump(LIST_ADDRESSES))
            if each.packed and each.scope == RT_SCOPE_UNIVERSE
        )
    families = {family_of(each) for each in addresses}
    found = {each: look_up(each) for each in destinations if family_of(each) in families}
    listening, tables = frozenset(listening_sockets()), [f"table {a} {b}" for a, b in list_tables()]
    for family, name in (("ip", "iptables-legacy"), ("ip6", "ip6tables-legacy")):
        with suppress(OSError):
            names = (SELF / f"net/{family}_tables_names").read_text().split()
            tables += [f"table {each} of {name}" for each in names]
    return PodView(device, addresses, link_state(), listening, found, tuple(tables))


def _asked(context: Context) -> Asked:
    endpoints: dict[str, set[tuple[int, Protocol]]] = {}
    for plan in context.plans:
        for each in plan.reachable:
            if each.local:
                protocol = plan.key.name.protocol
                endpoints.setdefault(each.ip, set()).add((each.port, protocol))
    services = frozenset(f.address for plan in context.plans for f in plan.frontends) - {""}
    settings, nodes = context.world.plan.settings, {}
    every: set[str] = set()
    for family in context.families:
        own = [ip for ip in settings.family(family).local_addresses if not is_loopback(ip)]
        every.update(own)
        if own:
            nodes[family] = own[0]
    return Asked(endpoints, services, nodes, frozenset(every) - services)


async def pod_networks(context: Context) -> Found:
    """Check that the pods behind the endpoints can get packets, answer them, and listen."""
    asked, to_endpoint = _asked(context), await context.once(ways)
    nothing = skipped("no endpoint is on this node")
    if not asked.endpoints and not any(way.gateway for way in to_endpoint.values()):
        return nothing
    found = await context.once(views)
    next_hops = [*_of_next_hops(to_endpoint, found.node.neighbours)]
    if not asked.endpoints:
        return next_hops or nothing
    results = [
        *next_hops,
        *_of_addresses(asked, found, to_endpoint, context.world),
        *_of_links(asked, found),
        *_of_neighbours(asked, found),
        *_of_routes(asked, found, to_endpoint, context.world),
        *_of_sockets(asked, found),
        *_of_rules(found),
    ]
    if found.unseen:
        results.append(unknown(f"{found.unseen} pods of this node cannot be seen: {ELSEWHERE}"))
    count = len(asked.endpoints)
    return results or ok(f"the pods of all {count} endpoints on this node are connected")


def _suspect(text: str, shows: str, remedy: str = "", cause: int = Cause.PATH - 3) -> CheckResult:
    """Return a warning; `shows` is the command that shows it."""
    return warning(text, f"shown by: {shows}", remedy=remedy, cause=cause, suspect=True)


def _of_addresses(
    asked: Asked, found: Views, to: Mapping[str, Hop], world: World
) -> Iterator[CheckResult]:
    devices: dict[str, list[str]] = {}
    for pod in found.pods:
        for address in pod.addresses:
            devices.setdefault(address, []).append(pod.device)
    for address, those in sorted(devices.items()):
        if len(those) > 1 and is_pod((address,), those[0], world):
            yield _suspect(
                f"two pods of this node have the address {address}: those at "
                f"{' and '.join(sorted(those))}",
                "ip addr, in both pods",
                "delete one of the two pods: the CNI plugin gave one address twice",
            )
    for address in asked.endpoints:
        holders = devices.get(address, ())
        own = address in to and to[address].local
        if len(holders) == 1 and own:
            yield _suspect(
                f"the endpoint's address {address} is an address of this node, too: its packets "
                "do not leave the node",
                f"ip route get {address}",
                "remove the address from the node: `ip addr`",
            )
        elif not holders and not own and found.pods and not found.unseen:
            yield _suspect(
                f"no pod of this node has the address {address} of an endpoint",
                f"ip route get {address}; ip addr, in the pods",
                "the pod has lost its address, or has ended: see the CNI plugin, and restart it",
            )
    for pod in found.pods:
        for address in sorted(asked.services & pod.addresses):
            yield _suspect(
                f"{pod} has the Service's own address {address}: its connections do not leave it",
                "ip addr, in the pod",
                "remove the address from the pod",
            )
        for address in sorted(asked.own & pod.addresses):
            yield _suspect(
                f"{pod} has {address}, an address of this node: its answers to the node do not "
                "leave it",
                "ip addr, in the pod",
                "remove the address from the pod",
            )


def _of_links(asked: Asked, found: Views) -> Iterator[CheckResult]:
    for pod in found.pods:
        if not pod.addresses & asked.endpoints.keys():
            continue
        down = [each.name for each in pod.state.links.values() if each.name != "lo" and not each.up]
        port = found.node.links.get(pod.device)
        bridge = found.node.links.get(port.master) if port else None
        if bridge is not None and not bridge.up:
            yield _suspect(
                f"{bridge.name}, to which {pod} is connected, is down",
                f"ip link show {bridge.name}",
                f"`ip link set {bridge.name} up`; its routes have to be made again",
            )
            return
        if down:
            yield _suspect(
                f"the device {down[0]} in {pod} is down", f"ip link show {down[0]}, in the pod"
            )
        if port is not None and not port.up:
            yield _suspect(
                f"the device {port.name} of {pod} is down",
                f"ip link show {port.name}",
                f"`ip link set {port.name} up`",
            )
        elif port is not None and port.state not in ("", "forwarding"):
            yield _suspect(
                f"the port {port.name} of the bridge, that of {pod}, is {port.state}: frames are "
                "dropped",
                f"bridge link show dev {port.name}",
                f"`bridge link set dev {port.name} state 3`",
            )
    isolated = sorted(each.name for each in found.node.links.values() if each.isolated)
    if len(isolated) > 1:
        yield notice(
            f"the ports {_listed(isolated)} of a bridge are isolated: frames between them are "
            "dropped",
            f"shown by: bridge -d link show dev {isolated[0]}",
            remedy=f"`bridge link set dev {isolated[0]} isolated off`, and see the CNI plugin",
        )


def _of_neighbours(asked: Asked, found: Views) -> Iterator[CheckResult]:
    entries = found.node.neighbours
    for pod in found.pods:
        own = {each.mac for each in pod.state.links.values() if each.name != "lo"}
        mine = pod.addresses & asked.endpoints.keys()
        if not mine:
            continue
        for each in entries:
            if each.address in mine and each.state in SILENT:
                at_device = [_words(f) for f in found.node.filters if f.device == pod.device]
                why = "".join(f"; {words}" for words in at_device if words)
                port = found.node.links.get(pod.device)
                if port and each.device not in (port.name, port.master):
                    why += f"; its device {port.name} does not belong to {each.device}"
                yield _suspect(
                    f"{pod} does not answer when this node asks for its link-layer address on "
                    f"{each.device} (neighbour {each.state}){why}",
                    f"ip neigh show {each.address}",
                )
            elif each.address in mine and each.mac and each.mac not in own:
                yield _suspect(
                    f"the neighbour {each.address} on {each.device} has the link-layer address "
                    f"{each.mac} ({each.state}), but {pod} has {' '.join(sorted(own))}",
                    f"ip neigh show {each.address}",
                    f"`ip neigh del {each.address} dev {each.device}`",
                )
            elif _leads_away(each, own, pod, found):
                yield _suspect(
                    f"a static entry of the bridge sends frames for {pod} ({each.mac}) to the "
                    f"port {each.device} instead of {pod.device}",
                    f"bridge fdb show | grep {each.mac}",
                    f"`bridge fdb del {each.mac} dev {each.device} master`",
                )


def _of_next_hops(
    to: Mapping[str, Hop], neighbours: Collection[Neighbour]
) -> Iterator[CheckResult]:
    """Note gateways to endpoints elsewhere that do not answer."""
    states = {(each.device, each.address): each.state for each in neighbours}
    silent: dict[tuple[str, str, str], list[str]] = {}
    for address, way in to.items():
        if way.gateway and states.get((way.device, way.gateway)) in SILENT:
            silent.setdefault((way.device, way.gateway, way.rule), []).append(address)
    for (device, gateway, rule), addresses in silent.items():
        by = f", by the policy rule {rule!r}" if rule else ""
        yield notice(
            f"the next hop {gateway} on {device} does not answer ARP or neighbour discovery "
            f"({states[device, gateway]}): it leads to {_listed(addresses)}{by}",
            f"shown by: ip neigh show {gateway}",
            remedy="is that node up, and is the route right? The CNI plugin makes it",
            cause=Cause.PATH,
        )


def _leads_away(each: Neighbour, own: Collection[str], pod: PodView, found: Views) -> bool:
    """Return whether an entry of a bridge leads frames for a pod to another port."""
    port = found.node.links.get(each.device)
    return (
        not each.address
        and each.mac in own
        and each.state in _FIXED
        and each.device != pod.device
        and port is not None
        and bool(port.state)
    )


def _of_routes(
    asked: Asked, found: Views, to: Mapping[str, Hop], world: World
) -> Iterator[CheckResult]:
    for pod in found.pods:
        port = found.node.links.get(pod.device)
        for address in pod.addresses & to.keys():
            way = to[address]
            expected = {pod.device, port.master if port else ""}
            if not way.local and not way.trouble and way.device not in expected:
                yield notice(
                    f"packets to the endpoint {address} leave by {way.device}, not by "
                    f"{pod.device}, the device of its pod",
                    f"shown by: ip route get {address}",
                    remedy="see the CNI plugin's routes: `ip route`",
                    cause=Cause.PATH - 2,
                )
        serves = bool(pod.addresses & asked.endpoints.keys())
        # Other namespaces, such as those of virtual machines, need not reach Services.
        asks = is_pod(pod.addresses, pod.device, world)
        silent = {each.address for each in pod.state.neighbours if each.state in SILENT}
        for destination, way in pod.ways.items():
            if way.trouble and (serves or (asks and destination in asked.services)):
                what = "the Service's address" if destination in asked.services else "this node"
                yield _suspect(
                    f"{pod} has no route to {what} {destination}: {way.trouble}",
                    f"ip route get {destination}, in the pod",
                    "see the routes in the pod: the CNI plugin makes them",
                )
                break
            if way.gateway in silent:
                yield _suspect(
                    f"the gateway {way.gateway} of {pod} does not answer there",
                    f"ip neigh show {way.gateway}; ip route, in the pod",
                    "see the routes in the pod: the gateway may be wrong",
                )
                break


def _of_sockets(asked: Asked, found: Views) -> Iterator[CheckResult]:
    for address, ports in asked.endpoints.items():
        holders = [pod for pod in found.pods if address in pod.addresses]
        if len(holders) != 1:
            continue
        (pod,) = holders
        for port, protocol in sorted(ports):
            if protocol is Protocol.SCTP:
                continue
            there = [each for each in pod.listening if each.protocol is protocol]
            at_port = sorted(each.address for each in there if each.port == port)
            if any(each in (*_EVERY, address) for each in at_port):
                continue
            others = sorted({each.port for each in there})[:_EXAMPLES]
            if at_port:
                words = f"only on {', '.join(at_port)}"
                remedy = "let the program listen on every address (0.0.0.0, or [::])"
            elif others:
                words = f"on {', '.join(map(str, others))}"
                remedy = "is targetPort of the Service right?"
            else:
                words, remedy = "on no port", "the program does not run, or does not serve"
            yield _suspect(
                f"no process of {pod} listens on {join_host_port(address, port)}/{protocol}, an "
                f"endpoint: it listens {words}",
                f"ss -ln{protocol[0].lower()}, in the pod",
                remedy,
                Cause.ENDPOINT - 1,
            )


def _of_rules(found: Views) -> Iterator[CheckResult]:
    """Note pods with rules of their own, as a service mesh makes them; those of equal ones once."""
    pods: dict[tuple[str, ...], list[str]] = {}
    for pod in found.pods:
        if pod.tables:
            pods.setdefault(pod.tables, []).append(str(pod))
    for tables, names in pods.items():
        yield notice(
            f"{_listed(names)}: rules in the pod may drop or redirect packets: {', '.join(tables)}",
            "shown by: nft list ruleset, in the pod",
            remedy="see who made them: a service mesh, or a program of the pod",
            cause=Cause.PATH - 1,
        )


async def devices(context: Context) -> Found:
    """Note programs and queues at devices of this node that may drop packets."""
    found = await context.once(views)
    results = []
    by_program: dict[tuple[str, str, str], list[str]] = {}
    for each in found.node.filters:
        if _words(each):
            by_program.setdefault((each.kind, each.name, each.where), []).append(each.device)
    for (kind, name, where), names in by_program.items():
        results.append(_of_filter(Filter(_listed(names), kind, name, where), names[0]))
    if xdp := sorted(port.name for port in found.node.links.values() if port.xdp):
        results.append(
            notice(
                f"a program of XDP sees packets that come in by {_listed(xdp)} first",
                f"shown by: ip -d link show {xdp[0]}",
                remedy="ask whose it is, and what it drops: `bpftool net`",
                cause=Cause.NODE + 9,
            )
        )
    return results or ok("no program of tc or XDP, and no unusual queue, is at a device")


def _words(each: Filter) -> str:
    """Say what a filter or a queue may do; "" if it is a usual one."""
    if not each.where:
        words = f"the queueing discipline {each.kind} at {each.device} may delay or drop packets"
        return "" if each.kind in _USUAL else words
    way = "come in" if each.where == "ingress" else "leave"
    program = f"{each.kind} {each.name}".strip()
    return f"a program of tc ({program}) sees packets that {way} by {each.device}"


def _of_filter(each: Filter, first: str) -> CheckResult:
    command = f"filter show dev {first} {each.where}" if each.where else f"qdisc show dev {first}"
    return notice(
        _words(each),
        f"shown by: tc -s {command}",
        remedy="ask who made it, and what it drops",
        cause=Cause.NODE + 9,
    )


def _listed(names: Collection[str]) -> str:
    first = ", ".join(sorted(set(names))[:_EXAMPLES])
    more = len(set(names)) - _EXAMPLES
    return f"{first} and {more} more" if more > 0 else first
