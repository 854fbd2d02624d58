"""An interface of our own that has the addresses of Services, over rtnetlink."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable
from functools import partial

from steersman.host.netlink import Netlink, NetlinkError
from steersman.host.nlmsg import Request
from steersman.host.rtnetlink import (
    LIST_ADDRESSES,
    bring_up,
    delete_address,
    delete_link,
    get_link,
    new_address,
    new_link,
    parse_address,
    parse_link,
)
from steersman.host.tolerant import TolerantRequest, send
from steersman.model.addresses import canonical_ip

_NO_DEVICE = (errno.ENODEV, errno.ENXIO)


class AddressDevice:
    """The interface by its name; all operations may be repeated."""

    def __init__(self, netlink: Netlink, name: str) -> None:
        """Create an accessor from a rtnetlink socket and the name of the interface."""
        self._netlink = netlink
        self._name = name

    def index(self) -> int:
        """Return the index of the interface; 0 if it does not exist."""
        try:
            replies = self._netlink.request(get_link(self._name))
        except NetlinkError as error:
            if error.errno in _NO_DEVICE:
                return 0
            raise
        return parse_link(replies[0]).number

    def make(self, kind: str = "dummy", *, up: bool = False) -> None:
        """Create the interface, of a kind that leads nowhere, unless it exists.

        It may stay down, unless sockets are to be bound to its IPv6 addresses.

        Raises:
            ApplyError: the kernel does not have this kind, or refuses.
        """
        name = partial("interface {}".format, self._name)
        request = new_link(self._name, kind)
        send(self._netlink, [TolerantRequest(name, request, (errno.EEXIST,))])
        if up:
            send(self._netlink, [TolerantRequest(name, bring_up(self.index()))])

    def remove(self) -> None:
        """Delete the interface, with all addresses on it."""
        name = partial("interface {}".format, self._name)
        send(self._netlink, [TolerantRequest(name, delete_link(self._name), _NO_DEVICE)])

    def addresses(self) -> set[str]:
        """Return the addresses on the interface."""
        index, found = self.index(), set()
        for reply in self._netlink.dump(LIST_ADDRESSES) if index else ():
            each = parse_address(reply)
            if each.link == index:
                address = socket.inet_ntop(each.family, each.packed)
                found.add(canonical_ip(address) or address)
        return found

    def add(self, addresses: Iterable[str]) -> None:
        """Add addresses to the interface."""
        self._change(new_address, addresses, errno.EEXIST)

    def drop(self, addresses: Iterable[str]) -> None:
        """Delete addresses from the interface."""
        self._change(delete_address, addresses, errno.EADDRNOTAVAIL)

    def _change(
        self, make: Callable[[int, str], Request], addresses: Iterable[str], harmless: int
    ) -> None:
        wanted = list(addresses)
        if not wanted:
            return
        index = self.index()
        requests = []
        for address in wanted:
            name = partial("address {} on {}".format, address, self._name)
            requests.append(TolerantRequest(name, make(index, address), (harmless,)))
        send(self._netlink, requests)
