"""rtnetlink messages as values: links, addresses, routes, rules (rtnetlink(7), RFC 3549).

Layouts are those of linux/if_link.h, if_addr.h, rtnetlink.h and so on; link_state.py decodes what
only diagnosis reads. Every message starts with a fixed struct, which attributes follow:

    RTM_*LINK    struct ifinfomsg, 16 bytes   family, hardware type, index, flags, change mask
    RTM_*ADDR    struct ifaddrmsg, 8 bytes    family, prefix length, flags, scope, index
    RTM_*ROUTE   struct rtmsg, 12 bytes       family, destination length, ..., route type, flags

Traffic control (RTM_*TFILTER) is used by the ebpf mode only and stays there.
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import NamedTuple

from steersman.host.netlink import BpfInstruction
from steersman.host.nlmsg import (
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    Message,
    Request,
    attr,
    attributes,
    nested,
    string,
    text,
    u32,
)

RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK = 16, 17, 18
RTM_NEWADDR, RTM_DELADDR, RTM_GETADDR = 20, 21, 22
RTM_NEWROUTE, RTM_GETROUTE = 24, 26
RTM_NEWNEIGH = 28
RTM_GETRULE = 34
RTM_GETNSID = 90

RTNLGRP_LINK, RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV6_IFADDR = 1, 5, 9

ARPHRD_ETHER, ARPHRD_LOOPBACK = 1, 772
RT_SCOPE_UNIVERSE, RT_SCOPE_LINK = 0, 253
IFA_F_DADFAILED, IFA_F_DEPRECATED, IFA_F_TENTATIVE = 0x08, 0x20, 0x40

_IFINFOMSG = struct.Struct("=BxHiII")
_IFADDRMSG = struct.Struct("=BBBBI")
_RTMSG = struct.Struct("=BBBBBBBBI")
_NDMSG = struct.Struct("=BxxxiHBB")
_IFF_UP = 0x1
MAIN_TABLE, _RTPROT_STATIC, _RTN_UNICAST, _RTN_LOCAL, _RTNH_F_ONLINK = 254, 4, 1, 2, 4
_NUD_PERMANENT, _NDA_DST, _NDA_LLADDR = 0x80, 1, 2
_RTM_F_LOOKUP_TABLE = 0x1000
_RULE = struct.Struct("=BBBBBxxBI")  # struct fib_rule_hdr
_FRA_DST, _FRA_SRC, _FRA_IIFNAME, _FRA_PRIORITY = 1, 2, 3, 6
_FRA_FWMARK, _FRA_TABLE, _FRA_FWMASK, _FRA_OIFNAME = 10, 15, 16, 17
_FR_ACT_TO_TBL, _FIB_RULE_INVERT = 1, 2
_RULE_ACTIONS = {
    **{_FR_ACT_TO_TBL: "lookup", 2: "goto", 3: "nop"},
    **{6: "blackhole", 7: "unreachable", 8: "prohibit"},
}
_TABLES = {253: "default", MAIN_TABLE: "main", 255: "local"}

_IFLA_IFNAME, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_INFO_KIND, _IFLA_INFO_DATA = 3, 10, 18, 1, 2
_IFLA_ADDRESS, _IFLA_NET_NS_FD, _VETH_INFO_PEER = 1, 28, 1
_IFLA_LINK_NETNSID = 37
_NETNSA_NSID, _NETNSA_FD = 1, 3
_IFA_ADDRESS, _IFA_LOCAL, _IFA_CACHEINFO, _IFA_FLAGS = 1, 2, 6, 8
_IFA_F_NODAD = 0x02
_RTA_DST, _RTA_SRC, _RTA_IIF, _RTA_OIF, _RTA_GATEWAY = 1, 2, 3, 4, 5
_RTA_METRICS, _RTA_TABLE, _RTA_MARK, _RTA_VIA = 8, 15, 16, 18
_RTAX_MTU = 2

LIST_LINKS = Request(RTM_GETLINK, bytes(_IFINFOMSG.size))
LIST_ADDRESSES = Request(RTM_GETADDR, bytes(_IFADDRMSG.size))

NOT_LINK_LOCAL = (
    BpfInstruction(0x30, 0, 0, 16),  # load the byte at 16: ifa_family, after the nlmsghdr
    BpfInstruction(0x15, 0, 3, socket.AF_INET6),  # IPv4: keep
    BpfInstruction(0x30, 0, 0, 19),  # load the byte at 19: ifa_scope
    BpfInstruction(0x15, 0, 1, RT_SCOPE_LINK),
    BpfInstruction(0x06, 0, 0, 0),  # drop
    BpfInstruction(0x06, 0, 0, 0xFFFFFFFF),  # keep
)
"""Socket filter for address notifications: every pod that starts or stops brings a link-local IPv6
address on its veth, which would wake the process for nothing."""

# preferred lifetime 0, valid lifetime infinite, then two timestamps that the kernel ignores
_DEPRECATED_FOR_EVER = attr(_IFA_CACHEINFO, struct.pack("=IIII", 0, 0xFFFFFFFF, 0, 0))


class Interface(NamedTuple):
    """A network interface."""

    number: int
    """Interface index."""
    name: str
    kind: int
    """Hardware type, ARPHRD_*."""
    master: int
    """Index of the bridge or bond that it belongs to; 0 for none."""
    peer_elsewhere: bool = False
    """Whether it is a veth whose other end is in another network namespace."""


class VethEnd(NamedTuple):
    """One end of a new veth pair."""

    name: str
    mac: bytes
    """Its hardware address: six bytes."""
    namespace: int | None = None
    """A descriptor of the network namespace to put it into; None for that of the socket."""


class Route(NamedTuple):
    """The route that the kernel takes to an address."""

    device: int
    """Index of the interface."""
    gateway: str = ""
    """"" if the address is reached directly."""
    mtu: int = 0
    """Of the route itself; 0 if it has none."""
    local: bool = False
    """Whether the address is one of this machine."""
    table: int = 0
    """Number of the routing table; 0 if the kernel does not say."""


class Rule(NamedTuple):
    """A policy rule, which says for some packets in which table their route is."""

    table: int
    text: str
    """As `ip rule` prints it."""


class Address(NamedTuple):
    """An address of an interface."""

    link: int
    """Interface index."""
    family: int
    """AF_*; not only those of IP."""
    packed: bytes
    """In network byte order; b"" if the message has none."""
    length: int
    """Prefix length."""
    scope: int
    """RT_SCOPE_*."""
    flags: int
    """IFA_F_*, the first eight of them."""

    @property
    def is_link_local(self) -> bool:
        """Whether it is in fe80::/10."""
        return (
            self.family == socket.AF_INET6
            and self.packed[0] == 0xFE
            and self.packed[1] & 0xC0 == 0x80
        )


def parse_link(message: Message) -> Interface:
    """Decode RTM_NEWLINK or RTM_DELLINK."""
    _, kind, number, _, _ = _IFINFOMSG.unpack_from(message.payload)
    values = attributes(message.payload, _IFINFOMSG.size)
    master = int.from_bytes(values.get(_IFLA_MASTER, b""), sys.byteorder)
    info = attributes(values.get(_IFLA_LINKINFO, b""))
    veth = string(info.get(_IFLA_INFO_KIND, b"")) == "veth"
    elsewhere = veth and _IFLA_LINK_NETNSID in values
    return Interface(number, string(values.get(_IFLA_IFNAME, b"")), kind, master, elsewhere)


def namespace_of_peer(message: Message) -> int | None:
    """Return our number of the namespace in which the other end of a link is; None if it is here.

    The kernel numbers namespaces separately in each (`get_namespace_number`).
    """
    values = attributes(message.payload, _IFINFOMSG.size)
    number = values.get(_IFLA_LINK_NETNSID)
    return int.from_bytes(number, sys.byteorder, signed=True) if number else None


def get_namespace_number(opened: int) -> Request:
    """Ask for our number of a namespace, by a descriptor of it."""
    return Request(RTM_GETNSID, bytes(4) + u32(_NETNSA_FD, opened))


def parse_namespace_number(message: Message) -> int:
    """Decode the answer to `get_namespace_number`; -1 if it has none."""
    number = attributes(message.payload, 4).get(_NETNSA_NSID, b"")
    return int.from_bytes(number, sys.byteorder, signed=True) if number else -1


def is_bridge_port(message: Message) -> bool:
    """Whether a link message is about the port of a bridge (AF_BRIDGE), not about the link."""
    return message.payload[0] != socket.AF_UNSPEC


def parse_address(message: Message) -> Address:
    """Decode RTM_NEWADDR or RTM_DELADDR."""
    family, length, flags, scope, link = _IFADDRMSG.unpack_from(message.payload)
    values = attributes(message.payload, _IFADDRMSG.size)
    # On point-to-point links IFA_ADDRESS is the peer; otherwise IFA_LOCAL is absent in IPv6.
    packed = values.get(_IFA_LOCAL) or values.get(_IFA_ADDRESS, b"")
    return Address(link, family, packed, length, scope, flags)


def get_link(name: str) -> Request:
    """Ask for one link by name; the kernel answers ENODEV if there is none."""
    return Request(RTM_GETLINK, bytes(_IFINFOMSG.size) + text(_IFLA_IFNAME, name))


def new_link(name: str, kind: str) -> Request:
    """Create an interface of a kind that needs no more than a name; it is down."""
    info = nested(_IFLA_LINKINFO, text(_IFLA_INFO_KIND, kind))
    payload = bytes(_IFINFOMSG.size) + text(_IFLA_IFNAME, name) + info
    return Request(RTM_NEWLINK, payload, NLM_F_CREATE | NLM_F_EXCL | NLM_F_ACK)


def new_veth(near: VethEnd, far: VethEnd) -> Request:
    """Create a pair of veth devices. Both are down: see `bring_up`."""
    info = nested(_VETH_INFO_PEER, _veth_end(far))
    kind = text(_IFLA_INFO_KIND, "veth") + nested(_IFLA_INFO_DATA, info)
    payload = _veth_end(near) + nested(_IFLA_LINKINFO, kind)
    return Request(RTM_NEWLINK, payload, NLM_F_CREATE | NLM_F_EXCL | NLM_F_ACK)


def _veth_end(end: VethEnd) -> bytes:
    payload = bytes(_IFINFOMSG.size) + text(_IFLA_IFNAME, end.name)
    payload += attr(_IFLA_ADDRESS, end.mac)
    return payload if end.namespace is None else payload + u32(_IFLA_NET_NS_FD, end.namespace)


def bring_up(link: int) -> Request:
    """Bring an interface up."""
    payload = _IFINFOMSG.pack(socket.AF_UNSPEC, 0, link, _IFF_UP, _IFF_UP)
    return Request(RTM_NEWLINK, payload, NLM_F_ACK)


def delete_link(name: str) -> Request:
    """Delete an interface, with all addresses on it."""
    return Request(RTM_DELLINK, bytes(_IFINFOMSG.size) + text(_IFLA_IFNAME, name), NLM_F_ACK)


def new_address(link: int, address: str) -> Request:
    """Add an address to an interface, as the only one of its network and usable at once.

    IPv6 addresses are deprecated from the start: RFC 6724 then chooses none of them as the source
    of anything but connections to itself. Otherwise IPv6 masquerading may choose the address of a
    Service.
    """
    payload = _host_address(link, address)
    if ":" in address:
        payload += _DEPRECATED_FOR_EVER
    return Request(RTM_NEWADDR, payload, NLM_F_CREATE | NLM_F_EXCL | NLM_F_ACK)


def delete_address(link: int, address: str) -> Request:
    """Delete an address that `new_address` added."""
    return Request(RTM_DELADDR, _host_address(link, address), NLM_F_ACK)


def _host_address(link: int, address: str) -> bytes:
    """Return the payload for an address with the longest prefix and without duplicate detection."""
    family, packed = _packed(address)
    return (
        _IFADDRMSG.pack(family, len(packed) * 8, 0, 0, link)
        + attr(_IFA_LOCAL, packed)
        + attr(_IFA_ADDRESS, packed)
        + u32(_IFA_FLAGS, _IFA_F_NODAD)
    )


def new_route(link: int, address: str = "", gateway: str = "") -> Request:
    """Add a route to one address over an interface, or the default route over a gateway.

    The gateway needs no route of its own; see `new_neighbour`.
    """
    family, packed = _packed(address or gateway)
    length, scope = (0, RT_SCOPE_UNIVERSE) if gateway else (len(packed) * 8, RT_SCOPE_LINK)
    payload = _RTMSG.pack(
        *(family, length, 0, 0, MAIN_TABLE, _RTPROT_STATIC, scope, _RTN_UNICAST),
        _RTNH_F_ONLINK if gateway else 0,
    )
    payload += attr(_RTA_GATEWAY if gateway else _RTA_DST, packed) + u32(_RTA_OIF, link)
    return Request(RTM_NEWROUTE, payload, NLM_F_CREATE | NLM_F_EXCL | NLM_F_ACK)


def new_neighbour(link: int, address: str, mac: bytes) -> Request:
    """Set a permanent neighbour, so that nobody is asked who has the address."""
    family, packed = _packed(address)
    payload = _NDMSG.pack(family, link, _NUD_PERMANENT, 0, 0)
    payload += attr(_NDA_DST, packed) + attr(_NDA_LLADDR, mac)
    return Request(RTM_NEWNEIGH, payload, NLM_F_CREATE | NLM_F_REPLACE | NLM_F_ACK)


def _packed(address: str) -> tuple[int, bytes]:
    """Return family and bytes of an address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return family, socket.inet_pton(family, address)


