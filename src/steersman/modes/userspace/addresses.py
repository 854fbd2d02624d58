"""Adding the addresses of Services to an interface of this machine: what is asked, and Linux' way.

The other one is Windows' (modes/winuserspace/netsh.py); both are used by direct.py.
"""

from __future__ import annotations

import json
from typing import Protocol

from steersman.host.exec import Exec, Result, run_program
from steersman.model.addresses import canonical_ip, family_of
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family
from steersman.modes.base import Support

DEFAULT_INTERFACE = "kube-portals"
_KINDS = ("dummy", "bridge")
"""Kinds of interfaces that lead nowhere; kernels without the first one may have the other."""


class Addresses(Protocol):
    """Adds addresses to an interface, and takes them away."""

    interface: str
    dedicated: bool
    """Whether the interface is ours: then unknown addresses on it are leftovers of ours."""

    async def probe(self) -> Support:
        """Say whether it can be done here."""
        ...

    async def held(self) -> frozenset[str]:
        """The canonical addresses on the interface.

        Raises:
            BusyError: they cannot be read now.
        """
        ...

    async def add(self, address: str) -> None:
        """Add an address; one that is there already is fine. It can be bound on return.

        Raises:
            ApplyError: it is refused.
        """
        ...

    async def remove(self, address: str) -> None:
        """Remove an address; one that is not there is fine."""
        ...


class LinuxAddresses:
    """Addresses on an interface of our own that leads nowhere, by `ip`."""

    dedicated = True

    def __init__(self, execute: Exec, interface: str = DEFAULT_INTERFACE) -> None:
        """Take how to run `ip`, and the name of the interface; it is made when needed."""
        self.interface = interface
        self._execute = execute
        self._made = False

    async def probe(self) -> Support:
        """Make the interface, to see whether it can be; where it was not there, it is not after."""
        try:
            there = await self._is_there()
            await self._make()
            if not there:
                self._made = False
                await self._ip("link", "del", self.interface)
        except (ApplyError, BusyError) as error:
            return Support(usable=False, missing=(f"{error}.",))
        return Support(usable=True)

    async def held(self) -> frozenset[str]:
        """The addresses on the interface; see `Addresses.held`."""
        result = await self._ip("-json", "address", "show", "dev", self.interface)
        if result.returncode:
            self._made = False  # or somebody has removed it
            return frozenset()
        links = json.loads(result.stdout or b"[]")
        texts = [entry["local"] for link in links for entry in link.get("addr_info", ())]
        found = {address for text in texts if (address := canonical_ip(text))}
        return frozenset(a for a in found if not a.startswith("fe80:"))

    async def add(self, address: str) -> None:
        """Add an address, at once usable: no duplicate detection delays it."""
        await self._make()
        family = family_of(address)
        quick = ("nodad",) if family is Family.IPV6 else ()
        words = ("address", "replace", f"{address}/{family.bits}", "dev", self.interface, *quick)
        _check(await self._ip(*words), f"address {address} cannot be added to {self.interface}")

    async def remove(self, address: str) -> None:
        """Remove an address."""
        words = ("address", "del", f"{address}/{family_of(address).bits}", "dev", self.interface)
        await self._ip(*words)

    async def _make(self) -> None:
        if self._made:
            return
        if not await self._is_there():
            for kind in _KINDS:
                result = await self._ip("link", "add", self.interface, "type", kind)
                if not result.returncode:
                    break
            _check(result, f"interface {self.interface} cannot be made")
        up = await self._ip("link", "set", self.interface, "up")
        _check(up, f"interface {self.interface} cannot be brought up")
        self._made = True

    async def _is_there(self) -> bool:
        return not (await self._ip("link", "show", "dev", self.interface)).returncode

    async def _ip(self, *words: str) -> Result:
        return await run_program(self._execute, ["ip", *words], package="iproute2", timeout=10.0)


def _check(result: Result, what: str) -> None:
    if result.returncode:
        raise ApplyError(f"{what}: {result.message or f'exit status {result.returncode}'}")
