"""The interface that holds the addresses of Services, by rtnetlink."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable
from functools import partial

from steersman.host.netlink import Netlink, NetlinkError, Request
from steersman.host.rtnetlink import (
    LIST_ADDRESSES,
    delete_address,
    delete_link,
    get_link,
    new_address,
    new_dummy_link,
    parse_address,
    parse_link,
)
from steersman.model.addresses import canonical_ip
from steersman.modes.ipvs.apply import Step, send

_ABSENT = (errno.ENODEV, errno.ENXIO)


class Device:
    """The interface that holds the addresses of Services; it stays down, which is enough."""

    def __init__(self, netlink: Netlink, name: str) -> None:
        """Make it of a rtnetlink socket and the name of the interface."""
        self._netlink = netlink
        self._name = name

    def index(self) -> int:
        """Return the index of the interface; 0 if it does not exist."""
        try:
            replies = self._netlink.request(get_link(self._name))
        except NetlinkError as error:
            if error.errno in _ABSENT:
                return 0
            raise
        return parse_link(replies[0]).number

    def make(self) -> None:
        """Create the interface unless it exists."""
        request = new_dummy_link(self._name)
        send(self._netlink, [Step(lambda: f"interface {self._name}", request, (errno.EEXIST,))])

    def remove(self) -> None:
        """Delete the interface, with all addresses on it."""
        request = delete_link(self._name)
        send(self._netlink, [Step(lambda: f"interface {self._name}", request, _ABSENT)])

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
        steps = [
            Step(
                partial("address {} on {}".format, address, self._name),
                make(index, address),
                (harmless,),
            )
            for address in wanted
        ]
        send(self._netlink, steps)
