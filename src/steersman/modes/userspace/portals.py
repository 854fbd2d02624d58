"""Portal rules through iptables: the kernel's and ours, kept as sets of lines per family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TypeGuard

from steersman.host.exec import Exec
from steersman.model.errors import BusyError
from steersman.model.names import Family
from steersman.modes.base import Support
from steersman.modes.userspace.names import BASE, STRAY, BaseKey, Key, Portal, StrayKey
from steersman.modes.userspace.rules import (
    ALL_CHAINS,
    CHAINS,
    Kernel,
    Rule,
    parse,
    portal_rules,
    write,
)
from steersman.modes.userspace.written import Written
from steersman.netfilter.iptables import Iptables, choose_tool
from steersman.netfilter.nf_tables import chains_left, legacy_left
from steersman.netfilter.rule_text import Run
from steersman.proxy.listeners import FrontendKey

_LOCK_WAIT = 5  # seconds, for the lock of iptables-legacy
_NOTHING = Kernel(frozenset(), frozenset(), frozenset())


class IptablesPortals:
    """The portals of this node, and the rules that they are made of."""

    def __init__(self, execute: Exec, variant: str = "", *, leftovers: bool = False) -> None:
        """Make them; nothing is run before `probe`.

        Args:
            execute: runs programs.
            variant: `nft`, `legacy`, or "" for the one in use here.
            leftovers: only to remove what is left: no table is created by asking.
        """
        self._execute = execute
        self._variant = variant
        self._leftovers = leftovers
        self._iptables: Iptables | None = None
        self.families: tuple[Family, ...] = ()
        self._written: Written[Rule] = Written()
        self._kernel: dict[Family, Kernel] = {}

    async def probe(self) -> Support:
        """Find the iptables to use."""
        choice = await choose_tool(self._execute, self._variant, leftovers=self._leftovers)
        if choice.tool is None:
            return Support(usable=False, missing=choice.missing)
        self.families = choice.families
        self._iptables = Iptables(self._execute, choice.tool, _LOCK_WAIT)
        return Support(usable=True, missing=choice.missing)

    def find_leftovers(self, families: Iterable[Family]) -> str:
        """Look for our chains; those of iptables-legacy only its tool can list."""
        if self._variant == "legacy":
            return legacy_left(families)
        return chains_left(lambda table, chain: (table, chain) in ALL_CHAINS, families)

    async def read(self) -> dict[Key, Portal | str]:
        """Return the portals whose rules are all there, and what else is in our chains."""
        found: dict[Key, Portal | str] = {}
        iptables = await self._tool()
        for family in self.families:
            kernel = parse(await iptables.save(int(family)))
            self._kernel[family] = kernel
            if kernel.complete:
                found[BaseKey(BASE, family)] = ""
            found.update(self._in_force(family, kernel))
        return found

    def _in_force(self, family: Family, kernel: Kernel) -> dict[Key, Portal | str]:
        portals, left = self._written.compare(family, kernel.rules)
        found: dict[Key, Portal | str] = dict(portals.items())
        for rule in sorted(left):
            found[StrayKey(STRAY, family, rule.table, rule.line)] = rule.line
        if not kernel.complete and (kernel.chains or kernel.jumps):
            found[StrayKey(STRAY, family, "", BASE)] = ""  # something of the base is left
        return found

    async def apply(
        self,
        gone: Iterable[Key],
        wanted: Mapping[FrontendKey, Portal],
        bases: Iterable[BaseKey],
        ports: Mapping[FrontendKey, int],
    ) -> None:
        """Write rules, in one run per family.

        Args:
            gone: portals, strays and bases to remove.
            wanted: portals to write, those included whose listener has another port now.
            bases: families whose chains and jumps are to be made.
            ports: the port of each portal's listener.
        """
        gone = set(gone)
        iptables = await self._tool()
        for family in self.families:
            fresh = BaseKey(BASE, family) in bases
            text = self._script(family, gone, wanted, fresh, ports)
            if text:
                await iptables.restore(Run(int(family), text))
            self._accept(family, gone, wanted, ports)

    def _script(
        self,
        family: Family,
        gone: set[Key],
        wanted: Mapping[FrontendKey, Portal],
        fresh: bool,
        ports: Mapping[FrontendKey, int],
    ) -> str:
        kernel = self._kernel.get(family, _NOTHING)
        if BaseKey(BASE, family) in gone and not fresh:
            return write((), (), gone=kernel)
        if StrayKey(STRAY, family, "", BASE) in gone and not fresh:
            return write((), (), gone=kernel)
        mine = {
            key: portal_rules(key, portal, ports[key])
            for key, portal in wanted.items()
            if key.family is family
        }
        if fresh:
            kept = [key for key in self._written.of(family) if key not in gone and key not in mine]
            rules = chain(self._written.parts_of(kept), *mine.values())
            return write((), rules, fresh=kernel.jumps)
        changed = {key: rules for key, rules in mine.items() if self._written.parts(key) != rules}
        old = [key for key in self._written.of(family) if key in gone or key in changed]
        removed = list(self._written.parts_of(old))
        removed += [Rule(k.where, k.text) for k in gone if _is_stray(k, family)]
        return write(removed, chain.from_iterable(changed.values()))

    def _accept(
        self,
        family: Family,
        gone: set[Key],
        wanted: Mapping[FrontendKey, Portal],
        ports: Mapping[FrontendKey, int],
    ) -> None:
        self._written.forget([key for key in self._written.of(family) if key in gone])
        for key, portal in wanted.items():
            if key.family is family:
                self._written.note(key, portal, portal_rules(key, portal, ports[key]))

    def known(self, key: FrontendKey) -> Portal | None:
        """The portal in force at a destination, as far as this process wrote it."""
        return self._written.portal(key)

    async def _tool(self) -> Iptables:
        if self._iptables is None:
            support = await self.probe()
            if self._iptables is None:
                raise BusyError(" ".join(support.missing))
        return self._iptables


def _is_stray(key: Key, family: Family) -> TypeGuard[StrayKey]:
    return isinstance(key, StrayKey) and key.family is family and key.where in CHAINS
