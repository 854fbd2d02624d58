"""The interface that holds the addresses of Services, by rtnetlink."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable
from functools import partial

from steersman.host.netlink import Netlink, NetlinkError, Request
from steersman.host.nlmsg import (
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_EXCL,
    attr,
    attributes,
    nested,
    text,
    u32,
)
from steersman.model.addresses import canonical_ip
from steersman.modes.ipvs.apply import Step, send

_RTM_NEWLINK, _RTM_DELLINK, _RTM_GETLINK = 16, 17, 18
_RTM_NEWADDR, _RTM_DELADDR, _RTM_GETADDR = 20, 21, 22
_IFNAME, _LINKINFO, _INFO_KIND = 3, 18, 1
_ADDRESS, _LOCAL, _CACHEINFO, _FLAGS, _NODAD = 1, 2, 6, 8, 2
_DEPRECATED = attr(_CACHEINFO, struct.pack("=IIII", 0, 0xFFFFFFFF, 0, 0))
"""Valid for ever, preferred never: RFC 6724 then takes none of them as the source of anything but
connections to itself. Without it IPv6 masquerading may choose the address of a Service."""
_ABSENT = (errno.ENODEV, errno.ENXIO)


class Device:
    """The interface that holds the addresses of Services; it stays down, which is enough."""

    def __init__(self, netlink: Netlink, name: str) -> None:
        """Take a rtnetlink socket."""
        self._netlink = netlink
        self._name = name

    def index(self) -> int:
        """Return the number of the interface; 0 where it is not there."""
        try:
            replies = self._netlink.request(
                Request(_RTM_GETLINK, bytes(16) + text(_IFNAME, self._name))
            )
        except NetlinkError as error:
            if error.errno in _ABSENT:
                return 0
            raise
        return int(struct.unpack_from("=i", replies[0].payload, 4)[0])

    def make(self) -> None:
        """Make the interface where it is not there."""
        kind = nested(_LINKINFO, text(_INFO_KIND, "dummy"))
        payload = bytes(16) + text(_IFNAME, self._name) + kind
        flags = NLM_F_CREATE | NLM_F_EXCL
        request = Request(_RTM_NEWLINK, payload, flags | NLM_F_ACK)
        send(self._netlink, [Step(lambda: f"interface {self._name}", request, (errno.EEXIST,))])

    def remove(self) -> None:
        """Remove the interface, and with it all addresses on it."""
        request = Request(_RTM_DELLINK, bytes(16) + text(_IFNAME, self._name), NLM_F_ACK)
        send(self._netlink, [Step(lambda: f"interface {self._name}", request, _ABSENT)])

    def addresses(self) -> set[str]:
        """List the addresses on the interface."""
        index, found = self.index(), set()
        for reply in self._netlink.dump(Request(_RTM_GETADDR, bytes(8))) if index else ():
            family, _, _, _, number = struct.unpack_from("=BBBBI", reply.payload)
            if number == index:
                values = attributes(reply.payload, 8)
                address = socket.inet_ntop(family, values.get(_LOCAL) or values[_ADDRESS])
                found.add(canonical_ip(address) or address)
        return found

    def add(self, addresses: Iterable[str]) -> None:
        """Put addresses on the interface."""
        self._change(_RTM_NEWADDR, addresses, errno.EEXIST)

    def drop(self, addresses: Iterable[str]) -> None:
        """Take addresses off the interface."""
        self._change(_RTM_DELADDR, addresses, errno.EADDRNOTAVAIL)

    def _change(self, kind: int, addresses: Iterable[str], harmless: int) -> None:
        wanted = list(addresses)
        if not wanted:
            return
        index = self.index()
        flags = NLM_F_ACK | (NLM_F_CREATE | NLM_F_EXCL if kind == _RTM_NEWADDR else 0)
        steps = []
        for address in wanted:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            packed = socket.inet_pton(family, address)
            head = struct.pack("=BBBBI", family, len(packed) * 8, 0, 0, index)
            body = head + attr(_LOCAL, packed) + attr(_ADDRESS, packed) + u32(_FLAGS, _NODAD)
            if family == socket.AF_INET6:
                body += _DEPRECATED
            what = partial("address {} on {}".format, address, self._name)
            steps.append(Step(what, Request(kind, body, flags), (harmless,)))
        send(self._netlink, steps)