def get_route(packed: bytes, *, source: bytes = b"", device: int = 0, mark: int = 0) -> Request:
    """Ask for the route of a packet; the kernel answers with an error if there is none.

    Args:
        packed: the destination.
        source: the packet's source; b"" for none.
        device: index of the interface that received it; 0 if this machine sends it.
        mark: of the packet (fwmark).
    """
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    lengths = len(packed) * 8, len(source) * 8
    payload = _RTMSG.pack(family, *lengths, 0, 0, 0, 0, 0, _RTM_F_LOOKUP_TABLE)
    payload += attr(_RTA_DST, packed)
    if source:
        payload += attr(_RTA_SRC, source)
    if device:
        payload += u32(_RTA_IIF, device)
    if mark:
        payload += u32(_RTA_MARK, mark)
    return Request(RTM_GETROUTE, payload)


def is_local_route(message: Message) -> bool:
    """Whether a route delivers packets to this machine itself."""
    kind: int = _RTMSG.unpack_from(message.payload)[7]
    return kind == _RTN_LOCAL


def parse_route(message: Message) -> Route:
    """Decode the answer to `get_route`."""
    values = attributes(message.payload, _RTMSG.size)
    gateway = values.get(_RTA_GATEWAY) or values.get(_RTA_VIA, b"")[2:]
    metrics = attributes(values.get(_RTA_METRICS, b""))
    family = {4: socket.AF_INET, 16: socket.AF_INET6}.get(len(gateway))
    return Route(
        int.from_bytes(values.get(_RTA_OIF, b""), sys.byteorder),
        socket.inet_ntop(family, gateway) if family else "",
        int.from_bytes(metrics.get(_RTAX_MTU, b""), sys.byteorder),
        is_local_route(message),
        int.from_bytes(values.get(_RTA_TABLE, b""), sys.byteorder),
    )


