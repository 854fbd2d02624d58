"""List the tracked connections of Services: who connects, to which endpoint, in which state.

The kernel sends its whole table, about 1 us for each entry here; it selects by protocol only. Other
entries are skipped as they stream in. It blocks: call it in a thread.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Collection
from typing import NamedTuple

from steersman.host.netlink import NETLINK_NETFILTER, DumpInterruptedError, Netlink
from steersman.host.nlmsg import Request, attributes
from steersman.model.addresses import canonical_ip
from steersman.model.names import PROTOCOL_BY_NUMBER, Family, Protocol

_CT_GET = 0x101  # NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_GET
# linux/netfilter/nfnetlink_conntrack.h
_TUPLE_ORIG, _TUPLE_REPLY, _STATUS, _PROTOINFO, _TIMEOUT = 1, 2, 3, 4, 7
_TUPLE_IP, _TUPLE_PROTO = 1, 2
_SOURCES, _DESTINATIONS = (1, 3), (2, 4)  # IPv4, IPv6
_NUMBER, _SOURCE_PORT, _DESTINATION_PORT = 1, 2, 3
_PROTOINFO_TCP, _PROTOINFO_TCP_STATE = 1, 1
_SEEN_REPLY = 1 << 1  # IPS_SEEN_REPLY
_TCP_STATES = {
    **{1: "SYN_SENT", 2: "SYN_RECV", 3: "ESTABLISHED", 4: "FIN_WAIT", 5: "CLOSE_WAIT"},
    **{6: "LAST_ACK", 7: "TIME_WAIT", 8: "CLOSE", 9: "SYN_SENT2"},
}
_FAMILIES = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}


class Tracked(NamedTuple):
    """A tracked connection, or a flow of datagrams."""

    protocol: Protocol
    client: str
    """Address of who opened it."""
    client_port: int
    address: str
    """The destination that the client used."""
    port: int
    endpoint: str
    """Address that answers: the endpoint, if the destination was translated."""
    endpoint_port: int
    answered: bool
    """Whether a packet came back."""
    state: str = ""
    """State of TCP, such as ESTABLISHED; "" for others."""
    seconds_left: int = 0
    """Until the entry is removed, if no packet comes."""


def tracked(family: Family, addresses: Collection[tuple[str, int]]) -> list[Tracked]:
    """Return the tracked connections to some destinations, as clients named them.

    Args:
        family: the address family.
        addresses: canonical address and port; the address is "" for a port at any address.

    Raises:
        OSError: the table cannot be listed (CAP_NET_ADMIN is missing).
    """
    wanted, found = frozenset(addresses), []
    request = Request(_CT_GET, bytes((_FAMILIES[family], 0, 0, 0)))
    with Netlink(NETLINK_NETFILTER) as netlink:
        try:
            for reply in netlink.dump(request):
                entry = _parsed(reply.payload)
                if entry and not wanted.isdisjoint(((entry.address, entry.port), ("", entry.port))):
                    found.append(entry)
        except DumpInterruptedError:
            pass  # the table changed while it was listed: most of it was seen
    return found


def _parsed(payload: bytes) -> Tracked | None:
    """Decode an entry; None if it has no ports (ICMP)."""
    values = attributes(payload, 4)
    protocol: Protocol | None = None
    ends: list[tuple[str, int]] = []
    for number in (_TUPLE_ORIG, _TUPLE_REPLY):
        pair = attributes(values.get(number, b""))
        ip, ports = attributes(pair.get(_TUPLE_IP, b"")), attributes(pair.get(_TUPLE_PROTO, b""))
        protocol = PROTOCOL_BY_NUMBER.get(next(iter(ports.get(_NUMBER, b"")), 0))
        if protocol is None or not {_SOURCE_PORT, _DESTINATION_PORT} <= ports.keys():
            return None
        for address, port in ((_SOURCES, _SOURCE_PORT), (_DESTINATIONS, _DESTINATION_PORT)):
            packed = ip.get(address[0]) or ip.get(address[1], b"")
            family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
            text = socket.inet_ntop(family, packed)
            ends.append((canonical_ip(text) or text, struct.unpack(">H", ports[port])[0]))
    tcp = attributes(attributes(values.get(_PROTOINFO, b"")).get(_PROTOINFO_TCP, b""))
    state = next(iter(tcp.get(_PROTOINFO_TCP_STATE, b"")), 0)
    (status,) = struct.unpack(">I", values.get(_STATUS, bytes(4)))
    (left,) = struct.unpack(">I", values.get(_TIMEOUT, bytes(4)))
    client, destination, endpoint, _ = ends
    seen = bool(status & _SEEN_REPLY)
    assert protocol is not None
    word = _TCP_STATES.get(state, "")
    return Tracked(protocol, *client, *destination, *endpoint, seen, word, left)
