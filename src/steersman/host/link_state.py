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
from steersman.host.rtnetlink import LIST_LINKS, parse_link

_RTM_GETNEIGH, _RTM_GETQDISC, _RTM_GETTFILTER = 30, 38, 46
_IFINFOMSG, _NDMSG = struct.Struct("=BxHiII"), struct.Struct("=BxxxiHBB")
_TC = struct.Struct("=BxxxiIII")
_NDA_DST, _NDA_LLADDR = 1, 2
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_XDP = 1, 3, 18, 43
_IFLA_INFO_SLAVE_KIND, _IFLA_INFO_SLAVE_DATA, _IFLA_BRPORT_STATE = 4, 5, 1
_IFLA_XDP_ATTACHED = 2
_IFF_UP = 1
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
_PORT_STATES = {0: "disabled", 1: "listening", 2: "learning", 3: "forwarding", 4: "blocking"}


class Port(NamedTuple):
    """A link."""

    name: str
    mac: str
    up: bool
    xdp: bool
    """Whether a program of XDP sees its packets."""
    state: str
    """Of the port of a bridge, such as `forwarding`; "" if it is none."""
    master: str = ""
    """The bridge or bond that it belongs to."""


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

    ports: Mapping[str, Port]
    neighbours: tuple[Neighbour, ...]
    filters: tuple[Filter, ...]


def link_state() -> LinkState:
    """Read the state of the links of this thread's network namespace; it blocks.

    Raises:
        OSError: the kernel cannot be asked.
    """
    with Netlink(NETLINK_ROUTE, buffer=1 << 20) as netlink:
        links = [*_dump(netlink, LIST_LINKS)]
        masters = {each.number: each.name for each in map(parse_link, links)}
        numbered = dict(_port(each, masters) for each in links)
        names = {number: port.name for number, port in numbered.items()}
        neighbours = [
            _neighbour(each, names)
            for family in (socket.AF_INET, socket.AF_INET6, socket.AF_BRIDGE)
            for each in _dump(netlink, Request(_RTM_GETNEIGH, _NDMSG.pack(family, 0, 0, 0, 0)))
        ]
        filters: list[Filter] = []
        for each in [*_dump(netlink, Request(_RTM_GETQDISC, bytes(_TC.size)))]:
            number = _TC.unpack_from(each.payload)[1]
            kind = string(attributes(each.payload, _TC.size).get(_TCA_KIND, b""))
            device = names.get(number, "")
            if kind in _CLSACT:
                filters += _filters(netlink, number, device)
            else:
                filters.append(Filter(device, kind))
    ports = {port.name: port for port in numbered.values()}
    return LinkState(ports, tuple(neighbours), tuple(filters))


def _dump(netlink: Netlink, request: Request) -> Iterator[Message]:
    """Yield the messages of a list; one that changed meanwhile, or that is not known, will do."""
    try:
        with suppress(DumpInterruptedError):
            yield from netlink.dump(request)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOENT):
            raise


def _port(message: Message, masters: Mapping[int, str]) -> tuple[int, Port]:
    _, _, number, flags, _ = _IFINFOMSG.unpack_from(message.payload)
    values = attributes(message.payload, _IFINFOMSG.size)
    xdp = attributes(values.get(_IFLA_XDP, b""))
    info = attributes(values.get(_IFLA_LINKINFO, b""))
    state = ""
    if string(info.get(_IFLA_INFO_SLAVE_KIND, b"")) == "bridge":
        data = attributes(info.get(_IFLA_INFO_SLAVE_DATA, b""))
        state = _PORT_STATES.get(_number(data.get(_IFLA_BRPORT_STATE, b"\3")), "")
    name = string(values.get(_IFLA_IFNAME, b""))
    mac = values.get(_IFLA_ADDRESS, b"").hex(":")
    attached = any(xdp.get(_IFLA_XDP_ATTACHED, b""))
    master = masters.get(parse_link(message).master, "")
    return number, Port(name, mac, bool(flags & _IFF_UP), attached, state, master)


def _neighbour(message: Message, names: Mapping[int, str]) -> Neighbour:
    _, number, state, _, _ = _NDMSG.unpack_from(message.payload)
    values = attributes(message.payload, _NDMSG.size)
    packed = values.get(_NDA_DST, b"")
    family = {4: socket.AF_INET, 16: socket.AF_INET6}.get(len(packed))
    return Neighbour(
        names.get(number, ""),
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