def list_rules(family: int) -> Request:
    """Ask for the policy rules of a family (AF_*)."""
    return Request(RTM_GETRULE, bytes((family,)) + bytes(_RULE.size - 1))


def parse_rule(message: Message) -> Rule:
    """Decode RTM_NEWRULE."""
    family, to_length, from_length, _, table, action, flags = _RULE.unpack_from(message.payload)
    values = attributes(message.payload, _RULE.size)

    def number(kind: int) -> int:
        return int.from_bytes(values.get(kind, b""), sys.byteorder)

    def prefix(kind: int, length: int) -> str:
        return f"{socket.inet_ntop(family, values[kind])}/{length}" if kind in values else "all"

    table = number(_FRA_TABLE) or table
    words = ["not"] if flags & _FIB_RULE_INVERT else []
    words += ["from", prefix(_FRA_SRC, from_length)]
    if _FRA_DST in values:
        words += ["to", prefix(_FRA_DST, to_length)]
    if _FRA_FWMARK in values:
        mask = number(_FRA_FWMASK)
        words += [
            "fwmark",
            f"{number(_FRA_FWMARK):#x}" + (f"/{mask:#x}" if mask + 1 >> 32 == 0 else ""),
        ]
    for kind, name in ((_FRA_IIFNAME, "iif"), (_FRA_OIFNAME, "oif")):
        if kind in values:
            words += [name, string(values[kind])]
    words += [_RULE_ACTIONS.get(action, f"action {action}")]
    if action == _FR_ACT_TO_TBL:
        words += [_TABLES.get(table, str(table))]
    return Rule(table, f"{number(_FRA_PRIORITY)}: {' '.join(words)}")
