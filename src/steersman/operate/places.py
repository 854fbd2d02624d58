"""Places of this machine from which packets can be sent: the node, its pods, a client outside.

A pod is the namespace at the other end of one of the node's veth devices. A client outside is a
namespace of our own, linked to the node by a veth pair:

    our namespace, smc-PID-N ---- smd-PID-N, the node    198.19.x.y/32, 2001:2::x:y/128

Its addresses are reserved for tests of networks (RFC 2544, RFC 5180), so no neighbour has them. All
that is made hangs on the two devices, and only a descriptor keeps the namespace alive: if this
process is killed, the kernel removes everything.

Rules and programs often are about the uplink, the device by which clients really come. So packets
of IPv4 are redirected to enter by it, if the kernel can do that; answers leave by our device. With
a strict rp_filter they enter by our device, too: the way back is not the uplink.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, NamedTuple

from steersman.host.link_state import list_links
from steersman.host.netlink import NETLINK_ROUTE, Netlink
from steersman.host.netns import call_inside, linked_namespaces, new_namespace
from steersman.host.redirect import redirect_ipv4
from steersman.host.rtnetlink import (
    LIST_ADDRESSES,
    RT_SCOPE_UNIVERSE,
    VethEnd,
    bring_up,
    delete_link,
    new_address,
    new_neighbour,
    new_route,
    new_veth,
    parse_address,
)
from steersman.host.worker import KernelWorker
from steersman.model.names import Family
from steersman.operate.trace_lookups import look_up

_OUTSIDE = {Family.IPV4: 0xC6130000, Family.IPV6: 0x20010002 << 96}
"""198.19.0.0/16 and 2001:2::/48."""
_GATEWAYS = {Family.IPV4: "169.254.1.1", Family.IPV6: "fe80::1"}
"""Next hops of the client; no interface has them, the neighbour entry is enough."""
CLIENT_DEVICE = "smd-"
"""Beginning of the name of the node's device to a client outside."""
_LOOPBACK = 1  # LOOPBACK_IFINDEX of net/net_namespace.h
_serial = itertools.count(1)


class Place(NamedTuple):
    """A place to send packets from."""

    kind: Literal["node", "pod", "outside"]
    name: str
    """For people, such as `the pod 10.244.0.9`."""
    netns: Path | None = None
    """Its network namespace; None for that of this process."""
    addresses: Mapping[Family, str] = {}
    """The source to send from, by family; for the node, the kernel chooses one."""
    device: str = ""
    """The node's interface by which its packets come in; "" for the node."""

    def has(self, family: Family) -> bool:
        """Whether it can send packets of a family."""
        return self.kind == "node" or family in self.addresses


class Pods(NamedTuple):
    """The pods of this node that have a veth device."""

    found: tuple[Place, ...]
    unseen: int
    """Number of pods whose namespaces cannot be seen from here, as in a pod without hostPID."""


NODE = Place("node", "this node")


def find_pods() -> Pods:
    """Return the pods of this node, by address; it blocks, about 1 ms for each."""
    found = []
    linked, unseen = linked_namespaces()
    for path, number in linked.items():
        try:
            addresses = call_inside(path, _global_addresses)
            if addresses:
                way = look_up(next(iter(addresses.values())))
                device = way.device or socket.if_indextoname(number)
                name = f"the pod {' '.join(addresses.values())}"
                found.append(Place("pod", name, path, addresses, device))
        except PermissionError:
            unseen += 1
        except OSError:
            pass  # it ended meanwhile
    return Pods(tuple(sorted(found, key=lambda place: place.name)), unseen)


def _global_addresses() -> dict[Family, str]:
    """Return the first address of each family that other hosts may use, in this namespace.

    One of the loopback device, as programs that announce addresses have them, comes last.
    """
    found: dict[Family, str] = {}
    families = {socket.AF_INET: Family.IPV4, socket.AF_INET6: Family.IPV6}
    with Netlink(NETLINK_ROUTE, buffer=1 << 18) as netlink:
        listed = map(parse_address, netlink.dump(LIST_ADDRESSES))
        for address in sorted(listed, key=lambda each: each.link == _LOOPBACK):
            family = families.get(socket.AddressFamily(address.family))
            if family and address.packed and address.scope == RT_SCOPE_UNIVERSE:
                found.setdefault(family, str(ip_address(address.packed)))
    return dict(sorted(found.items()))


