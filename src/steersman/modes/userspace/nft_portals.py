"""Portal rules through nft, where there is no iptables.

The table is written whole each time, in one transaction. What nft lists right after that is kept,
and compared with what it lists later: so nothing depends on how it spells rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from steersman.host.exec import Exec, Result
from steersman.model.names import Family
from steersman.modes.base import ApplyError, BusyError, Support
from steersman.modes.userspace.names import (
    BASE,
    STRAY,
    BaseKey,
    FrontendKey,
    Key,
    Portal,
    StrayKey,
)
from steersman.modes.userspace.nft_rules import TABLE, remove, replace, table_of

_TIMEOUT = 60.0


class NftPortals:
    """The portals of this node in tables of nft."""

    def __init__(self, execute: Exec) -> None:
        """Take how to run nft."""
        self._execute = execute
        self.families: tuple[Family, ...] = tuple(Family)
        self._portals: dict[Family, dict[FrontendKey, Portal]] = {f: {} for f in Family}
        self._listed: dict[Family, str] = {}
        """What nft listed after we wrote."""
        self._ports: dict[FrontendKey, int] = {}

    async def probe(self) -> Support:
        """Say whether nft can be used."""
        try:
            result = await self._nft("list", "tables")
        except BusyError as error:
            return Support(usable=False, missing=(f"{error}.",))
        if result.returncode:
            return Support(usable=False, missing=(f"nft does not work: {result.message}.",))
        return Support(usable=True)

    async def read(self) -> dict[Key, Portal | str]:
        """Return the portals of a family where its table is as we left it, or that it is not."""
        found: dict[Key, Portal | str] = {}
        for family in self.families:
            listed = await self._list(family)
            if listed and listed == self._listed.get(family):
                found[BaseKey(BASE, family)] = ""
                found.update(self._portals[family].items())
                continue
            self._portals[family] = {}
            self._listed.pop(family, None)
            if listed:
                found[StrayKey(STRAY, family, TABLE, "")] = ""
        return found

    async def apply(
        self,
        gone: Iterable[Key],
        wanted: Mapping[FrontendKey, Portal],
        bases: Iterable[BaseKey],
        ports: Mapping[FrontendKey, int],
    ) -> None:
        """Write the table of each family in which something changes; see `IptablesPortals`."""
        touched = {key.family for key in (*gone, *wanted, *bases)}
        for family in sorted(touched.intersection(self.families)):
            kept = {key: each for key, each in self._portals[family].items() if key not in gone}
            mine = {key: portal for key, portal in wanted.items() if key.family is family}
            portals = {**kept, **mine}
            ours = {key: ports.get(key, self._ports.get(key, 0)) for key in portals}
            is_base = BaseKey(BASE, family) in bases or family in self._listed
            stays = is_base and BaseKey(BASE, family) not in gone
            await self._write(replace(family, portals, ours) if stays else remove(family))
            self._portals[family] = portals if stays else {}
            self._ports.update(ours)
            self._listed[family] = await self._list(family)
            if not stays:
                del self._listed[family]

    def known(self, key: FrontendKey) -> Portal | None:
        """The portal in force at a destination, as far as this process wrote it."""
        return self._portals[key.family].get(key)

    async def _write(self, text: str) -> None:
        result = await self._nft("-f", "-", stdin=text)
        if result.returncode:
            raise ApplyError(f"nft: {result.message or f'exit status {result.returncode}'}")

    async def _list(self, family: Family) -> str:
        """The table of a family as nft lists it; "" where there is none."""
        result = await self._nft("-nn", "list", "table", *table_of(family).split())
        return result.stdout.decode(errors="replace") if not result.returncode else ""

    async def _nft(self, *words: str, stdin: str = "") -> Result:
        try:
            return await self._execute.run(["nft", *words], stdin.encode(), timeout=_TIMEOUT)
        except FileNotFoundError:
            raise BusyError("nft is not installed; install the package nftables") from None
        except TimeoutError as error:
            raise BusyError(str(error)) from error
