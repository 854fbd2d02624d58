"""Portal rules through nft, where there is no iptables: only what changes is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from itertools import chain

from steersman.host.exec import Exec, Result, run_program
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family
from steersman.modes.base import Support
from steersman.modes.userspace.names import BASE, STRAY, BaseKey, Key, Portal, StrayKey
from steersman.modes.userspace.nft_rules import (
    TABLE,
    Chain,
    Element,
    Object,
    base,
    change,
    objects,
    parse,
    remove,
    table_of,
    whole,
)
from steersman.modes.userspace.written import Written
from steersman.netfilter.nf_tables import table_left
from steersman.proxy.listeners import FrontendKey

_TIMEOUT = 60.0
_PROBE = f"add table ip {TABLE}\n"


class NftPortals:
    """The portals of this node in tables of nft."""

    def __init__(self, execute: Exec) -> None:
        """Take how to run nft."""
        self._execute = execute
        self.families: tuple[Family, ...] = tuple(Family)
        self._written: Written[Object] = Written()

    async def probe(self) -> Support:
        """Say whether nft can be used.

        Nothing is listed: nft reads all rules for `list tables`, again and again for as long as
        others change them, so that on a busy node it ends only by its time-out.
        """
        try:
            result = await self._nft("--check", "-f", "-", stdin=_PROBE)
        except BusyError as error:
            return Support(usable=False, missing=(f"{error}.",))
        if result.returncode:
            return Support(usable=False, missing=(f"nft does not work: {result.message}.",))
        return Support(usable=True)

    def find_leftovers(self, families: Iterable[Family]) -> str:
        """Look for our tables."""
        return table_left(TABLE, families)

    async def read(self) -> dict[Key, Portal | str]:
        """Return the portals whose objects are all there, and what else is in our tables."""
        found: dict[Key, Portal | str] = {}
        for family in self.families:
            listed = await self._list(family)
            have = parse(listed)
            if listed and base(family) <= have:
                found[BaseKey(BASE, family)] = ""
                found.update(self._in_force(family, have - base(family)))
                continue
            self._written.forget(self._written.of(family))
            if listed:
                found[StrayKey(STRAY, family, TABLE, BASE)] = ""
        return found

    def _in_force(self, family: Family, have: Set[Object]) -> dict[Key, Portal | str]:
        portals, left = self._written.compare(family, have)
        found: dict[Key, Portal | str] = dict(portals.items())
        for each in sorted(left, key=str):
            where, text = (each.map, each.text) if isinstance(each, Element) else ("", each.name)
            found[StrayKey(STRAY, family, where, text)] = ""
        return found

    async def apply(
        self,
        gone: Iterable[Key],
        wanted: Mapping[FrontendKey, Portal],
        bases: Iterable[BaseKey],
        ports: Mapping[FrontendKey, int],
    ) -> None:
        """Write what changes, in one transaction per family; see `IptablesPortals`."""
        gone = set(gone)
        new = {key: objects(key, portal, ports[key]) for key, portal in wanted.items()}
        for family in self.families:
            mine = {key: some for key, some in new.items() if key.family is family}
            away = {key for key in gone if key.family is family}
            if BaseKey(BASE, family) in bases:
                await self._write(self._whole(family, away, mine))
            elif away & {BaseKey(BASE, family), StrayKey(STRAY, family, TABLE, BASE)}:
                await self._write(remove(family))
            elif mine or away:
                await self._step(family, away, mine)
            self._written.forget([key for key in self._written.of(family) if key in away])
            for key, parts in mine.items():
                self._written.note(key, wanted[key], parts)

    async def _step(
        self, family: Family, gone: Set[Key], new: Mapping[FrontendKey, frozenset[Object]]
    ) -> None:
        """Write the difference; where what is there is not what was thought, all of it."""
        old = [key for key in self._written.of(family) if key in gone or key in new]
        strays = {_stray(key) for key in gone if isinstance(key, StrayKey)}
        away = chain(strays, self._written.parts_of(old))
        text = change(family, away, chain.from_iterable(new.values()))
        if text and (await self._nft("-f", "-", stdin=text)).returncode:
            await self._write(self._whole(family, gone, new))

    def _whole(
        self, family: Family, gone: Set[Key], new: Mapping[FrontendKey, frozenset[Object]]
    ) -> str:
        kept = [key for key in self._written.of(family) if key not in gone and key not in new]
        return whole(family, chain(self._written.parts_of(kept), *new.values()))

    def known(self, key: FrontendKey) -> Portal | None:
        """The portal in force at a destination, as far as this process wrote it."""
        return self._written.portal(key)

    async def _write(self, text: str) -> None:
        result = await self._nft("-f", "-", stdin=text)
        if result.returncode:
            raise ApplyError(f"nft: {result.message or f'exit status {result.returncode}'}")

    async def _list(self, family: Family) -> str:
        """The table of a family as nft lists it; "" where there is none."""
        result = await self._nft("-nn", "list", "table", *table_of(family).split())
        return result.stdout.decode(errors="replace") if not result.returncode else ""

    async def _nft(self, *words: str, stdin: str = "") -> Result:
        argv = ["nft", *words]
        data = stdin.encode()
        return await run_program(self._execute, argv, data, package="nftables", timeout=_TIMEOUT)


def _stray(key: StrayKey) -> Object:
    return Element(key.where, key.text) if key.where else Chain(key.text, ())
