"""Share the ports of masqueraded connections with another program that masquerades.

An endpoint sees a masqueraded connection come from a port of this node. netfilter chooses a port
that no entry has towards the same endpoint. If another program masquerades, too, each has to know
the ports of the other: two connections with the same addresses and ports break each other.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import suppress

from steersman.host.netlink import DumpInterruptedError, Netlink
from steersman.host.nlmsg import NLM_F_ACK, NLM_F_CREATE, Request, be32
from steersman.model.names import Family
from steersman.netfilter.conntrack.flows import Tracked, parse_entry
from steersman.netfilter.conntrack.wire import (
    AF_NUMBERS,
    ASSURED,
    CONFIRMED,
    CT_GET,
    CT_NEW,
    CTA_STATUS,
    CTA_STATUS_MASK,
    CTA_TIMEOUT,
    CTA_TUPLE_ORIG,
    CTA_TUPLE_REPLY,
    SEEN_REPLY,
    SRC_NAT,
    entry_keys,
    pack_tuple,
)

_AT_ONCE = 256  # entries made by one datagram
_IPV4_END = 6  # bytes of an address and a port


def masqueraded(netlink: Netlink) -> Iterator[Tracked]:
    """Yield the connections to Services that netfilter masquerades and that have not ended.

    Args:
        netlink: a socket in the network namespace of the entries.

    Raises:
        OSError: the entries cannot be listed.
    """
    masquerade = be32(CTA_STATUS, SRC_NAT) + be32(CTA_STATUS_MASK, SRC_NAT)
    with suppress(DumpInterruptedError):  # most of them were seen
        for reply in netlink.dump(Request(CT_GET, bytes(4) + masquerade)):
            destination, endpoint = entry_keys(reply.payload)
            # Most leave the cluster. (IPVS does not set IPS_DST_NAT, so addresses must tell.)
            if destination[1:] == endpoint:
                continue
            entry = parse_entry(reply.payload)
            ended = entry is None or entry.state in ("TIME_WAIT", "CLOSE")
            if entry and not ended and entry[1:3] != entry[7:9]:  # client and seen source
                yield entry


def hold_ports(
    netlink: Netlink, connections: Iterable[tuple[int, bytes, bytes]], seconds: int
) -> None:
    """Keep netfilter from choosing ports of connections that it does not masquerade itself.

    Each gets an entry that no packet uses; call it again to prolong it.

    Args:
        netlink: a socket in the network namespace of the entries.
        connections: protocol number, and the packed address and port of the node and of the
            endpoint.
        seconds: how long it lasts.

    Raises:
        OSError: the kernel tracks no connections, or permission is missing.
    """
    # A full table drops entries that are not assured.
    status = be32(CTA_STATUS, SEEN_REPLY | ASSURED | CONFIRMED)
    requests = []
    for protocol, node, endpoint in connections:
        family = Family.IPV4 if len(node) == _IPV4_END else Family.IPV6
        body = pack_tuple(CTA_TUPLE_ORIG, family, protocol, node, endpoint)
        body += pack_tuple(CTA_TUPLE_REPLY, family, protocol, endpoint, node)
        body += be32(CTA_TIMEOUT, seconds) + status
        header = bytes((AF_NUMBERS[family], 0, 0, 0))
        requests.append(Request(CT_NEW, header + body, NLM_F_CREATE | NLM_F_ACK))
    for first in range(0, len(requests), _AT_ONCE):
        for error in netlink.batch(requests[first : first + _AT_ONCE]).values():
            # Another entry has the port already: it is as good.
            if error.errno != errno.EEXIST:
                raise error
