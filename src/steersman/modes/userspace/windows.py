"""The winuserspace mode: direct portals on an interface of Windows, by `netsh interface ipv4|ipv6`.

It imports nothing that only Linux has; tests/unit/host/test_windows.py checks that.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection

from steersman.host.exec import Exec, Result, RunTool
from steersman.host.windows import (
    HOST_PREFIXES,
    SERVICE_INTERFACE,
    SERVICE_INTERFACE_VARIABLE,
    service_interface,
)
from steersman.model.addresses import canonical_ip, family_of
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family
from steersman.modes.base import Support
from steersman.modes.specs import ModeOptions
from steersman.modes.userspace.core import UserspaceMode
from steersman.modes.userspace.direct_portals import Addresses, DirectPortals

NAME = "winuserspace"
_CONTEXTS = {Family.IPV4: "ipv4", Family.IPV6: "ipv6"}
_INTERFACE_WORDS = {Family.IPV4: "name", Family.IPV6: "interface"}
_WORD = re.compile(r"[0-9a-fA-F:.]+")
_POLLS = 20
"""How often to look for an added address, which does not appear at once."""


def create(execute: Exec, options: ModeOptions) -> UserspaceMode:
    """Build the mode for registry.py, on the interface that the environment names."""
    addresses = NetshAddresses(execute.run_tool, service_interface(os.environ))
    mode = UserspaceMode(NAME, [DirectPortals(addresses)], options)
    mode.proxy.dns_search = options.dns_search
    return mode


class NetshAddresses(Addresses):
    """Addresses of an interface that has others, too: unknown ones are left alone."""

    dedicated = False

    def __init__(
        self, run: RunTool, interface: str = SERVICE_INTERFACE, poll_seconds: float = 0.5
    ) -> None:
        """Use an interface.

        Args:
            run: runs netsh.
            interface: name of the interface.
            poll_seconds: time between two looks for an address that was added.
        """
        self.interface = interface
        self._run = run
        self._poll_seconds = poll_seconds

    def probe(self) -> Support:
        """Check whether the interface exists."""
        try:
            result = self._netsh(Family.IPV4, "show")
        except BusyError as error:
            return Support(usable=False, missing=(f"{error}.",))
        if result.returncode:
            missing = f"there is no interface {self.interface!r}"
            advice = f"name another one in {SERVICE_INTERFACE_VARIABLE}."
            return Support(usable=False, missing=(f"{missing}; {advice}",))
        return Support(usable=True)

    def present(self) -> frozenset[str]:
        """Return the addresses of the interface."""
        found: set[str] = set()
        for family in Family:
            found |= self._present(family)
        return frozenset(found)

    def add(self, addresses: Collection[str]) -> None:
        """Add addresses without a network, so that nothing else is routed there; wait for them."""
        for address in addresses:
            self._add(address)

    def _add(self, address: str) -> None:
        family = family_of(address)
        if address in self._present(family):
            return
        # netsh takes the mask of an IPv4 address as a parameter of its own.
        words = [f"address={address}{HOST_PREFIXES[family]}"]
        if family is Family.IPV4:
            words = [f"address={address}", "mask=255.255.255.255"]
        result = self._netsh(family, "add", *words)
        if result.returncode:
            said = " ".join(result.stdout.decode(errors="replace").split())  # netsh's errors
            why = said or result.message or f"exit status {result.returncode}"
            raise ApplyError(f"netsh: {address} on {self.interface!r}: {why}")
        for _ in range(_POLLS):
            if address in self._present(family):
                return
            time.sleep(self._poll_seconds)
        raise BusyError(f"netsh: {address} does not appear on {self.interface!r}")

    def remove(self, addresses: Collection[str]) -> None:
        """Remove addresses."""
        for address in addresses:
            self._netsh(family_of(address), "delete", f"address={address}")

    def _present(self, family: Family) -> set[str]:
        result = self._netsh(family, "show")
        words = _WORD.findall(result.stdout.decode(errors="replace"))
        addresses = {address for word in words if (address := canonical_ip(word))}
        return {address for address in addresses if family_of(address) is family}

    def _netsh(self, family: Family, verb: str, *more: str) -> Result:
        noun = "addresses" if verb == "show" else "address"
        where = f"{_INTERFACE_WORDS[family]}={self.interface}"
        argv = ["netsh", "interface", _CONTEXTS[family], verb, noun, where, *more]
        try:
            return self._run(argv, timeout=30.0)
        except FileNotFoundError:
            raise BusyError("there is no netsh: this mode is for Windows") from None
        except TimeoutError as error:
            raise BusyError(str(error)) from error
