"""Addresses of Services on an interface of our own, for direct portals on Linux."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from steersman.host.address_device import AddressDevice
from steersman.host.netlink import NETLINK_ROUTE, Netlink
from steersman.model.errors import ApplyError, BusyError
from steersman.modes.base import Support
from steersman.modes.userspace.direct_portals import Addresses

DEFAULT_INTERFACE = "kube-portals"


class LinuxAddresses(Addresses):
    """Addresses of an interface that leads nowhere; the first one creates it."""

    dedicated = True

    def __init__(self, interface: str = DEFAULT_INTERFACE) -> None:
        """Use an interface."""
        self.interface = interface

    @contextmanager
    def _device(self) -> Iterator[AddressDevice]:
        try:
            with Netlink(NETLINK_ROUTE, buffer=1 << 20) as netlink:
                yield AddressDevice(netlink, self.interface)
        except OSError as error:
            raise BusyError(f"the addresses of {self.interface}: {error}") from error

    def probe(self) -> Support:
        """Create the interface, to see whether that works, and remove it again."""
        try:
            with self._device() as device:
                existed = device.index()
                _make(device)
                if not existed:
                    device.remove()
        except (ApplyError, BusyError) as error:
            return Support(usable=False, missing=(f"{error}.",))
        return Support(usable=True)

    def present(self) -> frozenset[str]:
        """Return the addresses of the interface but for IPv6 link-local ones."""
        with self._device() as device:
            return frozenset(a for a in device.addresses() if not a.startswith("fe80:"))

    def add(self, addresses: Collection[str]) -> None:
        """Add addresses without duplicate address detection, which would delay their use."""
        with self._device() as device:
            _make(device)
            device.add(addresses)

    def remove(self, addresses: Collection[str]) -> None:
        """Remove addresses; those that are gone already are no error."""
        with self._device() as device:
            if device.index():
                device.drop(addresses)


def _make(device: AddressDevice) -> None:
    try:
        device.make("dummy", up=True)
    except ApplyError:  # the kernel may lack this kind
        device.make("bridge", up=True)
