"""What stands on the links of this network namespace: neighbours, qdiscs, filters, bridge ports.

Decodes rtnetlink messages that only diagnosis reads (linux/neighbour.h, pkt_sched.h, pkt_cls.h):

    RTM_*NEIGH     struct ndmsg, 12 bytes    family, index, state, flags, type
    RTM_*QDISC     struct tcmsg, 20 bytes    family, index, handle, parent, info
    RTM_*TFILTER   the same
"""

from __future__ import annotations

import errno
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from steersman.host.netlink import NETLINK_ROUTE, DumpInterruptedError, Netlink
from steersman.host.nlmsg import Message, Request, attributes, string
from steersman.host.rtnetlink import LIST_LINKS, Interface, parse_link

_RTM_GETNEIGH, _RTM_GETQDISC, _RTM_GETTFILTER = 30, 38, 46
_IFINFOMSG, _NDMSG = struct.Struct("=BxHiII"), struct.Struct("=BxxxiHBB")
_TC = struct.Struct("=BxxxiIII")
_NDA_DST, _NDA_LLADDR = 1, 2
_IFLA_ADDRESS, _IFLA_MTU, _IFLA_LINK, _IFLA_LINKINFO, _IFLA_XDP = 1, 4, 5, 18, 43
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _IFLA_INFO_SLAVE_KIND, _IFLA_INFO_SLAVE_DATA = 1, 2, 4, 5
_IFLA_VXLAN_LINK, _IFLA_BRPORT_STATE, _IFLA_BRPORT_MODE, _IFLA_BRPORT_ISOLATED = 3, 1, 4, 33
_IFLA_BRPORT_LEARNING, _IFLA_BRPORT_UNICAST_FLOOD = 8, 9
_IFLA_XDP_ATTACHED = 2
_IFF_UP, _IFF_PROMISC = 0x1, 0x100
_TCA_KIND, _TCA_OPTIONS, _TCA_BPF_NAME = 1, 2, 7
_INGRESS, _EGRESS = 0xFFFFFFF2, 0xFFFFFFF3  # of TC_H_CLSACT
_CLSACT = ("clsact", "ingress")
_STATES = {
    0x01: "INCOMPLETE",
    0x02: "REACHABLE",
    0x04: "STALE",
    0x08: "DELAY",
    0x10: "PROBE",
    0x20: "FAILED",
    0x40: "NOARP",
    0x80: "PERMANENT",
}
SILENT = ("INCOMPLETE", "FAILED")
"""States of neighbours that do not answer."""
_PORT_STATES = {0: "disabled", 1: "listening", 2: "learning", 3: "forwarding", 4: "blocking"}


class Link(NamedTuple):
    """A network interface."""

    name: str
    mtu: int = 1500
    up: bool = True
    driver: str = ""
    """Kind of a virtual interface, such as `bridge` or `vxlan`; "" for a physical one."""
    master: str = ""
    """The bridge or bond that it belongs to."""
    below: str = ""
    """The interface that an overlay or VLAN sends through."""
    hairpin: bool | None = None
    """For the port of a bridge: whether a frame may leave by the port that it came in by."""
    promiscuous: bool = False
    mac: str = ""
    xdp: bool = False
    """Whether a program of XDP sees its packets."""
    state: str = ""
    """Of the port of a bridge, such as `forwarding`; "" if it is none."""
    isolated: bool = False
    """For the port of a bridge: no frame passes between two of these."""
    learns: bool = True
    """For the port of a bridge: whether the bridge notes who is behind it."""
    floods: bool = True
    """For the port of a bridge: whether it gets frames for those whose port is not known."""


class Neighbour(NamedTuple):
    """The link-layer address of a neighbour, as the kernel knows it."""

    device: str
    address: str
    """"" for an entry of a bridge's table of addresses (fdb)."""
    mac: str
    """"" if it is not known."""
    state: str
    """As `ip neigh` prints it."""


class Filter(NamedTuple):
    """A queueing discipline, or a filter of tc."""

    device: str
    kind: str
    """As `tc` prints it, such as `bpf` or `tbf`."""
    name: str = ""
    """Of the program."""
    where: str = ""
    """`ingress` or `egress`; "" for a queueing discipline."""


class LinkState(NamedTuple):
    """The state of a network namespace's links, at a moment."""

    links: Mapping[str, Link]
    neighbours: tuple[Neighbour, ...]
    filters: tuple[Filter, ...]


def list_links() -> dict[str, Link]:
    """Return the links of this thread's network namespace by name; it blocks.

    Raises:
        OSError: the kernel cannot be asked.
    """
    with Netlink(NETLINK_ROUTE, buffer=1 << 20) as netlink:
        return {link.name: link for link in _links(netlink).values()}


