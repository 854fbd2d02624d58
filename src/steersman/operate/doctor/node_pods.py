"""Checks of the pods of this node: their addresses, devices, neighbours, routes and sockets.

The rules may be right and a pod still be cut off: two pods have one address, a device is down, the
bridge sends frames to another port, no process listens where the EndpointSlice says. All of that is
read (pod_views.py), in the namespaces of the pods and in the node's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from functools import partial
from typing import NamedTuple

from steersman.host.link_state import SILENT, Filter, Link, LinkState
from steersman.model.addresses import join_host_port
from steersman.model.names import Protocol
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.facts import ways
from steersman.operate.doctor.pod_views import PodView, Views, is_pod, views
from steersman.operate.doctor.processes import ELSEWHERE
from steersman.operate.doctor.result import (
    Cause,
    CheckResult,
    Found,
    Verdict,
    first_of,
    ok,
    result_of,
    skipped,
    unknown,
)
from steersman.operate.trace_loss import Hop

_FIXED = ("NOARP", "PERMANENT")
"""States of entries that somebody has written."""
_USUAL = frozenset(
    {"noqueue", "mq", "pfifo_fast", "pfifo", "fq_codel", "fq", "fq_pie", "cake", "noop"}
)
"""Queueing disciplines that keep no packet from a pod on purpose."""
_EVERY = ("0.0.0.0", "::")
_NAMED = 3
"""Ports and devices that a text names."""


class Scene(NamedTuple):
    """What is compared: the endpoints on this node, and the pods."""

    context: Context
    pods: tuple[PodView, ...]
    complete: bool
    """Whether all pods could be seen."""
    node: LinkState
    ways: Mapping[str, Hop]
    """Of the node, by endpoint."""
    endpoints: Mapping[str, Set[tuple[int, Protocol]]]
    """Ports of the endpoints on this node, by address."""
    services: frozenset[str]
    """Addresses of Services."""
    own: frozenset[str]
    """Addresses of this node."""

    @property
    def serving(self) -> list[PodView]:
        """The pods of endpoints."""
        return [pod for pod in self.pods if not self.endpoints.keys().isdisjoint(pod.addresses)]

    def port_of(self, pod: PodView) -> Link:
        """Return the node's end of a pod's veth."""
        return self.node.links.get(pod.device, Link(pod.device))


async def pod_networks(context: Context) -> Found:
    """Check that the pods behind the endpoints can get packets, answer them, and listen."""
    endpoints: dict[str, set[tuple[int, Protocol]]] = {}
    for plan in context.plans:
        for each in plan.reachable:
            if each.local:
                endpoints.setdefault(each.ip, set()).add((each.port, plan.key.name.protocol))
    to_endpoint = await context.once(ways)
    nothing = skipped("no endpoint is on this node")
    if not endpoints and not any(way.gateway for way in to_endpoint.values()):
        return nothing
    found: Views = await context.once(views)
    services = frozenset(context.service_addresses)
    own = {address for family in context.families for address in context.own_addresses(family)}
    scene = Scene(
        context,
        found.pods,
        bool(found.pods) and not found.unseen,
        found.node,
        to_endpoint,
        endpoints,
        services,
        frozenset(own - services),
    )
    results = [*_silent_next_hops(scene)]
    if not endpoints:
        return results or nothing
    for judge in (_addresses, _devices, _neighbours, _routes, _sockets, _rules):
        results += judge(scene)
    if found.unseen:
        results.append(unknown(f"{found.unseen} pods of this node cannot be seen: {ELSEWHERE}"))
    return results or ok(f"the pod of every endpoint on this node is connected ({len(endpoints)})")


def _result(
    verdict: Verdict, text: str, shows: str, remedy: str = "", cause: int = Cause.PATH - 3
) -> CheckResult:
    """Return a result that may explain a failure; `shows` is the command that shows it."""
    return result_of(verdict, text, f"shown by: {shows}", remedy=remedy, cause=cause, suspect=True)


_warning, _notice = partial(_result, Verdict.WARNING), partial(_result, Verdict.NOTICE)


def _addresses(scene: Scene) -> Iterator[CheckResult]:
    devices: dict[str, list[str]] = {}
    for pod in scene.pods:
        for address in pod.addresses:
            devices.setdefault(address, []).append(pod.device)
    for address, those in sorted(devices.items()):
        if len(those) > 1 and is_pod(scene.context, (address,), those[0]):
            yield _warning(
                f"two pods of this node have the address {address}: those at "
                f"{' and '.join(sorted(those))}",
                "ip addr, in both pods",
                "delete one of the two pods: the CNI plugin gave one address twice",
            )
    for address in scene.endpoints:
        holders = devices.get(address, ())
        own = address in scene.ways and scene.ways[address].local
        if len(holders) == 1 and own:
            yield _warning(
                f"the endpoint's address {address} is an address of this node, too: its packets "
                "do not leave the node",
                f"ip route get {address}",
                "remove the address from the node: `ip addr`",
            )
        elif not holders and not own and scene.complete:
            yield _warning(
                f"no pod of this node has the address {address} of an endpoint",
                f"ip route get {address}; ip addr, in the pods",
                "the pod has lost its address, or has ended: see the CNI plugin, and restart it",
            )
    for pod in scene.pods:
        wrong = [
            f"the Service's own address {each}: its connections do not leave it"
            for each in sorted(scene.services & pod.addresses)
        ]
        wrong += [
            f"{each}, an address of this node: its answers to the node do not leave it"
            for each in sorted(scene.own & pod.addresses)
        ]
        for words in wrong:
            yield _warning(
                f"{pod} has {words}", "ip addr, in the pod", "remove the address from the pod"
            )


def _devices(scene: Scene) -> Iterator[CheckResult]:
    links = scene.node.links
    for pod in scene.serving:
        port = scene.port_of(pod)
        bridge = links.get(port.master)
        if bridge is not None and not bridge.up:
            yield _warning(
                f"{bridge.name}, to which {pod} is connected, is down",
                f"ip link show {bridge.name}",
                f"`ip link set {bridge.name} up`; its routes have to be made again",
            )
            return
        inside = [each for each in pod.state.links.values() if each.name != "lo"]
        if down := [each.name for each in inside if not each.up]:
            yield _warning(
                f"the device {down[0]} in {pod} is down", f"ip link show {down[0]}, in the pod"
            )
        known = {each.mac for each in scene.node.neighbours if each.device == port.name}
        if not port.up:
            yield _warning(
                f"the device {port.name} of {pod} is down",
                f"ip link show {port.name}",
                f"`ip link set {port.name} up`",
            )
        elif port.state not in ("", "forwarding"):
            yield _warning(
                f"the port {port.name} of the bridge, that of {pod}, is {port.state}: frames are "
                "dropped",
                f"bridge link show dev {port.name}",
                f"`bridge link set dev {port.name} state 3`",
            )
        elif not port.floods and known.isdisjoint(each.mac for each in inside):
            off = "flooding is" if port.learns else "flooding and learning are"
            yield _warning(
                f"the bridge does not know that {pod} is behind its port {port.name}, where "
                f"{off} off: frames for it are dropped",
                f"bridge -d link show dev {port.name}; bridge fdb show br {port.master}",
                f"`bridge link set dev {port.name} learning on flood on`",
            )
    isolated = sorted(each.name for each in links.values() if each.isolated)
    if len(isolated) > 1:
        yield _notice(
            f"the ports {_listed(isolated)} of a bridge are isolated: frames between them are "
            "dropped",
            f"bridge -d link show dev {isolated[0]}",
            f"`bridge link set dev {isolated[0]} isolated off`, and see the CNI plugin",
        )


def _neighbours(scene: Scene) -> Iterator[CheckResult]:
    links = scene.node.links
    for pod in scene.serving:
        port = scene.port_of(pod)
        macs = {each.mac for each in pod.state.links.values() if each.name != "lo"}
        for each in scene.node.neighbours:
            serves = each.address in pod.addresses & scene.endpoints.keys()
            if serves and each.state in SILENT:
                why = "".join(
                    f"; {words}"
                    for at_device in scene.node.filters
                    if at_device.device == pod.device and (words := _words(at_device))
                )
                if port.name in links and each.device not in (port.name, port.master):
                    why += f"; its device {port.name} does not belong to {each.device}"
                yield _warning(
                    f"{pod} does not answer when this node asks for its link-layer address on "
                    f"{each.device} (neighbour {each.state}){why}",
                    f"ip neigh show {each.address}",
                )
            elif serves and each.mac and each.mac not in macs:
                yield _warning(
                    f"the neighbour {each.address} on {each.device} has the link-layer address "
                    f"{each.mac} ({each.state}), but {pod} has {' '.join(sorted(macs))}",
                    f"ip neigh show {each.address}",
                    f"`ip neigh del {each.address} dev {each.device}`",
                )
            # An entry of a bridge, at one of its ports.
            elif not each.address and each.mac in macs and each.state in _FIXED:
                other = links.get(each.device)
                if other is not None and other.state and other.name != pod.device:
                    yield _warning(
                        f"a static entry of the bridge sends frames for {pod} ({each.mac}) to the "
                        f"port {each.device} instead of {pod.device}",
                        f"bridge fdb show | grep {each.mac}",
                        f"`bridge fdb del {each.mac} dev {each.device} master`",
                    )


def _silent_next_hops(scene: Scene) -> Iterator[CheckResult]:
    """Note gateways to endpoints elsewhere that do not answer."""
    states = {(each.device, each.address): each.state for each in scene.node.neighbours}
    silent: dict[tuple[str, str, str], list[str]] = {}
    for address, way in scene.ways.items():
        if way.gateway and states.get((way.device, way.gateway)) in SILENT:
            silent.setdefault((way.device, way.gateway, way.rule), []).append(address)
    for (device, gateway, rule), addresses in silent.items():
        by = f", by the policy rule {rule!r}" if rule else ""
        yield _notice(
            f"the next hop {gateway} on {device} does not answer ARP or neighbour discovery "
            f"({states[device, gateway]}): it leads to {_listed(addresses)}{by}",
            f"ip neigh show {gateway}",
            "is that node up, and is the route right? The CNI plugin makes it",
            Cause.PATH,
        )


def _routes(scene: Scene) -> Iterator[CheckResult]:
    for pod in scene.pods:
        expected = pod.device, scene.port_of(pod).master
        for address in pod.addresses & scene.ways.keys():
            way = scene.ways[address]
            if not way.local and not way.trouble and way.device not in expected:
                yield _notice(
                    f"packets to the endpoint {address} leave by {way.device}, not by "
                    f"{pod.device}, the device of its pod",
                    f"ip route get {address}",
                    "see the CNI plugin's routes: `ip route`",
                    Cause.PATH - 2,
                )
        # Other namespaces, such as those of virtual machines, need not reach Services.
        asks = is_pod(scene.context, pod.addresses, pod.device)
        serves = not scene.endpoints.keys().isdisjoint(pod.addresses)
        silent = {each.address for each in pod.state.neighbours if each.state in SILENT}
        for destination, way in pod.ways.items():
            to_service = destination in scene.services
            if way.trouble and (serves or (asks and to_service)):
                what = "the Service's address" if to_service else "this node"
                yield _warning(
                    f"{pod} has no route to {what} {destination}: {way.trouble}",
                    f"ip route get {destination}, in the pod",
                    "see the routes in the pod: the CNI plugin makes them",
                )
                break
            if way.gateway in silent:
                yield _warning(
                    f"the gateway {way.gateway} of {pod} does not answer there",
                    f"ip neigh show {way.gateway}; ip route, in the pod",
                    "see the routes in the pod: the gateway may be wrong",
                )
                break


def _sockets(scene: Scene) -> Iterator[CheckResult]:
    for address, ports in scene.endpoints.items():
        holders = [pod for pod in scene.pods if address in pod.addresses]
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
            others = sorted({each.port for each in there})[:_NAMED]
            if at_port:
                words = f"only on {', '.join(at_port)}"
                remedy = "let the program listen on every address (0.0.0.0, or [::])"
            elif others:
                words = f"on {', '.join(map(str, others))}"
                remedy = "is targetPort of the Service right?"
            else:
                words, remedy = "on no port", "the program does not run, or does not serve"
            yield _warning(
                f"no process of {pod} listens on {join_host_port(address, port)}/{protocol}, an "
                f"endpoint: it listens {words}",
                f"ss -ln{protocol[0].lower()}, in the pod",
                remedy,
                Cause.ENDPOINT - 1,
            )


def _rules(scene: Scene) -> Iterator[CheckResult]:
    """Note pods with rules of their own, as a service mesh makes them; those of equal ones once."""
    pods: dict[tuple[str, ...], list[str]] = {}
    for pod in scene.pods:
        if pod.tables:
            pods.setdefault(pod.tables, []).append(str(pod))
    for tables, names in pods.items():
        yield _notice(
            f"{_listed(names)}: rules in the pod may drop or redirect packets: {', '.join(tables)}",
            "nft list ruleset, in the pod",
            "see who made them: a service mesh, or a program of the pod",
            Cause.PATH - 1,
        )


async def devices(context: Context) -> Found:
    """Note programs and queues at devices of this node that may drop packets."""
    found = await context.once(views)
    same: dict[Filter, list[str]] = {}
    for each in found.node.filters:
        if _words(each):
            same.setdefault(each._replace(device=""), []).append(each.device)
    results = []
    for each, names in same.items():
        what = f"{'filter' if each.where else 'qdisc'} show dev {names[0]} {each.where}".rstrip()
        results.append(
            _notice(
                _words(each._replace(device=_listed(names))),
                f"tc -s {what}",
                "ask who made it, and what it drops",
                Cause.NODE + 9,
            )
        )
    if xdp := [port.name for port in found.node.links.values() if port.xdp]:
        results.append(
            _notice(
                f"a program of XDP sees packets that come in by {_listed(xdp)} first",
                f"ip -d link show {min(xdp)}",
                "ask whose it is, and what it drops: `bpftool net`",
                Cause.NODE + 9,
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


def _listed(names: Iterable[str]) -> str:
    return first_of(sorted(set(names)), _NAMED)
