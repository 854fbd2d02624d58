"""The winuserspace mode: direct portals on an interface of Windows, by `netsh interface ipv4|ipv6`.

The interface has addresses of others, too, and Windows keeps an address after the process that
added it. So a file records which ones are ours, before they are added: after a kill the next start,
or `steersman cleanup`, removes those that no Service has.

It imports nothing that only Linux has; tests/unit/host/test_windows.py checks that.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Collection
from pathlib import Path

from steersman.host.exec import Exec, Result, RunTool
from steersman.host.local_port import state_folder
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

log = logging.getLogger(__name__)

NAME = "winuserspace"
_CONTEXTS = {Family.IPV4: "ipv4", Family.IPV6: "ipv6"}
_INTERFACE_WORDS = {Family.IPV4: "name", Family.IPV6: "interface"}
_WORD = re.compile(r"[0-9a-fA-F:.]+")
_POLLS = 20
"""How often to look for added addresses, which do not appear at once."""
_AT_ONCE = 500
"""Addresses that one process of netsh changes."""
_TIMEOUT, _SCRIPT_TIMEOUT = 30.0, 300.0  # seconds


def create(execute: Exec, options: ModeOptions) -> UserspaceMode:
    """Build the mode for registry.py, on the interface that the environment names."""
    # Only administrators write there, so nobody else can name addresses to remove.
    record = state_folder() / "addresses"
    addresses = NetshAddresses(execute.run_tool, record, service_interface(os.environ))
    mode = UserspaceMode(NAME, [DirectPortals(addresses)], options)
    mode.proxy.dns_search = options.dns_search
    return mode


class NetshAddresses(Addresses):
    """Addresses of an interface that has others, too: those that are not recorded stay."""

    dedicated = False

    def __init__(
        self,
        run: RunTool,
        record: Path,
        interface: str = SERVICE_INTERFACE,
        poll_seconds: float = 0.5,
    ) -> None:
        """Use an interface.

        Args:
            run: runs netsh.
            record: file with a line for each address that was added, and its interface.
            interface: name of the interface.
            poll_seconds: time between two looks for addresses that were added.
        """
        self.interface = interface
        self._run = run
        self._record = record
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

    def ours(self, present: frozenset[str]) -> frozenset[str]:
        """Return the addresses that are recorded."""
        recorded = self._recorded()
        return frozenset(address for address in present if self._line(address) in recorded)

    def add(self, addresses: Collection[str]) -> None:
        """Add addresses without a network, so that nothing else is routed there; wait for them."""
        self._write_record(self._recorded() | set(map(self._line, addresses)))
        missing = self._missing(addresses)
        # A script does not say which of its lines failed, so missing addresses are added again.
        if self._run_scripts("add", missing):
            missing = self._missing(missing)
        for address in missing:
            self._add(address)
        for _ in range(_POLLS):
            missing = self._missing(missing)
            if not missing:
                return
            time.sleep(self._poll_seconds)
        raise BusyError(f"netsh: {missing[0]} does not appear on {self.interface!r}")

    def _missing(self, addresses: Collection[str]) -> list[str]:
        """Return the addresses that the interface does not have."""
        present: set[str] = set()
        for family in {family_of(address) for address in addresses}:
            present |= self._present(family)
        return [address for address in addresses if address not in present]

    def _add(self, address: str) -> None:
        result = self._netsh(family_of(address), "add", *_parameters("add", address))
        if result.returncode and self._missing([address]):  # perhaps it appeared late
            said = " ".join(result.stdout.decode(errors="replace").split())  # netsh's errors
            why = said or result.message or f"exit status {result.returncode}"
            raise ApplyError(f"netsh: {address} on {self.interface!r}: {why}")

    def remove(self, addresses: Collection[str]) -> None:
        """Remove addresses."""
        gone = set()
        if not self._run_scripts("delete", addresses):
            for address in addresses:
                words = _parameters("delete", address)
                if not self._netsh(family_of(address), "delete", *words).returncode:
                    gone.add(address)
        if len(gone) < len(addresses):
            gone = set(addresses) - self.present()
        self._write_record(self._recorded() - set(map(self._line, gone)))

    def _run_scripts(self, verb: str, addresses: Collection[str]) -> bool:
        """Change several addresses with few processes; return False if scripts cannot be used."""
        if len(addresses) < 2 or not self.interface.isascii():  # netsh reads a code page
            return False
        script, todo = self._record.with_name("netsh.txt"), list(addresses)
        try:
            for at in range(0, len(todo), _AT_ONCE):
                lines = [self._script_line(verb, address) for address in todo[at : at + _AT_ONCE]]
                script.parent.mkdir(parents=True, exist_ok=True)
                script.write_text("".join(lines), encoding="ascii")
                self._call(["netsh", "-f", str(script)], _SCRIPT_TIMEOUT)
            script.unlink()
        except OSError as error:
            log.warning("cannot run netsh with a script, so it runs for each address: %s", error)
            return False
        return True

    def _script_line(self, verb: str, address: str) -> str:
        family = family_of(address)
        where = f'{_INTERFACE_WORDS[family]}="{self.interface}"'
        words = ["interface", _CONTEXTS[family], verb, "address", where]
        return " ".join([*words, *_parameters(verb, address)]) + "\n"

    def _line(self, address: str) -> str:
        return f"{address} {self.interface}"

    def _recorded(self) -> set[str]:
        try:
            return set(self._record.read_text(encoding="utf-8").splitlines())
        except FileNotFoundError:
            return set()
        except (OSError, UnicodeDecodeError) as error:
            log.warning("cannot read which addresses were added: %s: %s", self._record, error)
            return set()

    def _write_record(self, lines: set[str]) -> None:
        """Replace the record; if that fails, Services are served nevertheless."""
        if lines == self._recorded():
            return
        new = self._record.with_suffix(".new")
        try:
            self._record.parent.mkdir(parents=True, exist_ok=True)
            new.write_text("".join(f"{line}\n" for line in sorted(lines)), encoding="utf-8")
            new.replace(self._record)
        except OSError as error:
            log.warning(
                "cannot record which addresses are added, so a kill may leave them: %s: %s",
                *(self._record, error),
            )

    def _present(self, family: Family) -> set[str]:
        result = self._netsh(family, "show")
        words = _WORD.findall(result.stdout.decode(errors="replace"))
        addresses = {address for word in words if (address := canonical_ip(word))}
        return {address for address in addresses if family_of(address) is family}

    def _netsh(self, family: Family, verb: str, *more: str) -> Result:
        noun = "addresses" if verb == "show" else "address"
        where = f"{_INTERFACE_WORDS[family]}={self.interface}"
        return self._call(["netsh", "interface", _CONTEXTS[family], verb, noun, where, *more])

    def _call(self, argv: list[str], timeout: float = _TIMEOUT) -> Result:
        try:
            return self._run(argv, timeout=timeout)
        except FileNotFoundError:
            raise BusyError("there is no netsh: this mode is for Windows") from None
        except TimeoutError as error:
            raise BusyError(str(error)) from error


def _parameters(verb: str, address: str) -> list[str]:
    """Return the parameters of netsh for an address; an IPv4 mask is one of its own."""
    family = family_of(address)
    if verb == "delete":
        return [f"address={address}"]
    if family is Family.IPV4:
        return [f"address={address}", "mask=255.255.255.255"]
    return [f"address={address}{HOST_PREFIXES[family]}"]