def source_to(address: str) -> str:
    """Return the address that this node uses to an address; "" if it has no way there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((address, 9))  # nothing is sent
        return str(sock.getsockname()[0])
    return ""


def uplink(addresses: Collection[str]) -> str:
    """Return the device that has one of some addresses, such as those of the Node; "" for none."""
    packed = {ip_address(each).packed for each in addresses}
    with Netlink(NETLINK_ROUTE, buffer=1 << 18) as netlink, suppress(OSError):
        for each in map(parse_address, netlink.dump(LIST_ADDRESSES)):
            if each.packed in packed and each.scope == RT_SCOPE_UNIVERSE:
                return socket.if_indextoname(each.link)
    return ""


@asynccontextmanager
async def client_outside(by: str = "") -> AsyncIterator[Place]:
    """Link a client to this node for a while.

    Args:
        by: the uplink; "" if its packets come in by a device of their own.

    Raises:
        OSError: CAP_SYS_ADMIN or CAP_NET_ADMIN is missing, or the kernel has no veth devices.
    """
    host = 1 + secrets.randbelow((1 << 16) - 2)
    wanted = {family: str(ip_address(net + host)) for family, net in _OUTSIDE.items()}
    async with _linked("outside", "a client outside", wanted) as place:
        with _redirected(place, by) as redirected:
            yield redirected


@contextmanager
def _redirected(place: Place, by: str) -> Iterator[Place]:
    """Let packets of IPv4 come in by another device for a while, if that can be done."""
    mac = list_links()[by].mac if by else ""
    link = -1
    if mac and not _is_strict(by) and place.has(Family.IPV4):
        with suppress(OSError):
            link = redirect_ipv4(*map(socket.if_nametoindex, (place.device, by)))
    if link < 0:
        yield place
        return
    try:
        call_inside(place.netns, partial(_set_gateway, bytes.fromhex(mac.replace(":", ""))))
        name = f"a client outside ({', '.join(place.addresses.values())}, by {by})"
        yield place._replace(name=name, device=by)
    finally:
        os.close(link)


def _is_strict(device: str) -> bool:
    """Return whether rp_filter wants packets of a device to have their way back by it."""
    with suppress(OSError, ValueError):
        folder = Path("/proc/sys/net/ipv4/conf")
        values = (int((folder / each / "rp_filter").read_text()) for each in ("all", device))
        return max(values) == 1
    return False


def _set_gateway(mac: bytes) -> None:
    """Give the gateway of IPv4 another link-layer address, in the namespace of a client."""
    with Netlink(NETLINK_ROUTE, buffer=1 << 16) as netlink:
        (link,) = [number for number, name in socket.if_nameindex() if name.startswith("smc-")]
        netlink.request(new_neighbour(link, _GATEWAYS[Family.IPV4], mac))


@asynccontextmanager
async def pod_of_ours(wanted: Mapping[Family, str]) -> AsyncIterator[Place]:
    """Link a pod with these addresses to this node for a while; raises as `client_outside`."""
    async with _linked("pod", "a pod of ours", wanted) as place:
        yield place


@asynccontextmanager
async def _linked(
    kind: Literal["pod", "outside"], name: str, wanted: Mapping[Family, str]
) -> AsyncIterator[Place]:
    """Link a namespace with these addresses, as far as this machine has their families."""
    worker = KernelWorker()  # which waits for the end of each call, also when cancelled
    namespace = await worker.do(new_namespace)
    try:
        yield await worker.do(_link, namespace, kind, name, wanted)
    finally:
        await worker.do(_unlink, namespace)
        await worker.close()


def _link(
    namespace: int, kind: Literal["pod", "outside"], name: str, wanted: Mapping[Family, str]
) -> Place:
    """Link a new namespace to the node, and return the place in it."""
    tag, path = f"{os.getpid()}-{next(_serial) % 100}", Path(f"/proc/self/fd/{namespace}")
    outer = VethEnd(f"smc-{tag}", b"\x02sm" + secrets.token_bytes(3), namespace)
    inner = VethEnd(f"{CLIENT_DEVICE}{tag}", b"\x02sm" + secrets.token_bytes(3))
    addresses: dict[Family, str] = {}

    def inside(address: str, gateway: str) -> None:
        with Netlink(NETLINK_ROUTE, buffer=1 << 16) as netlink:
            link = socket.if_nametoindex(outer.name)
            netlink.request(bring_up(link))
            netlink.request(new_address(link, address))
            netlink.request(new_neighbour(link, gateway, inner.mac))
            netlink.request(new_route(link, gateway=gateway))

    with Netlink(NETLINK_ROUTE, buffer=1 << 16) as netlink:
        netlink.request(new_veth(inner, outer))
        link = socket.if_nametoindex(inner.name)
        netlink.request(bring_up(link))
        for family, address in wanted.items():
            gateway = _GATEWAYS[family]
            with suppress(OSError):  # the family is off on this machine
                netlink.request(new_route(link, address))
                netlink.request(new_neighbour(link, address, outer.mac))
                call_inside(path, partial(inside, address, gateway))
                addresses[family] = address
    name = f"{name} ({', '.join(addresses.values())}, by a device of its own)"
    return Place(kind, name, path, addresses, inner.name)


def _unlink(namespace: int) -> None:
    """Remove the client; its namespace alone would be removed later, when the kernel has time."""

    def links() -> list[str]:
        return [name for _, name in socket.if_nameindex() if name.startswith("smc-")]

    try:
        path = Path(f"/proc/self/fd/{namespace}")
        for name in call_inside(path, links):
            call_inside(path, partial(_delete, name))
    finally:
        os.close(namespace)


def _delete(name: str) -> None:
    with Netlink(NETLINK_ROUTE, buffer=1 << 16) as netlink:
        netlink.request(delete_link(name))
