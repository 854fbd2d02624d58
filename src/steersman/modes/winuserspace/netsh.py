"""Windows' way of adding addresses to an interface: `netsh interface ipv4|ipv6`."""

from __future__ import annotations

import asyncio
import re

from steersman.host.exec import Exec, Result
from steersman.host.windows import SERVICE_INTERFACE, SERVICE_INTERFACE_VARIABLE, SINGLE
from steersman.model.addresses import canonical_ip, family_of
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family
from steersman.modes.base import Support

_PLACES = {Family.IPV4: "ipv4", Family.IPV6: "ipv6"}
_NAMES = {Family.IPV4: "name", Family.IPV6: "interface"}
_WORD = re.compile(r"[0-9a-fA-F:.]+")
_APPEARS = 20
"""How often to look for an address that was added; it is not there at once."""


class NetshAddresses:
    """Addresses on an interface of Windows, which has others too: unknown ones are left alone."""

    dedicated = False

    def __init__(
        self, execute: Exec, interface: str = SERVICE_INTERFACE, look_again: float = 0.5
    ) -> None:
        """Take how to run netsh and the interface.

        Args:
            execute: the door to netsh.
            interface: name of the interface.
            look_again: seconds between two looks for an address that was added.
        """
        self.interface = interface
        self._execute = execute
        self._look_again = look_again

    async def probe(self) -> Support:
        """Say whether the interface is there."""
        try:
            result = await self._netsh(Family.IPV4, "show")
        except BusyError as error:
            return Support(usable=False, missing=(f"{error}.",))
        if result.returncode:
            missing = f"there is no interface {self.interface!r}"
            advice = f"name another one in {SERVICE_INTERFACE_VARIABLE}."
            return Support(usable=False, missing=(f"{missing}; {advice}",))
        return Support(usable=True)

    async def held(self) -> frozenset[str]:
        """The addresses on the interface."""
        found: set[str] = set()
        for family in Family:
            found |= await self._of(family)
        return frozenset(found)

    async def add(self, address: str) -> None:
        """Add an address and wait until it can be used."""
        family = family_of(address)
        if address in await self._of(family):
            return
        result = await self._netsh(family, "add", *_alone(address, family))
        if result.returncode:
            raise ApplyError(f"netsh: {address} on {self.interface!r}: {_said(result)}")
        for _ in range(_APPEARS):
            if address in await self._of(family):
                return
            await asyncio.sleep(self._look_again)
        raise BusyError(f"netsh: {address} does not appear on {self.interface!r}")

    async def remove(self, address: str) -> None:
        """Remove an address."""
        await self._netsh(family_of(address), "delete", f"address={address}")

    async def _of(self, family: Family) -> set[str]:
        result = await self._netsh(family, "show")
        words = _WORD.findall(result.stdout.decode(errors="replace"))
        addresses = {address for word in words if (address := canonical_ip(word))}
        return {address for address in addresses if family_of(address) is family}

    async def _netsh(self, family: Family, verb: str, *more: str) -> Result:
        noun = "addresses" if verb == "show" else "address"
        where = f"{_NAMES[family]}={self.interface}"
        argv = ["netsh", "interface", _PLACES[family], verb, noun, where, *more]
        try:
            return await self._execute.run(argv, timeout=30.0)
        except FileNotFoundError:
            raise BusyError("netsh is not here: this mode is for Windows") from None
        except TimeoutError as error:
            raise BusyError(str(error)) from error


def _alone(address: str, family: Family) -> tuple[str, ...]:
    """The words that add an address without a network: nothing else is to be routed there."""
    if family is Family.IPV4:
        return f"address={address}", "mask=255.255.255.255"
    return (f"address={address}{SINGLE[family]}",)


def _said(result: Result) -> str:
    """What netsh said: it complains on standard output."""
    words = " ".join(result.stdout.decode(errors="replace").split())
    return words or result.message or f"exit status {result.returncode}"