def link_state() -> LinkState:
    """Read the state of the links of this thread's network namespace; it blocks.

    Raises:
        OSError: the kernel cannot be asked.
    """
    with Netlink(NETLINK_ROUTE, buffer=1 << 20) as netlink:
        links = _links(netlink)
        neighbours = [
            _neighbour(each, links)
            for family in (socket.AF_INET, socket.AF_INET6, socket.AF_BRIDGE)
            for each in _dump(netlink, Request(_RTM_GETNEIGH, _NDMSG.pack(family, 0, 0, 0, 0)))
        ]
        filters: list[Filter] = []
        for each in [*_dump(netlink, Request(_RTM_GETQDISC, bytes(_TC.size)))]:
            number = _TC.unpack_from(each.payload)[1]
            kind = string(attributes(each.payload, _TC.size).get(_TCA_KIND, b""))
            device = links[number].name if number in links else ""
            if kind in _CLSACT:
                filters += _filters(netlink, number, device)
            else:
                filters.append(Filter(device, kind))
    by_name = {link.name: link for link in links.values()}
    return LinkState(by_name, tuple(neighbours), tuple(filters))


def _dump(netlink: Netlink, request: Request) -> Iterator[Message]:
    """Yield the messages of a list; one that changed meanwhile, or that is not known, will do."""
    try:
        with suppress(DumpInterruptedError):
            yield from netlink.dump(request)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOENT):
            raise


def _links(netlink: Netlink) -> dict[int, Link]:
    """Return the links by index."""
    listed = [(parse_link(each), each) for each in _dump(netlink, LIST_LINKS)]
    names = {interface.number: interface.name for interface, _ in listed}
    return {interface.number: _link(interface, each, names) for interface, each in listed}


def _link(interface: Interface, message: Message, names: Mapping[int, str]) -> Link:
    flags: int = _IFINFOMSG.unpack_from(message.payload)[3]
    values = attributes(message.payload, _IFINFOMSG.size)
    info = attributes(values.get(_IFLA_LINKINFO, b""))
    driver = string(info.get(_IFLA_INFO_KIND, b""))
    below = _number(values.get(_IFLA_LINK, b""))
    if driver == "vxlan" and not below:  # it has no IFLA_LINK
        below = _number(attributes(info.get(_IFLA_INFO_DATA, b"")).get(_IFLA_VXLAN_LINK, b""))
    hairpin, state, isolated, learns, floods = None, "", False, True, True
    if string(info.get(_IFLA_INFO_SLAVE_KIND, b"")) == "bridge":
        port = attributes(info.get(_IFLA_INFO_SLAVE_DATA, b""))
        hairpin = any(port.get(_IFLA_BRPORT_MODE, b""))
        isolated = any(port.get(_IFLA_BRPORT_ISOLATED, b""))
        learns = any(port.get(_IFLA_BRPORT_LEARNING, b"\1"))
        floods = any(port.get(_IFLA_BRPORT_UNICAST_FLOOD, b"\1"))
        state = _PORT_STATES.get(_number(port.get(_IFLA_BRPORT_STATE, b"\3")), "")
    return Link(
        interface.name,
        _number(values.get(_IFLA_MTU, b"")),
        bool(flags & _IFF_UP),
        driver,
        names.get(interface.master, ""),
        # The peer of a veth is no interface to send through.
        names.get(below, "") if driver != "veth" else "",
        hairpin,
        bool(flags & _IFF_PROMISC),
        values.get(_IFLA_ADDRESS, b"").hex(":"),
        any(attributes(values.get(_IFLA_XDP, b"")).get(_IFLA_XDP_ATTACHED, b"")),
        state,
        isolated,
        learns,
        floods,
    )


def _neighbour(message: Message, links: Mapping[int, Link]) -> Neighbour:
    _, number, state, _, _ = _NDMSG.unpack_from(message.payload)
    values = attributes(message.payload, _NDMSG.size)
    packed = values.get(_NDA_DST, b"")
    family = {4: socket.AF_INET, 16: socket.AF_INET6}.get(len(packed))
    return Neighbour(
        links[number].name if number in links else "",
        socket.inet_ntop(family, packed) if family else "",
        values.get(_NDA_LLADDR, b"").hex(":"),
        _STATES.get(state, "NONE"),
    )


def _filters(netlink: Netlink, number: int, device: str) -> Iterator[Filter]:
    for parent, where in ((_INGRESS, "ingress"), (_EGRESS, "egress")):
        head = _TC.pack(0, number, 0, parent, 0)
        found = {}
        for each in _dump(netlink, Request(_RTM_GETTFILTER, head)):
            values = attributes(each.payload, _TC.size)
            kind = string(values.get(_TCA_KIND, b""))
            options = attributes(values.get(_TCA_OPTIONS, b""))
            name = string(options.get(_TCA_BPF_NAME, b"")) if kind == "bpf" else ""
            # The head of a list of filters comes without a program.
            if name or kind != "bpf":
                found[kind, name] = Filter(device, kind, name, where)
        yield from found.values()


def _number(packed: bytes) -> int:
    return int.from_bytes(packed, sys.byteorder)
