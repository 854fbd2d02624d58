"""The pods of this node as their network namespaces show them: a fact that checks share."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address, ip_network
from typing import NamedTuple

from steersman.host.link_state import LinkState, link_state
from steersman.host.listening import SELF, ListeningSocket, listening_sockets
from steersman.host.netlink import NETLINK_ROUTE, Netlink
from steersman.host.netns import call_inside, linked_namespaces
from steersman.host.rtnetlink import LIST_ADDRESSES, RT_SCOPE_UNIVERSE, parse_address
from steersman.model.addresses import family_of, in_cidr
from steersman.model.names import Family
from steersman.netfilter.nft.tables import list_tables
from steersman.operate.doctor.context import Context
from steersman.operate.places import CLIENT_DEVICE, Place, Pods, find_pods
from steersman.operate.trace_lookups import look_up
from steersman.operate.trace_loss import Hop

_SETTLED = 1.5
"""Seconds before neighbours are looked at: dials, which begin now, ask for them."""


class PodView(NamedTuple):
    """A pod of this node, as its network namespace shows it."""

    device: str
    """The node's end of its veth."""
    addresses: frozenset[str]
    state: LinkState
    listening: frozenset[ListeningSocket]
    ways: Mapping[str, Hop]
    """By destination: the Service's addresses, and one of this node for each family."""
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


async def namespaces(context: Context) -> Pods:
    """Return the namespaces that a veth device links to this node; not all are those of pods."""
    del context
    return await asyncio.to_thread(find_pods)


async def pods(context: Context) -> Sequence[Place]:
    """Return the namespaces of pods."""
    found = (await context.once(namespaces)).found
    return [each for each in found if is_pod(context, each.addresses.values(), each.device)]


def is_pod(context: Context, addresses: Iterable[str], device: str) -> bool:
    """Whether a namespace with these addresses, behind a device of this node, is likely a pod's.

    There may be others. The addresses are those of endpoints or of the pod network. If that is not
    known, they are near an endpoint of this node, as those of one node usually are.
    """
    settings, node = context.world.plan.settings, context.world.snapshot.node
    ends, cidrs = context.endpoint_addresses, node.pod_cidrs if node else ()
    for address in addresses:
        detector = settings.family(family_of(address)).detector
        if address in ends or detector.detects(address, device):
            return True
        if any(in_cidr(address, cidr) for cidr in cidrs):
            return True
        if not detector and not cidrs:
            length = 24 if family_of(address) is Family.IPV4 else 64
            near = str(ip_network(f"{address}/{length}", strict=False))
            if any(local and in_cidr(end, near) for end, local in ends.items()):
                return True
    return False


async def views(context: Context) -> Views:
    """Look at all pods of this node, when connections to them have begun."""
    await asyncio.sleep(_SETTLED)
    nodes = [own[0] for family in context.families if (own := context.own_addresses(family))]
    return await asyncio.to_thread(_look, (*context.service_addresses, *nodes))


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
