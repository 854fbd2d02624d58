"""Portals made of nftables objects, for machines without iptables; nft_rules.py has their text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from itertools import chain

from steersman.host.exec import Result, RunTool, tool_result
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family
from steersman.modes.base import Support
from steersman.modes.userspace import TABLE
from steersman.modes.userspace.nft_rules import (
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
from steersman.modes.userspace.render import BASE, STRAY, BaseKey, Key, Portal, StrayKey
from steersman.modes.userspace.rule_portals import RulePortals
from steersman.netfilter.nft.tables import table_left
from steersman.proxy.listeners import FrontendKey

_NO_TABLE = "No such file or directory"
_TIMEOUT = 60.0
_PROBE = f"add table ip {TABLE}\n"


class NftPortals(RulePortals[Object]):
    """The portals of this node, written by nft."""

    variant = "nftables"
    own_tables = frozenset({TABLE})

    def __init__(self, run: RunTool) -> None:
        """Make portals; nothing is run before `probe`."""
        super().__init__()
        self._run = run
        self.families = tuple(Family)

    def probe(self) -> Support:
        """Check whether nft can be used.

        This lists nothing: nft reads all rules for `list tables`, again and again while other
        programs change them, so that on a busy node it only ends by its timeout.
        """
        try:
            result = self._nft("--check", "-f", "-", stdin=_PROBE)
        except BusyError as error:
            return Support(usable=False, missing=(f"{error}.",))
        if result.returncode:
            return Support(usable=False, missing=(f"nft does not work: {result.message}.",))
        return Support(usable=True)

    def find_leftovers(self, families: Iterable[Family]) -> str:
        """Look for our tables."""
        return table_left(TABLE, families)

    def read_rules(self) -> dict[Key, Portal | str]:
        """Return the portals whose objects are all there, and other objects in our tables."""
        found: dict[Key, Portal | str] = {}
        for family in self.families:
            result = self._nft("-nn", "list", "table", *table_of(family).split())
            if result.returncode and _NO_TABLE not in result.message:
                raise BusyError(f"nft cannot list the portals: {result.message}")
            listed = "" if result.returncode else result.stdout.decode(errors="replace")
            have = parse(listed)
            if listed and base(family) <= have:
                found[BaseKey(BASE, family)] = ""
                portals, strays = self.written.compare(family, have - base(family))
                found.update(portals.items())
                for each in sorted(strays, key=str):
                    found[self.stray(family, each)] = ""
                continue
            self.written.remove(self.written.of(family))
            if listed:
                found[StrayKey(STRAY, family, TABLE, BASE)] = ""
        return found

    def parts_of(self, key: FrontendKey, portal: Portal, port: int) -> frozenset[Object]:
        """Return the objects of a portal."""
        return objects(key, portal, port)

    def stray(self, family: Family, part: Object) -> StrayKey:
        """Return the key of an object whose portal is not known."""
        at = (part.map, part.text) if isinstance(part, Element) else ("", part.name)
        return StrayKey(STRAY, family, *at)

    def write_rules(
        self,
        family: Family,
        gone: Set[Key],
        new: Mapping[FrontendKey, Collection[Object]],
        *,
        base: bool,
    ) -> None:
        """Write the changes; write the whole table if another program has changed it."""
        if not base and gone & {BaseKey(BASE, family), StrayKey(STRAY, family, TABLE, BASE)}:
            text = remove(family)
        else:
            if not base:
                old = self.written.among(gone | new.keys())
                strays = {
                    Element(key.where, key.text) if key.where else Chain(key.text, ())
                    for key in gone
                    if isinstance(key, StrayKey)
                }
                removed = chain(strays, self.written.all_parts(old))
                text = change(family, removed, chain.from_iterable(new.values()))
                # A refusal means that the kernel does not have what this process wrote.
                if not text or not (self._nft("-f", "-", stdin=text)).returncode:
                    return
            kept = [key for key in self.written.of(family) if key not in gone and key not in new]
            text = whole(family, chain(self.written.all_parts(kept), *new.values()))
        result = self._nft("-f", "-", stdin=text)
        if result.returncode:
            raise ApplyError(f"nft: {result.message or f'exit status {result.returncode}'}")

    def _nft(self, *words: str, stdin: str = "") -> Result:
        argv, data = ["nft", *words], stdin.encode()
        return tool_result(self._run, argv, data, package="nftables", timeout=_TIMEOUT)
